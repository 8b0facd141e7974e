"""A plan pins what it reuses, learns from the answer what is gone, and lets go when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gd2fs import errors
from tests.control_api import BYTES_PER_TOKEN, ControlApi, control
from tests.control_fakes import FakeColumn, FakeNode

IDS = list(range(20))
NEXT = [*IDS, 1, 30]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ControlApi]:
    with control(tmp_path) as api:
        api.start_node("n1", has_log=True)
        yield api


@pytest.fixture
def session(api: ControlApi) -> str:
    session = api.session()
    api.turn(session, IDS, [1, 2], "r1")
    return session


def _node(api: ControlApi) -> FakeNode:
    return api.nodes.node("n1")


def _column(api: ControlApi, plan: dict[str, Any], name: str) -> FakeColumn:
    layouts = plan["kv_transfer"]["plan"]["layouts"]
    [file] = [layout["file"] for layout in layouts.values() if layout["path"].endswith(name)]
    return _node(api).columns[file, 0]


def _fresh(plan: dict[str, Any]) -> str:
    return str(plan["kv_transfer"]["fresh_kvcache"][0]["kv_uri"][-4:])


def _eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_plan_pins_its_ranges_and_its_commit_lets_go(api: ControlApi, session: str) -> None:
    assert api.nodes.calls["pin"] == 0, "nothing was stored: nothing was asked"
    plan = api.plan(session, [*IDS[:12], 99], "r2")
    assert api.nodes.calls["pin"] == 1, "one call, for KV cache and ids"
    [(pin, items)] = _node(api).pins.items()
    assert pin == plan["plan"]
    assert [(item["start"], item["end"]) for item in items] == [(0, 12 * BYTES_PER_TOKEN), (0, 48)]
    assert {item["ttl_ms"] for item in items} == {600_000}
    assert plan["estimate"]["best_effort"] is False
    api.commit(api.write(plan, [*IDS[:12], 99]))
    _eventually(lambda: not _node(api).pins)


def test_ranges_are_pinned_in_the_order_of_their_tokens(api: ControlApi, session: str) -> None:
    edited = [*IDS[:12], 70, 71, 72]
    api.turn(session, edited, [3], "r2")
    plan = api.plan(session, [*edited, 3, 4], "r3")
    paths = {layout["file"]: layout["path"] for layout in plan["kv_transfer"]["plan"]["layouts"].values()}
    items = _node(api).pins[plan["plan"]]
    names = [paths[item["file"]].rpartition("/")[2] for item in items]
    assert names == ["1.kv", "1.kv.tokens", "2.kv", "2.kv.tokens"], "the node evicts from the end"


def test_an_abort_lets_go_once(api: ControlApi, session: str) -> None:
    plan = api.plan(session, NEXT, "r2")
    body = {"plan_token": plan["kv_transfer"]["plan"]["token"]}
    assert api.call("POST", "/v1/kv/abort", body)["aborted"] is True
    _eventually(lambda: not _node(api).pins)
    calls = api.nodes.calls["unpin"]
    assert api.call("POST", "/v1/kv/abort", body)["aborted"] is False
    assert api.nodes.calls["unpin"] == calls


def test_a_retry_takes_the_place_of_its_predecessors_pins(api: ControlApi, session: str) -> None:
    api.plan(session, NEXT, "r2")
    again = api.plan(session, NEXT, "r2")
    _eventually(lambda: set(_node(api).pins) == {again["plan"]})


def test_a_plan_that_is_refused_leaves_no_pin(
    api: ControlApi, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gd2fs.control.plans.PLANS_MAX", 3)
    for number in range(3):
        api.plan(session, NEXT, f"r{number}")
    with pytest.raises(errors.Overloaded):
        api.plan(session, NEXT, "one too many")
    _eventually(lambda: len(_node(api).pins) == 3)


def test_what_was_evicted_since_the_last_report_shortens_the_plan(api: ControlApi, session: str) -> None:
    first = api.plan(session, NEXT, "look")
    _column(api, first, "1.kv").lose(9 * BYTES_PER_TOKEN + 1, 10 * BYTES_PER_TOKEN)
    plan = api.plan(session, NEXT, "r2")
    assert (plan["reusable_tokens"], plan["cached_tokens"], plan["miss"]) == (21, 9, "lost")
    assert _fresh(plan) == "2.kv"
    assert plan["estimate"]["cached_bytes"] == 9 * BYTES_PER_TOKEN
    api.commit(api.write(plan, NEXT))
    assert api.plan(session, [*NEXT, 7], "r3")["cached_tokens"] == len(NEXT), "its digests are right"


def test_evicted_ids_do_not_shorten_it_but_nothing_is_written_behind_them(
    api: ControlApi, session: str
) -> None:
    first = api.plan(session, NEXT, "r2")
    _column(api, first, "1.kv.tokens").lose(8, 12)
    plan = api.plan(session, NEXT, "r2")
    assert (plan["cached_tokens"], plan["miss"], _fresh(plan)) == (21, None, "2.kv")


def test_beyond_the_bound_of_pins_a_plan_is_best_effort(api: ControlApi, session: str) -> None:
    _node(api).pins_max = 0
    first = api.plan(session, NEXT, "r2")
    assert (first["cached_tokens"], first["estimate"]["best_effort"]) == (21, True)
    _column(api, first, "1.kv").lose(0, 1)
    plan = api.plan(session, NEXT, "r3")
    assert (plan["cached_tokens"], plan["miss"]) == (0, "lost"), "what is gone is known all the same"


def test_a_node_of_the_version_before_is_best_effort(api: ControlApi, session: str) -> None:
    _node(api).knows_pins = False
    plan = api.plan(session, NEXT, "r2")
    assert (plan["cached_tokens"], plan["estimate"]["best_effort"], _fresh(plan)) == (21, True, "1.kv")


def test_a_node_that_does_not_answer_is_a_miss(api: ControlApi, session: str) -> None:
    _node(api).away = True
    plan = api.plan(session, NEXT, "r2")
    assert (plan["reusable_tokens"], plan["cached_tokens"], plan["miss"]) == (21, 0, "unreachable")


def test_a_restart_that_control_has_not_heard_of_is_a_miss(api: ControlApi, session: str) -> None:
    _node(api).incarnation += 1
    plan = api.plan(session, NEXT, "r2")
    assert (plan["cached_tokens"], plan["miss"]) == (0, "unreachable"), "its layouts would be refused"


def test_a_column_that_the_node_does_not_know_is_lost(api: ControlApi, session: str) -> None:
    _node(api).columns.clear()
    plan = api.plan(session, NEXT, "r2")
    assert (plan["cached_tokens"], plan["miss"], _fresh(plan)) == (0, "lost", "2.kv")


def test_segments_on_several_nodes_are_pinned_at_each(api: ControlApi, session: str) -> None:
    api.heartbeat("n1", capacity_bytes=0)
    api.start_node("n2")
    second = api.turn(session, [*IDS[:10], 99], [7, 8], "r2")
    assert _fresh(second) == "2.kv"
    plan = api.plan(session, [*IDS[:10], 99, 7, 5], "r3")
    assert (plan["cached_tokens"], plan["miss"]) == (12, None)
    assert [list(api.nodes.node(name).pins) for name in ("n1", "n2")] == [[plan["plan"]]] * 2
    api.nodes.node("n2").away = True
    short = api.plan(session, [*IDS[:10], 99, 7, 5], "r4")
    assert (short["cached_tokens"], short["miss"]) == (10, "unreachable")
    assert short["kv_transfer"]["fresh_kvcache"] == [], "nor is anything placed where nobody answered"
