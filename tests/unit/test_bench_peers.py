"""The peers' processes and environments, with a driver that only pretends; the real ones on demand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gd2fs.bench.peers import PeerFailed, PeerUnavailable, WrongBytes, environment, mooncake, nixl, pair
from gd2fs.bench.peers.driving import blank, first_wrong, pattern
from gd2fs.bench.peers.environment import COMPLETE, Environment, Recipe, prepare
from gd2fs.bench.peers.pair import Pair
from gd2fs.bench.peers.process import ANSWER_BYTES_MAX, Process

ROOT = Path(__file__).resolve().parents[2]
SIZE = 100_001
GONE_S = 10.0
ANSWER_S = 20.0
REAL = "GD2FS_TEST_PEERS"


class Here(Environment):
    """This interpreter, as if it were a peer's."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)


class FakePeer(Pair):
    name = "fake"
    recipe = Recipe("fake", "1", packages=(), probe="")
    driver = "tests.peer_fake_driver"
    fault = ""

    def _settings(self) -> Mapping[str, str]:
        return {"FAKE_PEER": self.fault}

    @property
    def processes(self) -> list[Process]:
        return list(self._processes)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'python'}:{ROOT}")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakePeer]]:
    """Starts a fake peer with a fault; afterwards nothing of any of them runs."""
    started: list[FakePeer] = []
    processes: list[Process] = []
    monkeypatch.setattr(pair, "prepare", lambda recipe: Here(tmp_path))
    run = Pair._run

    def remember(self: Pair, role: str, command: list[str]) -> Process:
        processes.append(run(self, role, command))
        return processes[-1]

    monkeypatch.setattr(Pair, "_run", remember)

    def start(fault: str = "", kind: type[FakePeer] = FakePeer) -> FakePeer:
        monkeypatch.setattr(kind, "fault", fault)
        started.append(kind.start(tmp_path, SIZE))
        return started[-1]

    yield start
    for each in started:
        each.close()
    assert processes
    assert not any(process.running for process in processes)


def state(pid: int) -> str:
    """Of /proc: T is stopped by a signal, Z dead, empty gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def reaches(pid: int, *states: str) -> bool:
    """Whether the process is in one of these states soon: signals take effect when the kernel gets to it."""
    deadline = time.monotonic() + GONE_S
    while state(pid) not in states:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_the_time_of_a_read_is_the_drivers(start: Callable[..., FakePeer]) -> None:
    peer = start()
    # The first of its reads was the one that was verified.
    assert [peer.read(SIZE), peer.read(SIZE)] == [0.5, 0.75]


def test_another_size_is_prepared_and_verified_anew(start: Callable[..., FakePeer]) -> None:
    peer = start()
    before = peer.processes
    assert peer.read(2 * SIZE) == 0.5
    assert not any(process.running for process in before)
    with pytest.raises(ValueError, match="size_bytes is 0"):
        peer.read(0)


def test_wrong_bytes_are_no_measurement(start: Callable[..., FakePeer]) -> None:
    with pytest.raises(WrongBytes, match=rf"fake read a wrong byte at {SIZE // 2} of {SIZE}"):
        start("wrong byte")


def test_a_driver_that_dies_at_the_start_makes_the_peer_unavailable(start: Callable[..., FakePeer]) -> None:
    with pytest.raises(PeerUnavailable, match=r"fake-reader ended with code 3; .*cannot open the device"):
        start("dies early")


def test_a_driver_that_refuses_says_why(start: Callable[..., FakePeer]) -> None:
    with pytest.raises(PeerUnavailable, match="fake-holder could not hold: RuntimeError: no more memory"):
        start("refuses")


def test_a_driver_that_dies_in_a_read_is_a_failure(start: Callable[..., FakePeer]) -> None:
    peer = start("dies late")
    with pytest.raises(PeerFailed, match="fake-reader ended with code 4"):
        peer.read(SIZE)
    with pytest.raises(PeerFailed, match="fake-reader ended with code 4"):
        peer.read(SIZE)


def test_a_read_that_hangs_is_waited_for_only_so_long(
    start: Callable[..., FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = start("hangs")
    monkeypatch.setattr(pair, "READ_S", 0.2)
    began = time.monotonic()
    with pytest.raises(PeerFailed, match=r"fake-reader did not answer 'read' within 0\.2 s"):
        peer.read(SIZE)
    assert time.monotonic() - began < ANSWER_S
    # What it would answer late must not pass for the answer to another command.
    with pytest.raises(PeerFailed, match="fake-reader ended with code -9"):
        peer.read(SIZE)


def test_processes_are_stopped_between_reads_where_they_would_spin(start: Callable[..., FakePeer]) -> None:
    class Spinning(FakePeer):
        pausable = True

    peer = start(kind=Spinning)
    assert all(reaches(process._popen.pid, "T") for process in peer.processes)
    assert peer.read(SIZE) == 0.5
    assert all(reaches(process._popen.pid, "T") for process in peer.processes)


def child(tmp_path: Path, code: str) -> Process:
    return Process("child", [sys.executable, "-c", code], dict(os.environ), tmp_path)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('hello')", "something else than JSON"),
        ("print([1])", "something else than JSON"),
        (f"print('1' * {ANSWER_BYTES_MAX + 2}, end='', flush=True); input(); input()", "more than"),
        ("pass", "child ended with code 0; end of its log: empty"),
    ],
)
def test_what_is_no_answer_is_a_failure(tmp_path: Path, code: str, message: str) -> None:
    process = child(tmp_path, f"input(); {code}")
    try:
        with pytest.raises(PeerFailed, match=message):
            process.ask("read", ANSWER_S)
    finally:
        process.close()
        process.close()
    assert not process.running


def test_a_peers_processes_end_with_the_command(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, time\n"
        "from gd2fs.bench.peers.process import Process\n"
        "sleeper = [sys.executable, '-c', 'import os, time; os.write(1, b\"{}\\\\n\"); time.sleep(60)']\n"
        f"child = Process('child', sleeper, dict(os.environ), pathlib.Path({str(tmp_path)!r}))\n"
        f"child.ask('start', {ANSWER_S})\n"
        "print(child._popen.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as command:
        try:
            assert command.stdout is not None
            pid = int(command.stdout.readline())
            os.kill(pid, 0)
        finally:
            command.kill()
    # Whoever adopted it may take a while to reap it.
    if not reaches(pid, "Z", ""):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the child outlived the command")


def test_the_pattern_shows_wrong_and_misplaced_bytes() -> None:
    memory = pattern(SIZE)
    assert memory.size == SIZE
    assert first_wrong(memory) is None
    assert np.array_equal(pattern(SIZE - 80, 80), memory[80:])
    assert first_wrong(blank(SIZE)) == 8
    moved = memory.copy()
    moved[8:16], moved[16:24] = memory[16:24], memory[8:16]
    assert first_wrong(moved) == 8
    memory[-1] ^= 1
    assert first_wrong(memory) == SIZE - 1


def test_mooncake_is_measured_with_its_fastest_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = mooncake.TUNINGS[2]
    opened: list[mooncake.Tuning] = []
    monkeypatch.setattr(pair, "prepare", lambda recipe: Here(tmp_path))
    monkeypatch.setattr(mooncake.Peer, "_open", lambda self, size: opened.append(self.tuning))
    monkeypatch.setattr(mooncake.Peer, "read", lambda self, size: 1.0 if self.tuning == best else 2.0)
    peer = mooncake.Peer.start(tmp_path, SIZE)
    assert peer.tuning == best
    assert opened == [*mooncake.TUNINGS, best]


class Commands:
    """Takes the place of running commands; `failing` are words that a failing command has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: str) -> None:
        self.ran: list[str] = []
        self.failing = set(failing)
        monkeypatch.setattr(environment, "_run", self._run)

    def _run(self, what: str, command: list[str], *rest: Any, **options: Any) -> None:
        self.ran.append(what)
        if "venv" in command:
            Path(command[-1]).mkdir()
        if found := self.failing & {*command}:
            raise PeerUnavailable(f"{what} failed: no {found.pop()}")


RECIPE = Recipe("toy", "1.0", packages=("toy==1.0",), probe="import toy", debian=("libtoy1",))


def test_an_environment_is_made_once_and_anew_if_it_was_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real venv and a wheel of our own: what pip and venv really do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy.py", "ANSWER = 42\n")
        archive.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        archive.writestr(
            "toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("toy-1.0.dist-info/RECORD", "")
    unfinished = (
        environment.cache() / f"toy-1.0-py{sys.version_info.major}.{sys.version_info.minor}" / "left over"
    )
    unfinished.mkdir(parents=True)
    recipe = Recipe("toy", "1.0", packages=(str(wheel),), probe="import toy", debian=("libtoy1",))
    made = prepare(recipe)
    assert not unfinished.exists()
    answer = [str(made.python), "-c", "import toy; print(toy.ANSWER)"]
    assert subprocess.run(answer, capture_output=True, text=True, timeout=ANSWER_S).stdout == "42\n"
    commands = Commands(monkeypatch)
    assert prepare(recipe) == made
    assert commands.ran == []


def test_a_failed_installation_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands = Commands(monkeypatch, "toy==1.0")
    with pytest.raises(PeerUnavailable, match=r"installing toy==1\.0 failed") as failure:
        prepare(RECIPE)
    assert failure.value.reason == str(failure.value)
    commands.failing.clear()
    assert (prepare(RECIPE).directory / COMPLETE).exists()
    assert commands.ran[-1] == "the import"


def test_missing_libraries_are_laid_beside_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands = Commands(monkeypatch, RECIPE.probe)
    monkeypatch.setattr(environment.shutil, "which", lambda program: f"/usr/bin/{program}")
    with pytest.raises(PeerUnavailable, match=r"toy 1\.0 does not load here: the import failed"):
        prepare(RECIPE)
    assert commands.ran[-3:] == ["the import", "apt-get download libtoy1", "the import"]
    monkeypatch.setattr(environment.shutil, "which", lambda program: None)
    with pytest.raises(PeerUnavailable, match="install the libraries of Debian's libtoy1"):
        prepare(RECIPE)


def test_the_libraries_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/theirs")
    assert Environment(Path("/e"), "/ours").variables()["LD_LIBRARY_PATH"] == "/ours:/theirs"
    assert Environment(Path("/e")).variables() == dict(os.environ)


def test_a_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(PeerUnavailable, match=r"sleeping took longer than 0\.1 s"):
        environment._run("sleeping", ["sleep", "30"], 0.1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("peer", [mooncake.Peer, nixl.Peer])
@pytest.mark.skipif(os.environ.get(REAL) != "1", reason=f"downloads the peers; set {REAL}=1 to measure them")
def test_the_real_ones_read_what_they_hold(tmp_path: Path, peer: type[Pair]) -> None:
    size = (64 << 20) + 1
    started = peer.start(tmp_path, size)
    try:
        rates = [size / 1e9 / started.read(size) for _ in range(5)]
    finally:
        started.close()
    print(json.dumps({"peer": started.name, "size": size, "gb_per_s": rates}))
    # Slower than a disk, or faster than memory, would be a mistake of ours.
    assert all(0.05 < rate < 200 for rate in rates)
