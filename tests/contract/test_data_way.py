"""A way that is slow, uneven or damages bytes: right bytes or an error, never other bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Client
from tests.client_real_node import RealNode
from tests.contract.data_plane import KIB, MIB, Files, Room, Transport, noise, through, within
from tests.contract.proxy import DIRECTIONS, Direction, FrameAt, Proxy, Way, Ways, frames_of

pytest_plugins = ["tests.contract.data_fixtures"]

OFFSET, LENGTH = 11, 100_001
OLD, NEW = noise(LENGTH, 1), noise(LENGTH, 2)


def write_directly(stream: Transport, layout: dict[str, Any], offset: int, data: np.ndarray) -> None:
    with stream.client() as client:
        assert client.open_layout(layout).write(offset, data) == len(data)


def read_directly(stream: Transport, layout: dict[str, Any], offset: int, length: int) -> np.ndarray:
    with stream.client() as client:
        back = np.empty(length, np.uint8)
        assert client.open_layout(layout).read_into(offset, back) == length
    return back


@contextmanager
def on_the_way(
    stream: Transport, node: RealNode, ways: Any, seed: int = 0, **options: Any
) -> Iterator[tuple[Proxy, Client]]:
    with Proxy(node.address, ways, seed=seed) as proxy, stream.client(**options) as client:
        yield proxy, client


@pytest.fixture(scope="module")
def frames(stream: Transport, node: RealNode) -> dict[str, dict[Direction, list[FrameAt]]]:
    """The frames of a clean read and of a clean write: HELLO, OPEN, transfer."""
    files = Files([node])
    found: dict[str, dict[Direction, list[FrameAt]]] = {}
    for work in ("read", "write"):
        layout, kept = files.layout(), Ways(Way(record=bytearray()), Way(record=bytearray()))
        write_directly(stream, layout, OFFSET, OLD)
        with on_the_way(stream, node, lambda _number, kept=kept: kept, streams=1) as (proxy, client):
            file = client.open_layout(through(layout, proxy.address))
            if work == "read":
                file.read_into(OFFSET, np.empty(LENGTH, np.uint8))
            else:
                file.write(OFFSET, NEW)
        found[work] = {one: frames_of(getattr(kept, one).record) for one in DIRECTIONS}
    files.delete_all()
    return found


@dataclass(frozen=True)
class Damage:
    """One byte of a part of a frame of one direction is changed: on the first connection, or on every one."""

    work: str
    direction: Direction
    always: bool
    parts: tuple[str, ...] = ("header", "ext", "sums", "payload")

    def __str__(self) -> str:
        often = "always" if self.always else "once"
        return f"{self.work} {self.direction} {often} {'+'.join(self.parts)}"

    def places(self, frames: list[FrameAt], rng: np.random.Generator) -> list[tuple[str, int]]:
        """Some bytes of each of the parts of each frame."""
        return [
            (f"frame {number}, {part}", int(at))
            for number, frame in enumerate(frames)
            for part, (start, end) in frame.parts().items()
            if part in self.parts
            for at in rng.integers(start, end, 4)
        ]

    def ways(self, at: int) -> Callable[[int], Ways]:
        def one(number: int) -> Ways:
            return Ways(**{self.direction: Way(flip_at=at if self.always or number == 0 else None)})

        return one


#: The node answers BAD_FRAME to a frame whose ext or sums are damaged, which the client takes for a refusal.
FINAL = pytest.mark.xfail(
    strict=True, raises=errors.BadFrame, reason="BAD_FRAME from the node is not retried"
)
ONCE = [
    Damage("read", "to_node", False, ("header",)),
    pytest.param(Damage("read", "to_node", False, ("ext",)), marks=FINAL),
    Damage("read", "to_client", False),
    Damage("write", "to_node", False, ("header", "payload")),
    pytest.param(Damage("write", "to_node", False, ("ext", "sums")), marks=FINAL),
    Damage("write", "to_client", False),
]
#: Not the payload: what is asked for again on the same connection passes the one damaged place no more.
HEADS = ("header", "ext", "sums")
ALWAYS = [Damage(work, direction, True, HEADS) for work in ("read", "write") for direction in DIRECTIONS]


class DamagedExchange:
    """One transfer over a way that changes a byte at one place."""

    def __init__(self, stream: Transport, node: RealNode, layout: dict[str, Any], damage: Damage) -> None:
        self._stream, self._node, self._layout, self._damage = stream, node, layout, damage

    def run(self, at: int) -> None:
        """Raises what the transfer raises; nothing is wrong then, neither here nor in the file."""
        write_directly(self._stream, self._layout, OFFSET, OLD)
        ways = self._damage.ways(at)
        with on_the_way(self._stream, self._node, ways, seed=at, streams=1) as (proxy, client):
            file = client.open_layout(through(self._layout, proxy.address))
            room = Room(client, self._stream, LENGTH)
            room.bytes[:] = NEW
            transfer = file.write if self._damage.work == "write" else file.read_into
            try:
                with within(6):
                    assert transfer(OFFSET, room.bytes, timeout_s=5) == LENGTH
            except errors.Gd2fsError:
                self._check_file(OLD, *([NEW] if self._damage.work == "write" else []))
                raise
            finally:
                room.check_guards()
            right = OLD if self._damage.work == "read" else NEW
            assert np.array_equal(room.bytes, right), "wrong bytes"
            self._check_file(right)

    def _check_file(self, *allowed: np.ndarray) -> None:
        there = read_directly(self._stream, self._layout, OFFSET, LENGTH)
        assert any(np.array_equal(there, one) for one in allowed), "the file holds other bytes"


def at_all(places: list[tuple[str, int]], check: Callable[[int], None]) -> None:
    """Runs ``check`` at every place, some at once; fails with the name of the place."""

    def named(place: tuple[str, int]) -> None:
        try:
            check(place[1])
        except BaseException as error:
            error.add_note(f"damaged: {place[0]}, byte {place[1]} of the connection")
            raise

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(named, place) for place in places]:
            done.result(60)


@pytest.mark.parametrize("damage", ONCE, ids=str)
def test_one_damaged_byte_is_healed(
    stream: Transport, node: RealNode, files: Files, frames: Any, rng: np.random.Generator, damage: Damage
) -> None:
    def check(at: int) -> None:
        DamagedExchange(stream, node, files.layout(), damage).run(at)

    at_all(damage.places(frames[damage.work][damage.direction], rng), check)


@pytest.mark.parametrize("damage", ALWAYS, ids=str)
def test_a_way_that_always_damages_is_an_error(
    stream: Transport, node: RealNode, files: Files, frames: Any, rng: np.random.Generator, damage: Damage
) -> None:
    def check(at: int) -> None:
        with pytest.raises((errors.Disconnected, errors.Checksum, errors.BadFrame)):
            DamagedExchange(stream, node, files.layout(), damage).run(at)

    at_all(damage.places(frames[damage.work][damage.direction], rng), check)


def test_damage_everywhere_now_and_then(
    stream: Transport, node: RealNode, files: Files, rng: np.random.Generator
) -> None:
    """Each connection damages a byte in its first MiB: reads end with the right bytes or with an error."""
    layout = files.layout()
    data = noise(8 * MIB, 3)
    write_directly(stream, layout, 0, data)
    flips = rng.integers(0, MIB, 4000).tolist()
    ends = {"right": 0, "error": 0}
    with on_the_way(stream, node, lambda number: Ways(to_client=Way(flip_at=flips[number]))) as (
        proxy,
        client,
    ):
        file = client.open_layout(through(layout, proxy.address))
        for _ in range(30):
            offset, length = int(rng.integers(0, 6 * MIB)), int(rng.integers(1, 2 * MIB))
            room = Room(client, stream, length)
            try:
                assert file.read_into(offset, room.bytes, timeout_s=5) == length
                assert np.array_equal(room.bytes, data[offset : offset + length])
                ends["right"] += 1
            except (errors.Disconnected, errors.Checksum):
                ends["error"] += 1
            room.check_guards()
        assert proxy.connections < len(flips)
        assert client.stats()["retries"] > 0
    assert ends["right"] > 0, ends


def test_bytes_in_crumbs(stream: Transport, node: RealNode, files: Files, rng: np.random.Generator) -> None:
    """Frames arrive in pieces of 1 to 100 bytes, split anywhere."""
    layout = files.layout()
    data = noise(200_000, 4)

    def ways(_number: int) -> Ways:
        return Ways(Way(chop_bytes_max=100), Way(chop_bytes_max=100))

    with on_the_way(stream, node, ways, int(rng.integers(1 << 30))) as (proxy, client):
        file = client.open_layout(through(layout, proxy.address))
        assert file.write(7, data) == len(data)
        room = Room(client, stream, len(data))
        for length in (1, 100, 33_000, len(data)):
            assert file.read_into(7, room.bytes[:length]) == length
            assert np.array_equal(room.bytes[:length], data[:length])
        room.check_guards()


def test_delay_costs_time_and_nothing_else(
    stream: Transport, node: RealNode, files: Files, rng: np.random.Generator
) -> None:
    """30 ms each way. Requests wait at the same time, not one after the other."""
    layout = files.layout()
    data = noise(MIB, 5)
    write_directly(stream, layout, 0, data)

    def ways(_number: int) -> Ways:
        return Ways(Way(delay_s=0.03), Way(delay_s=0.03))

    with on_the_way(stream, node, ways, streams=4) as (proxy, client):
        file = client.open_layout(through(layout, proxy.address))
        rooms = [Room(client, stream, 4 * KIB) for _ in range(64)]
        file.read_into(0, rooms[0].bytes)
        offsets = rng.integers(0, MIB - 4 * KIB, len(rooms)).tolist()
        begun = time.monotonic()
        requests = [file.submit_read(offset, room.bytes) for offset, room in zip(offsets, rooms, strict=True)]
        for request, offset, room in zip(requests, offsets, rooms, strict=True):
            assert request.wait() == 4 * KIB
            assert np.array_equal(room.bytes, data[offset : offset + 4 * KIB])
            room.check_guards()
        taken = time.monotonic() - begun
    assert 0.06 < taken < 64 * 0.06 / 2, f"{taken:.2f} s"


def test_a_narrow_way_is_used_to_its_width_or_the_call_ends_in_time(
    stream: Transport, node: RealNode, files: Files
) -> None:
    layout = files.layout()
    data = noise(MIB, 6)
    write_directly(stream, layout, 0, data)

    def ways(_number: int) -> Ways:
        return Ways(Way(bytes_per_s=2 * MIB), Way(bytes_per_s=2 * MIB))

    with on_the_way(stream, node, ways, streams=1) as (proxy, client):
        file = client.open_layout(through(layout, proxy.address))
        room = Room(client, stream, MIB)
        begun = time.monotonic()
        assert file.read_into(0, room.bytes) == MIB
        assert 0.4 < time.monotonic() - begun < 3
        assert np.array_equal(room.bytes, data)
        begun = time.monotonic()
        with pytest.raises(errors.Timeout):
            file.read_into(0, room.bytes, timeout_s=0.2)
        assert time.monotonic() - begun < 2
        room.bytes[:] = 0xA5
        assert file.write(0, data, timeout_s=10) == MIB
        assert (room.bytes == 0xA5).all()
        with pytest.raises(errors.Timeout):
            file.write(0, room.bytes, timeout_s=0.2)
        there = read_directly(stream, layout, 0, MIB)
        assert np.array_equal(there, data) or (there == 0xA5).all()
