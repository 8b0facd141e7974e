"""The node agent against a control that is a function and a native node that is a list."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gd2fs import errors
from gd2fs.config import Loaded, load
from gd2fs.config.serving import alone_in
from gd2fs.node.agent import EXIT_NOT_KEPT, EXIT_REGISTRATION_LOST, Agent, incarnation_floor
from gd2fs.node.link import ControlLink, RegistrationRefused
from gd2fs.node.observe import create_app, prometheus_text
from gd2fs.signing import Keys, Token

WAIT_S = 10.0
STATS = {
    "bytes_read": 7,
    "files": 2,
    "arena_used": 5,
    "arena_capacity": 9,
    "errors": {"HOLE": 3},
    "read_latency": {"bounds_us": [25, 50], "counts": [1, 2, 4], "count": 7, "sum_us": 1_500_000},
}


class FakeNative:
    def __init__(self, config: str) -> None:
        self.config = json.loads(config)
        self.stopped: list[int] = []
        self.reports: list[list[dict[str, Any]]] = []
        self.reported_up_to = 0
        self.heard: list[float] = []
        self.lost: errors.Gd2fsError | None = None

    def report(self, limit: int) -> str:
        items = self.reports[0] if self.reports else []
        assert len(items) <= limit
        return json.dumps({"sequence": self.reported_up_to + len(items), "items": items})

    def reported(self, sequence: int) -> None:
        assert sequence == self.reported_up_to + len(self.reports.pop(0))
        self.reported_up_to = sequence

    def hear_time(self, now: float) -> None:
        self.heard.append(now)

    def addresses(self) -> list[str]:
        return ["tcp://127.0.0.1:1234"]

    def stats(self) -> str:
        return json.dumps(STATS)

    def stop(self, grace_ms: int) -> None:
        self.stopped.append(grace_ms)
        if self.lost:
            raise self.lost


class World:
    """One agent; `answer(request)` is control."""

    def __init__(
        self, tmp_path: Path, answer: Callable[[httpx2.Request], httpx2.Response], **knobs: Any
    ) -> None:
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.queries: list[str] = []
        self.natives: list[FakeNative] = []
        self.reports: list[list[dict[str, Any]]] = []
        self._answer = answer
        flags = {
            "node.id": "n1",
            "node.http_listen": "127.0.0.1:0",
            "node.data_dir": str(tmp_path / "node"),
            **knobs,
        }
        self.loaded: Loaded = load(flags, environ={})
        link = ControlLink("gd2fs://127.0.0.1:1", "", httpx2.MockTransport(self._control))
        self.checked: list[dict[str, Any]] = []
        self.agent = Agent(self.loaded, self._check, self._start, link)

    def _check(self, config: str) -> None:
        self.checked.append(json.loads(config))
        assert self.requests == [], "before it registers"

    def _start(self, config: str) -> FakeNative:
        self.natives.append(FakeNative(config))
        self.natives[-1].reports = self.reports
        return self.natives[-1]

    def _control(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content) if request.content else {}
        self.requests.append((request.method, request.url.path, body))
        self.queries.append(request.url.query.decode())
        return self._answer(request)

    def run(self, until: Callable[[World], bool] | None = None, announce_path: Path | None = None) -> int:
        async def main() -> int:
            task = asyncio.create_task(self.agent.run(str(announce_path) if announce_path else None))
            while until is not None and not task.done() and not until(self):
                await asyncio.sleep(0.01)
            if until is not None:
                self.agent.stopping.set()
            return await asyncio.wait_for(task, WAIT_S)

        return asyncio.run(asyncio.wait_for(main(), WAIT_S))

    def count(self, verb: str) -> int:
        return sum(path.endswith(verb) for _, path, _ in self.requests)


def well(request: httpx2.Request) -> httpx2.Response:
    if request.url.path.endswith("/register"):
        return httpx2.Response(
            200, json={"cluster": "local", "incarnation": 6, "now": 11.5, "lease_s": 10, "heartbeat_s": 0.05}
        )
    if request.url.path.endswith("/ranges"):
        return httpx2.Response(200, json={"taken": 1, "unknown": [], "stale": []})
    return httpx2.Response(200, json={"now": 12.5})


def error(status: int, message: str) -> httpx2.Response:
    return httpx2.Response(status, json={"error": {"code": 1, "name": "X", "message": message}})


def test_register_start_report_and_leave(tmp_path: Path) -> None:
    world = World(tmp_path, well)
    assert world.run(lambda w: w.count("/heartbeat") >= 2) == 0
    method, path, body = world.requests[0]
    assert (method, path) == ("POST", "/v1/nodes/register")
    assert body["node"] == "n1" and body["incarnation_floor"] == 0 and body["config_hash"]
    (native,) = world.natives
    assert native.config["incarnation"] == 6 and native.config["memory_bytes"] == 1 << 30
    assert native.config["now"] == 11.5 and set(native.heard) == {12.5}, "control says what time it is"
    _, path, beat = world.requests[1]
    assert path == "/v1/nodes/n1/heartbeat" and beat["incarnation"] == 6
    assert beat["addresses"] == ["tcp://127.0.0.1:1234"] and beat["used_bytes"] == 5 and beat["files"] == 2
    assert not any(name.startswith(("log", "flush", "dirty")) for name in native.config)
    assert body["has_log"] is False and world.count("/ranges") == 0
    # It leaves before it drains, so that nothing new is planned on it.
    assert world.requests[-1][:2] == ("DELETE", "/v1/nodes/n1")
    assert world.queries[-1] == "incarnation=6", "only itself"
    assert native.stopped == [5000]


def test_what_did_not_reach_the_logs_is_told_by_message_and_exit_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, well)

    def until(world: World) -> bool:
        if world.natives:
            world.natives[0].lost = errors.Internal("/logs/a: 4096 bytes did not reach this log and are lost")
        return world.count("/heartbeat") >= 2

    assert world.run(until) == EXIT_NOT_KEPT != 0
    assert world.natives[0].stopped == [5000] and world.requests[-1][0] == "DELETE"
    assert "/logs/a: 4096 bytes did not reach this log and are lost" in caplog.text


def _item(number: int) -> dict[str, Any]:
    return {"file": f"{number:032x}", "column": 0, "epoch": 1, "sealed": 0, "length": 9, "valid": None}


def _logged(
    tmp_path: Path, answer: Callable[[httpx2.Request], httpx2.Response] = well, **knobs: Any
) -> World:
    logs = {"node.logs": f"{tmp_path}/a.log,{tmp_path}/b.log", "node.log_bytes": "1GiB", **knobs}
    return World(tmp_path, answer, **logs)


def test_what_came_back_is_reported_before_the_first_heartbeat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def half_known(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/ranges"):
            return httpx2.Response(
                200, json={"taken": 0, "unknown": [{"file": "f", "column": 0}], "stale": []}
            )
        return well(request)

    world = _logged(
        tmp_path,
        half_known,
        **{"node.flush_s": "7", "node.dirty_bytes_max": "64MiB", "node.tenant_share": "0.5"},
    )
    world.reports.extend([_item(3 * n), _item(3 * n + 1)] for n in range(10))
    assert world.run(lambda w: w.count("/heartbeat") >= 1) == 0
    verbs = [path.rsplit("/", 1)[1] for _, path, _ in world.requests[:12]]
    assert verbs == ["register", *["ranges"] * 10, "heartbeat"]
    assert world.requests[0][2]["has_log"] is True
    assert world.requests[1][2] == {"incarnation": 6, "items": [_item(0), _item(1)]}
    (native,) = world.natives
    assert native.reported_up_to == 20
    given = {name: native.config[name] for name in ("log_bytes", "log_engine", "flush_delay_ms")}
    assert given == {"log_bytes": 1 << 30, "log_engine": "auto", "flush_delay_ms": 200}
    assert native.config["logs"] == [f"{tmp_path}/a.log", f"{tmp_path}/b.log"]
    assert native.config["dirty_bytes_max"] == 64 << 20
    assert native.config["tenant_share"] == 0.5
    assert native.stopped == [5000]
    assert "does not know 10" in caplog.text and "fsck" in caplog.text


def test_later_changes_go_with_the_heartbeats_and_never_instead_of_them(tmp_path: Path) -> None:
    world = _logged(tmp_path)

    def feed(w: World) -> bool:
        if w.count("/heartbeat") == 1 and not w.count("/ranges"):
            w.reports.extend([_item(n)] for n in range(9))
        return w.count("/ranges") >= 9

    assert world.run(feed) == 0
    verbs = [path.rsplit("/", 1)[1] for _, path, _ in world.requests]
    told = verbs[verbs.index("ranges") :]
    assert told[:10] == [*["ranges"] * 4, "heartbeat", *["ranges"] * 4, "heartbeat"]


def test_reports_wait_for_a_control_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gd2fs.node.agent.BACKOFF_MAX_S", 0.01)

    def away(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/ranges") and world.count("/ranges") < 4:
            raise httpx2.ConnectError("connection refused")
        return well(request)

    world = _logged(tmp_path, away)
    world.reports.append([_item(1)])
    assert world.run(lambda w: w.count("/heartbeat") >= 1) == 0
    assert world.count("/ranges") == 4 and world.natives[0].reported_up_to == 1


def test_it_can_be_stopped_while_it_waits_to_report(tmp_path: Path) -> None:
    def away(request: httpx2.Request) -> httpx2.Response:
        return error(500, "no") if request.url.path.endswith("/ranges") else well(request)

    world = _logged(tmp_path, away)
    world.reports.append([_item(1)])
    assert world.run(lambda w: w.count("/ranges") >= 1) == 0
    assert world.count("/heartbeat") == 0 and world.natives[0].stopped == [5000]


def test_a_report_of_a_stale_incarnation_ends_the_node(tmp_path: Path) -> None:
    def stale(request: httpx2.Request) -> httpx2.Response:
        return error(409, "over") if request.url.path.endswith("/ranges") else well(request)

    world = _logged(tmp_path, stale)
    world.reports.append([_item(1)])
    assert world.run() == EXIT_REGISTRATION_LOST


def test_a_log_file_without_a_size_is_refused_before_it_registers(tmp_path: Path) -> None:
    world = _logged(tmp_path, **{"node.log_bytes": "0"})
    with pytest.raises(ValueError, match=r"node\.logs: .*a\.log is not there.*mount.*node\.log_bytes"):
        world.run()
    assert world.requests == []


def test_more_memory_than_there_is_is_refused_before_it_registers(tmp_path: Path) -> None:
    world = World(tmp_path, well, **{"node.memory_bytes": "100TiB"})
    with pytest.raises(
        ValueError, match=r"node\.memory_bytes: 100\.0 TiB is more than the .* of this machine"
    ):
        world.run()
    assert world.requests == []


def test_what_the_native_node_would_refuse_is_refused_before_it_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _logged(tmp_path)
    world.run(lambda w: w.count("/heartbeat") >= 1)
    [checked], [native] = world.checked, world.natives
    assert checked == {**native.config, "incarnation": 1, "now": 0.0}, (
        "what it starts with is what was checked"
    )

    def refuse(world: World, config: str) -> None:
        raise ValueError("node.log_bytes: 5 is not a multiple of 1 MiB")

    monkeypatch.setattr(World, "_check", refuse)
    world = _logged(tmp_path)
    with pytest.raises(ValueError, match="multiple"):
        world.run()
    assert world.requests == [] and world.natives == []


def test_a_log_in_trouble_goes_with_the_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FakeNative, "stats", lambda self: json.dumps({**STATS, "log_trouble": len(beats) % 2})
    )
    world = _logged(tmp_path)
    beats: list[bool] = []

    def enough(w: World) -> bool:
        beats[:] = [body["log_trouble"] for _, path, body in w.requests if path.endswith("/heartbeat")]
        return len(beats) >= 4

    world.run(enough)
    assert {True, False} <= set(beats)


def test_with_a_log_the_node_is_as_large_as_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = {"log_total": 100, "log_capacity": 80, "log_live": 60}
    tiers |= {"dirty_bytes": 7, "evictable_bytes": 90, "arena_used": 5}
    monkeypatch.setattr(FakeNative, "stats", lambda self: json.dumps(tiers))
    world = _logged(tmp_path)
    world.run(lambda w: w.count("/heartbeat") >= 1)
    beat = next(body for _, path, body in world.requests if path.endswith("/heartbeat"))
    assert [beat[f"{name}_bytes"] for name in ("capacity", "used", "evictable")] == [80, 67, 67]


def test_a_stale_incarnation_ends_the_node(tmp_path: Path) -> None:
    def stale(request: httpx2.Request) -> httpx2.Response:
        return (
            error(409, "incarnation 6 is not current")
            if request.url.path.endswith("/heartbeat")
            else well(request)
        )

    world = World(tmp_path, stale)
    assert world.run() == EXIT_REGISTRATION_LOST
    assert world.natives[0].stopped and world.requests[-1][0] != "DELETE"


def test_it_serves_on_while_control_is_away_and_reports_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gd2fs.node.agent.BACKOFF_MAX_S", 0.05)
    answers = iter(["well", "away", "broken", "well"])

    def shaky(request: httpx2.Request) -> httpx2.Response:
        if not request.url.path.endswith("/heartbeat"):
            return well(request)
        state = next(answers, "well")
        if state == "away":
            raise httpx2.ConnectError("connection refused")
        return error(500, "broken") if state == "broken" else well(request)

    world = World(tmp_path, shaky)
    assert world.run(lambda w: w.count("/heartbeat") >= 5) == 0
    assert len(world.natives) == 1 and world.count("/register") == 1


def test_it_announces_itself_once_control_knows_its_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gd2fs.node.agent.BACKOFF_MAX_S", 0.02)
    announced = tmp_path / "node.json"
    told_early: list[bool] = []

    def slow(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/heartbeat") and len(told_early) < 2:
            told_early.append(announced.exists())
            if len(told_early) == 1:
                raise httpx2.ConnectError("connection refused")
        return well(request)

    world = World(tmp_path, slow)
    assert world.run(lambda w: announced.exists(), announced) == 0
    assert told_early == [False, False]
    assert json.loads(announced.read_text())["addresses"] == ["tcp://127.0.0.1:1234"]


def test_it_waits_for_control_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gd2fs.node.agent.BACKOFF_MAX_S", 0.01)

    def late(request: httpx2.Request) -> httpx2.Response:
        if world.count("/register") < 3:
            raise httpx2.ConnectError("connection refused")
        return well(request)

    world = World(tmp_path, late)
    assert world.run(lambda w: w.count("/heartbeat") >= 1) == 0
    assert world.count("/register") == 3


def test_a_refused_registration_says_why(tmp_path: Path) -> None:
    world = World(tmp_path, lambda request: error(403, "the role client may not register nodes"))
    with pytest.raises(RegistrationRefused, match="may not register"):
        world.run()
    assert not world.natives


def test_a_foreign_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="GD2FS_CLUSTER_ID"):
        World(tmp_path, well, **{"cluster.id": "other"}).run()


@pytest.mark.parametrize("knob", [{"node.listen": "tcp://10.0.0.1:1"}, {"node.http_listen": "0.0.0.0:0"}])
def test_it_does_not_listen_beyond_loopback_without_keys(tmp_path: Path, knob: dict[str, str]) -> None:
    world = World(tmp_path, well, **knob)
    with pytest.raises(PermissionError, match="GD2FS_CLUSTER_KEYS"):
        world.run()
    assert not world.requests


def test_the_floor_is_read_from_the_data_directory(tmp_path: Path) -> None:
    assert incarnation_floor(tmp_path) == 0
    (tmp_path / "incarnation").write_bytes(struct.pack("<8sII", b"GD2FSINC", 41, 0))
    assert incarnation_floor(tmp_path) == 41


def test_metrics_are_prometheus_text() -> None:
    tiers = {"flush_lag_ms": 1500, "hits_nvme": 3, "log_live": 8, "log_failed": 0}
    lines = prometheus_text({"node": 'n"1'}, STATS | tiers).splitlines()
    assert r'gd2fs_node_bytes_read_total{node="n\"1"} 7' in lines
    assert "# TYPE gd2fs_node_files gauge" in lines
    assert r'gd2fs_node_flush_lag_seconds{node="n\"1"} 1.5' in lines
    assert "# TYPE gd2fs_node_hits_nvme_total counter" in lines
    assert "# TYPE gd2fs_node_log_live gauge" in lines and "# TYPE gd2fs_node_log_failed gauge" in lines
    assert r'gd2fs_node_errors_total{node="n\"1",code="HOLE"} 3' in lines
    buckets = [
        line.rsplit(" ", 1) for line in lines if line.startswith("gd2fs_node_read_latency_seconds_bucket")
    ]
    assert [count for _, count in buckets] == ["1", "3", "7"] and 'le="+Inf"' in buckets[-1][0]


def test_beyond_loopback_metrics_want_a_token() -> None:
    keys = "1:" + "ab" * 16
    app = create_app(lambda: {"status": "ok", "node": "n1", "addresses": []}, lambda: STATS, keys)
    token = Keys.parse(keys).sign(Token("default", "client", 2**31))

    async def ask(path: str, headers: dict[str, str]) -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://n") as http:
            return await http.get(path, headers=headers)

    assert asyncio.run(ask("/metrics", {})).status_code == 401
    assert asyncio.run(ask("/metrics", {"authorization": f"Bearer {token}x"})).status_code == 401
    assert asyncio.run(ask("/metrics", {"authorization": f"Bearer {token}"})).status_code == 200
    assert asyncio.run(ask("/health", {})).json() == {"status": "ok"}


def test_a_data_directory_that_is_none_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "node").write_text("mine")
    world = World(tmp_path, well)
    with pytest.raises(
        OSError, match=r"node\.data_dir: .*node cannot be used \(File exists\); name a directory"
    ):
        world.run()
    assert world.requests == [] and (tmp_path / "node").read_text() == "mine"


def test_the_lock_of_a_data_directory_cuts_nothing(tmp_path: Path) -> None:
    (tmp_path / "running.lock").write_text("a log that was put here")
    with alone_in(tmp_path, "gd2fs node", "node.data_dir"):
        assert (tmp_path / "running.lock").read_text() == "a log that was put here"


def test_a_second_node_over_one_data_directory_does_not_register(tmp_path: Path) -> None:
    """Its registration would end the first node, and with it all the bytes that it holds."""
    second = World(tmp_path, well)
    directory = Path(second.loaded.settings.node.data_dir)
    with (
        alone_in(directory, "gd2fs node", "node.data_dir"),
        pytest.raises(OSError, match="choose another --data-dir"),
    ):
        second.run()
    assert second.requests == [] and second.natives == []
    assert second.run(lambda w: w.count("/heartbeat") >= 1) == 0, "the lock went with its holder"


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_data_dir_that_cannot_be_written_is_named_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(OSError, match=f"node.data_dir: {tmp_path} cannot be used.*write to") as told,
        alone_in(tmp_path, "gd2fs node", "node.data_dir"),
    ):
        pytest.fail("it has no lock")
    assert told.value.errno == number
