"""Every size, at every kind of offset, in one piece and in many: what was written is read back."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Client
from tests.client_real_node import RealNode
from tests.contract.data_plane import GIB, KIB, MIB, UNIT, Files, Fragments, Room, Transport, noise, within

pytest_plugins = ["tests.contract.data_fixtures"]

SIZES = [1, 4095, 4096, 32 * KIB - 1, 32 * KIB, 32 * KIB + 1, MIB + 3, UNIT, UNIT + 1]
#: Aligned to a stripe unit; one byte before a unit's end; inside a piece of 32 KiB.
OFFSETS = [2 * UNIT, UNIT - 1, 12_345]
#: Large ones at fewer places: what differs at the ends is tested with the small ones.
PLACES = [(size, offset) for size in SIZES for offset in OFFSETS]
PLACES += [(64 * MIB, 2 * UNIT), (64 * MIB, UNIT - 1)]
#: Files up to this size lie on a background, which a write must leave as it is.
BACKGROUND_MAX = 8 * MIB


@pytest.mark.parametrize(("size", "offset"), PLACES)
def test_in_one_piece(client: Client, transport: Transport, files: Files, size: int, offset: int) -> None:
    file = client.open_layout(files.layout())
    end = offset + size
    model = noise(end + 100, size)
    if size <= BACKGROUND_MAX:
        assert file.write(0, model) == len(model)
    source = Room(client, transport, size, skew=size % 7)
    source.bytes[:] = model[offset:end] = noise(size, size + 1)
    assert file.write(offset, source.bytes) == size
    sink = Room(client, transport, size, skew=offset % 5)
    assert file.read_into(offset, sink.bytes) == size
    sink.check_guards()
    source.check_guards()
    assert np.array_equal(sink.bytes, source.bytes)
    if size <= BACKGROUND_MAX:
        whole = Room(client, transport, len(model) + 50)
        assert file.read_into(0, whole.bytes) == len(model), "the file ends where the background ends"
        assert np.array_equal(whole.bytes[: len(model)], model)
        whole.check_guards()
    else:
        with pytest.raises(errors.Hole):
            file.read_into(offset - 1, sink.bytes)


@pytest.mark.parametrize(("size", "offset"), PLACES)
def test_scattered(
    client: Client, transport: Transport, files: Files, rng: np.random.Generator, size: int, offset: int
) -> None:
    layout = files.layout()
    file = client.open_layout(layout)
    source, sink = Room(client, transport, size), Room(client, transport, size, skew=1)
    source.bytes[:] = noise(size, size)
    sink.bytes[:] = 0
    count = min(size, 3000)  # more than one system call takes
    pieces = Fragments.at_random(source.bytes, rng, count)
    written = file.submit_write_at(offset, pieces.addresses, pieces.lengths)
    assert written.wait() == size
    into = Fragments.at_random(sink.bytes, rng, count)
    assert file.submit_read_at(offset, into.addresses, into.lengths).wait() == size
    assert np.array_equal(into.gathered(), pieces.gathered())
    sink.check_guards()
    # Lists of buffers are the other spelling; another client has no memory of the first.
    with transport.client(streams=1) as other:
        back = Room(other, transport, size)
        half = size // 2
        parts = [back.bytes[:half], back.bytes[half:half], back.bytes[half:]]
        assert other.open_layout(layout).read_into(offset, parts) == size
        assert np.array_equal(back.bytes, pieces.gathered())
        back.check_guards()


def test_ten_thousand_fragments_of_64_kib(client: Client, transport: Transport, files: Files) -> None:
    """A long conversation: an engine's scattered blocks to a file and back, one call each way."""
    count, length = 10_000, 64 * KIB
    file = client.open_layout(files.layout())
    blocks, back = Room(client, transport, count * length), Room(client, transport, count * length)
    words = blocks.bytes.view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    order, other = np.random.default_rng(1).permutation(count), np.random.default_rng(2).permutation(count)
    lengths = np.full(count, length, np.uint64)
    out = Fragments(blocks.bytes, order * length, lengths)
    into = Fragments(back.bytes, other * length, lengths)
    begun = time.monotonic()
    write = file.submit_write_at(12_288, out.addresses, out.lengths)
    assert write.wait() == count * length
    read = file.submit_read_at(12_288, into.addresses, into.lengths)
    # Nothing is done for each fragment in Python: submitting is a matter of milliseconds.
    assert read.wait() == count * length
    taken = time.monotonic() - begun
    back.check_guards()
    sources, sinks = blocks.bytes.reshape(count, length), back.bytes.reshape(count, length)
    for mine, yours in zip(order, other, strict=True):
        assert np.array_equal(sinks[yours], sources[mine])
    assert taken < 30, f"655 MB out and in took {taken:.1f} s"


def test_ten_thousand_buffers_in_a_list(
    client: Client, transport: Transport, files: Files, rng: np.random.Generator
) -> None:
    """The same by objects in place of addresses: arrays to write, memoryviews to read into, in any order."""
    count, length = 10_000, 4 * KIB
    file = client.open_layout(files.layout())
    source, sink = Room(client, transport, count * length), Room(client, transport, count * length)
    source.bytes[:] = noise(count * length, 5)
    blocks, back = source.bytes.reshape(count, length), sink.bytes.reshape(count, length)
    order, other = rng.permutation(count), rng.permutation(count)
    with within(10):
        assert file.write(7, [blocks[index] for index in order]) == count * length
        assert file.read_into(7, [memoryview(back[index]) for index in other]) == count * length
    assert np.array_equal(back[other], blocks[order])
    sink.check_guards()


def test_submitting_does_nothing_for_each_fragment(
    client: Client, transport: Transport, files: Files
) -> None:
    file = client.open_layout(files.layout())
    room = Room(client, transport, 10_000)
    room.bytes[:] = noise(10_000, 1)
    pieces = Fragments.cut(room.bytes, np.arange(1, 10_000), np.arange(10_000))
    taken = []
    for turn in range(5):
        begun = time.perf_counter()
        request = file.submit_write_at(turn, pieces.addresses, pieces.lengths)
        taken.append(time.perf_counter() - begun)
        assert request.wait() == 10_000
    # 10,000 Python objects alone would take longer.
    assert min(taken) < 0.002, taken


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
def test_fragments_of_one_byte(client: Client, transport: Transport, files: Files, reverse: bool) -> None:
    """70,000 of them, over the edge of a stripe unit."""
    count, offset = 70_000, UNIT - 35_001
    file = client.open_layout(files.layout())
    source, sink = Room(client, transport, count), Room(client, transport, 2 * count)
    source.bytes[:] = noise(count, 3)
    sink.bytes[:] = 0
    order = np.arange(count)[::-1] if reverse else np.arange(count)
    ones = np.ones(count, np.uint64)
    out = Fragments(source.bytes, order, ones)
    assert file.submit_write_at(offset, out.addresses, ones).wait() == count
    # Every other byte, in order.
    even = Fragments(sink.bytes, np.arange(count) * 2, ones)
    assert file.submit_read_at(offset, even.addresses, ones).wait() == count
    assert np.array_equal(sink.bytes[::2], source.bytes[order])
    assert not sink.bytes[1::2].any(), "bytes between the fragments were changed"
    sink.check_guards()


def test_nothing_is_a_size_too(client: Client, files: Files) -> None:
    file = client.open_layout(files.layout())
    none = np.zeros(0, np.uint64)
    for offset in (0, UNIT, 1 << 40):
        assert file.write(offset, b"") == 0
        assert file.read_into(offset, bytearray()) == 0
        assert file.submit_write_at(offset, none, none).wait() == 0
        assert file.submit_read_at(offset, none, none).wait() == 0


def test_a_read_over_the_end_touches_nothing_behind_it(
    client: Client, transport: Transport, files: Files
) -> None:
    file = client.open_layout(files.layout())
    data = noise(UNIT + 1000, 4)
    file.write(0, data)
    room = Room(client, transport, 3 * UNIT)
    room.bytes[:] = 77
    assert file.read_into(5, room.bytes) == len(data) - 5
    assert np.array_equal(room.bytes[: len(data) - 5], data[5:])
    assert (room.bytes[len(data) - 5 :] == 77).all()
    room.check_guards()


@pytest.mark.large
@pytest.mark.timeout(90)
def test_one_gibibyte(transport: Transport, record_property: Callable[[str, object], None]) -> None:
    """Needs about 3 GiB of memory; its times are in the report (``--junit-xml``) and bounded here."""
    with (
        RealNode("large", memory_bytes=GIB + 64 * MIB) as large,
        transport.client(timeout_s=60) as client,
        within(60),
    ):
        file = client.open_layout(Files([large]).layout(stripe_unit=16 * MIB))
        source, sink = Room(client, transport, GIB), Room(client, transport, GIB)
        words = source.bytes.view(np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64)
        words *= np.uint64(0x9E3779B97F4A7C15)
        for name, transfer, room in (("write", file.write, source), ("read", file.read_into, sink)):
            begun = time.monotonic()
            assert transfer(3, room.bytes) == GIB
            record_property(f"{name}_s", round(time.monotonic() - begun, 3))
        sink.check_guards()
        assert np.array_equal(sink.bytes, source.bytes)
