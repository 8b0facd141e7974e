"""Control behind its REST API, over a database file and fake nodes: what the tests of control talk to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi.testclient import TestClient
from sqlalchemy import func, select

from gd2fs import errors
from gd2fs.control.app import create_app
from gd2fs.control.clock import ClusterTime
from gd2fs.control.database import Database
from gd2fs.control.migrate import upgrade
from gd2fs.control.service import Service
from gd2fs.kv import digest, ids_to_bytes
from gd2fs.signing import Keys
from tests import postgres
from tests.control_fakes import FakeClock, FakeNodes

IDENTITY = "identity-1"
BYTES_PER_TOKEN = 64


class ControlApi:
    """Calls that raise the error the answer names."""

    def __init__(self, client: TestClient, nodes: FakeNodes, clock: FakeClock) -> None:
        self.client, self.nodes, self.clock = client, nodes, clock
        self.headers: dict[str, str] = {}

    @property
    def service(self) -> Service:
        service: Service = self.client.app.state.service  # type: ignore[attr-defined]
        return service

    def call(self, method: str, path: str, body: Any = None, /, **params: Any) -> Any:
        answer = self.client.request(method, path, json=body, params=params, headers=self.headers)
        if answer.status_code >= 400:
            problem = answer.json()["error"]
            error = errors.from_code(problem["code"], problem["message"])
            assert error.name == problem["name"]
            raise error
        return answer.json()

    def start_node(
        self, name: str, capacity_bytes: int = 2**30, floor: int | None = None, has_log: bool = False
    ) -> int:
        """Registers an empty node (again) and lets it listen; returns its incarnation. floor: what its data
        directory keeps, if that is not the incarnation of before."""
        kept = {} if floor is None else {"incarnation_floor": floor}
        incarnation = self.register(name, capacity_bytes, has_log=has_log, **kept)
        self.nodes.node(name).restart(incarnation)
        self.nodes.node(name).away = False
        self.heartbeat(name, capacity_bytes)
        return incarnation

    def return_node(self, name: str, *, batch: int = 4096, alive: bool = True) -> list[dict[str, Any]]:
        """Registers a node with a log again, which has everything still, and reports it; returns what was
        unknown."""
        node = self.nodes.node(name)
        incarnation = self.register(name, has_log=True)
        items = node.recover(incarnation)
        unknown = []
        for start in range(0, len(items), batch):
            unknown += self.ranges(name, items[start : start + batch])["unknown"]
        node.away = False
        if alive:
            self.heartbeat(name)
        return unknown

    def register(self, name: str, capacity_bytes: int = 2**30, **more: Any) -> int:
        # What the node has kept on its disk, as one that is started again does.
        kept = {"incarnation_floor": self.nodes.node(name).incarnation}
        body = {"node": name, "addresses": [], "memory_bytes": capacity_bytes, **kept, **more}
        return int(self.call("POST", "/v1/nodes/register", body)["incarnation"])

    def ranges(
        self, name: str, items: list[dict[str, Any]], incarnation: int | None = None
    ) -> dict[str, Any]:
        body = {"incarnation": incarnation or self.nodes.node(name).incarnation, "items": items}
        return dict(self.call("POST", f"/v1/nodes/{name}/ranges", body))

    def heartbeat(self, name: str, capacity_bytes: int = 2**30, **more: Any) -> None:
        node = self.nodes.node(name)
        body = {
            "incarnation": node.incarnation,
            "addresses": [node.address],
            "used_bytes": node.used_bytes(),
            "capacity_bytes": capacity_bytes,
            **more,
        }
        self.call("POST", f"/v1/nodes/{name}/heartbeat", body)

    def session(self, identity: str = IDENTITY, **more: Any) -> str:
        kv_format = more.pop("kv_format", {"name": "token", "bytes_per_token": BYTES_PER_TOKEN, "granule": 1})
        body = {"kv_identity": identity, "kv_format": kv_format, **more}
        return str(self.call("POST", "/v1/kv/sessions", body)["session"])

    def get(self, session: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/kv/sessions/{session}"))

    def plan(
        self,
        session: str,
        ids: Sequence[int],
        request: str = "r",
        max_tokens: int = 8,
        identity: str = IDENTITY,
    ) -> dict[str, Any]:
        body = {
            "token_ids": list(ids),
            "max_tokens": max_tokens,
            "request_id": request,
            "kv_identity": identity,
        }
        return dict(self.call("POST", f"/v1/kv/sessions/{session}/plan", body))

    def write(self, plan: dict[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        """Does the engine's part: writes ids and KV cache of what is not cached; returns the body of the
        commit."""
        metadata = plan["kv_transfer"]
        [fresh] = metadata["fresh_kvcache"]
        start, uri = fresh["token_start"], fresh["kv_uri"]
        layouts = metadata["plan"]["layouts"]
        bytes_per_token = metadata["plan"]["kv_format"]["bytes_per_token"]
        data = ids_to_bytes(list(ids[start:]))
        self.nodes.write(layouts[uri + ".tokens"], fresh["kv_start"] // bytes_per_token * 4, len(data), data)
        tokens = len(ids) - start
        ack = self.nodes.write(layouts[uri], fresh["kv_start"], tokens * bytes_per_token)
        written = {**fresh, "token_length": tokens, "kv_length": tokens * bytes_per_token}
        return {
            "plan_token": metadata["plan"]["token"],
            "fresh": [written],
            "digest": digest(list(ids)),
            "acks": [ack],
        }

    def commit(self, body: dict[str, Any]) -> dict[str, Any]:
        return dict(self.call("POST", "/v1/kv/commit", body))

    def turn(
        self, session: str, prompt: Sequence[int], output: Sequence[int], request: str = "r"
    ) -> dict[str, Any]:
        """One whole turn; stores prompt and output but the last sampled token, as engines do. Returns the
        plan."""
        plan = self.plan(session, prompt, request, max_tokens=len(output))
        self.commit(self.write(plan, [*prompt, *output][:-1]))
        return plan

    def rows(self, table: Any) -> int:
        return self.service.database.read(lambda c: c.scalar(select(func.count()).select_from(table)) or 0)


@cache
def _migrated() -> bytes:
    """An empty database of this version: hundreds of tests begin with one."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "control.db"
        database = Database(f"sqlite:///{file}")
        upgrade(database)
        database.close()
        return file.read_bytes()


def database_of(directory: Path) -> str:
    """The URL of the database in `directory`, a fresh one if there is none. PostgreSQL has it elsewhere, with
    GD2FS_TEST_DATABASE=postgresql: then its URL is kept there."""
    if postgres.wanted():
        kept = directory / "control.url"
        if not kept.exists():
            kept.write_text(postgres.server().database(postgres.server().migrated()))
        return kept.read_text()
    file = directory / "control.db"
    if not file.exists():
        file.write_bytes(_migrated())
    return f"sqlite:///{file}"


@contextmanager
def control(
    directory: Path,
    keys: Keys | None = None,
    *,
    nodes: FakeNodes | None = None,
    time: ClusterTime | None = None,
    **options: Any,
) -> Iterator[ControlApi]:
    """Control over the database in `directory`, a fresh one if there is none; its worker runs only when the
    test calls `sweep`. `time` replaces the clock that the test moves."""
    keys = keys or Keys.development()
    nodes, clock = nodes or FakeNodes(keys), FakeClock()
    url = database_of(directory)
    time = time or ClusterTime(clock, clock)
    app = create_app(url, keys, nodes, "test", time=time, background=False, **options)
    with TestClient(app, base_url="http://control:7527") as client:
        yield ControlApi(client, nodes, clock)
