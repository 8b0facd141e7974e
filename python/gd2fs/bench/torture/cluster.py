"""Control and nodes as processes that are killed, stopped and started again, and the disks under them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from gd2fs import _native, errors
from gd2fs.bench.torture.clocks import SetClock
from gd2fs.bench.torture.disk import Disk
from gd2fs.bench.torture.model import INFINITE, FileModel, Timeline
from gd2fs.cli.processes import Child, Processes
from gd2fs.cli.up import READY_S, start_node
from gd2fs.client.connect import connect
from gd2fs.signing import Keys, Token

STOP_S = 20.0
"""A clean stop flushes everything; the arenas here are small."""
CALL_MS = 5_000
TOKEN_LIFE_S = 30 * 24 * 3600
SEAL, STAT, SCRUB = 16, 18, 22
METRICS_S = 5.0
DATA_DISK_BYTES = 1 << 20
"""Only its directory is used."""


@dataclass(slots=True)
class Node:
    """One node: its process while it runs, its clock, and its disks."""

    name: str
    clock: SetClock
    disks: list[Disk] = field(default_factory=list)
    data: Disk | None = None
    """Where the data directory lies if its power can be cut."""
    child: Child | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def powered(self) -> list[Disk]:
        """Everything whose power is cut with the node's."""
        return [*self.disks, *([self.data] if self.data else [])]


class Cluster:
    """Control on SQLite and some nodes. A context manager: afterwards no process and no mount is left.

    ``logs`` counts the disks of each node, of ``log_bytes`` each; 0 where nodes have none. With logs, or with
    ``data_disks``, the node's data directory is on a disk, too. ``environment`` is the nodes' alone.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 1,
        logs: int = 0,
        memory: str = "24MiB",
        log_bytes: int = 128 << 20,
        data_disks: bool = False,
        seed: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory, self._memory, self._log_bytes = directory, memory, log_bytes
        self._environment = dict(environment or {})
        self._random = Random(seed)
        self.timeline = Timeline()
        self.nodes: dict[str, Node] = {}
        self._stack = ExitStack()
        try:
            self._processes = self._stack.enter_context(Processes(directory))
            self.clock = self._clock("control")
            self._control, self.control = self._run_control(0)
            for number in range(1, nodes + 1):
                node = self.add_node(f"node-{number}")
                seeded = seed + 1000 * number
                for log in range(logs):
                    disk = Disk(directory / f"{node.name}-disk-{log}", log_bytes, seeded + log)
                    node.disks.append(self._stack.enter_context(disk))
                if logs or data_disks:
                    disk = Disk(directory / f"{node.name}-disk-data", DATA_DISK_BYTES, seeded + logs)
                    node.data = self._stack.enter_context(disk)
                self.start_node(node.name)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        # Nothing here is worth the flush of a clean end.
        for node in self.nodes.values():
            if node.child is not None:
                self._processes.kill(node.child)
        self._stack.close()

    # Nodes

    def add_node(self, name: str) -> Node:
        """A node without disks, not started yet."""
        self.nodes[name] = Node(name, self._clock(name))
        return self.nodes[name]

    def start_node(self, name: str) -> None:
        """Starts a node over its own directory and disks, and waits until control places files on it."""
        child = self._launch(name)
        self.nodes[name].facts = self._processes.wait_ready(child, READY_S)
        self.timeline.back(name, time.monotonic())

    def _launch(self, name: str) -> Child:
        node = self.nodes[name]
        environment = self._environment | node.clock.environment
        if node.disks:
            environment["GD2FS_NODE_LOGS"] = ",".join(str(disk.path) for disk in node.disks)
            environment["GD2FS_NODE_LOG_BYTES"] = str(self._log_bytes)
        node.child = start_node(
            self._processes,
            self.directory,
            node.number,
            self._memory,
            self.control,
            environment,
            data_dir=node.data.data if node.data else None,
        )
        return node.child

    def kill_node(self, name: str) -> None:
        """SIGKILL, as a crash would."""
        begun = time.monotonic()
        self._kill(name)
        self.timeline.deaths.setdefault(name, []).append((begun, INFINITE))

    def _kill(self, name: str) -> None:
        self._processes.kill(self._child(name))
        self.nodes[name].child = None

    def cut_power(self, name: str) -> list[dict[str, int]]:
        """The power of a node's disks, then of the node; the disks work again afterwards. What each lost."""
        begun = time.monotonic()
        cuts = self._cut(name)
        self.timeline.deaths.setdefault(name, []).append((begun, INFINITE))
        return cuts

    def cut_start(self, name: str, syncs: int) -> list[dict[str, int]]:
        """Starts a node that is away and cuts its power again when it has begun so many syncs of its data
        directory, or else as soon as it serves: it was not back."""
        data, child = self.nodes[name].data, self._launch(name)
        assert data is not None, "only the disk can tell"
        enough, until = data.stats()["syncs"] + syncs, time.monotonic() + READY_S
        while child.running and not child.announced.exists() and time.monotonic() < until:
            if data.stats()["syncs"] >= enough:
                break
            time.sleep(0.002)
        return self._cut(name)

    def _cut(self, name: str) -> list[dict[str, int]]:
        powered = self.nodes[name].powered
        # What goes first decides what the node still does to the others.
        self._random.shuffle(powered)
        cuts = [disk.cut() for disk in powered]
        self._kill(name)
        for disk in powered:
            disk.clear()
            disk.restore()
        return cuts

    def stop_node(self, name: str) -> bool:
        """Ends a node in order; whether it did so in time and with exit code 0."""
        child, begun = self._child(name), time.monotonic()
        child.popen.terminate()
        try:
            code = child.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill_node(name)
            return False
        self._processes.kill(child)
        self.nodes[name].child = None
        kept = code == 0 and self.nodes[name].disks
        absences = self.timeline.stops if kept else self.timeline.deaths
        absences.setdefault(name, []).append((begun, INFINITE))
        return code == 0

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a node, or to ``control``."""
        child = self._control if name == "control" else self._child(name)
        os.kill(child.popen.pid, number)

    def _child(self, name: str) -> Child:
        child = self.nodes[name].child
        if child is None:
            raise RuntimeError(f"{name} does not run")
        return child

    def crashed(self) -> list[str]:
        """What ended without having been told to, with the end of its log."""
        children = [self._control, *(node.child for node in self.nodes.values() if node.child)]
        gone = [child for child in children if not child.running]
        return [f"{child.name} ended with {child.popen.returncode}:\n{child.tail()}" for child in gone]

    # Control

    def kill_control(self) -> None:
        self._processes.kill(self._control)

    def start_control(self) -> None:
        """Starts it again on its old port, over its old database."""
        self._control, _ = self._run_control(int(self.control.rpartition(":")[2]))

    def _run_control(self, port: int) -> tuple[Child, str]:
        """Starts control with a clock that can be set; returns it and its gd2fs:// address once it serves."""
        arguments = ["control", "--listen", f"127.0.0.1:{port}", "--data-dir", str(self._database.parent)]
        module = "gd2fs.bench.torture.clocks"
        child = self._processes.start("control", arguments, self.clock.environment, module=module)
        url = str(self._processes.wait_ready(child, READY_S)["url"])
        return child, url.replace("http://", "gd2fs://")

    def _clock(self, name: str) -> SetClock:
        clock = SetClock(self.directory / f"{name}.clock")
        clock.set(0)
        return clock

    def time(self) -> float:
        """What time it is for nodes and control, to a few seconds: their clocks may be set, ours is not."""
        [(now,)] = self._ask_control("SELECT watched_at FROM cluster", ())
        return float(now)

    # What the check wants to know

    def ask(self, name: str, opcode: int, items: Sequence[dict[str, Any]]) -> list[Any]:
        """A control operation on columns of a node, as control would send it. Raises errors of
        gd2fs.errors."""
        answered: list[Any] = self.ask_one(name, opcode, {"items": list(items)})["items"]
        return answered

    def ask_one(self, name: str, opcode: int, message: dict[str, Any]) -> dict[str, Any]:
        """The same with a message of its own."""
        token = Keys.development().sign(Token("default", "control", int(self.time()) + TOKEN_LIFE_S))
        link = _native.NodeLink(self.cluster_name(), token, CALL_MS)
        address = next(a for a in self.nodes[name].facts["addresses"] if a.startswith("tcp://"))
        code, _, reply = link.call(address, opcode, json.dumps(message).encode())
        if code:
            raise errors.from_code(code, reply.decode(errors="replace"))
        answered: dict[str, Any] = json.loads(reply)
        return answered

    def metrics(self, name: str) -> dict[str, float]:
        """What the node shows on /metrics, without labels."""
        with urllib.request.urlopen(self.nodes[name].facts["url"] + "/metrics", timeout=METRICS_S) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {series.partition("{")[0]: float(value) for series, value in pairs}

    def alive(self) -> list[str]:
        """The nodes that control places files on."""
        with connect(self.control) as client:
            nodes = client.control("GET", "/v1/nodes")["nodes"]
        return [node["node"] for node in nodes if node["state"] == "alive"]

    def cluster_name(self) -> str:
        with connect(self.control) as client:
            return client.cluster

    def evicted(self, model: FileModel, offset: int) -> bool:
        """Whether control knows that this byte is gone: it lies behind the valid part, or in a column that
        the node did not name when it came back."""
        query = (
            "SELECT c.valid, c.born < n.incarnation FROM file_columns c JOIN nodes n ON c.node = n.node "
            "WHERE c.file = ? AND c.ordinal = ?"
        )
        place = model.file, offset // model.unit % len(model.nodes)
        rows = self._ask_control(query, place)
        return any(older or (valid is not None and valid <= offset) for valid, older in rows)

    @property
    def _database(self) -> Path:
        return self.directory / "control" / "control.sqlite"

    def _ask_control(self, query: str, values: tuple[Any, ...]) -> list[Any]:
        with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True, timeout=5)) as database:
            return database.execute(query, values).fetchall()
