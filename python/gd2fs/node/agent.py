"""The life of a storage node: register, start, report, drain."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gd2fs.config import Listen, Loaded, bind, require_authentication
from gd2fs.config.listen import bound
from gd2fs.config.serving import Server, alone_in, announce
from gd2fs.config.tree import DATA_PORT, NodeConfig
from gd2fs.config.units import format_bytes
from gd2fs.errors import Gd2fsError
from gd2fs.node.link import ControlLink, ControlUnreachable, RegistrationLost
from gd2fs.node.observe import create_app

log = logging.getLogger("gd2fs.node")

# Until control says its own.
HEARTBEAT_S = 2.0
# A node that cannot reach control asks again at most this seldom, so that it is back soon after control is.
BACKOFF_MAX_S = 10.0
# Columns in one report: as many as control takes at once.
RANGES_MAX = 4096
# Reports of one heartbeat: what changed beyond them waits for the next one, since the lease does not wait.
REPORTS_MAX = 4
# The file in which the native node keeps its incarnation: magic, number, checksum.
_INCARNATION_MAGIC = b"GD2FSINC"
_INCARNATION = struct.Struct("<8sII")
# For the check of a configuration, which comes before control gives one out.
_SOME_INCARNATION = 1
# Exit codes besides 0: a supervisor starts the node again, which registers a new incarnation.
EXIT_REGISTRATION_LOST = 3
# It was told to stop, and not everything reached its logs.
EXIT_NOT_KEPT = 4


class NativeNode(Protocol):
    """What the agent needs of gd2fs._native.Node."""

    def addresses(self) -> list[str]: ...
    def stats(self) -> str: ...
    def report(self, limit: int) -> str: ...
    def reported(self, sequence: int) -> None: ...
    def hear_time(self, now: float) -> None: ...
    def stop(self, grace_ms: int) -> None: ...


class Agent:
    """Runs one node until it is told to stop. `check_native` refuses a JSON configuration that the native
    node would not start with, `start_native` builds it from one.
    """

    def __init__(
        self,
        loaded: Loaded,
        check_native: Callable[[str], None],
        start_native: Callable[[str], NativeNode],
        link: ControlLink,
    ) -> None:
        self._loaded = loaded
        self._config = loaded.settings.node
        self._cluster = loaded.settings.cluster
        self._check_native = check_native
        self._start_native = start_native
        self._link = link
        self._native: NativeNode | None = None
        self._incarnation = 0
        self._now = 0.0
        self._http_url = ""
        self._heartbeat_s = HEARTBEAT_S
        self.stopping = asyncio.Event()

    async def run(self, announce_path: str | None = None) -> int:
        """Serves until `stopping` is set (0) or control no longer knows this incarnation
        (EXIT_REGISTRATION_LOST); EXIT_NOT_KEPT if not everything reached the logs then.

        What is wrong with the configuration is said before the node registers. Raises PermissionError if it
        would listen beyond loopback without keys, ValueError for a setting that can't be, a log file without
        a size and more memory than the machine has, OSError if it cannot listen or another node runs over its
        data directory, RegistrationRefused if control will not have it.
        """
        config = self._config
        listens = [
            *(Listen.parse(address, DATA_PORT) for address in config.listen),
            Listen.parse(config.http_listen),
        ]
        require_authentication("the node", listens, self._cluster.keys, "set GD2FS_CLUSTER_KEYS")
        _require_log_bytes(config)
        _require_memory(config.memory_bytes)
        self._check_native(self._native_config(_SOME_INCARNATION))
        with (
            alone_in(Path(config.data_dir), "gd2fs node", "node.data_dir"),
            bind(Listen.parse(config.http_listen)) as listener,
        ):
            self._http_url = bound(listener).url
            if not await self._register():
                return 0
            self._native = await asyncio.to_thread(self._start_native, self._native_config(self._incarnation))
            observer = self._observer()
            observing = asyncio.create_task(observer.serve(sockets=[listener]))
            try:
                code = await self._report(announce_path)
            finally:
                kept = await self._drain()
                observer.should_exit = True
                await observing
            return code if kept else EXIT_NOT_KEPT

    async def _register(self) -> bool:
        """Registers, however long control is away; False if told to stop before."""
        body = {
            "node": self._config.id,
            "http": self._http_url,
            "has_log": bool(self._config.logs),
            "memory_bytes": self._config.memory_bytes,
            "incarnation_floor": incarnation_floor(Path(self._config.data_dir)),
            "config_hash": self._loaded.digest(),
        }
        failures = 0
        while not self.stopping.is_set():
            try:
                reply = await self._link.register(body)
            except ControlUnreachable as error:
                failures += 1
                log.warning("cannot register with control, will try again: %s", error)
                await self._pause(failures)
                continue
            if reply["cluster"] != self._cluster.id:
                raise PermissionError(
                    f"control serves cluster {reply['cluster']!r}, this node is of {self._cluster.id!r}; "
                    "set cluster.id (GD2FS_CLUSTER_ID) or cluster.control (GD2FS_CONTROL)"
                )
            self._incarnation = int(reply["incarnation"])
            self._now = float(reply["now"])
            self._heartbeat_s = float(reply["heartbeat_s"])
            return True
        return False

    def _native_config(self, incarnation: int) -> str:
        config = self._config
        facts = {
            "cluster": self._cluster.id,
            "node": config.id,
            "incarnation": incarnation,
            "now": self._now,
            "keys": self._cluster.keys,
            "listen": config.listen,
            "memory_bytes": config.memory_bytes,
            "data_dir": config.data_dir,
            "connections_max": config.connections_max,
            "shm": config.shm,
            "io_threads": config.io_threads,
            "memory_threads": config.memory_threads,
            "tenant_share": config.tenant_share,
        }
        if config.logs:
            facts |= {
                "logs": config.logs,
                "log_bytes": config.log_bytes,
                "log_engine": config.log_engine,
                "flush_delay_ms": config.flush_delay_ms,
                "dirty_bytes_max": config.dirty_bytes_max,
                "flush_s": math.ceil(config.flush_s),
            }
        return json.dumps(facts)

    async def _report(self, announce_path: str | None) -> int:
        """Reports until the end. Cache files need no lease: the node serves on while control is away.

        Control plans nothing here before the first heartbeat, so what came back from the logs goes before it.
        """
        failures = 0
        announced = False
        while not self.stopping.is_set():
            try:
                await self._report_ranges(REPORTS_MAX if announced else None)
                if self.stopping.is_set():
                    break
                now = await self._link.heartbeat(self._config.id, await asyncio.to_thread(self._heartbeat))
                if self._native is not None:
                    self._native.hear_time(now)
                if failures:
                    log.warning("control answers again")
                failures = 0
                if not announced:
                    # Only now does control place files here: whoever waits for this may write at once.
                    self._announce(announce_path)
                    announced = True
            except ControlUnreachable as error:
                failures += 1
                if failures == 1:
                    log.warning("control does not answer; serving on without it: %s", error)
            except RegistrationLost as error:
                log.error("this process has lost its registration and stops: %s", error)
                return EXIT_REGISTRATION_LOST
            await self._pause(failures)
        return 0

    async def _report_ranges(self, reports_max: int | None) -> None:
        """Tells control how far columns are valid: after the start of all, later of those that changed."""
        native = self._native
        unknown = reports = 0
        while native is not None and reports != reports_max and not self.stopping.is_set():
            report = json.loads(await asyncio.to_thread(native.report, RANGES_MAX))
            if not report["items"]:
                break
            body = {"incarnation": self._incarnation, "items": report["items"]}
            reply = await self._link.ranges(self._config.id, body)
            await asyncio.to_thread(native.reported, report["sequence"])
            unknown += len(reply["unknown"])
            reports += 1
        if unknown:
            log.warning(
                "control does not know %d of this node's columns; it frees those it has deleted, and"
                " `gd2fs fsck` shows the others",
                unknown,
            )

    def _announce(self, path: str | None) -> None:
        addresses = self._addresses()
        announce(path, {"url": self._http_url, "node": self._config.id, "addresses": addresses})
        log.warning("node %s serves %s (incarnation %d)", self._config.id, addresses, self._incarnation)

    def _heartbeat(self) -> dict[str, Any]:
        stats = self.stats()
        if stats.get("log_total"):
            # Everything goes to the log in the end; memory only holds it sooner. What can live there counts.
            capacity, used = stats["log_capacity"], stats.get("log_live", 0) + stats.get("dirty_bytes", 0)
        else:
            capacity = stats.get("arena_capacity", self._config.memory_bytes)
            used = stats.get("arena_used", 0)
        return {
            "incarnation": self._incarnation,
            "addresses": self._addresses(),
            "http": self._http_url,
            "used_bytes": used,
            "capacity_bytes": capacity,
            "evictable_bytes": min(used, stats.get("evictable_bytes", 0)),
            "log_trouble": bool(stats.get("log_trouble")),
            "files": stats.get("files", 0),
            "stats": stats,
        }

    def stats(self) -> dict[str, Any]:
        """The native node's counters."""
        stats: dict[str, Any] = json.loads(self._native.stats()) if self._native else {}
        return stats

    def describe(self) -> dict[str, Any]:
        """What /health answers."""
        return {
            "status": "stopping" if self.stopping.is_set() else "ok",
            "node": self._config.id,
            "cluster": self._cluster.id,
            "incarnation": self._incarnation,
            "addresses": self._addresses(),
        }

    def _addresses(self) -> list[str]:
        listened = self._native.addresses() if self._native else []
        if not self._config.advertise:
            return listened
        # The way through shared memory is the node's to name: it works on its host only.
        return [*self._config.advertise, *(a for a in listened if a.startswith("shm://"))]

    async def _pause(self, failures: int) -> None:
        """Until the next call: one heartbeat, longer after failures, with jitter so that nodes do not come
        in step.
        """
        seconds = (
            min(self._heartbeat_s * 2 ** min(failures, 8), BACKOFF_MAX_S) if failures else self._heartbeat_s
        )
        try:
            await asyncio.wait_for(self.stopping.wait(), seconds * random.uniform(0.8, 1.0))
        except TimeoutError:
            return

    def _observer(self) -> Server:
        keys = "" if Listen.parse(self._config.http_listen).loopback else self._cluster.keys
        return Server(create_app(self.describe, self.stats, keys), drain_s=1.0, signals=False)

    async def _drain(self) -> bool:
        """Leaves the cluster first, so that nothing new is planned here, then lets requests under way
        finish and everything reach the logs; whether it did.
        """
        native = self._native
        if native is None:
            return True
        if self.stopping.is_set():
            try:
                await self._link.leave(self._config.id, self._incarnation)
            except ControlUnreachable as error:
                log.warning("could not tell control that this node leaves: %s", error)
        try:
            await asyncio.to_thread(native.stop, int(self._config.drain_s * 1000))
        except Gd2fsError as error:
            log.error("not everything is kept: %s", error)
            return False
        return True


def _require_log_bytes(config: NodeConfig) -> None:
    """Before the node registers, which ends the life of the one before it."""
    absent = [path for path in config.logs if not Path(path).exists()]
    if absent and not config.log_bytes:
        raise ValueError(
            f"node.logs: {absent[0]} is not there; if it is a log already, mount its drive or correct the"
            " path; of a new one say how large it is to be (node.log_bytes), for example"
            " GD2FS_NODE_LOG_BYTES=100GiB"
        )


def _require_memory(memory_bytes: int) -> None:
    """Before the node registers: it would take files until the system ends it in the middle of one."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory_bytes > there:
        raise ValueError(
            f"node.memory_bytes: {format_bytes(memory_bytes)} is more than the {format_bytes(there)} of this"
            " machine; give what other processes leave"
        )


def incarnation_floor(data_dir: Path) -> int:
    """The last incarnation that the data directory saw; 0 for a new one.

    Control counts on from it if it lost its own count (a database restored from a backup). A damaged file
    counts as 0 here: the native node refuses it by name when it opens the directory.
    """
    try:
        data = (data_dir / "incarnation").read_bytes()
    except FileNotFoundError:
        return 0
    whole = len(data) == _INCARNATION.size and data.startswith(_INCARNATION_MAGIC)
    return int(_INCARNATION.unpack(data)[1]) if whole else 0


def run(loaded: Loaded, announce_path: str | None = None) -> int:
    """Runs a node in the foreground until SIGTERM or SIGINT; returns the exit code."""
    from gd2fs import _native

    _native.show_messages(loaded.settings.node.message_level)

    async def main() -> int:
        link = ControlLink(loaded.settings.cluster.control, loaded.token())
        agent = Agent(loaded, _native.Node.check, lambda config: _native.Node(config), link)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, agent.stopping.set)
        try:
            return await agent.run(announce_path)
        finally:
            await link.close()

    return asyncio.run(main())
