"""Registration, heartbeats, leases, placement, freeing of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, update

from gd2fs import errors
from gd2fs.control import nodes, overdue, requests, schema
from gd2fs.control.placement import Candidate, place
from gd2fs.signing import Keys
from tests.control_api import BYTES_PER_TOKEN, ControlApi, control


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ControlApi]:
    with control(tmp_path) as api:
        yield api


def _register(api: ControlApi, node: str, floor: int = 0) -> int:
    body = {"node": node, "addresses": [], "memory_bytes": 1024, "incarnation_floor": floor}
    answer = api.call("POST", "/v1/nodes/register", body)
    assert (answer["cluster"], answer["lease_s"], answer["heartbeat_s"]) == ("test", 10, 2)
    return int(answer["incarnation"])


def _states(api: ControlApi) -> dict[str, str]:
    return {node["node"]: node["state"] for node in api.call("GET", "/v1/nodes")["nodes"]}


def test_incarnations_only_rise(api: ControlApi) -> None:
    assert [_register(api, "a"), _register(api, "a")] == [1, 2]
    # The database came from a backup; the node kept a higher one on its disk.
    assert _register(api, "a", floor=40) == 41
    assert _register(api, "a", floor=7) == 42
    assert _register(api, "b") == 1
    with pytest.raises(errors.Invalid, match="incarnation_floor"):
        _register(api, "a", floor=2**32 - 1)


def test_a_heartbeat_of_another_incarnation_is_refused(api: ControlApi) -> None:
    old = api.start_node("a")
    api.heartbeat("a")
    assert _register(api, "a", floor=old) == old + 1
    with pytest.raises(errors.StaleIncarnation, match=r"registered as a \(at an unknown address\)"):
        api.heartbeat("a")
    api.nodes.node("a").incarnation = old + 1
    api.heartbeat("a")
    api.nodes.node("a").incarnation = old + 2
    with pytest.raises(errors.StaleIncarnation, match="register again"):
        api.heartbeat("a")
    with pytest.raises(errors.NotFound):
        api.heartbeat("stranger")


def test_a_living_node_keeps_its_name(api: ControlApi) -> None:
    """Who registers ends the life of the one before: only that node itself may, with its own directory."""
    own = api.start_node("a")
    with pytest.raises(errors.Conflict, match=r"node\.id: a is alive at tcp://a:7528, .*--id.* dead in 10 s"):
        _register(api, "a", floor=own - 1)
    assert _states(api) == {"a": "alive"}
    api.heartbeat("a")
    # Killed, and started again at once; then it has not listened yet, and was killed again before it could
    # keep its incarnation: nobody's bytes end with that.
    assert _register(api, "a", floor=own) == own + 1
    assert _register(api, "a", floor=own) == own + 2
    # A new directory is welcome once the former is dead, or has left.
    own = api.start_node("a", floor=own + 2)
    api.clock.now += 10.01
    assert _states(api) == {"a": "dead"} and _register(api, "a", floor=0) == own + 1
    own = api.start_node("a", floor=own + 1)
    api.call("DELETE", "/v1/nodes/a")
    assert _register(api, "a", floor=0) == own + 1


def test_who_has_lost_a_name_takes_nobody_out_of_the_cluster(api: ControlApi) -> None:
    former = api.start_node("a")
    current = api.start_node("a", floor=former)
    with pytest.raises(errors.StaleIncarnation, match="tcp://a:7528"):
        api.call("DELETE", "/v1/nodes/a", incarnation=former)
    assert _states(api) == {"a": "alive"}
    api.call("DELETE", "/v1/nodes/a", incarnation=current)
    assert _states(api) == {"a": "left"}


def test_a_node_whose_log_fails_gets_nothing_new_until_it_works(api: ControlApi) -> None:
    api.start_node("bad", has_log=True)
    api.start_node("well", has_log=True)
    api.heartbeat("bad", log_trouble=True)
    made = [api.call("POST", "/v1/fs/create", {"path": f"/{i}"})["layout"] for i in range(20)]
    assert {layout["columns"][0]["replicas"][0]["node"] for layout in made} == {"well"}
    session = api.session()
    api.turn(session, range(20), [1, 2], "r1")
    assert api.nodes.node("bad").columns == {}
    # A session that has begun there goes on elsewhere: it could be written on, but not sealed.
    api.heartbeat("bad")
    api.heartbeat("well", log_trouble=True)
    assert api.plan(session, [*range(20), 1, 30], "r2")["cached_tokens"] == 21
    api.turn(session, [*range(20), 1, 30], [4, 5], "r3")
    assert len(api.nodes.node("bad").columns) == 2
    api.heartbeat("bad", log_trouble=True)
    with pytest.raises(
        errors.NoNodes, match=r"of 2 that are alive; 2 of them take no new files, since a log"
    ):
        api.call("POST", "/v1/fs/create", {"path": "/nowhere"})
    plan = api.plan(api.session(), range(20), "r4")
    assert plan["kv_transfer"]["fresh_kvcache"] == [], "nothing is saved, and nobody waits for a disk"
    assert [node["log_trouble"] for node in api.call("GET", "/v1/nodes")["nodes"]] == [True, True]
    api.heartbeat("bad")
    api.call("POST", "/v1/fs/create", {"path": "/somewhere"})
    # A new life begins without the trouble of the former.
    api.heartbeat("bad", log_trouble=True)
    api.start_node("bad", has_log=True)
    api.call("POST", "/v1/fs/create", {"path": "/later"})


def test_an_older_copy_of_a_data_directory_is_refused(api: ControlApi) -> None:
    """Its logs may hold bytes that were replaced since, and nothing in them says so."""
    served = api.start_node("a", floor=40)
    api.clock.now += 10.01
    # The real directory comes again, and is killed before it serves; that changes nothing.
    assert _register(api, "a", floor=served) == served + 1
    older = r"node\.data_dir: node a has served as incarnation 41, and this directory knows of 40: .* empty"
    with pytest.raises(errors.Conflict, match=older):
        _register(api, "a", floor=40)
    # One that is new, and the real one, may come.
    assert _register(api, "a", floor=0) == served + 2
    assert _register(api, "a", floor=served) == served + 3


def test_a_node_is_alive_within_its_lease_and_once_it_listens(api: ControlApi) -> None:
    _register(api, "a")
    assert _states(api) == {"a": "dead"}, "registered, not listening yet"
    api.start_node("a")
    assert _states(api) == {"a": "alive"}
    api.clock.now += 10
    assert _states(api) == {"a": "alive"}
    api.clock.now += 0.01
    assert _states(api) == {"a": "dead"}
    [node] = api.call("GET", "/v1/nodes")["nodes"]
    assert node["last_heartbeat_age_s"] == pytest.approx(10.01)
    api.heartbeat("a")
    assert _states(api) == {"a": "alive"}
    api.call("DELETE", "/v1/nodes/a")
    assert _states(api) == {"a": "left"}
    with pytest.raises(errors.StaleIncarnation):
        api.heartbeat("a")
    with pytest.raises(errors.NotFound):
        api.call("DELETE", "/v1/nodes/b")


def test_a_gap_of_controls_own_kills_no_node(api: ControlApi) -> None:
    api.start_node("a")
    api.start_node("b")
    for _ in range(4):
        api.clock.now += 2
        nodes.watch(api.service.database)
    api.heartbeat("a")  # b is 8 s old here
    api.clock.now += 60  # control was stopped: nobody could report
    assert _states(api) == {"a": "dead", "b": "dead"}
    nodes.watch(api.service.database)
    assert _states(api) == {"a": "alive", "b": "alive"}
    api.clock.now += 3
    assert _states(api) == {"a": "alive", "b": "dead"}, "the gap does not count, the 8 s before it do"
    for _ in range(4):
        api.clock.now += 2
        nodes.watch(api.service.database)
    assert _states(api) == {"a": "dead", "b": "dead"}, "watched all the time: no excuse"


def test_placement_follows_free_space() -> None:
    living = [Candidate("a", 1, 300), Candidate("b", 1, 100), Candidate("full", 1, 0)]
    counts = Counter(place(f"file-{i}", living, 1)[0].node for i in range(4000))
    assert counts["full"] == 0
    assert 0.70 < counts["a"] / 4000 < 0.80
    assert place("f", living, 1) == place("f", list(reversed(living)), 1), "whatever the order"
    assert {item.node for item in place("f", living, 2)} == {"a", "b"}
    assert place("f", living, 3) == [], "columns of one file lie on different nodes"
    assert place("f", living, 1, bytes_needed=200)[0].node == "a"
    assert place("f", living, 1, bytes_needed=301) == []


def test_deleting_frees_the_bytes_at_once(api: ControlApi) -> None:
    api.start_node("a")
    session = api.session()
    api.turn(session, range(100), [1, 2], "r1")
    assert api.nodes.node("a").used_bytes() == 101 * (BYTES_PER_TOKEN + 4)
    answer = api.call("DELETE", f"/v1/kv/sessions/{session}")
    assert answer == {"deleted_files": 2, "freed_bytes": 101 * (BYTES_PER_TOKEN + 4)}
    assert api.nodes.node("a").used_bytes() == 0
    for table in (schema.reclaims, schema.sessions, schema.segments, schema.file_columns, schema.plans):
        assert api.rows(table) == 0, table.name
    with pytest.raises(errors.NotFound):
        api.get(session)


def test_freeing_is_tried_again_until_the_node_is_back(api: ControlApi) -> None:
    api.start_node("a")
    session = api.session()
    api.turn(session, range(100), [1, 2], "r1")
    api.nodes.node("a").away = True
    assert api.call("DELETE", f"/v1/kv/sessions/{session}")["freed_bytes"] == 0
    assert api.rows(schema.reclaims) == 2
    asked = api.nodes.calls["delete"]
    api.service.reclaimer.sweep()
    assert api.nodes.calls["delete"] == asked, "not before its pause is over"
    api.clock.now += 5
    api.service.reclaimer.sweep()
    assert api.nodes.calls["delete"] == asked + 1
    api.clock.now += 60
    api.service.reclaimer.sweep()
    assert api.nodes.calls["delete"] == asked + 1, "a dead node is not asked"
    api.nodes.node("a").away = False
    api.heartbeat("a")
    assert api.service.reclaimer.sweep() == 2
    assert api.rows(schema.reclaims) == 0 and api.nodes.node("a").used_bytes() == 0


def test_a_node_that_leaves_has_nothing_left_to_free(api: ControlApi) -> None:
    api.start_node("a")
    one, two = api.session(), api.session()
    for session in (one, two):
        api.turn(session, range(10), [1, 2], "r1")
    api.nodes.node("a").away = True
    api.call("DELETE", f"/v1/kv/sessions/{one}")
    assert api.rows(schema.reclaims) == 2
    api.call("DELETE", "/v1/nodes/a")
    assert api.rows(schema.reclaims) == 0
    api.call("DELETE", f"/v1/kv/sessions/{two}")
    assert api.rows(schema.reclaims) == 0 and api.rows(schema.file_columns) == 0


def test_sessions_end_with_their_ttl_which_use_renews(api: ControlApi) -> None:
    api.start_node("a")
    kept, ended = api.session(ttl_s=100), api.session(ttl_s=100)
    for session in (kept, ended):
        api.turn(session, range(10), [1, 2], "r1")
    api.clock.now += 60
    api.heartbeat("a")
    api.turn(kept, [*range(10), 1, 5], [1, 2], "r2")
    api.clock.now += 60
    api.heartbeat("a")
    api.service.reclaimer.sweep()
    assert api.get(kept)["tokens"] == 13
    with pytest.raises(errors.NotFound):
        api.get(ended)


def test_a_commit_does_not_end_a_session_under_another_plan(api: ControlApi) -> None:
    api.start_node("a")
    session = api.session(ttl_s=5)
    first, second = api.plan(session, range(10), "r1"), api.plan(session, range(20), "r2")
    api.commit(api.write(first, range(10)))
    api.clock.now += 60
    api.heartbeat("a")
    api.service.reclaimer.sweep()
    assert api.get(session)["tokens"] == 10
    api.call("POST", "/v1/kv/abort", {"plan_token": second["kv_transfer"]["plan"]["token"]})


def test_a_session_that_was_renewed_meanwhile_is_not_overdue(
    api: ControlApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.start_node("a")
    session = api.session(ttl_s=5)
    api.turn(session, range(10), [1, 2])
    api.clock.now += 60
    lock = overdue._lock

    def renewed_first(connection: Connection, *rest: Any) -> bool:
        connection.execute(update(schema.sessions).values(expires_at=api.clock.now + 1000))
        return lock(connection, *rest)

    monkeypatch.setattr(overdue, "_lock", renewed_first)
    api.service.reclaimer.sweep()
    assert api.get(session)["tokens"] == 11


def test_the_worker_frees_by_itself(tmp_path: Path) -> None:
    with control(tmp_path, Keys.development()) as api:
        api.start_node("a")
        session = api.session()
        plan = api.plan(session, range(10), "r1")
        api.write(plan, range(10))
        api.service.reclaimer.start()
        api.call("POST", "/v1/kv/abort", {"plan_token": plan["kv_transfer"]["plan"]["token"]})
        for _ in range(200):
            if api.rows(schema.reclaims) == 0 and api.nodes.node("a").used_bytes() == 0:
                return
            api.service.reclaimer._stop.wait(0.02)
        raise AssertionError("the worker freed nothing within 4 s")


@pytest.mark.parametrize("value", ["NaN", '"\\ud800"', '"' + "x" * requests.STATS_BYTES_MAX + '"'])
def test_counters_that_nobody_could_be_shown_are_refused(api: ControlApi, value: str) -> None:
    api.start_node("a")
    body = '{"incarnation":1,"addresses":["tcp://a:1"],"used_bytes":0,"capacity_bytes":9,"stats":{"x":%s}}'
    headers = {"content-type": "application/json"}
    answer = api.client.post("/v1/nodes/a/heartbeat", content=body % value, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("stats")
    assert _states(api) == {"a": "alive"}


def test_whatever_stands_in_a_methods_place_is_one_series(api: ControlApi) -> None:
    for number in range(3):
        api.client.request(f"WORD{number}", "/health")
    text = api.client.get("/metrics").text
    assert 'method="other"' in text and "WORD" not in text
