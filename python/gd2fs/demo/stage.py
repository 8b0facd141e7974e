"""The demo's processes: control, two nodes, engines and a gateway, all on loopback with ports of the kernel's
choice.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gd2fs.cli.processes import Child, Processes
from gd2fs.cli.up import READY_S, start_control, start_node
from gd2fs.config import Listen
from gd2fs.demo.talk import Talker

NODES = 2
# The whole conversation needs about 130 MB of KV cache, and the negative control two copies of it.
NODE_MEMORY = "1GiB"
# An engine reads half a gigabyte of weights; several start at once on few cores.
ENGINE_READY_S = 90.0
HEALTHY_S = 30.0
_BYTES_READ = re.compile(r"^gd2fs_node_bytes_read_total{[^}]*} (\d+)", re.MULTILINE)


@dataclass
class Engine:
    name: str
    child: Child
    url: str = ""


@dataclass
class Stage:
    """What runs. `serving` are the gateway's engines; `local` keeps KV in its memory; `plain` is never given
    any KV.
    """

    processes: Processes
    control: str = ""
    gateway: str = ""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    serving: list[Engine] = field(default_factory=list)
    local: Engine | None = None
    plain: Engine | None = None
    killed: Engine | None = None

    def start(self, directory: Path) -> None:
        """Starts everything; returns when all serve. Raises ProcessFailed."""
        _, self.control = start_control(self.processes, directory, 0)
        nodes = [
            start_node(self.processes, directory, n + 1, NODE_MEMORY, self.control) for n in range(NODES)
        ]
        engines = [self._engine("engine-a"), self._engine("engine-b")]
        local, plain = (
            self._engine("engine-local", "--keep-local"),
            self._engine("engine-plain", "--no-storage"),
        )
        self.nodes = [self.processes.wait_ready(node, READY_S) for node in nodes]
        for engine in (*engines, local, plain):
            self._await(engine)
        self.serving, self.local, self.plain = engines, local, plain
        urls = ",".join(engine.url for engine in engines)
        arguments = ["gateway", "--listen", "127.0.0.1:0", "--engines", urls, "--control", self.control]
        self.gateway = self.processes.wait_ready(self.processes.start("gateway", arguments), READY_S)["url"]

    def serving_at(self, url: str) -> Engine:
        """The engine that has this address now."""
        return next(engine for engine in self.serving if engine.url == url)

    def kill(self, name: str) -> None:
        """Ends one of the gateway's engines with SIGKILL."""
        self.killed = next(engine for engine in self.serving if engine.name == name)
        self.processes.kill(self.killed.child)

    def replace_killed(self, name: str) -> None:
        """Starts another process at the address of the killed engine, where the gateway will find it."""
        assert self.killed is not None
        new = self._engine(name, port=Listen.parse(self.killed.url).port)
        self.serving[self.serving.index(self.killed)] = new

    def wait_healthy(self, talker: Talker) -> None:
        """Until the gateway sees all its engines healthy. Raises ProcessFailed or TimeoutError."""
        for engine in self.serving:
            self._await(engine)
        deadline = time.monotonic() + HEALTHY_S
        while not all(engine["healthy"] for engine in talker.get(f"{self.gateway}/health")["engines"]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gateway did not see its engines healthy within {HEALTHY_S:g} s")
            time.sleep(0.1)

    def bytes_read(self, talker: Talker) -> int:
        """What the nodes say they have sent, all together, from their own counters."""
        total = 0
        for node in self.nodes:
            found = _BYTES_READ.findall(talker.text(f"{node['url']}/metrics"))
            if not found:
                raise RuntimeError(f"{node['url']}/metrics has no counter of bytes read")
            total += sum(map(int, found))
        return total

    def rss_mib(self, talker: Talker) -> dict[str, int]:
        """Resident memory of each running engine, in MiB."""
        assert self.local and self.plain
        engines = [*self.serving, self.local, self.plain]
        return {engine.name: round(talker.get(f"{engine.url}/health")["rss_mib"]) for engine in engines}

    def _engine(self, name: str, *options: str, port: int = 0) -> Engine:
        arguments = ["engine", "--listen", f"127.0.0.1:{port}", "--control", self.control, *options]
        return Engine(name, self.processes.start(name, arguments))

    def _await(self, engine: Engine) -> None:
        engine.url = self.processes.wait_ready(engine.child, ENGINE_READY_S)["url"]
