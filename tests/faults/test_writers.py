"""Two writers of one range, and memory that does not keep what was written to it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import gd2fs
from gd2fs import errors
from gd2fs.bench.torture.cluster import SCRUB, Cluster
from gd2fs.bench.torture.pattern import pattern
from tests.faults.conftest import Start
from tests.faults.test_disks import NODE, UNIT, holds, written
from tests.fleet import eventually

ARENA_BYTES_MIN = 16 << 20


def test_of_two_writers_of_one_range_one_wins_in_each_chunk(start: Start) -> None:
    cluster, connect = start()
    client = connect()
    chunks, rounds = 4, 30
    file = str(client.create("/contended", stripe_unit=UNIT).file_id)

    def write(first: int) -> None:
        """Every second version, from ``first`` on."""
        with gd2fs.connect(cluster.control) as own:
            for version in range(first, 2 * rounds, 2):
                own.write("/contended", 100, pattern(file, version, 100, chunks * UNIT - 200))

    writers = [threading.Thread(target=write, args=(first,)) for first in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)

    def found() -> list[int]:
        """The version in each chunk."""
        versions = []
        for chunk in range(chunks):
            begin, end = max(100, chunk * UNIT), min(chunks * UNIT - 100, (chunk + 1) * UNIT)
            data = np.zeros(end - begin, np.uint8)
            assert client.read_into("/contended", begin, data) == len(data)
            (version,) = (
                version
                for version in (2 * rounds - 1, 2 * rounds - 2)
                if np.array_equal(data, pattern(file, version, begin, len(data)))
            )
            versions.append(version)
        return versions

    before = found()
    client.flush("/contended")
    cluster.kill_node(NODE)
    cluster.start_node(NODE)
    client = connect()
    assert found() == before


def flip_in_memory(cluster: Cluster, sample: bytes) -> int:
    """Turns a bit of every place in the node's memory that holds the sample; how many there are."""
    child = cluster.nodes[NODE].child
    assert child is not None
    process, found = Path(f"/proc/{child.popen.pid}"), 0
    with open(process / "mem", "r+b", buffering=0) as memory:
        for line in (process / "maps").read_text().splitlines():
            fields = line.split()
            begin, end = (int(text, 16) for text in fields[0].split("-"))
            # The arena is anonymous memory in one piece; stacks and heaps are smaller or named.
            if fields[1] != "rw-p" or len(fields) > 5 or end - begin < ARENA_BYTES_MIN:
                continue
            memory.seek(begin)
            held, at = memory.read(end - begin), -1
            while (at := held.find(sample, at + 1)) >= 0:
                memory.seek(begin + at)
                memory.write(bytes([sample[0] ^ 1]))
                found += 1
    return found


@pytest.mark.parametrize("flushed", [True, False])
def test_a_bit_that_turns_in_memory_is_never_served_nor_laundered(start: Start, flushed: bool) -> None:
    # Flushing waits long enough for the bit to turn first.
    cluster, connect = start(environment={"GD2FS_NODE_FLUSH_DELAY_MS": "3000"})
    client = connect()
    file = written(client, "/turned", 3 * UNIT)
    if flushed:
        client.flush("/turned")
    assert flip_in_memory(cluster, pattern(file, 1, UNIT + 30_000, 64).tobytes()) > 0
    for start_of, length in ((UNIT, UNIT), (UNIT + 30_000, 10)):
        # From the log the node may read it again; what it serves is right, or an error.
        try:
            data = np.zeros(length, np.uint8)
            client.read_into("/turned", start_of, data, timeout_s=2)
            assert flushed and np.array_equal(data, pattern(file, 1, start_of, length))
        except (errors.Corrupt, errors.Lost, errors.Checksum):
            pass
    for chunk in (0, 2):
        assert holds(client, "/turned", file, chunk * UNIT, (chunk + 1) * UNIT)
    try:
        client.flush("/turned")
    except errors.Gd2fsError:
        assert not flushed
    cluster.kill_node(NODE)
    cluster.start_node(NODE)
    client = connect()
    data = np.zeros(UNIT, np.uint8)
    try:
        client.read_into("/turned", UNIT, data)
        assert flushed and np.array_equal(data, pattern(file, 1, UNIT, UNIT)), "a flipped bit was laundered"
    except (errors.Corrupt, errors.Lost):
        assert not flushed


def test_a_scrub_finds_a_bit_that_turned_in_memory(start: Start) -> None:
    cluster, connect = start()
    client = connect()
    file = written(client, "/scrubbed", 3 * UNIT)
    client.flush("/scrubbed")
    assert flip_in_memory(cluster, pattern(file, 1, 2 * UNIT + 100, 64).tobytes()) > 0
    cluster.ask_one(NODE, SCRUB, {"start": True})
    look = {"start": False}
    eventually(lambda: not cluster.ask_one(NODE, SCRUB, look)["running"], 10, "the end of the scrub")
    assert cluster.ask_one(NODE, SCRUB, look)["corrupt_chunks"] >= 1
    assert holds(client, "/scrubbed", file, 0, 2 * UNIT)
