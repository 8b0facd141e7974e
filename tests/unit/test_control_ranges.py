"""Nodes with a log come back: what they report is planned on, what they lost is not, and nothing is believed
that the current incarnation did not say."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert, select

from gd2fs import errors
from gd2fs.control import files, requests, schema
from gd2fs.control.placement import Candidate
from tests.control_api import BYTES_PER_TOKEN, ControlApi, control
from tests.control_fakes import FakeColumn

IDS = list(range(20))


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ControlApi]:
    with control(tmp_path) as api:
        api.start_node("n1", has_log=True)
        yield api


def _columns(api: ControlApi) -> dict[str, FakeColumn]:
    """The node's columns by the names of their files."""
    rows = api.service.database.read(
        lambda c: c.execute(select(schema.files.c.file, schema.files.c.path)).all()
    )
    columns = api.nodes.node("n1").columns
    return {row.path.rsplit("/", 1)[1]: columns[row.file, 0] for row in rows if (row.file, 0) in columns}


def _rows(api: ControlApi) -> list[tuple[int, int | None]]:
    """In the order of their paths."""
    query = (
        select(schema.file_columns.c.born, schema.file_columns.c.valid)
        .join(schema.files, schema.files.c.file == schema.file_columns.c.file)
        .order_by(schema.files.c.path)
    )
    return [tuple(row) for row in api.service.database.read(lambda c: c.execute(query).all())]


def _fresh(plan: dict[str, Any]) -> str:
    return str(plan["kv_transfer"]["fresh_kvcache"][0]["kv_uri"][-4:])


def _stored(api: ControlApi) -> str:
    session = api.session()
    api.turn(session, IDS, [1, 2], "r1")
    return session


def test_what_came_back_is_planned_on_and_written_on(api: ControlApi) -> None:
    session = _stored(api)
    assert api.return_node("n1") == []
    plan = api.turn(session, [*IDS, 1, 30], [4], "r2")
    assert (plan["cached_tokens"], plan["miss"], _fresh(plan)) == (21, None, "1.kv")
    assert api.get(session)["valid_tokens"] == 22
    assert _rows(api) == [(2, None)] * 2


def test_until_everything_is_reported_a_session_is_unreachable_not_lost(api: ControlApi) -> None:
    session = _stored(api)
    api.register("n1", has_log=True)
    plan = api.plan(session, [*IDS, 1, 30], "r2")
    assert (plan["cached_tokens"], plan["miss"]) == (0, "unreachable")
    assert plan["kv_transfer"]["fresh_kvcache"] == [], "nor is anything placed there"
    assert api.get(session)["valid_tokens"] == 0


def test_a_column_that_is_not_reported_is_lost(api: ControlApi) -> None:
    session = _stored(api)
    api.nodes.node("n1").columns.clear()
    api.return_node("n1")
    plan = api.plan(session, [*IDS, 1, 30], "r2")
    assert (plan["cached_tokens"], plan["miss"], _fresh(plan)) == (0, "lost", "2.kv")


def test_a_session_shrinks_to_its_valid_prefix(api: ControlApi) -> None:
    session = _stored(api)
    _columns(api)["1.kv"].lose(7 * BYTES_PER_TOKEN + 5, 9 * BYTES_PER_TOKEN)
    api.return_node("n1")
    assert _rows(api) == [(2, 7 * BYTES_PER_TOKEN + 5), (2, None)]
    plan = api.plan(session, [*IDS, 1, 30], "r2")
    assert (plan["stored_tokens"], plan["reusable_tokens"]) == (21, 21)
    assert (plan["cached_tokens"], plan["miss"]) == (7, "lost")
    assert _fresh(plan) == "2.kv", "what is missing in 1.kv never comes back: it is not written on"
    assert api.get(session)["valid_tokens"] == 7
    assert api.call("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"] == IDS[:7]
    api.commit(api.write(plan, [*IDS, 1, 30]))
    segments = api.get(session)["stored_kv_cache"]
    assert [(s["token_start"], s["token_length"]) for s in segments] == [(0, 7), (7, 15)]
    assert api.plan(session, [*IDS, 1, 30, 5], "r3")["cached_tokens"] == 22


def test_a_valid_prefix_ends_at_a_granule(api: ControlApi) -> None:
    session = api.session(kv_format={"name": "block", "bytes_per_token": 64, "granule": 4})
    api.commit(api.write(api.plan(session, IDS, "r1"), IDS))
    _columns(api)["1.kv"].lose(10 * 64, 11 * 64)
    api.return_node("n1")
    plan = api.plan(session, [*IDS, 30], "r2")
    assert (plan["cached_tokens"], plan["miss"]) == (8, "lost")


def test_segments_that_are_not_in_token_order_are_there_or_not(api: ControlApi) -> None:
    session = api.session(kv_format={"name": "rank-major", "bytes_per_token": 64})
    api.commit(api.write(api.plan(session, IDS, "r1"), IDS))
    _columns(api)["1.kv"].lose(19 * 64, 20 * 64)
    api.return_node("n1")
    assert api.plan(session, [*IDS, 30], "r2")["cached_tokens"] == 0


def test_lost_ids_cost_what_must_be_compared_only(api: ControlApi) -> None:
    session = _stored(api)
    _columns(api)["1.kv.tokens"].lose(10 * 4, 11 * 4)
    api.return_node("n1")
    whole = api.plan(session, [*IDS, 1, 30], "r2")
    assert (whole["cached_tokens"], whole["miss"]) == (21, None), "the digest says that they are the same"
    assert _fresh(whole) == "2.kv", "the ids beside 1.kv would keep their hole"
    edited = api.plan(session, [*IDS[:15], 99], "r3")
    assert (edited["cached_tokens"], edited["miss"]) == (10, "lost")
    early = api.plan(session, [*IDS[:5], 99, 98], "r4")
    assert (early["cached_tokens"], early["miss"]) == (5, "edited")
    assert api.call("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"] == IDS[:10]


def test_bytes_that_were_never_flushed_are_refused_with_their_commit(api: ControlApi) -> None:
    session = _stored(api)
    body = api.write(api.plan(session, [*IDS, 1, 30], "r2"), [*IDS, 1, 30])
    api.return_node("n1")
    with pytest.raises(errors.Lost):
        api.commit(body)
    body["acks"][0]["incarnation"] = 2  # it never wrote to that one
    _columns(api)["1.kv"].lose(21 * BYTES_PER_TOKEN, 22 * BYTES_PER_TOKEN)
    api.register("n1", has_log=True)
    body["acks"][0]["incarnation"] = 3
    with pytest.raises(errors.Lost):
        api.commit(body)


def test_what_lies_beyond_the_nodes_own_end_is_missing(api: ControlApi) -> None:
    """Control believes in a seal that the node never made durable."""
    session = _stored(api)
    column = _columns(api)["1.kv"]
    column.sealed = 5 * BYTES_PER_TOKEN
    column.written = [(0, 5 * BYTES_PER_TOKEN)]
    api.return_node("n1")
    assert api.plan(session, [*IDS, 1, 30], "r2")["cached_tokens"] == 5


def test_reports_are_idempotent_and_only_sink_within_an_incarnation(api: ControlApi) -> None:
    _stored(api)
    api.return_node("n1", batch=1)
    column = _columns(api)["1.kv"]
    before = api.nodes.node("n1").item(next(iter(api.nodes.node("n1").columns)))
    column.lose(640, 700)
    [item] = [i for i in map(api.nodes.node("n1").item, api.nodes.node("n1").columns) if i["valid"] == 640]
    for _ in range(2):
        assert api.ranges("n1", [item]) == {"taken": 1, "unknown": [], "stale": []}
    late = {**item, "valid": None}
    api.ranges("n1", [late, {**item, "valid": 650}, before])
    assert sorted(_rows(api), key=str) == [(2, 640), (2, None)]
    assert api.return_node("n1") == [] and (3, 640) in _rows(api)
    column.written, column.wanted = [(0, 21 * BYTES_PER_TOKEN)], 0
    api.return_node("n1")
    assert _rows(api) == [(4, None)] * 2, "a new incarnation states it anew"


def test_strange_columns_are_answered_back(api: ControlApi) -> None:
    _stored(api)
    items = api.nodes.node("n1").recover(1)
    stranger = {**items[0], "file": "ab" * 16}
    wrong_column, wrong_epoch = {**items[0], "column": 7}, {**items[1], "epoch": 9}
    answer = api.ranges("n1", [stranger, wrong_column, wrong_epoch])
    assert answer["taken"] == 0
    assert [(item["file"], item["column"]) for item in answer["unknown"]] == [
        ("ab" * 16, 0),
        (items[0]["file"], 7),
    ]
    assert answer["stale"] == [{"file": items[1]["file"], "column": 0, "epoch": 1}]
    api.start_node("n2", has_log=True)
    assert len(api.ranges("n2", items)["unknown"]) == 2, "they are another node's"


def test_only_the_current_incarnation_is_believed(api: ControlApi) -> None:
    _stored(api)
    items = api.nodes.node("n1").recover(1)
    api.register("n1", has_log=True)
    with pytest.raises(errors.StaleIncarnation, match="another process has registered as n1"):
        api.ranges("n1", items, incarnation=1)
    with pytest.raises(errors.NotFound):
        api.ranges("n9", items, incarnation=1)
    assert _rows(api) == [(1, None)] * 2
    api.call("DELETE", "/v1/nodes/n1")
    with pytest.raises(errors.StaleIncarnation, match="left"):
        api.ranges("n1", items, incarnation=2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"file": "x"}, "file"),
        ({"column": -1}, "column"),
        ({"valid": -1}, "valid"),
        ({"sealed": None}, "sealed"),
        ({"more": 1}, "more"),
    ],
)
def test_bad_reports_name_the_field(api: ControlApi, change: dict[str, Any], field: str) -> None:
    item = {"file": "ab" * 16, "column": 0, "epoch": 1, "sealed": 0, "length": 0, "valid": None}
    with pytest.raises(errors.Invalid, match=field):
        api.ranges("n1", [item | change], 1)
    with pytest.raises(errors.Invalid, match="items"):
        api.ranges("n1", [item] * (requests.RANGES_MAX + 1), 1)


def test_a_node_with_a_log_leaves_its_rows_for_its_return(api: ControlApi) -> None:
    kept, ended = _stored(api), _stored(api)
    gone = _stored(api)
    api.nodes.node("n1").away = True
    api.call("DELETE", f"/v1/kv/sessions/{gone}")
    api.call("DELETE", "/v1/nodes/n1")
    api.call("DELETE", f"/v1/kv/sessions/{ended}")
    assert api.rows(schema.reclaims) == 4
    assert api.plan(kept, [*IDS, 1, 30], "r2")["miss"] == "unreachable"
    unknown = api.return_node("n1")
    assert len(unknown) == 4, "deleted while it was away"
    api.clock.now += 5
    assert api.service.reclaimer.sweep() == 4
    assert len(api.nodes.node("n1").columns) == 2
    assert api.plan(kept, [*IDS, 1, 30], "r2")["cached_tokens"] == 21
    # Back without its log: everything is gone, and it is said at once.
    api.register("n1")
    assert api.plan(kept, [*IDS, 1, 30], "r3")["miss"] == "lost"


def test_a_file_with_a_hole_says_where_it_ends(api: ControlApi) -> None:
    api.start_node("n2")
    made = api.call("POST", "/v1/fs/create", {"path": "/f", "width": 2})
    place = {column["replicas"][0]["node"]: n for n, column in enumerate(made["layout"]["columns"])}
    for name, column in place.items():
        api.nodes.node(name).columns[made["file"], column] = FakeColumn(1, 1, written=[(0, 100)])
    assert "valid" not in api.call("GET", "/v1/fs/stat", path="/f")
    api.nodes.node("n1").columns[made["file"], place["n1"]].lose(40, 50)
    api.return_node("n1")
    info = api.call("GET", "/v1/fs/stat", path="/f")
    assert (info["length"], info["valid"], "lost" in info) == (100, 40, False)


def test_a_full_node_that_can_evict_takes_more(api: ControlApi) -> None:
    session = api.session()
    full = {"capacity_bytes": 100, "used_bytes": 100}
    api.heartbeat("n1", **full)
    assert api.plan(session, IDS, "r1")["kv_transfer"]["fresh_kvcache"] == []
    api.heartbeat("n1", **full, evictable_bytes=20 * BYTES_PER_TOKEN)
    assert _fresh(api.plan(session, IDS, "r1")) == "1.kv"


def test_a_large_report_is_a_handful_of_statements(api: ControlApi) -> None:
    count = requests.RANGES_MAX

    def fill(connection: Any, now: float) -> list[str]:
        made = [secrets.token_hex(16) for _ in range(count)]
        files.add(connection, now, "default", "/f", file=made[0], on=[Candidate("n1", 1, 1)])
        row = connection.execute(select(schema.files).where(schema.files.c.path == "/f")).mappings().one()
        connection.execute(
            insert(schema.files), [{**row, "file": file, "path": f"/f{file}"} for file in made[1:]]
        )
        column = {"ordinal": 0, "epoch": 1, "born": 1, "node": "n1", "valid": None}
        connection.execute(insert(schema.file_columns), [{**column, "file": file} for file in made[1:]])
        return made

    made = api.service.write(fill)
    items = [{"file": file, "column": 0, "epoch": 1, "sealed": 0, "length": 9, "valid": 5} for file in made]
    executed: list[str] = []
    engine = api.service.database.engine
    event.listen(engine, "before_cursor_execute", lambda c, u, statement, *more: executed.append(statement))
    assert api.ranges("n1", items, 1)["taken"] == count
    assert len(executed) <= 5, "whatever its size"
    assert set(_rows(api)) == {(1, 5)}
