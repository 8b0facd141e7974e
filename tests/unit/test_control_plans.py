"""Plans, commits and aborts: what is reused, who may write, what is stored (I5, I6, I7, I10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gd2fs import errors
from gd2fs.control import plan_rules, schema
from gd2fs.signing import Capability, Keys
from tests.control_api import BYTES_PER_TOKEN, IDENTITY, ControlApi, control


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ControlApi]:
    with control(tmp_path) as api:
        api.start_node("n1")
        api.start_node("n2")
        yield api


def _fresh(plan: dict[str, Any]) -> dict[str, Any]:
    [fresh] = plan["kv_transfer"]["fresh_kvcache"]
    return dict(fresh)


def _node_of(plan: dict[str, Any]) -> str:
    layout = plan["kv_transfer"]["plan"]["layouts"][_fresh(plan)["kv_uri"]]
    return str(layout["columns"][0]["replicas"][0]["node"])


def test_first_turn_stores_prompt_and_output(api: ControlApi) -> None:
    session = api.session()
    plan = api.plan(session, range(10), "r1", max_tokens=5)
    assert (plan["stored_tokens"], plan["reusable_tokens"], plan["cached_tokens"]) == (0, 0, 0)
    assert plan["miss"] is None
    assert plan["estimate"] == {
        "cached_tokens": 0,
        "fresh_tokens": 10,
        "cached_bytes": 0,
        "max_output_tokens": 5,
        "best_effort": False,
    }
    uri = f"gd2fs://test/.kv/{session}/1.kv"
    assert _fresh(plan) == {"token_start": 0, "token_length": -1, "kv_uri": uri, "kv_start": 0}
    stored = api.commit(api.write(plan, range(14)))
    segment = {
        "token_start": 0,
        "token_length": 14,
        "kv_uri": uri,
        "kv_start": 0,
        "kv_length": 14 * BYTES_PER_TOKEN,
    }
    assert stored == {"session": session, "version": 1, "stored_kv_cache": [segment]}
    assert api.call("GET", f"/v1/kv/sessions/{session}/tokens") == {"token_ids": list(range(14))}


def test_a_growing_session_stays_one_segment_over_100_turns(api: ControlApi) -> None:
    session = api.session()
    history: list[int] = []
    for turn in range(100):
        prompt = [*history, *range(1000 * turn, 1000 * turn + 7)]
        plan = api.turn(session, prompt, [5, 6, turn], f"r{turn}")
        assert plan["cached_tokens"] == plan["reusable_tokens"] == plan["stored_tokens"] == len(history)
        assert plan["miss"] is None
        history = [*prompt, 5, 6]
    state = api.get(session)
    assert state["control_rows"] == {"segments": 1, "plans": 0, "files": 2, "chain": 2}
    assert state["tokens"] == len(history) == 900
    assert state["bytes"] == 900 * BYTES_PER_TOKEN
    # The rows themselves, not what the session says of them.
    counts = {
        table.name: api.rows(table)
        for table in (schema.segments, schema.plans, schema.file_columns, schema.reclaims)
    }
    assert counts == {"segments": 1, "plans": 0, "file_columns": 2, "reclaims": 0}
    assert api.nodes.calls["read_ids"] == 0, "equal digests need no ids"


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_an_edited_history_is_cached_up_to_the_edit_exactly(api: ControlApi, percent: int) -> None:
    session = api.session()
    prompt = list(range(200))
    api.turn(session, prompt, [7, 7, 7], "r1")
    edit = 2 * percent
    edited = [*prompt[:edit], 999_999, *prompt[edit + 1 :], 1, 2, 3]
    plan = api.turn(session, edited, [8, 8], "r2")
    assert plan["stored_tokens"] == 202
    assert plan["reusable_tokens"] == plan["cached_tokens"] == edit
    assert plan["miss"] == "edited"
    assert plan["estimate"]["cached_bytes"] == edit * BYTES_PER_TOKEN
    [stored] = plan["kv_transfer"]["stored_kvcache"]
    assert (stored["token_length"], stored["kv_length"]) == (edit, edit * BYTES_PER_TOKEN)
    fresh = _fresh(plan)
    assert fresh["kv_uri"].endswith("/2.kv") and fresh["kv_start"] == 0 and fresh["token_start"] == edit
    # What replaced the old tail is found again, whole, and goes on in the second file.
    after = api.plan(session, [*edited, 8, 4], "r3")
    assert after["cached_tokens"] == after["stored_tokens"] == len(edited) + 1
    assert _fresh(after)["kv_uri"] == fresh["kv_uri"]
    assert api.call("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"] == [*edited, 8]


def test_ids_are_read_from_the_differing_segment_only(api: ControlApi) -> None:
    session = api.session()
    first = list(range(100))
    api.turn(session, first, [1, 1], "r1")
    second = [*first[:60], *range(500, 560)]
    api.turn(session, second, [2, 2], "r2")
    assert api.get(session)["control_rows"]["segments"] == 2
    before = api.nodes.calls["read_ids"]
    plan = api.plan(session, [*second[:90], 777], "r3")
    assert plan["cached_tokens"] == 90
    assert api.nodes.calls["read_ids"] == before + 1


def test_the_last_prompt_token_is_always_computed(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(20), [1, 2], "r1")
    plan = api.plan(session, [*range(20), 1], "r2")
    assert (plan["stored_tokens"], plan["cached_tokens"], plan["miss"]) == (21, 20, "edited")
    single = api.plan(session, [0], "r3")
    assert single["cached_tokens"] == 0 and single["kv_transfer"]["stored_kvcache"] == []


def test_block_granules_round_down_and_commits_must_be_whole(api: ControlApi) -> None:
    session = api.session(kv_format={"name": "block", "bytes_per_token": 10, "granule": 16})
    plan = api.plan(session, range(40), "r1")
    with pytest.raises(errors.Invalid, match="granule"):
        api.commit(api.write(plan, range(40)))
    api.commit(api.write(plan, range(32)))
    plan = api.plan(session, range(30), "r2")
    assert (plan["reusable_tokens"], plan["cached_tokens"], plan["miss"]) == (16, 16, "edited")
    plan = api.plan(session, range(40), "r3")
    assert (plan["cached_tokens"], plan["miss"]) == (32, None)
    assert _fresh(plan)["kv_start"] == 320 and _fresh(plan)["kv_uri"].endswith("/1.kv")


def test_another_identity_is_a_miss_and_takes_the_session_over(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(20), [1, 2], "r1")
    body = {
        "token_ids": list(range(20)),
        "max_tokens": 4,
        "request_id": "r2",
        "kv_identity": "identity-2",
        "kv_format": {"name": "token", "bytes_per_token": 32},
    }
    plan = api.call("POST", f"/v1/kv/sessions/{session}/plan", body)
    assert (plan["miss"], plan["reusable_tokens"], plan["cached_tokens"]) == ("identity", 0, 0)
    assert plan["kv_transfer"]["stored_kvcache"] == []
    api.commit(api.write(plan, range(22)))
    state = api.get(session)
    assert (state["kv_identity"], state["kv_format"]["bytes_per_token"]) == ("identity-2", 32)
    assert state["control_rows"] == {"segments": 1, "plans": 0, "files": 2, "chain": 2}
    assert api.plan(session, [*range(9), 99], "r3")["miss"] == "identity"
    assert api.nodes.calls["read_ids"] == 0, "ids of another identity are of no interest"
    again = api.plan(session, range(23), "r4", identity="identity-2")
    assert (again["cached_tokens"], again["miss"]) == (22, None)


def test_a_retry_takes_the_grant_over_and_the_old_commit_is_refused(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(10), [1, 2], "r1")
    prompt = [*range(10), 1, 50, 51]
    old = api.plan(session, prompt, "r2")
    paused = api.write(old, [*prompt, 60])
    new = api.plan(session, prompt, "r2")
    assert _fresh(new) == _fresh(old), "the same place, under a higher grant"
    layouts = [plan["kv_transfer"]["plan"]["layouts"][_fresh(plan)["kv_uri"]] for plan in (old, new)]
    assert layouts[1]["grant"] == layouts[0]["grant"] + 1
    with pytest.raises(errors.PlanSuperseded):
        api.commit(paused)
    body = api.write(new, [*prompt, 61, 62])
    with pytest.raises(errors.StaleWriter):
        api.nodes.write(layouts[0], _fresh(old)["kv_start"], 1)
    assert api.commit(body)["version"] == 2
    with pytest.raises(errors.PlanSuperseded):
        api.commit(paused)
    assert api.call("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"] == [*prompt, 61, 62]


def test_a_takeover_while_the_old_plan_seals_stores_only_one(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(10), [1, 2], "r1")
    prompt = [*range(10), 1, 50]
    body = api.write(api.plan(session, prompt, "r2"), prompt)
    taken: list[dict[str, Any]] = []
    api.nodes.before_seal = lambda: taken or taken.append(api.plan(session, prompt, "r2"))
    with pytest.raises(errors.PlanSuperseded):
        api.commit(body)
    # The seal happened on the node: the retry must not write below it, and does not.
    assert _fresh(taken[0])["kv_uri"].endswith("/2.kv")
    assert api.commit(api.write(taken[0], [*prompt, 9]))["version"] == 2


def test_a_seal_whose_commit_failed_is_never_written_over(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(10), [1, 2], "r1")
    prompt = [*range(10), 1, 50]
    plan, rival = api.plan(session, prompt, "r2"), api.plan(session, prompt, "rival")
    body = api.write(plan, prompt)

    def rival_commits() -> None:
        api.nodes.before_seal = None
        api.commit(api.write(rival, prompt))

    api.nodes.before_seal = rival_commits
    with pytest.raises(errors.Conflict):
        api.commit(body)
    # 1.kv is sealed further than the session knows; going on in it would fail for ever.
    third = api.plan(session, [*prompt[:11], 60], "r3")
    api.commit(api.write(third, [*prompt[:11], 60, 61]))
    assert api.get(session)["tokens"] == 13


def test_a_concurrent_turn_gets_a_new_file_and_the_loser_a_conflict(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(10), [1, 2], "r1")
    prompt = [*range(10), 1, 70]
    one, two = api.plan(session, prompt, "a"), api.plan(session, prompt, "b")
    assert _fresh(one)["kv_uri"].endswith("/1.kv") and _fresh(two)["kv_uri"].endswith("/2.kv")
    assert one["cached_tokens"] == two["cached_tokens"] == 11
    bodies = [api.write(one, [*prompt, 1]), api.write(two, [*prompt, 2])]
    assert api.commit(bodies[1])["version"] == 2
    with pytest.raises(errors.Conflict):
        api.commit(bodies[0])
    assert [item["kv_uri"][-4:] for item in api.get(session)["stored_kv_cache"]] == ["1.kv", "2.kv"]


def test_a_commit_in_the_middle_of_a_plan_is_planned_on(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(20), [1, 2], "r1")
    rival = api.write(api.plan(session, [*range(20), 1, 50], "rival"), [*range(20), 1, 50, 51])

    def commits() -> None:
        api.nodes.before_read_ids = None
        api.commit(rival)

    api.nodes.before_read_ids = commits
    plan = api.plan(session, [*range(10), 99], "r2")
    assert (plan["version"], plan["stored_tokens"], plan["cached_tokens"]) == (2, 23, 10)
    assert api.commit(api.write(plan, [*range(10), 99]))["version"] == 3


def test_commit_is_idempotent_by_plan(api: ControlApi) -> None:
    session = api.session()
    plan = api.plan(session, range(10), "r1")
    body = api.write(plan, range(12))
    first = api.commit(body)
    seals = api.nodes.calls["seal"]
    assert api.commit(body) == first
    assert api.nodes.calls["seal"] == seals
    api.clock.now += 10_000  # also long after the plan's time
    assert api.commit(body) == first


def test_a_request_repeated_after_its_commit_is_planned_again(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(10), [1, 2, 3], "r1")
    again = api.plan(session, range(10), "r1")
    assert again["cached_tokens"] == 9
    assert api.commit(api.write(again, [*range(10), 4]))["version"] == 2
    assert api.call("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"] == [*range(10), 4]


def test_bytes_that_are_not_there_are_not_stored(api: ControlApi) -> None:
    session = api.session()
    plan = api.plan(session, range(10), "r1")
    body = api.write(plan, range(10))
    column = api.nodes.node(_node_of(plan)).columns[
        plan["kv_transfer"]["plan"]["layouts"][_fresh(plan)["kv_uri"]]["file"], 0
    ]
    column.written = [(0, 100), (200, 640)]
    with pytest.raises(errors.Hole):
        api.commit(body)
    assert api.get(session)["version"] == 0 and api.rows(schema.segments) == 0
    column.written = [(0, 640)]
    assert api.commit(body)["version"] == 1


def test_acknowledgements_of_an_earlier_incarnation_are_lost(api: ControlApi) -> None:
    session = api.session()
    plan = api.plan(session, range(10), "r1")
    body = api.write(plan, range(10))
    api.start_node(_node_of(plan))
    with pytest.raises(errors.Lost):
        api.commit(body)
    body["acks"][0]["incarnation"] += 1  # a writer that claims the new one has not written to it either
    with pytest.raises(errors.Lost):
        api.commit(body)
    assert api.rows(schema.segments) == 0


def test_a_restart_that_control_has_not_heard_of_is_lost_too(api: ControlApi) -> None:
    session = api.session()
    plan = api.plan(session, range(10), "r1")
    body = api.write(plan, range(10))
    node = api.nodes.node(_node_of(plan))
    node.incarnation += 1
    with pytest.raises(errors.Lost):
        api.commit(body)
    node.incarnation -= 1
    api.nodes.before_seal = lambda: api.register(node.name)
    with pytest.raises(errors.Lost):  # registered anew between seal and compare-and-swap
        api.commit(body)
    assert api.rows(schema.segments) == 0


def test_a_restarted_node_is_a_miss_and_fresh_goes_to_a_new_file(api: ControlApi) -> None:
    session = api.session()
    first = api.turn(session, range(20), [1, 2], "r1")
    api.start_node(_node_of(first))
    prompt = [*range(20), 1, 30]
    plan = api.turn(session, prompt, [4], "r2")
    assert (plan["reusable_tokens"], plan["cached_tokens"], plan["miss"]) == (21, 0, "lost")
    assert _fresh(plan)["kv_uri"].endswith("/2.kv") and _fresh(plan)["kv_start"] == 0
    state = api.get(session)
    assert state["control_rows"] == {"segments": 1, "plans": 0, "files": 2, "chain": 2}
    assert api.plan(session, [*prompt, 4], "r3")["cached_tokens"] == len(prompt)


def test_a_dead_node_is_a_miss_and_fresh_goes_to_a_living_one(api: ControlApi) -> None:
    session = api.session()
    first = api.turn(session, range(20), [1, 2], "r1")
    dead = _node_of(first)
    living = "n2" if dead == "n1" else "n1"
    api.clock.now += 11
    api.heartbeat(living)
    plan = api.plan(session, [*range(20), 1, 30], "r2")
    assert (plan["reusable_tokens"], plan["cached_tokens"], plan["miss"]) == (21, 0, "unreachable")
    assert _node_of(plan) == living
    api.heartbeat(dead)  # it was only slow: everything is still there
    assert api.plan(session, [*range(20), 1, 30], "r3")["cached_tokens"] == 21


def test_a_retry_after_its_node_died_writes_elsewhere(api: ControlApi) -> None:
    session = api.session()
    first = api.plan(session, range(10), "r1")
    again = api.plan(session, range(10), "r1")
    assert _fresh(again) == _fresh(first)
    dead = _node_of(first)
    api.clock.now += 11
    api.heartbeat("n2" if dead == "n1" else "n1")
    retried = api.plan(session, range(10), "r1")
    assert _node_of(retried) != dead and _fresh(retried)["kv_uri"].endswith("/2.kv")
    rows = api.get(session)["control_rows"]
    assert rows == {"segments": 0, "plans": 1, "files": 2, "chain": 2}, "the former plan's files went with it"
    assert api.commit(api.write(retried, range(10)))["version"] == 1


def test_a_retry_under_another_identity_gets_a_file_of_that_identity(api: ControlApi) -> None:
    session = api.session()
    api.plan(session, range(10), "r1")
    plan = api.plan(session, range(10), "r1", identity="identity-2")
    layout = plan["kv_transfer"]["plan"]["layouts"][_fresh(plan)["kv_uri"]]
    assert layout["kv_identity"] == "identity-2"


def test_ids_that_can_not_be_read_are_a_miss_not_an_error(api: ControlApi) -> None:
    session = api.session()
    plan = api.turn(session, range(20), [1, 2], "r1")
    api.nodes.node(_node_of(plan)).away = True  # control has not noticed yet
    edited = api.plan(session, [*range(10), 99, 98], "r2")
    assert (edited["cached_tokens"], edited["miss"]) == (0, "unreachable")


def test_without_any_living_node_the_plan_saves_nothing(api: ControlApi) -> None:
    session = api.session()
    api.clock.now += 60
    plan = api.plan(session, range(10), "r1")
    assert plan["kv_transfer"]["fresh_kvcache"] == [] and plan["kv_transfer"]["plan"]["layouts"] == {}
    api.start_node("n1")
    assert _node_of(api.plan(session, range(10), "r1")) == "n1"


def test_a_full_node_serves_reads_and_fresh_goes_elsewhere(api: ControlApi) -> None:
    session = api.session()
    first = api.turn(session, range(20), [1, 2], "r1")
    full = _node_of(first)
    api.heartbeat(full, capacity_bytes=21 * BYTES_PER_TOKEN + 22 * 4)
    plan = api.plan(session, [*range(20), 1, *range(100, 140)], "r2")
    assert plan["cached_tokens"] == 21
    assert _fresh(plan)["kv_uri"].endswith("/2.kv") and _node_of(plan) != full


def test_an_expired_plan_is_refused_and_its_rows_go(api: ControlApi) -> None:
    session = api.session()
    plan = api.plan(session, range(10), "r1")
    body = api.write(plan, range(10))
    api.clock.now += 601
    with pytest.raises(errors.PlanExpired):
        api.commit(body)
    api.start_node("n3")
    api.service.reclaimer.sweep()
    assert api.rows(schema.plans) == 0 and api.get(session)["control_rows"]["files"] == 0
    with pytest.raises(errors.PlanExpired):
        api.commit(body)


def test_plans_are_bounded_and_end_with_abort(api: ControlApi) -> None:
    session = api.session()
    plans = [api.plan(session, range(10), f"r{i}") for i in range(64)]
    with pytest.raises(errors.Overloaded):
        api.plan(session, range(10), "one too many")
    for plan in plans:
        body = {"plan_token": plan["kv_transfer"]["plan"]["token"]}
        assert api.call("POST", "/v1/kv/abort", body) == {"session": session, "aborted": True}
    assert api.call("POST", "/v1/kv/abort", body) == {"session": session, "aborted": False}
    assert api.get(session)["control_rows"] == {"segments": 0, "plans": 0, "files": 0, "chain": 0}
    with pytest.raises(errors.PlanSuperseded):
        api.commit(
            {
                "plan_token": plans[0]["kv_transfer"]["plan"]["token"],
                "fresh": [{**_fresh(plans[0]), "token_length": 1, "kv_length": BYTES_PER_TOKEN}],
                "digest": "0" * 64,
                "acks": [{"column": 0, "epoch": 1, "incarnation": 1}],
            }
        )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_start": 1}, "token_start"),
        ({"kv_start": 64}, "kv_start"),
        ({"kv_uri": "gd2fs://test/.kv/other/1.kv"}, "kv_uri"),
        ({"token_length": 999, "kv_length": 999 * BYTES_PER_TOKEN}, "token_length"),
        ({"kv_length": 1}, "kv_length"),
    ],
)
def test_a_commit_must_be_what_was_planned(api: ControlApi, change: dict[str, Any], field: str) -> None:
    session = api.session()
    body = api.write(api.plan(session, range(10), "r1"), range(10))
    body["fresh"][0] |= change
    with pytest.raises(errors.Invalid, match=field):
        api.commit(body)


def test_a_session_gives_its_priority_to_its_files(api: ControlApi) -> None:
    keys = Keys.development()

    def priority(layout: dict[str, Any]) -> int:
        return keys.verify(layout["capability"], Capability, now=api.clock.now).priority

    session = api.session(priority=7)
    api.turn(session, range(20), [1, 2], "r1")
    layouts = api.plan(session, [*range(12), 70, 71], "r2")["kv_transfer"]["plan"]["layouts"]
    assert [priority(layout) for layout in layouts.values()] == [7] * 4
    alone = api.call("GET", "/v1/fs/layout", path=f"/.kv/{session}/1.kv")
    assert priority(alone) == 7
    other = api.plan(api.session(), range(5), "r1")["kv_transfer"]["plan"]["layouts"]
    assert [priority(layout) for layout in other.values()] == [0, 0]
    assert priority(api.call("POST", "/v1/fs/create", {"path": "/plain"})["layout"]) == 0


def test_capabilities_reach_exactly_what_was_planned(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(20), [1, 2], "r1")
    edited = [*range(12), 70, 71]
    plan = api.plan(session, edited, "r2")
    layouts = plan["kv_transfer"]["plan"]["layouts"]
    root = f"gd2fs://test/.kv/{session}/"
    assert set(layouts) == {root + name for name in ("1.kv", "1.kv.tokens", "2.kv", "2.kv.tokens")}
    keys = Keys.development()
    said = {
        name.removeprefix(root): keys.verify(layout["capability"], Capability, now=api.clock.now)
        for name, layout in layouts.items()
    }
    assert (said["1.kv"].rights, said["1.kv"].ranges) == (("read",), ((0, 12 * BYTES_PER_TOKEN),))
    assert (said["1.kv.tokens"].rights, said["1.kv.tokens"].ranges) == (("read",), ((0, 48),))
    assert said["2.kv"].ranges == ((0, -1),) and said["2.kv"].grant == 1
    assert all(item.bearer and item.tenant == "default" for item in said.values())
    assert all(item.expiry == plan["expires_at"] == int(api.clock.now) + 600 for item in said.values())
    grown = api.plan(session, [*range(20), 1, 5], "r3")
    both = keys.verify(
        grown["kv_transfer"]["plan"]["layouts"][root + "1.kv"]["capability"], Capability, now=api.clock.now
    )
    end = 21 * BYTES_PER_TOKEN
    assert both.rights == ("read", "write") and both.ranges == ((0, end), (end, -1))
    assert both.grant == 2
    with pytest.raises(errors.Sealed):
        api.nodes.write(grown["kv_transfer"]["plan"]["layouts"][root + "1.kv"], 0, 1)
    with pytest.raises(errors.Forbidden):
        api.nodes.write(layouts[root + "1.kv"], end, 1)
    assert grown["kv_transfer"]["plan"]["control"] == ["http://control:7527"]
    assert grown["kv_transfer"]["plan"]["kv_identity"] == IDENTITY


def test_an_ever_edited_conversation_has_a_bounded_number_of_segments(
    api: ControlApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_rules, "SEGMENTS_MAX", 8)
    session = api.session()
    history = list(range(5))
    counts = []
    for turn in range(24):
        plan = api.plan(session, [*history, 10_000 + turn, 3], f"r{turn}", max_tokens=2)
        history = [*history, 10_000 + turn]
        # The token after these was sampled otherwise each time: the next prompt cuts it off.
        api.commit(api.write(plan, [*history, 3, 4]))
        counts.append(api.get(session)["control_rows"]["segments"])
    assert max(counts) == 9 and counts.count(9) >= 3, "cut in the middle, several times"
    assert api.call("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"] == [*history, 3, 4]


def _all_rows(api: ControlApi) -> dict[str, int]:
    return {table.name: api.rows(table) for table in schema.metadata.sorted_tables}


def test_an_estimate_says_what_a_plan_would_and_changes_nothing(api: ControlApi) -> None:
    session = api.session()
    prompt = list(range(100))
    api.turn(session, prompt, [1, 2, 3], "r1")
    for ids in ([*prompt, 1, 2, 9], prompt[:50], [*prompt[:20], 999], [7]):
        body = {"token_ids": ids, "max_tokens": 4, "kv_identity": IDENTITY}
        rows, pins = _all_rows(api), api.nodes.calls["pin"]
        said = api.call("POST", f"/v1/kv/sessions/{session}/estimate", body)
        assert (_all_rows(api), api.nodes.calls["pin"]) == (rows, pins)
        plan = api.plan(session, ids, "p")
        plan["estimate"].pop("best_effort")
        assert said == {name: plan[name] for name in said} | {
            "estimate": plan["estimate"] | {"max_output_tokens": 4}
        }
        api.call("POST", "/v1/kv/abort", {"plan_token": plan["kv_transfer"]["plan"]["token"]})
    api.headers["X-GD2FS-Tenant"] = "another"
    with pytest.raises(errors.NotFound):
        api.call("POST", f"/v1/kv/sessions/{session}/estimate", body)


def test_a_session_is_extended(api: ControlApi) -> None:
    session = api.session(ttl_s=100, priority=1)
    begun = api.clock.now
    route = f"/v1/kv/sessions/{session}"
    api.clock.now += 60
    assert api.call("PATCH", route, {})["expires_at"] == begun + 160, "used now"
    changed = api.call("PATCH", route, {"ttl_s": 1000, "priority": 7})
    assert (changed["ttl_s"], changed["priority"], changed["expires_at"]) == (1000, 7, begun + 1060)
    api.plan(session, range(10), "r1")
    assert api.call("PATCH", route, {"ttl_s": 1})["expires_at"] == begun + 660, "not under a plan"
    forever = api.call("PATCH", route, {"ttl_s": None})
    assert (forever["ttl_s"], forever["priority"], forever["expires_at"]) == (None, 7, None)
    for body, field in (({"priority": None}, "priority"), ({"ttl_s": 0}, "ttl_s"), ({"model": "x"}, "model")):
        with pytest.raises(errors.Invalid, match=field):
            api.call("PATCH", route, body)
    api.headers["X-GD2FS-Tenant"] = "another"
    with pytest.raises(errors.NotFound):
        api.call("PATCH", route, {})


def test_sessions_are_listed_by_model_and_identity(api: ControlApi) -> None:
    made = [api.session(identity, model=model) for identity in ("a", "b") for model in ("x", "y", "x")]
    listed = api.call("GET", "/v1/kv/sessions", kv_identity="a", model="x", limit=1)
    rest = api.call("GET", "/v1/kv/sessions", kv_identity="a", model="x", after=listed["next"])
    found = [one["session"] for one in listed["sessions"] + rest["sessions"]]
    assert found == sorted([made[0], made[2]]) and rest["next"] is None
    assert len(api.call("GET", "/v1/kv/sessions", model="x")["sessions"]) == 4
