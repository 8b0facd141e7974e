"""The ceilings: copies in memory, and a bare socket pair of GD2FS's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gd2fs import _native
from gd2fs.bench.buffers import Buffer, addresses, slots
from gd2fs.bench.cases import (
    COPY_THREADS,
    FRAGMENT_BYTES,
    KIB,
    MIB,
    OPS,
    UNDER_WAY_BYTES,
    VOLUME_BYTES,
    Ceiling,
    Key,
    Op,
    outstanding,
    requests,
)
from gd2fs.bench.raw_server import RawServer
from gd2fs.bench.samples import Contender, median_gb_per_s, timed

#: What the raw sockets move at a time, as GD2FS does with its stripe units.
PART_BYTES = 4 * MIB
#: Sizes of socket buffers that are tried; 0 leaves them to the kernel.
SOCKET_BUFFERS = (0, 256 * KIB, MIB, 4 * MIB)
#: Parts asked ahead on a stream that are tried.
AHEAD = (2, 4)
TRIES = 3


def copies(source: Buffer, target: Buffer, op: Op, size: int, span_bytes: int) -> dict[Key, Contender]:
    """memcpy and the streaming-store copy, with one thread and with all."""
    length = size * requests(size, span_bytes)
    places = [addresses(source.address), addresses(target.address), addresses(length)]
    found: dict[Key, Contender] = {}
    for threads in sorted({1, COPY_THREADS}):
        found[Ceiling("memcpy", op, size, threads)] = _copy(False, places, length, threads)
        found[Ceiling("stream_copy", op, size, threads)] = _copy(True, places, length, threads)
    return found


def scattered_copies(source: Buffer, target: Buffer, span_bytes: int, size: int) -> dict[Key, Contender]:
    """The same fragments copied inside this machine's memory, from scattered into scattered places."""
    there = slots(span_bytes, size // FRAGMENT_BYTES) * np.uint64(FRAGMENT_BYTES)
    # Sources in the opposite order: scattered, too, and at another distance from its target each.
    places = [
        source.address + there[::-1],
        target.address + there,
        np.full(len(there), FRAGMENT_BYTES, np.uint64),
    ]
    return {
        Ceiling("scattered_memcpy", "read", size, COPY_THREADS): _copy(False, places, size, COPY_THREADS),
        Ceiling("scattered_stream_copy", "read", size, COPY_THREADS): _copy(True, places, size, COPY_THREADS),
    }


def _copy(streaming: bool, places: Sequence[Any], length: int, threads: int) -> Contender:
    sources, targets, lengths = places
    return lambda: timed(
        length, (), lambda: (_native.bench_copy(streaming, sources, targets, lengths, threads), [])
    )


class RawSockets:
    """Bare connections to a server process. A context manager.

    Before anything is compared, the size of the socket buffers and the number of parts asked ahead are tried
    for each number of streams and each direction; the fastest stay. Each end has one blocking thread a
    stream, and receives with MSG_WAITALL straight into its big buffer.
    """

    def __init__(self, span_bytes: int, source: Buffer, target: Buffer) -> None:
        self._span, self._buffers = span_bytes, {"read": target, "write": source}
        self._server = RawServer(span_bytes)
        self._tuned: dict[tuple[Op, int], tuple[_native.RawTcp, int, int]] = {}

    def __enter__(self) -> RawSockets:
        return self

    def __exit__(self, *error: object) -> None:
        self._tuned.clear()
        self._server.__exit__()

    def tune(self, streams: int) -> None:
        """Finds what is fastest with ``streams``."""
        for op in OPS:
            tried = []
            for buffer_bytes in SOCKET_BUFFERS:
                raw = _native.RawTcp(self._server.port, streams, buffer_bytes)
                for ahead in AHEAD:
                    run = self._runs(raw, op, min(VOLUME_BYTES, self._span), 1, ahead)
                    rate = median_gb_per_s([run() for _ in range(TRIES)])
                    tried.append((rate, buffer_bytes, ahead, raw))
            _, buffer_bytes, ahead, raw = max(tried, key=lambda one: one[0])
            self._tuned[op, streams] = (raw, buffer_bytes, ahead)

    def settings(self, op: Op, streams: int) -> dict[str, int]:
        """What was found fastest."""
        _, buffer_bytes, ahead = self._tuned[op, streams]
        return {"streams": streams, "socket_buffer_bytes": buffer_bytes, "ahead": ahead}

    def contender(self, op: Op, size: int, streams: int) -> Contender:
        """Requests of ``size`` as GD2FS makes them: big ones one after the other, small ones many at once."""
        if (op, streams) not in self._tuned:
            self.tune(streams)
        raw, _, ahead = self._tuned[op, streams]
        count = requests(size, self._span)
        if size < PART_BYTES:
            return self._runs(raw, op, size * count, 1, -(-outstanding(size) // streams), part=size)
        # As many bytes under way as GD2FS has, at least one part on every stream.
        ahead = min(ahead, max(1, UNDER_WAY_BYTES // PART_BYTES // streams))
        if outstanding(size) > 1:
            return self._runs(raw, op, size * count, 1, ahead)
        return self._runs(raw, op, size, count, ahead)

    def _runs(
        self, raw: _native.RawTcp, op: Op, length: int, count: int, ahead: int, part: int = PART_BYTES
    ) -> Contender:
        buffer = self._buffers[op]

        def work() -> tuple[float, list[float]]:
            offsets = range(0, length * count, length)
            return sum(raw.run(op == "write", at, buffer.at(at, length), part, ahead) for at in offsets), []

        return lambda: timed(length * count, (self._server.pid,), work)

    def check(self, source: Buffer, target: Buffer) -> None:
        """What was written comes back. Raises RuntimeError."""
        for (op, streams), (raw, _, ahead) in self._tuned.items():
            if op == "write":
                raw.run(True, 0, source.at(0, self._span), PART_BYTES, ahead)
                target.array[: self._span] = 0
                reader, _, _ = self._tuned["read", streams]
                reader.run(False, 0, target.at(0, self._span), PART_BYTES, ahead)
                if not (target.array[: self._span] == source.array[: self._span]).all():
                    raise RuntimeError("the raw socket pair delivered other bytes than were sent")
