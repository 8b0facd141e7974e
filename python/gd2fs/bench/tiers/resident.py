"""Memory of the node's process beyond its arena, under load from many connections."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from gd2fs.bench.cases import KIB, MIB
from gd2fs.bench.tiers.plan import Sizes
from gd2fs.bench.tiers.stage import Stage
from gd2fs.bench.tiers.traffic import Memory, Traffic
from gd2fs.client import Client

#: Connections of one client: the most that it opens to a node.
STREAMS = 64
LOAD_S = 10.0
READ_BYTES = 256 * KIB
#: A client uses another connection only where the others are busy.
TRIES_MAX = 50
FILE_BYTES = 64 * MIB


def measure(directory: Path, sizes: Sizes, memory: Memory) -> dict[str, Any]:
    """Writers and readers on all connections, the arena full, the log in use: the peak of the process.

    Raises RuntimeError if not all connections stood, or the arena was not full.
    """
    with ExitStack() as stack:
        stage = stack.enter_context(
            Stage(directory / "resident", sizes.resident_memory, 6 * sizes.resident_memory)
        )
        idle = stage.memory_peak()
        counts = [min(STREAMS, sizes.connections - first) for first in range(0, sizes.connections, STREAMS)]
        clients = [stack.enter_context(stage.connect(count, io_threads=1)) for count in counts]
        filler = Traffic(clients[0], memory, 16)
        paths = [f"/filled-{number}" for number in range(2 * sizes.resident_memory // FILE_BYTES)]
        for path in paths:
            filler.fill(path, FILE_BYTES)
        for client, count in zip(clients, counts, strict=True):
            _open(client, count, memory, paths[0])
        deadline = time.monotonic() + LOAD_S
        with ThreadPoolExecutor(len(clients)) as pool:
            loads = [
                pool.submit(_load, client, count, memory, number, paths, deadline)
                for number, (client, count) in enumerate(zip(clients, counts, strict=True))
            ]
            time.sleep(LOAD_S / 2)
            during = stage.metrics()
            moved = sum(load.result() for load in loads)
        after, peak = stage.metrics(), stage.memory_peak()
    if during["connections"] < sizes.connections:
        raise RuntimeError(f"{during['connections']:.0f} of {sizes.connections} connections stood")
    if after["arena_mapped"] < after["arena_capacity"]:
        raise RuntimeError("the arena was never full: what the process needs beside it can't be told")
    return {
        "rss_over_arena_mib": round((peak - after["arena_capacity"]) / MIB, 1),
        "peak_mib": round(peak / MIB, 1),
        "arena_mib": round(after["arena_capacity"] / MIB, 1),
        "idle_mib": round(idle / MIB, 1),
        "connections": int(during["connections"]),
        "moved_bytes": moved,
    }


def _open(client: Client, streams: int, memory: Memory, path: str) -> None:
    """Keeps a client busy until it has opened all its connections. Raises RuntimeError if it does not."""
    traffic = Traffic(client, memory, streams)
    for _ in range(TRIES_MAX):
        if client.stats()["connections_opened"] >= streams:
            return
        traffic.read(path, range(0, FILE_BYTES, MIB), MIB)
    raise RuntimeError(f"a client opened {client.stats()['connections_opened']} of {streams} connections")


def _load(
    client: Client, streams: int, memory: Memory, number: int, paths: list[str], deadline: float
) -> int:
    """As many requests under way as the client has connections; every other client writes. Bytes moved."""
    reads = 2 * streams
    own = memory.beside(reads * READ_BYTES)
    traffic, chosen, moved, turn = Traffic(client, own, streams), np.random.default_rng(number), 0, 0
    while time.monotonic() < deadline:
        if number % 2:
            path = f"/loaded-{number}-{turn}"
            client.create(path)
            moved += traffic.write(path, range(0, FILE_BYTES, MIB), MIB).bytes
            client.delete(path)
        else:
            path = paths[int(chosen.integers(len(paths)))]
            places = chosen.permutation(FILE_BYTES // READ_BYTES)[:reads]
            moved += traffic.read(path, [int(place) * READ_BYTES for place in places], READ_BYTES).bytes
        turn += 1
    return moved
