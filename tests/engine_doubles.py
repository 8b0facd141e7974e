"""For the tests of the engine: a storage in memory that can fail, and a served app."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import uvicorn

from gd2fs import errors
from gd2fs.config.listen import Listen, bind, bound
from gd2fs.engine.app import create_app
from gd2fs.engine.loaded import LoadedModel
from gd2fs.kv import digest, ids_from_bytes

CLUSTER = "testing"
WAIT_S = 20.0


@dataclass
class StoredFile:
    """Bytes of one file, and which of them were ever written."""

    path: str
    data: bytearray = field(default_factory=bytearray)
    written: list[tuple[int, int]] = field(default_factory=list)
    kv_identity: str | None = None

    def covers(self, start: int, end: int) -> bool:
        for low, high in sorted(self.written):
            if low <= start:
                start = max(start, high)
        return start >= end


class MemoryTransfer:
    """Completes in a thread of its own after the storage's delay; `cancel` completes it unless it is deaf."""

    def __init__(self, work: Callable[[], int], delay_s: float, *, deaf: bool = False) -> None:
        self._done = threading.Event()
        self._cancelled = threading.Event()
        self._deaf = deaf
        self._moved = 0
        self._error: Exception | None = None
        threading.Thread(target=self._run, args=(work, delay_s), daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> int:
        if not self._done.wait(timeout_s):
            raise errors.Timeout("the wait ran out; the transfer goes on")
        if self._error is not None:
            raise self._error
        return self._moved

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def _run(self, work: Callable[[], int], delay_s: float) -> None:
        if self._deaf:
            time.sleep(delay_s)
        else:
            self._cancelled.wait(delay_s)
        try:
            if self._cancelled.is_set() and not self._deaf:
                raise errors.Cancelled("cancelled by the caller")
            self._moved = work()
        except Exception as error:
            self._error = error
        self._done.set()


class MemoryFile:
    def __init__(self, storage: MemoryStorage, file: StoredFile) -> None:
        self._storage, self._file = storage, file

    def submit_read(self, offset: int, buffers: Any, *, timeout_s: float | None = None) -> MemoryTransfer:
        target = memoryview(buffers).cast("B")

        def work() -> int:
            self._storage.before("read", self._file.path, offset)
            data = self._file.data[offset : offset + len(target)]
            if not self._file.covers(offset, offset + len(data)):
                raise errors.Hole(f"{self._file.path} at {offset}")
            target[: len(data)] = data
            return len(data)

        return self._storage.transfer("read", self._file.path, offset, len(target), work)

    def submit_write(self, offset: int, buffers: Any, *, timeout_s: float | None = None) -> MemoryTransfer:
        source = memoryview(buffers).cast("B")

        def work() -> int:
            self._storage.before("write", self._file.path, offset)
            with self._storage.lock:
                end = offset + len(source)
                self._file.data.extend(bytes(max(0, end - len(self._file.data))))
                self._file.data[offset:end] = source
                self._file.written.append((offset, end))
            return len(source)

        return self._storage.transfer("write", self._file.path, offset, len(source), work)


class MemoryStorage:
    """Client, node and control in one: what the connector needs of them, with faults to order.

    `fail[(way, path suffix, nth)] = error` makes the nth read or write of such a file fail; `before` hooks
    can do anything. `log` has every operation in the order in which it reached the storage.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.files: dict[str, StoredFile] = {}
        self.log: list[tuple[str, str, int, int]] = []
        self.fail: dict[tuple[str, str, int], Exception] = {}
        self.delay_s: dict[tuple[str, str], float] = {}
        self.deaf: set[str] = set()
        self.commits: list[dict[str, Any]] = []
        self.aborts: list[str] = []
        self.control_errors: list[Exception] = []
        self.under_way = 0
        self.under_way_max = 0
        self._counts: dict[tuple[str, str], int] = {}

    def close(self) -> None:
        self.delay_s.clear()

    # What the connector calls.

    def open_layout(self, layout: dict[str, Any]) -> MemoryFile:
        if layout["capability"] != "signed":
            raise errors.BadSignature(f"{layout['path']}: the capability is not signed by this cluster")
        return MemoryFile(self, self._file(layout["path"]))

    def control(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        if self.control_errors:
            raise self.control_errors.pop(0)
        route = urlsplit(path)
        if (method, route.path) == ("GET", "/v1/fs/layout"):
            return self._own_layout(parse_qs(route.query)["path"][0])
        assert body is not None
        if (method, route.path) == ("POST", "/v1/fs/create"):
            if body["path"] in self.files:
                raise errors.Exists(body["path"])
            self._file(body["path"]).kv_identity = body["kv_identity"]
            return {}
        if (method, route.path) == ("POST", "/v1/kv/abort"):
            self.aborts.append(body["plan_token"])
            return {}
        assert (method, route.path) == ("POST", "/v1/kv/commit")
        return self._commit(body)

    # What the tests call.

    def plan(
        self, model: LoadedModel, stored: list[dict[str, Any]], fresh_uri: str | None = None, **changes: Any
    ) -> dict[str, Any]:
        """kvcache_params as control makes them: stored segments, fresh ones behind them in the same file or
        in `fresh_uri`.
        """
        tokens = sum(segment["token_length"] for segment in stored)
        if fresh_uri is None:
            fresh_uri = stored[-1]["kv_uri"] if stored else uri("a")
        same = [segment for segment in stored if segment["kv_uri"] == fresh_uri]
        start = same[-1]["kv_start"] + same[-1]["kv_length"] if same else 0
        fresh = {"token_start": tokens, "token_length": -1, "kv_uri": fresh_uri, "kv_start": start}
        uris = {segment["kv_uri"] for segment in [*stored, fresh]}
        layouts = {name: self.layout(name) for base in uris for name in (base, base + ".tokens")}
        kv_format = {"name": "token", "bytes_per_token": model.kv_format.bytes_per_token, "granule": 1}
        plan = {
            "token": f"plan-{time.monotonic_ns()}",
            "control": ["http://127.0.0.1:1"],
            "kv_identity": model.kv_identity,
            "kv_format": kv_format,
            "layouts": layouts,
        }
        params = {"id": "s", "stored_kvcache": stored, "fresh_kvcache": [fresh], "load_threshold": 0}
        return {**params, "plan": {**plan, **changes}}

    def layout(self, kv_uri: str) -> dict[str, Any]:
        columns = [{"epoch": 1, "born": 1, "replicas": [{"node": "n", "incarnation": 7, "addresses": []}]}]
        return {"path": urlsplit(kv_uri).path, "capability": "signed", "columns": columns}

    def corrupt(self, kv_uri: str, offset: int) -> None:
        self.files[urlsplit(kv_uri).path].data[offset] ^= 0xFF

    def bytes_of(self, kv_uri: str) -> bytes:
        return bytes(self.files[urlsplit(kv_uri).path].data)

    # How it works inside.

    def transfer(
        self, way: str, path: str, offset: int, length: int, work: Callable[[], int]
    ) -> MemoryTransfer:
        suffix = ".tokens" if path.endswith(".tokens") else ".kv"
        with self.lock:
            self.under_way += 1
            self.under_way_max = max(self.under_way_max, self.under_way)

        def tracked() -> int:
            try:
                moved = work()
                with self.lock:
                    self.log.append((way, path, offset, length))
                return moved
            finally:
                with self.lock:
                    self.under_way -= 1

        return MemoryTransfer(tracked, self.delay_s.get((way, suffix), 0.0), deaf=suffix in self.deaf)

    def before(self, way: str, path: str, offset: int) -> None:
        suffix = ".tokens" if path.endswith(".tokens") else ".kv"
        with self.lock:
            nth = self._counts.get((way, suffix), 0)
            self._counts[way, suffix] = nth + 1
        if error := self.fail.get((way, suffix, nth)):
            raise error

    def reset_counts(self) -> None:
        self._counts.clear()
        self.fail.clear()

    def _file(self, path: str) -> StoredFile:
        return self.files.setdefault(path, StoredFile(path))

    def _own_layout(self, path: str) -> dict[str, Any]:
        if path not in self.files:
            raise errors.NotFound(path)
        return {**self.layout(f"gd2fs://{CLUSTER}{path}"), "kv_identity": self.files[path].kv_identity}

    def _commit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Control's checks: every byte is there, and the digest is that of the ids beside them."""
        (fresh,) = body["fresh"]
        kv = self.files[urlsplit(fresh["kv_uri"]).path]
        ids = self.files[kv.path + ".tokens"]
        start, end = fresh["kv_start"], fresh["kv_start"] + fresh["kv_length"]
        if not kv.covers(start, end):
            raise errors.Hole(f"{kv.path}: [{start}, {end}) is not all there")
        per_token = fresh["kv_length"] // fresh["token_length"]
        if not ids.covers(start // per_token * 4, end // per_token * 4):
            raise errors.Hole(f"{ids.path}: ids are missing")
        if body["acks"] != [{"column": 0, "epoch": 1, "incarnation": 7}]:
            raise errors.Lost("acknowledged by another incarnation")
        if fresh["kv_start"] == fresh["token_start"] * per_token:  # the whole session lies in this file
            known = ids_from_bytes(bytes(ids.data[: end // per_token * 4]))
            if digest(known) != body["digest"]:
                raise errors.Invalid("digest: is not that of the ids")
        self.commits.append(body)
        return {"session": "s", "version": len(self.commits), "stored_kv_cache": []}


def uri(name: str) -> str:
    return f"gd2fs://{CLUSTER}/.kv/s/{name}.kv"


class ServedEngine:
    """An app on a loopback port; plain sockets, so that disconnecting is what it is in life."""

    def __init__(self, model: LoadedModel, client: Any, **options: Any) -> None:
        self.app = create_app(model, client, **options)
        self._listener = bind(Listen("127.0.0.1", 0))
        self.port = bound(self._listener).port
        config = uvicorn.Config(self.app, log_level="error", timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )

    def __enter__(self) -> ServedEngine:
        self._thread.start()
        until(lambda: self._server.started, "the server starts")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._listener.close()
        assert not self._thread.is_alive(), "the server does not end"

    def post(self, path: str, body: Any, *, status: int = 200) -> dict[str, Any]:
        answer, data = self.send(path, json.dumps(body).encode())
        assert answer.status == status, (answer.status, data[:500])
        return json.loads(data)

    def send(self, path: str, data: bytes | None) -> tuple[http.client.HTTPResponse, bytes]:
        with self.connection() as connection:
            headers = {"content-type": "application/json"}
            connection.request("GET" if data is None else "POST", path, data, headers)
            answer = connection.getresponse()
            return answer, answer.read()

    def get(self, path: str) -> bytes:
        answer, data = self.send(path, None)
        assert answer.status == 200
        return data

    @contextlib.contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            yield connection
        finally:
            connection.close()

    def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream; the last one must be [DONE], which is left out."""
        answer, data = self.send(path, json.dumps({**body, "stream": True}).encode())
        assert answer.status == 200, data
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def metric(self, name: str) -> float:
        """A sample by its full name with labels; 0 while it was never counted."""
        for line in self.get("/metrics").decode().splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        return 0.0


def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting until {what}"
        time.sleep(0.005)
