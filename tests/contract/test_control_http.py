"""The REST service as strangers meet it: tokens, tenants, bad input, limits, errors, restarts (I11, I12)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import select, text

from gd2fs import errors
from gd2fs.control import files, schema
from gd2fs.control.database import Database
from gd2fs.control.migrate import config, upgrade
from gd2fs.signing import Keys, Role, Token
from tests.control_api import IDENTITY, ControlApi, control, database_of

KEYS = Keys.parse("7:00112233445566778899aabbccddeeff,3:ffeeddccbbaa99887766554433221100")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ControlApi]:
    with control(tmp_path) as api:
        yield api


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ControlApi]:
    """A control that has keys, with one node."""
    with control(tmp_path, KEYS) as api:
        _login(api, "ops", "admin")
        api.start_node("n1")
        api.headers.clear()
        yield api


def _login(api: ControlApi, tenant: str, role: Role, life_s: int = 60, keys: Keys = KEYS) -> None:
    token = keys.sign(Token(tenant, role, int(api.clock.now) + life_s))
    api.headers["Authorization"] = f"Bearer {token}"


def test_health_metrics_and_openapi(api: ControlApi) -> None:
    assert api.call("GET", "/health")["status"] == "ok"
    api.start_node("n1")
    api.turn(api.session(), range(10), [1, 2])
    text = api.client.get("/metrics").text
    assert 'gd2fs_control_nodes{state="alive"} 1.0' in text
    assert 'gd2fs_control_plans_total{miss="none"} 1.0' in text
    assert 'gd2fs_control_commits_total{result="stored"} 1.0' in text
    assert 'route="/v1/kv/sessions/{session}/plan",status="200"' in text
    paths = api.client.get("/openapi.json").json()["paths"]
    assert {"/v1/kv/commit", "/v1/fs/create", "/v1/nodes/register"} <= set(paths)
    cluster = api.call("GET", "/v1/cluster")
    assert (cluster["cluster"], cluster["tenant"], cluster["role"]) == ("test", "default", "admin")
    assert cluster["nodes"][0]["state"] == "alive"


def test_with_keys_nothing_but_health_is_served_without_a_token(guarded: ControlApi) -> None:
    assert guarded.call("GET", "/health")["status"] == "ok"
    for route in guarded.client.get("/openapi.json").json()["paths"]:
        if route == "/health":
            continue
        for method in guarded.client.get("/openapi.json").json()["paths"][route]:
            answer = guarded.client.request(method, route.replace("{", "").replace("}", ""), json={})
            assert answer.status_code >= 400, (method, route)
            assert answer.json()["error"]["name"] in ("UNAUTHENTICATED", "INVALID"), (method, route)
            # Commit and abort carry their credential in the body, which is empty here.
            if not route.startswith(("/v1/kv/commit", "/v1/kv/abort")):
                assert answer.json()["error"]["name"] == "UNAUTHENTICATED", (method, route)


@pytest.mark.parametrize("header", ["", "Bearer", "Basic abc", "Bearer x", "Bearer gd2fs1.7.e30.e30"])
def test_what_is_not_a_token_is_refused(guarded: ControlApi, header: str) -> None:
    guarded.headers["Authorization"] = header
    with pytest.raises((errors.Unauthenticated, errors.BadSignature)):
        guarded.call("GET", "/v1/cluster")


def test_forged_and_expired_tokens_are_refused(guarded: ControlApi) -> None:
    _login(guarded, "a", "admin", life_s=-1)
    with pytest.raises(errors.Expired):
        guarded.call("GET", "/v1/cluster")
    _login(guarded, "a", "admin", keys=Keys.parse("7:" + "00" * 16))
    with pytest.raises(errors.BadSignature):
        guarded.call("GET", "/v1/cluster")
    _login(guarded, "a", "admin", keys=Keys.development())
    with pytest.raises(errors.BadSignature):
        guarded.call("GET", "/v1/cluster")
    _login(guarded, "a", "client", keys=Keys.parse("3:ffeeddccbbaa99887766554433221100"))
    assert guarded.call("GET", "/v1/cluster")["tenant"] == "a", "keys rotate: the second one still verifies"


def test_roles_do_what_they_are_for(guarded: ControlApi) -> None:
    register = {"node": "evil", "memory_bytes": 1}
    _login(guarded, "a", "client")
    with pytest.raises(errors.Forbidden):
        guarded.call("POST", "/v1/nodes/register", register)
    with pytest.raises(errors.Forbidden):
        guarded.call("DELETE", "/v1/nodes/n1")
    with pytest.raises(errors.Forbidden):
        guarded.ranges("n1", [])
    _login(guarded, "a", "node")
    with pytest.raises(errors.Forbidden):
        guarded.call("POST", "/v1/fs/create", {"path": "/f"})
    with pytest.raises(errors.Forbidden):
        guarded.session()
    assert guarded.call("POST", "/v1/nodes/register", register)["incarnation"] == 1


def test_tenants_do_not_see_each_other(guarded: ControlApi) -> None:
    _login(guarded, "alice", "client")
    file = guarded.call("POST", "/v1/fs/create", {"path": "/f"})["file"]
    session = guarded.session()
    guarded.turn(session, range(10), [1, 2])
    _login(guarded, "bob", "client")
    assert guarded.call("GET", "/v1/fs/list", path="/")["entries"] == []
    assert guarded.call("GET", "/v1/kv/sessions")["sessions"] == []
    attempts: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("GET", "/v1/fs/stat", None, {"path": "/f"}),
        ("GET", "/v1/fs/layout", None, {"path": "/f"}),
        ("GET", "/v1/fs/layout", None, {"file": file}),
        ("GET", "/v1/fs/layout", None, {"path": f"/.kv/{session}/1.kv"}),
        ("DELETE", "/v1/fs/file", None, {"path": "/f"}),
        ("POST", "/v1/fs/rename", {"from": "/f", "to": "/g"}, {}),
        ("GET", f"/v1/kv/sessions/{session}", None, {}),
        ("GET", f"/v1/kv/sessions/{session}/tokens", None, {}),
        ("DELETE", f"/v1/kv/sessions/{session}", None, {}),
    ]
    for method, path, body, params in attempts:
        with pytest.raises(errors.NotFound):
            guarded.call(method, path, body, **params)
    with pytest.raises(errors.NotFound):
        guarded.plan(session, range(10))
    guarded.headers["X-GD2FS-Tenant"] = "alice"
    with pytest.raises(errors.Forbidden):
        guarded.get(session)
    _login(guarded, "ops", "admin")
    assert guarded.get(session)["tokens"] == 11
    guarded.headers["X-GD2FS-Tenant"] = "no/tenant"
    with pytest.raises(errors.Invalid):
        guarded.get(session)
    del guarded.headers["X-GD2FS-Tenant"]
    guarded.call("POST", "/v1/fs/create", {"path": "/f"})


def test_a_commit_needs_its_own_plan_token(guarded: ControlApi) -> None:
    _login(guarded, "alice", "client")
    session = guarded.session()
    body = guarded.write(guarded.plan(session, range(10)), range(10))
    token = body["plan_token"]
    for forged in (
        guarded.headers["Authorization"].removeprefix("Bearer "),
        token[:-2] + ("AA" if token[-2:] != "AA" else "BB"),
        Keys.development().sign(Token("alice", "admin", 2**40)),
    ):
        with pytest.raises(errors.BadSignature):
            guarded.commit({**body, "plan_token": forged})
        with pytest.raises(errors.BadSignature):
            guarded.call("POST", "/v1/kv/abort", {"plan_token": forged})
    guarded.headers.clear()
    assert guarded.commit(body)["version"] == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/fs/create", {"path": "/f", "mode": 1}, "mode"),
        ("/v1/fs/create", {"path": 5}, "path"),
        ("/v1/fs/create", {"path": "/f", "width": 0}, "width"),
        ("/v1/fs/create", {"path": "/f", "width": True}, "width"),
        ("/v1/fs/mkdir", {"path": "/f", "class": "fast"}, "class"),
        ("/v1/fs/rename", {"from": "/f"}, "to"),
        ("/v1/nodes/register", {"node": "a b", "memory_bytes": 1}, "node"),
        ("/v1/nodes/register", {"node": "a", "memory_bytes": -1}, "memory_bytes"),
        ("/v1/kv/sessions", {"kv_identity": "", "kv_format": {}}, "kv_identity"),
        (
            "/v1/kv/sessions",
            {"kv_identity": "k", "kv_format": {"name": "token", "bytes_per_token": 0}},
            "kv_format",
        ),
        (
            "/v1/kv/sessions",
            {"kv_identity": "k", "kv_format": {"name": "token", "bytes_per_token": 8, "granule": 2}},
            "kv_format.granule",
        ),
    ],
)
def test_bad_input_names_the_field(api: ControlApi, path: str, body: Any, field: str) -> None:
    with pytest.raises(errors.Invalid, match=field):
        api.call("POST", path, body)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids.0"),
        ({"token_ids": [0, 2**32]}, "token_ids.1"),
        ({"token_ids": ["1"]}, "token_ids.0"),
        ({"token_ids": [1.0]}, "token_ids.0"),
        ({"token_ids": [[1]]}, "token_ids.0"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"kv_identity": None}, "kv_identity"),
        ({"tenant": "x"}, "tenant"),
    ],
)
def test_bad_plans_name_the_field(api: ControlApi, change: dict[str, Any], field: str) -> None:
    session = api.session()
    body = {"token_ids": [1], "max_tokens": 1, "request_id": "r", "kv_identity": IDENTITY} | change
    with pytest.raises(errors.Invalid, match=field):
        api.call("POST", f"/v1/kv/sessions/{session}/plan", body)


def test_prompts_up_to_a_million_ids_and_not_beyond(api: ControlApi) -> None:
    api.start_node("n1")
    session = api.session()
    ids = [2**32 - 1] * 1_048_576
    assert api.plan(session, ids)["prompt_tokens"] == 1_048_576
    with pytest.raises(errors.Invalid, match="token_ids"):
        api.plan(session, [*([1] * 1_048_576), 1])
    with pytest.raises(errors.TooLarge):
        api.call("POST", "/v1/fs/create", {"path": "x" * (16 * 2**20)})


def test_a_body_of_unknown_length_is_bounded_too(api: ControlApi) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(17):
            yield b"x" * 2**20

    answer = api.client.post("/v1/fs/create", content=chunks())
    assert (answer.status_code, answer.json()["error"]["name"]) == (413, "TOO_LARGE")


def test_broken_json_and_unknown_routes_have_the_same_shape(api: ControlApi) -> None:
    answer = api.client.post(
        "/v1/fs/create", content=b"{nonsense", headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["name"]) == (400, "INVALID")
    answer = api.client.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 501)
    assert api.client.put("/v1/fs/create").json()["error"]["name"] == "INVALID"


def test_sessions_are_listed_in_pages(api: ControlApi) -> None:
    made = {api.session() for _ in range(5)}
    first = api.call("GET", "/v1/kv/sessions", limit=3)
    second = api.call("GET", "/v1/kv/sessions", limit=3, after=first["next"])
    assert second["next"] is None
    assert {item["session"] for item in first["sessions"] + second["sessions"]} == made


def test_a_restart_of_control_loses_nothing(tmp_path: Path) -> None:
    with control(tmp_path) as before:
        before.start_node("n1")
        session = before.session()
        before.turn(session, range(10), [1, 2])
        body = before.write(before.plan(session, [*range(10), 1, 5], "r2"), [*range(10), 1, 5, 6])
        state, nodes, now = before.get(session), before.nodes, before.clock.now
    with control(tmp_path) as after:
        after.clock.now = now
        after.nodes.nodes = nodes.nodes
        assert after.get(session) == {**state, "control_rows": {**state["control_rows"], "plans": 1}}
        assert after.commit(body)["version"] == 2, "a plan outlives the control that made it"
        after.heartbeat("n1")


def test_the_database_belongs_to_one_cluster(tmp_path: Path) -> None:
    with control(tmp_path):
        pass
    from gd2fs.control.app import create_app
    from tests.control_fakes import FakeNodes

    with pytest.raises(errors.WrongCluster, match="test"):
        create_app(database_of(tmp_path), KEYS, FakeNodes(KEYS), "other")


def test_migrations_make_the_schema(tmp_path: Path) -> None:
    database = Database(database_of(tmp_path))
    upgrade(database)

    def difference(connection: Any) -> list[Any]:
        return compare_metadata(MigrationContext.configure(connection), schema.metadata)

    assert database.read(difference) == []
    assert abs(database.read(database.time.wall) - time.time()) < 2.0
    database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(errors.Unsupported, match="newer"):
        upgrade(database)
    database.close()


def test_a_database_of_the_version_before_keeps_its_rows(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'old.db'}")
    database.write(lambda c: command.upgrade(config(c), "0002"))
    node = (
        "INSERT INTO nodes VALUES ('n1', 'joined', 4, '[]', '', 10, 5, 0, '{}', '', 1.0, 2.0)",
        "INSERT INTO files VALUES ('f', 't', '/f', '/', 0, 'cache', 4096, 1, NULL, NULL, 7, 1, 1.0)",
        "INSERT INTO file_columns VALUES ('f', 0, 1, 4, 'n1')",
        *(
            f"INSERT INTO files VALUES ('{file}', 't', '/.kv/s/{name}', '/.kv/s', 0, 'cache', 4096, 1, NULL,"
            " NULL, 7, 1, 1.0)"
            for file, name in (("k1", "1.kv"), ("i1", "1.kv.tokens"), ("k2", "2.kv"), ("i2", "2.kv.tokens"))
        ),
    )
    database.write(lambda c: [c.execute(text(statement)) for statement in node])
    upgrade(database)
    [view] = database.read(lambda c: files.load(c, 2.0, schema.files.c.file == "f"))
    [column] = view.columns
    assert (column.proven, column.valid, column.has_log, column.free_bytes) == (True, None, False, 5)
    beside = database.read(lambda c: c.execute(select(schema.files.c.file, schema.files.c.ids_of)).all())
    assert dict(map(tuple, beside)) == {"f": None, "k1": None, "i1": "k1", "k2": None, "i2": "k2"}
    database.close()


def test_racing_turns_store_exactly_one_winner_a_version(api: ControlApi) -> None:
    """Eight clients, each retrying until its turn is stored; every version has one winner, and nothing is
    torn."""
    api.start_node("n1")
    session = api.session()
    api.turn(session, range(10), [1, 2])
    lock = threading.Lock()
    problems: list[BaseException] = []
    won = [0]

    def client(number: int) -> None:
        try:
            for attempt in range(200):
                state = api.call("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"]
                prompt = [*state, 1000 + number]
                try:
                    plan = api.plan(session, prompt, f"c{number}-{attempt}")
                    with lock:  # the fake nodes are not made for threads
                        body = api.write(plan, [*prompt, 7])
                    api.commit(body)
                except (errors.Conflict, errors.PlanSuperseded, errors.StaleWriter):
                    continue
                with lock:
                    won[0] += 1
                return
            raise AssertionError(f"client {number} never won")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == [] and won == [8]
    state = api.get(session)
    assert state["version"] == 9
    ids = api.call("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"]
    assert len(ids) == state["tokens"]
    assert api.plan(session, [*ids, 3], "last")["cached_tokens"] == len(ids)
