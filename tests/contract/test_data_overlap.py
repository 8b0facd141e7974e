"""Requests for the same bytes at the same time: each stripe unit is one writer's, for every reader."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gd2fs import _native, errors
from gd2fs.client import Client
from tests.client_real_node import CLUSTER, RealNode
from tests.contract.data_plane import (
    KIB,
    MIB,
    TRANSPORTS,
    UNIT,
    Bytes,
    Files,
    Room,
    Transport,
    noise,
    through,
)
from tests.contract.proxy import Proxy, Way, Ways

pytest_plugins = ["tests.contract.data_fixtures"]

SMALL_UNIT = 64 * KIB


def stamped(length: int, stamp: int) -> Bytes:
    """Bytes that say which write they are of: 64-bit words, all the same."""
    return np.full(length // 8, stamp, np.uint64).view(np.uint8)


def check_units(data: Bytes, unit: int, stamps: set[int]) -> None:
    """Every unit is all of one write."""
    words = data.view(np.uint64).reshape(-1, unit // 8)
    first = words[:, :1]
    mixed = np.flatnonzero((words != first).any(axis=1))
    assert not len(mixed), f"units {mixed[:5]} are mixtures of {[set(words[at]) for at in mixed[:2]]}"
    assert {int(stamp) for stamp in first[:, 0]} <= stamps


@pytest.mark.parametrize(
    ("unit", "units", "turns"),
    [
        (SMALL_UNIT, 16, 60),
        (UNIT, 3, 12),
        (16 * MIB, 1, 12),
    ],
    ids=["64 KiB", "4 MiB", "16 MiB"],
)
def test_two_writers_and_two_readers_of_one_range(
    transport: Transport, files: Files, unit: int, units: int, turns: int
) -> None:
    layout = files.layout(stripe_unit=unit)
    length = unit * units
    ended = threading.Event()
    with ThreadPoolExecutor(4) as pool, transport.client() as first:
        first.open_layout(layout).write(0, stamped(length, 0))

        def write(writer: int) -> None:
            with transport.client() as client:
                file, room = client.open_layout(layout), Room(client, transport, length)
                for turn in range(turns):
                    room.bytes[:] = stamped(length, 1 + writer * turns + turn)
                    assert file.write(0, room.bytes) == length

        def read(_: int) -> int:
            count = 0
            with transport.client() as client:
                file, room = client.open_layout(layout), Room(client, transport, length)
                while not ended.is_set() or not count:
                    assert file.read_into(0, room.bytes) == length
                    check_units(room.bytes, unit, set(range(1 + 2 * turns)))
                    count += 1
                room.check_guards()
            return count

        readers = [pool.submit(read, index) for index in range(2)]
        writers = [pool.submit(write, index) for index in range(2)]
        try:
            for one in writers:
                one.result(60)
        finally:
            ended.set()
        assert all(one.result(30) for one in readers)
        last = np.empty(length, np.uint8)
        assert first.open_layout(layout).read_into(0, last) == length
        check_units(last, unit, {turns, 2 * turns})


def test_ranges_that_overlap_in_part_of_a_unit(transport: Transport, files: Files) -> None:
    """Where only one wrote, its bytes are there; where both did, the later one's within each unit."""
    layout = files.layout(stripe_unit=SMALL_UNIT)
    length = 4 * SMALL_UNIT
    a, b = slice(0, 3 * length // 4 + 100), slice(length // 4 - 3, length)
    both = slice(b.start, a.stop)
    old, ones, twos = noise(length, 1), noise(length, 2), noise(length, 3)
    with transport.client() as left, transport.client() as right:
        files_of = left.open_layout(layout), right.open_layout(layout)
        back = Room(left, transport, length)
        for turn in range(40):
            files_of[0].write(0, old)
            order = ((0, a, ones), (1, b, twos)) if turn % 2 else ((1, b, twos), (0, a, ones))
            requests = [files_of[who].submit_write(span.start, data[span]) for who, span, data in order]
            for request in requests:
                request.wait()
            assert files_of[0].read_into(0, back.bytes) == length
            assert np.array_equal(back.bytes[: b.start], ones[: b.start])
            assert np.array_equal(back.bytes[a.stop :], twos[a.stop :])
            for start in range(0, length, SMALL_UNIT):
                span = slice(max(start, both.start), min(start + SMALL_UNIT, both.stop))
                got = back.bytes[span]
                assert np.array_equal(got, ones[span]) or np.array_equal(got, twos[span]), (turn, start)


def test_a_request_whose_fragments_overlap_is_written_as_listed(
    client: Client, transport: Transport, files: Files
) -> None:
    """The same memory may be a source several times."""
    file = client.open_layout(files.layout())
    room = Room(client, transport, MIB)
    room.bytes[:] = noise(MIB, 5)
    starts = np.arange(0, MIB // 2, 1000, dtype=np.uint64)
    addresses = starts + np.uint64(room.bytes.ctypes.data)
    lengths = np.full(len(starts), 5000, np.uint64)
    assert file.submit_write_at(0, addresses, lengths).wait() == 5000 * len(starts)
    back = Room(client, transport, 5000 * len(starts))
    assert file.read_into(0, back.bytes) == 5000 * len(starts)
    expected = np.concatenate([room.bytes[int(at) : int(at) + 5000] for at in starts])
    assert np.array_equal(back.bytes, expected)


class Burst:
    """Many reads submitted at once to a native client, and their completions in the order they came."""

    def __init__(self, transport: Transport, layout: dict[str, Any], data: Bytes, **options: Any) -> None:
        self._data = data
        self._client = _native.Client([], CLUSTER, "", **{**transport.options, **options})
        self._file = self._client.file(json.dumps(layout))
        self._reads: dict[int, tuple[int, Bytes]] = {}

    def submit(self, offset: int, length: int) -> None:
        buffer = np.empty(length, np.uint8)
        number = self._client.submit_read(self._file, offset, [buffer], 30_000)
        self._reads[number] = (offset, buffer)

    def finish(self) -> list[int]:
        """Waits for all of them, checks their bytes; their numbers in the order of completion."""
        done: list[tuple[int, int, int, str]] = []
        while len(done) < len(self._reads):
            before = len(done)
            self._client.reap(1000, 30_000, done)
            assert len(done) > before, "nothing came for 30 s"
            for number, code, moved, message in done[before:]:
                offset, buffer = self._reads[number]
                assert (code, moved) == (0, len(buffer)), message
                # At its completion, not only later.
                assert np.array_equal(buffer, self._data[offset : offset + moved]), (number, offset)
        self._client.close()
        order = [number for number, *_ in done]
        assert sorted(order) == sorted(self._reads), "each once"
        return order


def test_thousands_at_once(transport: Transport, files: Files, rng: np.random.Generator) -> None:
    """Reads of 1 byte to 8 MiB, five times what may be under way."""
    layout = files.layout()
    data = noise(16 * MIB, 6)
    with transport.client() as client:
        client.open_layout(layout).write(0, data)
    burst = Burst(transport, layout, data, outstanding_bytes_max=8 * MIB)
    for length in np.concatenate([rng.integers(1, 40_000, 3000), rng.integers(MIB, 8 * MIB, 6)]):
        burst.submit(int(rng.integers(0, len(data) - length + 1)), int(length))
    burst.finish()


def test_completions_come_in_another_order(stream: Transport, files: Files, node: RealNode) -> None:
    """One of four connections is slow: what goes over the others overtakes it."""
    layout = files.layout()
    data = noise(MIB, 7)
    with stream.client() as client:
        client.open_layout(layout).write(0, data)

    def ways(number: int) -> Ways:
        return Ways(to_client=Way(delay_s=0.05 if number == 0 else 0))

    with Proxy(node.address, ways) as proxy:
        burst = Burst(stream, through(layout, proxy.address), data, streams=4)
        for offset in range(0, 400_000, 1000):
            burst.submit(offset, 4096)
        order = burst.finish()
        assert proxy.connections == 4
    overtaken = sum(1 for before, after in itertools.pairwise(order) if after < before)
    assert overtaken > 3, "the completions came in the order of their requests"


@pytest.mark.parametrize(
    "reader", [one for one in TRANSPORTS if one.memory == "foreign"], ids=lambda one: one.name
)
def test_memory_that_changes_while_it_is_written(
    client: Client, transport: Transport, files: Files, reader: Transport
) -> None:
    """A caller that breaks its promise spoils its own bytes at most: a write is refused, or some bytes that
    lay there are in the file and can be read, verified, ever after. Never bytes with the sums of others."""
    layout, length = files.layout(), 2 * UNIT
    file, source = client.open_layout(layout), Room(client, transport, length)
    source.bytes[:] = 0
    assert file.write(0, source.bytes) == length
    ended = threading.Event()

    def every_512th_byte(of: Bytes) -> np.ndarray[Any, Any]:
        return of.view(np.uint64)[::64]

    def scribble() -> None:
        for stamp in itertools.count(1):
            # Many times while one piece is copied; lets go of the interpreter's lock meanwhile.
            every_512th_byte(source.bytes)[:] = stamp
            if ended.is_set():
                return

    seen = {"refused": 0, "mixed": 0}
    with ThreadPoolExecutor(1) as pool, reader.client() as other:
        again, yours = other.open_layout(layout), Room(other, reader, length)
        mine = Room(client, transport, length)
        scribbling = pool.submit(scribble)
        try:
            # A busy machine may not let both run at the same time at first.
            for _ in itertools.takewhile(lambda turn: turn < 10 or not any(seen.values()), range(200)):
                try:
                    assert file.write(0, source.bytes) == length
                except errors.Checksum:
                    seen["refused"] += 1
                assert file.read_into(0, mine.bytes) == length
                for _ in range(2):
                    assert again.read_into(0, yours.bytes) == length
                    assert np.array_equal(mine.bytes, yours.bytes), "what is in the file changes"
                seen["mixed"] += len(np.unique(every_512th_byte(mine.bytes[:UNIT]))) > 1
        finally:
            ended.set()
        scribbling.result(10)
    assert any(seen.values()), "the memory never changed in the middle of a write"
    source.check_guards()
