"""`gd2fs up`: a whole cluster on this machine, used through the command line, and its clean end."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 40.0


def environment(**more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GD2FS_")}
    return {**clean, "COLUMNS": "200", **more}


class Up:
    """One running `gd2fs up --json`."""

    def __init__(self, directory: Path, nodes: int = 2, **environ: str) -> None:
        self.directory = directory
        arguments = f"up --json --nodes {nodes} --memory 64MiB --port 0 --data-dir {directory / 'data'}"
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "gd2fs.cli", *arguments.split()],
            cwd=directory,
            env=environment(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.environ = environ
        self.facts = self._read_facts()

    def _read_facts(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        text = ""
        for line in self.popen.stdout:
            text += line
            with contextlib.suppress(ValueError):
                facts: dict[str, Any] = json.loads(text)
                return facts
        self.popen.wait(WAIT_S)
        assert self.popen.stderr is not None
        raise AssertionError(f"up ended with {self.popen.returncode}: {self.popen.stderr.read()}")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "gd2fs.cli", *arguments],
            cwd=self.directory,
            env=environment(GD2FS_CONTROL=self.facts["control"], **self.environ),
            capture_output=True,
            timeout=WAIT_S,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done
        reply: dict[str, Any] = json.loads(done.stdout)
        return reply

    def pids(self) -> list[int]:
        files = (self.directory / "data").glob("*.json")
        return [json.loads(file.read_text())["pid"] for file in files]

    def end(self, number: signal.Signals) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(WAIT_S)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids: list[int]) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if running(pid)]}"
        time.sleep(0.05)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    cluster = Up(tmp_path)
    try:
        yield cluster
    finally:
        if cluster.popen.poll() is None:
            cluster.end(signal.SIGKILL)
        all_end(cluster.pids())


def test_files_through_the_command_line(up: Up, tmp_path: Path) -> None:
    status = up.json("status")
    assert status["ok"] and status["nodes_alive"] == 2
    assert [node["state"] for node in status["nodes"]] == ["alive", "alive"]

    data = os.urandom(5_000_000)
    (tmp_path / "a.bin").write_bytes(data)
    info = up.json("put", "a.bin", "/notes/deep/a.bin")
    assert info["length"] == len(data) and info["class"] == "cache" and not info["lost"]
    assert up.json("stat", "/notes/deep/a.bin") == info
    assert [entry["path"] for entry in up.json("ls", "/notes/deep")["entries"]] == ["/notes/deep/a.bin"]
    assert b"a.bin" in up.run("ls", "/notes/deep").stdout
    assert up.run("cat", "/notes/deep/a.bin").stdout == data
    part = up.json("cat", "/notes/deep/a.bin", "--offset", "1000", "--length", "10")
    assert base64.b64decode(part["data_base64"]) == data[1000:1010]
    assert up.json("cat", "/notes/deep/a.bin", "--length", "0")["data_base64"] == ""
    assert up.json("get", "/notes/deep/a.bin", "b.bin")["length"] == len(data)
    assert (tmp_path / "b.bin").read_bytes() == data

    missing = up.run("stat", "/notes/nothing", "--json")
    assert missing.returncode == 1 and json.loads(missing.stdout)["error"]["name"] == "NOT_FOUND"
    assert b"/notes/nothing" in missing.stderr
    refused = up.run("rm", "/notes")
    assert refused.returncode == 1 and b"NOT_EMPTY" in refused.stderr and b"--recursive" in refused.stderr
    refused = up.run("get", "/notes/deep/a.bin", "nowhere/b.bin")
    assert refused.returncode == 1 and b"gd2fs: nowhere is not a directory" in refused.stderr
    assert up.json("rm", "/notes", "-r")["deleted"]
    assert up.json("ls")["entries"] == [] or "/notes" not in str(up.json("ls"))
    assert up.json("sessions", "list")["sessions"] == []

    pids = up.pids()
    assert len(pids) == 3 and all(running(pid) for pid in pids)
    assert up.end(signal.SIGINT) == 0
    all_end(pids)


def test_a_restart_on_the_same_directory_counts_incarnations_on(up: Up, tmp_path: Path) -> None:
    before = {node["node"]: node["incarnation"] for node in up.json("status")["nodes"]}
    assert up.end(signal.SIGTERM) == 0
    again = Up(tmp_path)
    try:
        after = {
            node["node"]: node["incarnation"]
            for node in again.json("status")["nodes"]
            if node["state"] == "alive"
        }
        assert set(after) == set(before) and all(after[node] > before[node] for node in after)
    finally:
        assert again.end(signal.SIGINT) == 0


def test_the_children_die_with_up_however_it_dies(up: Up) -> None:
    pids = up.pids()
    assert up.end(signal.SIGKILL) == -signal.SIGKILL
    all_end(pids)


def test_a_node_that_dies_ends_the_whole_and_is_named(up: Up) -> None:
    victim = json.loads((up.directory / "data" / "node-2.json").read_text())["pid"]
    os.kill(victim, signal.SIGKILL)
    assert up.popen.wait(WAIT_S) == 1
    assert up.popen.stderr is not None
    said = up.popen.stderr.read().splitlines()[-1]
    assert "node-2 was killed by SIGKILL" in said and "start it again" in said and "node-2.log" in said
    assert up.popen.stdout is not None and up.popen.stdout.read() == "", "one JSON object, printed before"
    all_end(up.pids())


def test_a_cluster_with_keys_lets_nobody_in_without_a_token(tmp_path: Path) -> None:
    keys = "1:" + "5a" * 32
    cluster = Up(tmp_path, nodes=1, GD2FS_CLUSTER_KEYS=keys)
    try:
        refused = cluster.run("status", "--json")
        assert refused.returncode == 1 and json.loads(refused.stdout)["error"]["name"] == "UNAUTHENTICATED"
        token = cluster.json("token", "create", "--role", "client")["token"]
        cluster.environ["GD2FS_TOKEN"] = token
        assert cluster.json("status")["nodes_alive"] == 1
        (tmp_path / "x").write_bytes(b"x" * 1000)
        assert cluster.json("put", "x", "/x")["length"] == 1000
    finally:
        assert cluster.end(signal.SIGINT) == 0


def test_an_interrupted_start_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "gd2fs.cli", "up", "--json", "--port", "0", "--data-dir", str(data)]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + WAIT_S
    while not (data / "control.log").exists():  # control was started and is not ready yet
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130 and json.loads(stdout)["error"]["name"] == "INTERRUPTED"
    assert stderr.splitlines()[-1] == "gd2fs: interrupted"
