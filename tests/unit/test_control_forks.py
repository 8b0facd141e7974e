"""Forks: sessions that begin with another's segments, the same bytes, and what becomes of those."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gd2fs import errors
from gd2fs.control import schema
from tests.control_api import BYTES_PER_TOKEN, ControlApi, control


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ControlApi]:
    with control(tmp_path) as api:
        api.start_node("n1")
        api.start_node("n2")
        yield api


def _fork(api: ControlApi, session: str, tokens: int | None = None, **more: Any) -> dict[str, Any]:
    body = {"fork": {"session": session, "tokens": tokens}, **more}
    return dict(api.call("POST", "/v1/kv/sessions", body))


def _delete(api: ControlApi, session: str) -> dict[str, Any]:
    return dict(api.call("DELETE", f"/v1/kv/sessions/{session}"))


def _used(api: ControlApi) -> int:
    return sum(api.nodes.node(name).used_bytes() for name in ("n1", "n2"))


def _stored(tokens: int) -> int:
    """Bytes of KV cache and ids."""
    return tokens * (BYTES_PER_TOKEN + 4)


@pytest.mark.parametrize("tokens", [None, 0, 1, 57, 102])
def test_a_fork_anywhere_adds_no_bytes_and_is_served_from_there(api: ControlApi, tokens: int | None) -> None:
    session = api.session(model="m", priority=3, ttl_s=600)
    prompt = list(range(100))
    api.turn(session, prompt, [1, 2, 3], "r1")
    used, rows = _used(api), api.rows(schema.file_columns)
    fork = _fork(api, session, tokens)
    kept = 102 if tokens is None else tokens
    assert (fork["tokens"], fork["bytes"], fork["version"]) == (kept, kept * BYTES_PER_TOKEN, 0)
    assert (fork["model"], fork["priority"], fork["ttl_s"]) == ("m", 3, 600)
    assert (_used(api), api.rows(schema.file_columns)) == (used, rows)
    assert fork["control_rows"]["segments"] == (1 if kept else 0) and fork["control_rows"]["files"] == 0
    ids = [*prompt, 1, 2][:kept]
    assert api.call("GET", f"/v1/kv/sessions/{fork['session']}/tokens")["token_ids"] == ids
    plan = api.plan(fork["session"], [*ids, 900, 901], "f1")
    assert plan["cached_tokens"] == plan["reusable_tokens"] == plan["stored_tokens"] == kept


def test_both_go_on_by_themselves(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(50), [1, 1], "r1")
    fork = _fork(api, session, 30)["session"]
    left, right = [*range(51), *range(200, 220)], [*range(30), *range(300, 330)]
    left[50] = 1
    for turn in range(3):
        for owner, ids in ((session, left), (fork, right)):
            plan = api.turn(owner, [*ids, turn], [7, 8], f"{owner}{turn}")
            assert plan["cached_tokens"] == plan["reusable_tokens"]
            assert plan["cached_tokens"] == {0: 51 if owner == session else 30}.get(turn, len(ids))
            ids += [turn, 7]
    for owner, ids in ((session, left), (fork, right)):
        assert api.call("GET", f"/v1/kv/sessions/{owner}/tokens")["token_ids"] == ids
    uris = [[s["kv_uri"] for s in api.get(one)["stored_kv_cache"]] for one in (session, fork)]
    assert len(uris[0]) == 1 and len(uris[1]) == 2
    assert uris[1][0] == uris[0][0], "one file, and who does not own it writes another"
    assert api.nodes.calls["read_ids"] == 1 + 3, "by the first plan of the fork, and for the tokens"


def test_a_fork_is_planned_on_its_own_ids(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(50), [1, 1], "r1")
    fork = _fork(api, session, 30)["session"]
    plan = api.plan(fork, [*range(20), 999, *range(21, 60)], "f1")
    assert (plan["cached_tokens"], plan["miss"]) == (20, "edited")
    # What its parent has beyond the fork is not the fork's.
    plan = api.plan(fork, range(50), "f2")
    assert (plan["cached_tokens"], plan["stored_tokens"]) == (30, 30)


def test_a_fork_ends_at_a_granule(api: ControlApi) -> None:
    blocks = {"name": "block", "bytes_per_token": BYTES_PER_TOKEN, "granule": 16}
    session = api.session(kv_format=blocks)
    plan = api.plan(session, range(40), "r1")
    api.commit(api.write(plan, range(32)))
    assert _fork(api, session, 31)["tokens"] == 16
    assert _fork(api, session, 32)["tokens"] == 32
    with pytest.raises(errors.Invalid, match=r"fork\.tokens: 33, but session .* has 32 tokens"):
        _fork(api, session, 33)


def test_what_cannot_be_forked(api: ControlApi) -> None:
    session = api.session()
    with pytest.raises(errors.NotFound, match="session"):
        _fork(api, "0" * 32)
    with pytest.raises(errors.Invalid, match="kv_identity: 'other'"):
        _fork(api, session, kv_identity="other")
    with pytest.raises(errors.Invalid, match="kv_format"):
        _fork(api, session, kv_format={"name": "block", "bytes_per_token": 1, "granule": 1})
    with pytest.raises(errors.Invalid, match="kv_identity, kv_format"):
        api.call("POST", "/v1/kv/sessions", {"kv_identity": "x"})
    api.headers["X-GD2FS-Tenant"] = "another"
    with pytest.raises(errors.NotFound, match="session"):
        _fork(api, session)
    del api.headers["X-GD2FS-Tenant"]
    assert api.rows(schema.sessions) == 1
    assert _fork(api, session, ttl_s=None, priority=9)["priority"] == 9


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_bytes_go_with_the_last_reference(api: ControlApi, order: tuple[int, ...]) -> None:
    """A session, a fork of it, and a fork of that, each with something of its own."""
    first = api.session()
    api.turn(first, range(100), [1, 1], "r")
    second = _fork(api, first, 80)["session"]
    api.turn(second, [*range(80), *range(500, 540)], [2, 2], "r")
    third = _fork(api, second, 110)["session"]
    api.turn(third, [*range(80), *range(500, 530), *range(700, 710)], [3, 3], "r")
    family = [first, second, third]
    ids = {one: api.call("GET", f"/v1/kv/sessions/{one}/tokens")["token_ids"] for one in family}
    assert _used(api) == _stored(101 + 41 + 11)
    for position in order:
        gone = family[position]
        _delete(api, gone)
        del ids[gone]
        for one, expected in ids.items():
            assert api.call("GET", f"/v1/kv/sessions/{one}/tokens")["token_ids"] == expected
            plan = api.plan(one, [*expected, 9], f"again-{position}")
            assert plan["cached_tokens"] == len(expected)
            api.call("POST", "/v1/kv/abort", {"plan_token": plan["kv_transfer"]["plan"]["token"]})
        wanted = sum(
            {first: 101, second: 41, third: 11}[one] for one in family if _is_needed(one, family, ids)
        )
        assert _used(api) == _stored(wanted)
    assert api.rows(schema.files) == 1, "the directory of all sessions"
    assert api.rows(schema.file_columns) == 0


def _is_needed(one: str, family: list[str], left: dict[str, list[int]]) -> bool:
    """Whether the file that `one` wrote is named by it or by one that was forked from it later."""
    return any(family.index(other) >= family.index(one) for other in left)


def test_who_inherits_a_file_goes_on_in_it(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(50), [1, 1], "r1")
    fork = _fork(api, session)["session"]
    [before] = api.get(fork)["stored_kv_cache"]
    _delete(api, session)
    plan = api.turn(fork, [*range(50), 1, 5], [6, 6], "f1")
    assert plan["cached_tokens"] == 51
    [after] = api.get(fork)["stored_kv_cache"]
    assert (after["kv_uri"], after["token_length"]) == (before["kv_uri"], 53)
    path = after["kv_uri"].removeprefix("gd2fs://test")
    assert api.call("GET", "/v1/fs/stat", path=path)["sealed"] == 53 * BYTES_PER_TOKEN


def test_an_edit_leaves_others_what_they_refer_to(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(50), [1, 1], "r1")
    fork = _fork(api, session, 40)["session"]
    # Nothing of the old file is left to the one that wrote it.
    api.turn(session, range(900, 950), [1, 1], "r2")
    api.service.reclaimer.sweep()
    assert api.plan(fork, range(41), "f1")["cached_tokens"] == 40
    assert _used(api) == _stored(51 + 51)
    _delete(api, fork)
    assert _used(api) == _stored(51)


def test_a_session_that_expires_leaves_its_forks_everything(api: ControlApi) -> None:
    session = api.session(ttl_s=10)
    api.turn(session, range(50), [1, 1], "r1")
    fork = _fork(api, session, 40, ttl_s=None)["session"]
    api.clock.now += 700
    for node in ("n1", "n2"):
        api.heartbeat(node)
    api.service.reclaimer.sweep()
    with pytest.raises(errors.NotFound):
        api.get(session)
    assert api.plan(fork, range(41), "f1")["cached_tokens"] == 40


def test_fsck_knows_what_forks_refer_to(api: ControlApi) -> None:
    session = api.session()
    api.turn(session, range(50), [1, 1], "r1")
    fork = _fork(api, session, 40)["session"]
    _delete(api, session)
    [node] = [name for name in ("n1", "n2") if api.nodes.node(name).used_bytes()]
    page = api.call("POST", "/v1/fsck", {"node": node})
    assert (page["columns"], page["findings"]) == (2, [])
    for column in api.nodes.node(node).columns.values():
        column.sealed = 0
    page = api.call("POST", "/v1/fsck", {"node": node, "repair": True})
    assert [(found["kind"], found["repaired"]) for found in page["findings"]] == [("seal", True)] * 2
    assert api.plan(fork, range(41), "f1")["cached_tokens"] == 40
