"""Control and one node as processes: started, killed, started again over what they have kept."""

from __future__ import annotations

import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from gd2fs.bench.cases import MIB, STREAMS
from gd2fs.cli.processes import Child, Processes
from gd2fs.cli.up import start_control, start_node
from gd2fs.client import Client
from gd2fs.client.connect import connect

READY_S = 120.0
TIMEOUT_S = 60.0
METRICS_S = 10.0
#: A clean end flushes what is dirty: half of the memory at most, at the speed of a slow disk.
STOP_S = 90.0
_SERIES = re.compile(r'^gd2fs_node_(\w+){node="[^"]*"(?:,code="(\w+)")?} (\S+)$', re.MULTILINE)


class Stage:
    """Control and a node with ``memory`` bytes and a log file of ``log`` bytes, or none. A context manager.

    Everything lies in ``directory``, which is made. ``environment`` is the node's alone.
    """

    def __init__(
        self, directory: Path, memory: int, log: int | None, environment: Mapping[str, str] | None = None
    ) -> None:
        directory.mkdir()
        self.directory, self.memory, self.log = directory, memory, log
        self._environment = dict(environment or {})
        self.processes = Processes(directory)
        self.processes.__enter__()
        try:
            _, self.control = start_control(self.processes, directory, 0)
            self.start_node()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        # Nothing here is worth the flush of a clean end.
        if hasattr(self, "_node"):
            self.kill_node()
        self.processes.__exit__(None, None, None)

    def begin_node(self) -> None:
        """Starts the node; it may serve before it says so."""
        log = None if self.log is None else f"{self.log // MIB}MiB"
        self._node: Child = start_node(
            self.processes,
            self.directory,
            1,
            f"{self.memory // MIB}MiB",
            self.control,
            self._environment,
            log,
        )

    def start_node(self) -> None:
        """Starts the node and waits until control places files on it."""
        self.begin_node()
        self.await_node()

    def await_node(self) -> None:
        facts = self.processes.wait_ready(self._node, READY_S)
        self._url, self.pid = str(facts["url"]), int(facts["pid"])

    def kill_node(self) -> None:
        """SIGKILL, as a crash would."""
        self.processes.kill(self._node)

    def restart_node(self) -> None:
        """A clean end, which flushes everything, and a new start with empty memory. Raises RuntimeError."""
        self._node.popen.send_signal(signal.SIGTERM)
        try:
            code = self._node.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            code = None
        self.kill_node()
        if code:
            raise RuntimeError(f"the node did not stop cleanly ({code}):\n{self._node.tail()}")
        self.start_node()

    def metrics(self) -> dict[str, float]:
        """What the node counts, by its names without prefix; errors as ``errors_total CODE``."""
        with urllib.request.urlopen(self._url + "/metrics", timeout=METRICS_S) as answer:
            text = answer.read().decode()
        return {f"{name} {code}".strip(): float(value) for name, code, value in _SERIES.findall(text)}

    def memory_peak(self) -> int:
        """The most bytes that the node's process had resident so far. Reserved huge pages, which the kernel
        counts apart, never get fewer: an arena keeps what it has mapped."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        counted = re.findall(r"^(?:VmHWM|HugetlbPages):\s+(\d+) kB", status, re.MULTILINE)
        return sum(map(int, counted)) << 10

    def connect(self, streams: int = STREAMS, timeout_s: float = TIMEOUT_S, io_threads: int = 0) -> Client:
        """A client over tcp, as one on another host would be."""
        return connect(
            self.control, transport="tcp", streams=streams, timeout_s=timeout_s, io_threads=io_threads
        )

    def settle(self, limit_s: float = STOP_S) -> None:
        """Returns when nothing waits for the log any more. Raises RuntimeError."""
        deadline = time.monotonic() + limit_s
        while self.metrics()["dirty_bytes"]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the log has not taken everything within {limit_s:g} s")
            time.sleep(0.05)
