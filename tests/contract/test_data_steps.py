"""The way between client and node breaks at every step of a read and of a write: header, ext, sums, payload.

One clean exchange is recorded first; its bytes say where the steps are. At each of them the connection is
cut, stalls, or the node is killed. The outcome is right bytes or an error in time, never other bytes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Client, File
from tests.client_real_node import RealNode, sign
from tests.contract.data_plane import Files, Room, Transport, at_every_step, noise, through, within
from tests.contract.proxy import DIRECTIONS, Direction, Proxy, Way, Ways, frames_of, points

pytest_plugins = ["tests.contract.data_fixtures"]

Work = Literal["read", "write"]
WORKS: tuple[Work, Work] = ("read", "write")

#: Four pieces of 32 KiB are touched, the first and the last in part.
OFFSET, LENGTH = 11, 100_001
OLD, NEW = noise(LENGTH, 1), noise(LENGTH, 2)
#: Steps are independent of each other; most of their time is waiting.
AT_ONCE = 6


class Exchange:
    """A file with `OLD` in it, and one client on the way to it through a proxy."""

    def __init__(self, stream: Transport, layout: dict[str, Any], ways: Callable[[int], Ways]) -> None:
        self._stream, self._layout, self._ways = stream, layout, ways

    @contextmanager
    def open(self, node: RealNode, streams: int = 1) -> Iterator[tuple[Proxy, Client, File]]:
        with self._stream.client() as direct:
            assert direct.open_layout(self._layout).write(OFFSET, OLD) == LENGTH
        with (
            Proxy(node.address, self._ways) as proxy,
            # The bytes of the first connection are the same in every run.
            self._stream.client(streams=streams) as client,
        ):
            yield proxy, client, client.open_layout(through(self._layout, proxy.address))

    def check_file(self, *allowed: np.ndarray) -> None:
        """What lies in the file now, seen past the proxy."""
        with self._stream.client() as direct:
            back = np.empty(LENGTH, np.uint8)
            assert direct.open_layout(self._layout).read_into(OFFSET, back) == LENGTH
        assert any(np.array_equal(back, one) for one in allowed), "the file holds a mixture"


def transfer(file: File, room: Room, work: Work, timeout_s: float) -> None:
    """One read or write through the proxy; a read must bring what is in the file."""
    if work == "read":
        room.bytes[:] = 0
        assert file.read_into(OFFSET, room.bytes, timeout_s=timeout_s) == LENGTH
        assert np.array_equal(room.bytes, OLD), "wrong bytes"
    else:
        room.bytes[:] = NEW
        assert file.write(OFFSET, room.bytes, timeout_s=timeout_s) == LENGTH


@pytest.fixture(scope="module")
def steps(stream: Transport, node: RealNode) -> dict[tuple[Work, Direction], list[tuple[str, int]]]:
    """Every step of both kinds of exchange in both directions, by name and position."""
    files = Files([node])
    found: dict[tuple[Work, Direction], list[tuple[str, int]]] = {}
    for work in WORKS:
        kept = Ways(Way(record=bytearray()), Way(record=bytearray()))
        exchange = Exchange(stream, files.layout(), lambda _number, kept=kept: kept)
        with exchange.open(node) as (proxy, client, file):
            transfer(file, Room(client, stream, LENGTH), work, 10)
            assert proxy.connections == 1
        for direction in DIRECTIONS:
            record = getattr(kept, direction).record
            found[work, direction] = points(frames_of(record))
    files.delete_all()
    # HELLO, OPEN, then the transfer; data and sums go one way only.
    for key, names in (
        (("read", "to_node"), ["frame 2 (opcode 4), header"]),
        (("read", "to_client"), ["frame 0 (opcode 1), ext", "opcode 4), sums", "opcode 4), payload"]),
        (("write", "to_node"), ["frame 1 (opcode 2), ext", "opcode 5), sums", "opcode 5), payload"]),
        (("write", "to_client"), ["frame 2 (opcode 5), header"]),
    ):
        for name in names:
            assert any(name in step for step, _ in found[key]), (key, name, found[key])  # type: ignore[index]
    return found


def ways_of(direction: Direction, way: Way, only: int | None = None) -> Callable[[int], Ways]:
    """``way`` for one direction, of every connection or of the one with the number ``only``."""
    return lambda number: Ways(**{direction: replace(way)}) if only in (None, number) else Ways()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("work", WORKS)
def test_one_cut_is_healed(
    stream: Transport, node: RealNode, files: Files, steps: Any, work: Work, direction: Direction
) -> None:
    def check(at: int) -> None:
        exchange = Exchange(stream, files.layout(), ways_of(direction, Way(cut_at=at), only=0))
        with exchange.open(node) as (proxy, client, file), within(5):
            room = Room(client, stream, LENGTH)
            transfer(file, room, work, 10)
            room.check_guards()
            assert proxy.connections == 2, "cut once, connected again"
        exchange.check_file(OLD if work == "read" else NEW)

    at_every_step(steps[work, direction], check, AT_ONCE)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("work", WORKS)
def test_a_way_that_is_always_cut_is_an_error_soon(
    stream: Transport, node: RealNode, files: Files, steps: Any, work: Work, direction: Direction
) -> None:
    def check(at: int) -> None:
        exchange = Exchange(stream, files.layout(), ways_of(direction, Way(cut_at=at)))
        with exchange.open(node) as (_, client, file), within(6):
            room = Room(client, stream, LENGTH)
            with pytest.raises(errors.Disconnected):
                transfer(file, room, work, 10)
            room.bytes[:] = 0xA5
            room.check_guards()
            assert (room.bytes == 0xA5).all()
        exchange.check_file(OLD, *([NEW] if work == "write" else []))

    at_every_step(steps[work, direction][::2], check, AT_ONCE)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("work", WORKS)
def test_a_stall_ends_in_time_and_nothing_comes_late(
    stream: Transport, node: RealNode, files: Files, steps: Any, work: Work, direction: Direction
) -> None:
    """As a node or a network that hangs, exactly there, and goes on when the caller has long gone on too."""

    def check(at: int) -> None:
        exchange = Exchange(stream, files.layout(), ways_of(direction, Way(stall_at=at), only=0))
        with exchange.open(node) as (proxy, client, file):
            room = Room(client, stream, LENGTH)
            with within(0.3 + 2), pytest.raises((errors.Timeout, errors.Disconnected)):
                transfer(file, room, work, 0.3)
            assert proxy.stalled.acquire(timeout=5)
            room.bytes[:] = 0xA5
            newest = noise(LENGTH, at)
            if work == "write":
                # Where a write was under way, this one overtakes it on a new connection; else it waits too.
                request = file.submit_write(OFFSET, newest, timeout_s=10)
                with suppress(errors.Timeout):
                    request.wait(0.3)
            proxy.release()
            if work == "write":
                assert request.wait() == LENGTH
            again = Room(client, stream, LENGTH)
            assert file.read_into(OFFSET, again.bytes, timeout_s=10) == LENGTH
            assert np.array_equal(again.bytes, OLD if work == "read" else newest)
            threading.Event().wait(0.05)
            assert (room.bytes == 0xA5).all(), "memory was written after its request had ended"
            room.check_guards()
        exchange.check_file(OLD if work == "read" else newest)

    at_every_step(steps[work, direction], check, AT_ONCE)


def test_a_late_write_never_comes_after_a_newer_one(
    stream: Transport, node: RealNode, files: Files, steps: Any
) -> None:
    """It hangs on one connection when it is given up; the newer one goes over another; then it goes on."""

    def check(at: int) -> None:
        exchange = Exchange(stream, files.layout(), ways_of("to_node", Way(stall_at=at), only=0))
        with exchange.open(node, streams=2) as (proxy, client, file):
            with pytest.raises(errors.Timeout):
                transfer(file, Room(client, stream, LENGTH), "write", 0.2)
            assert proxy.stalled.acquire(timeout=5)
            # Keeps the first connection busy if it is still in use, so that the write takes the second.
            room = Room(client, stream, LENGTH)
            read = file.submit_read(OFFSET, room.bytes, timeout_s=10)
            newest = noise(LENGTH, at)
            assert file.write(OFFSET, newest, timeout_s=10) == LENGTH
            proxy.release()
            assert read.wait() == LENGTH
            threading.Event().wait(0.05)
        exchange.check_file(newest)

    hanging = [step for step in steps["write", "to_node"] if "opcode 5" in step[0]]
    assert len(hanging) >= 5
    at_every_step(hanging, check, AT_ONCE)


@pytest.mark.parametrize("work", WORKS)
def test_a_node_killed_at_a_step(stream: Transport, steps: Any, work: Work) -> None:
    """SIGKILL when so many bytes have passed: an error or right bytes, and the truth about the new node."""
    every = [(direction, step) for direction in DIRECTIONS for step in steps[work, direction]]
    lanes = 3
    # A node takes a moment to start: every other step.
    chosen = every[WORKS.index(work) :: 2]

    def lane(number: int) -> None:
        with RealNode(f"victim-{number}") as victim:
            for direction, (name, at) in itertools.islice(chosen, number, None, lanes):
                try:
                    one(victim, direction, at)
                except BaseException as error:
                    error.add_note(f"killed at {name} = byte {at}, {direction}")
                    raise

    def one(victim: RealNode, direction: Direction, at: int) -> None:
        layout = sign([victim])
        way = Way(act_at=at, act=victim.kill)
        exchange = Exchange(stream, layout, ways_of(direction, way, only=0))
        with exchange.open(victim) as (_, client, file):
            room = Room(client, stream, LENGTH)
            with within(5):
                try:
                    transfer(file, room, work, 10)
                except errors.Disconnected:
                    room.bytes[:] = 0xA5
            room.check_guards()
            victim.start()
            # What the layout names is gone, and the client does not take the new node for the old one.
            with pytest.raises((errors.StaleIncarnation, errors.Lost)), stream.client() as direct:
                direct.open_layout(layout).read_into(OFFSET, np.empty(LENGTH, np.uint8))
            with stream.client() as direct:
                fresh = direct.open_layout(sign([victim]))
                assert fresh.write(OFFSET, NEW) == LENGTH
                back = np.empty(LENGTH, np.uint8)
                assert fresh.read_into(OFFSET, back) == LENGTH
                assert np.array_equal(back, NEW)

    with ThreadPoolExecutor(lanes) as pool:
        for done in [pool.submit(lane, number) for number in range(lanes)]:
            done.result(90)
