"""fsck finds what control and nodes do not agree on, both ways, and repairs it; scrub through control."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from gd2fs import errors
from gd2fs.control import schema
from tests.control_api import BYTES_PER_TOKEN, ControlApi, control
from tests.control_fakes import FakeColumn, FakeNode

IDS = list(range(20))


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ControlApi]:
    with control(tmp_path) as api:
        api.start_node("n1", has_log=True)
        yield api


def _node(api: ControlApi) -> FakeNode:
    return api.nodes.node("n1")


def _key(api: ControlApi, name: str) -> tuple[str, int]:
    query = select(schema.files.c.file).where(schema.files.c.path.endswith(name))
    return str(api.service.database.read(lambda c: c.scalars(query).one())), 0


def _stored(api: ControlApi) -> str:
    session = api.session()
    api.turn(session, IDS, [1, 2], "r1")
    return session


def _fsck(api: ControlApi, repair: bool = False, limit: int = 1024) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = None
    for _ in range(100):
        body = {"node": "n1", "repair": repair, "after": after, "limit": limit}
        page = api.call("POST", "/v1/fsck", body)
        found += page["findings"]
        after = page["next"]
        if after is None:
            return found
    raise AssertionError("the pages never end")


def _repaired(api: ControlApi, kind: str, count: int = 1) -> None:
    """It is found, repaired, and then gone."""
    found = _fsck(api)
    assert [one["kind"] for one in found] == [kind] * count and not any(one["repaired"] for one in found)
    assert [(one["kind"], one["repaired"]) for one in _fsck(api, repair=True)] == [(kind, True)] * count
    assert _fsck(api) == []


def test_a_healthy_cluster_has_no_findings_whatever_the_page(api: ControlApi) -> None:
    for _ in range(3):
        _stored(api)
    api.call("POST", "/v1/fs/create", {"path": "/never-written"})
    plan = api.plan(api.session(), IDS, "planned, not written")
    assert plan["plan"] and [_fsck(api, limit=limit) for limit in (1, 2, 3, 1024)] == [[]] * 4


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_everything_is_found_once_whatever_the_page(api: ControlApi, limit: int) -> None:
    sessions = [_stored(api) for _ in range(4)]
    keys = sorted(_node(api).columns)
    for key in keys[::2]:
        del _node(api).columns[key]
    orphans = sorted((f"{number:032x}", 0) for number in (1, 2**127, 2**128 - 1))
    for key in orphans:
        _node(api).columns[key] = FakeColumn(1, 1, written=[(0, 5)])
    found = sorted((one["file"], one["column"], one["kind"]) for one in _fsck(api, limit=limit))
    assert sessions and found == sorted(
        [(*key, "missing") for key in keys[::2]] + [(*key, "orphan") for key in orphans]
    )


def test_orphans_are_deleted_where_they_are(api: ControlApi) -> None:
    _stored(api)
    _node(api).columns["ab" * 16, 3] = FakeColumn(1, 1, written=[(0, 5)])
    _repaired(api, "orphan")
    assert ("ab" * 16, 3) in _node(api).deleted and len(_node(api).columns) == 2


def test_the_largest_page_of_orphans_is_deleted_too(api: ControlApi) -> None:
    for number in range(4096):
        _node(api).columns[f"{number:032x}", 0] = FakeColumn(1, 1)
    assert len(_fsck(api, repair=True, limit=4096)) == 4096 and _node(api).columns == {}


def test_a_file_that_is_made_while_fsck_looks_is_no_orphan_and_not_missing(api: ControlApi) -> None:
    made: list[str] = []

    def meanwhile() -> None:
        api.nodes.after_list = None
        made.append(_stored(api))

    api.nodes.after_list = meanwhile
    assert _fsck(api, repair=True) == [] and len(made) == 1


def test_a_session_that_grows_while_fsck_looks_needs_no_seal(api: ControlApi) -> None:
    session = _stored(api)

    def meanwhile() -> None:
        api.nodes.after_list = None
        api.turn(session, [*IDS, 1, 30], [4, 5], "r2")

    api.nodes.after_list = meanwhile
    assert _fsck(api, repair=True) == [] and api.get(session)["version"] == 2


def test_what_is_deleted_and_freed_while_fsck_looks_is_no_orphan(api: ControlApi) -> None:
    """It is listed, and then neither control has it nor does anything wait to be freed."""
    session = _stored(api)
    _plain(api, "/goes")

    def meanwhile() -> None:
        api.nodes.after_list = None
        api.call("DELETE", f"/v1/kv/sessions/{session}")
        api.call("DELETE", "/v1/fs/file", path="/goes")
        # Two hours later a node has forgotten what it was told.
        _node(api).deleted.pop()
        assert api.rows(schema.reclaims) == 0 and _node(api).columns == {}

    api.nodes.after_list = meanwhile
    assert _fsck(api) == []


def test_what_waits_to_be_freed_is_no_orphan(api: ControlApi) -> None:
    session = _stored(api)
    _node(api).away = True
    api.call("DELETE", f"/v1/kv/sessions/{session}")
    _node(api).away = False
    assert _fsck(api) == []
    page = api.call("POST", "/v1/fsck", {"node": "n1", "repair": True})
    assert page["reclaims"] == 2
    assert api.service.reclaimer.sweep() == 2, "due now, not after its pause"
    assert api.call("POST", "/v1/fsck", {"node": "n1"})["reclaims"] == 0


def test_what_the_node_does_not_know_is_no_longer_planned_on(api: ControlApi) -> None:
    session = _stored(api)
    del _node(api).columns[_key(api, "1.kv")]
    _repaired(api, "missing")
    assert api.get(session)["valid_tokens"] == 0


def _plain(api: ControlApi, path: str) -> tuple[str, int]:
    """A file that somebody has written."""
    layout = api.call("POST", "/v1/fs/create", {"path": path})["layout"]
    api.nodes.write(layout, 0, 100)
    return layout["file"], 0


def test_a_plain_file_that_a_later_database_had_deleted_goes(api: ControlApi) -> None:
    key, other = _plain(api, "/restored"), _plain(api, "/kept")
    api.nodes.delete([_node(api).address], [{"file": key[0], "column": key[1]}])
    _repaired(api, "deleted")
    with pytest.raises(errors.NotFound):
        api.call("GET", "/v1/fs/stat", path="/restored")
    assert other in _node(api).columns and api.call("GET", "/v1/fs/stat", path="/kept")


def test_a_delete_while_fsck_looks_is_no_finding(api: ControlApi) -> None:
    key = _plain(api, "/goes")

    def meanwhile() -> None:
        api.nodes.after_list = None
        # The node lists nothing of it by now, and its rows go while it is asked.
        api.nodes.delete([_node(api).address], [{"file": key[0], "column": key[1]}])
        api.nodes.after_stat = lambda: api.call("DELETE", "/v1/fs/file", path="/goes")

    _node(api).columns.pop(key)
    api.nodes.after_list = meanwhile
    assert _fsck(api, repair=True) == []


def test_a_session_that_a_later_database_had_deleted_is_missing(api: ControlApi) -> None:
    session = _stored(api)
    file, column = _key(api, "1.kv")
    api.nodes.delete([_node(api).address], [{"file": file, "column": column}])
    _repaired(api, "missing")
    assert api.get(session)["valid_tokens"] == 0


def test_a_lost_file_that_somebody_opens_is_still_lost(api: ControlApi) -> None:
    """An OPEN makes an empty column, which is nothing that came back."""
    key = _plain(api, "/lost")
    _node(api).restart(api.register("n1", has_log=True))
    api.heartbeat("n1")
    assert _fsck(api) == []
    _node(api).columns[key] = FakeColumn(1, 1)
    assert _fsck(api) == []
    assert api.call("GET", "/v1/fs/stat", path="/lost")["lost"] is True


def test_what_shrank_without_a_report_is_noted(api: ControlApi) -> None:
    session = _stored(api)
    _node(api).columns[_key(api, "1.kv")].lose(5 * BYTES_PER_TOKEN, 6 * BYTES_PER_TOKEN)
    _repaired(api, "shrunken")
    assert api.get(session)["valid_tokens"] == 5


def test_what_came_back_without_a_report_is_believed_again(api: ControlApi) -> None:
    session = _stored(api)
    _node(api).recover(api.register("n1", has_log=True))
    api.heartbeat("n1")
    assert api.get(session)["valid_tokens"] == 0
    _repaired(api, "unreported", count=2)
    assert api.get(session)["valid_tokens"] == 21


def test_a_seal_that_the_node_forgot_is_made_again(api: ControlApi) -> None:
    session = _stored(api)
    column = _node(api).columns[_key(api, "1.kv")]
    column.sealed = 0
    _repaired(api, "seal")
    assert column.sealed == 21 * BYTES_PER_TOKEN and api.get(session)["valid_tokens"] == 21


def test_a_seal_over_bytes_that_are_gone_is_not(api: ControlApi) -> None:
    session = _stored(api)
    column = _node(api).columns[_key(api, "1.kv")]
    column.sealed = 5 * BYTES_PER_TOKEN
    column.drop_beyond(5 * BYTES_PER_TOKEN)
    found = _fsck(api, repair=True)
    assert [(one["kind"], one["repaired"]) for one in found] == [("seal", True)]
    assert api.get(session)["valid_tokens"] == 5
    assert api.plan(session, [*IDS, 1, 30], "r2")["cached_tokens"] == 5


def test_grants_of_a_restored_database_are_raised(api: ControlApi) -> None:
    session = _stored(api)
    key = _key(api, "1.kv")
    _node(api).columns[key].grant = 9
    _repaired(api, "grant")
    api.turn(session, [*IDS, 1, 30], [4, 5], "r2")
    assert _node(api).columns[key].grant == 10


def test_another_epoch_is_reported_and_left_alone(api: ControlApi) -> None:
    _stored(api)
    file, column = _key(api, "1.kv")
    raise_epoch = update(schema.file_columns).where(schema.file_columns.c.file == file).values(epoch=2)
    api.service.database.write(lambda c: c.execute(raise_epoch))
    [found] = _fsck(api, repair=True)
    assert (found["kind"], found["repaired"], found["column"]) == ("epoch", False, column)
    assert found["path"].endswith("/1.kv") and "epoch 1" in found["detail"]


def test_nodes_that_can_not_be_asked_are_said(api: ControlApi) -> None:
    with pytest.raises(errors.NotFound):
        api.call("POST", "/v1/fsck", {"node": "n9"})
    _stored(api)
    _node(api).incarnation += 1
    with pytest.raises(errors.StaleIncarnation, match="again"):
        _fsck(api)
    api.clock.now += 11
    with pytest.raises(errors.Unavailable, match="not alive"):
        _fsck(api)
    with pytest.raises(errors.Invalid, match="limit"):
        api.call("POST", "/v1/fsck", {"node": "n1", "limit": 4097})


def test_a_scrub_is_started_and_watched_through_control(api: ControlApi) -> None:
    idle = api.call("GET", "/v1/nodes/n1/scrub")
    assert (idle["node"], idle["incarnation"], idle["running"]) == ("n1", 1, False)
    assert api.call("POST", "/v1/nodes/n1/scrub")["running"] is True
    _node(api).scrub.update(running=False, rounds=1, corrupt_chunks=2)
    assert api.call("GET", "/v1/nodes/n1/scrub")["corrupt_chunks"] == 2
    with pytest.raises(errors.NotFound):
        api.call("POST", "/v1/nodes/n9/scrub")
