"""A real cluster of separate processes on loopback, for tests that kill, stop and resume them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gd2fs.cli.processes import Child, Processes
from gd2fs.cli.up import start_control, start_node

READY_S = 60.0


@dataclass
class Fleet:
    """Control and nodes that run, and whatever a test starts beside them."""

    processes: Processes
    directory: Path
    memory: str
    log: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """The nodes' alone."""
    control: str = ""
    children: dict[str, Child] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def start_node(self, number: int) -> str:
        """Starts (again) node NUMBER over its own data directory; returns its name."""
        child = start_node(
            self.processes,
            self.directory,
            number,
            self.memory,
            self.control,
            dict(self.environment),
            log=self.log,
        )
        self.children[child.name] = child
        self.facts[child.name] = self.processes.wait_ready(child, READY_S)
        return child.name

    def start_again_control(self) -> None:
        """Starts control on its old port, over its old database."""
        self.children["control"], again = start_control(
            self.processes, self.directory, int(self.control.rsplit(":", 1)[1])
        )
        assert again == self.control

    def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """Starts `gd2fs ARGUMENTS` beside the cluster; returns its URL once it serves."""
        child = self.processes.start(name, [*arguments, "--control", self.control], environment)
        self.children[name] = child
        self.facts[name] = self.processes.wait_ready(child, READY_S)
        return str(self.facts[name]["url"])

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.children[name].popen.pid, number)

    def kill(self, name: str) -> None:
        self.processes.kill(self.children[name])

    def stop(self, name: str) -> None:
        """Ends a node in order: everything reaches its log."""
        self.signal(name, signal.SIGTERM)
        assert self.children[name].popen.wait(READY_S) == 0

    def metrics(self, name: str) -> dict[str, float]:
        """What a node shows on /metrics, without labels."""
        with urllib.request.urlopen(f"{self.facts[name]['url']}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {series.partition("{")[0]: float(value) for series, value in pairs}

    def node_of(self, layout: Mapping[str, Any]) -> str:
        """The node that holds column 0 of a layout."""
        return str(layout["columns"][0]["replicas"][0]["node"])


@contextlib.contextmanager
def fleet(
    directory: Path,
    *,
    nodes: int = 2,
    memory: str = "512MiB",
    log: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Fleet]:
    """Control and `nodes` nodes, each with a log of size `log` and with `environment`; all processes are gone
    afterwards."""
    with Processes(directory) as processes:
        running = Fleet(processes, directory, memory, log, dict(environment or {}))
        child, running.control = start_control(processes, directory, 0)
        running.children["control"] = child
        for number in range(1, nodes + 1):
            running.start_node(number)
        yield running


def post(url: str, body: Mapping[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
    """POSTs JSON and returns the JSON answer; an HTTP error raises with the answer in its message."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url} answered {error.code}: {error.read().decode()}") from error


def get(url: str, timeout_s: float = 10.0) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def stream(url: str, body: Mapping[str, Any], timeout_s: float = 60.0) -> Iterator[dict[str, Any]]:
    """POSTs JSON and yields the objects of the SSE answer."""
    request = urllib.request.Request(
        url,
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[len(b"data: ") :])


def eventually(condition: Any, timeout_s: float, what: str) -> Any:
    """The first true value of `condition()`; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.05)
    return value
