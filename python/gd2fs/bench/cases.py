"""What is measured: the keys under which samples are kept, and the grids of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Op = Literal["read", "write"]
Transport = Literal["tcp", "shm"]
Memory = Literal["library", "foreign"]
OPS: tuple[Op, ...] = ("read", "write")
TRANSPORTS: tuple[Transport, ...] = ("tcp", "shm")

DEFAULT_SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB, GIB)
FULL_SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
#: From here on the variants are measured, too: verification off, fewer streams, foreign memory.
VARIANTS_FROM_BYTES = 64 * MIB
#: Below, raw sockets are no ceiling: each request is a system call at both ends, and Redis batches them.
RAW_FROM_BYTES = 64 * KIB
#: The default of `gd2fs.connect`.
STREAMS = 4
#: How many threads copy at most: the ceiling of one copy is that of all cores of the machine.
COPY_THREADS = min(os.cpu_count() or 1, 16)

#: Bytes under way at a time, as far as the number of requests allows: as much as the raw sockets ask ahead.
UNDER_WAY_BYTES = 64 * MIB
REQUESTS_UNDER_WAY_MAX = 64
#: What one measurement moves: long enough to be timed, short enough for many rounds.
VOLUME_BYTES = 256 * MIB
VOLUME_REQUESTS_MAX = 16_384
FRAGMENT_BYTES = 64 * KIB
FRAGMENTS = 10_000


@dataclass(frozen=True)
class Case:
    """One way to use GD2FS. ``size`` counts the bytes of a request; ``first``: into memory that the node has
    not used before."""

    transport: Transport
    op: Op
    size: int
    streams: int = STREAMS
    verify: bool = True
    scattered: bool = False
    memory: Memory = "foreign"
    first: bool = False


@dataclass(frozen=True)
class Ceiling:
    """What the machine does without GD2FS. ``width``: threads of a copy, streams of raw sockets."""

    name: Literal["memcpy", "stream_copy", "raw_tcp", "scattered_memcpy", "scattered_stream_copy"]
    op: Op
    size: int
    width: int


@dataclass(frozen=True)
class Peer:
    """A competitor. ``size`` counts the bytes of a value or request, ``total`` those of a measurement."""

    name: str
    op: Op
    size: int
    total: int


Key = Case | Ceiling | Peer


def outstanding(size: int) -> int:
    """Requests of ``size`` bytes under way at a time."""
    return max(1, min(REQUESTS_UNDER_WAY_MAX, UNDER_WAY_BYTES // size))


def span(sizes: Sequence[int]) -> int:
    """Bytes of the files and buffers that serve these sizes: small sizes are measured over many requests."""
    return max(max(sizes), min(VOLUME_BYTES, 64 * max(sizes)))


def requests(size: int, span_bytes: int) -> int:
    """Requests of ``size`` bytes that one measurement makes."""
    return max(1, min(VOLUME_REQUESTS_MAX, min(VOLUME_BYTES, span_bytes) // size))


def scattered_bytes(span_bytes: int) -> int:
    """Bytes of the scattered load: 10,000 fragments of 64 KiB, or fewer where less memory is in play."""
    return min(FRAGMENTS, span_bytes * 5 // 8 // FRAGMENT_BYTES) * FRAGMENT_BYTES


def home(transport: Transport) -> Memory:
    """The memory that a transport is meant for."""
    return "library" if transport == "shm" else "foreign"


def default_cases(op: Op, size: int, transports: Sequence[Transport]) -> Iterator[Case]:
    """The cases of one size: one of each transport, and variants where requests are big."""
    for transport in transports:
        usual = home(transport)
        yield Case(transport, op, size, memory=usual)
        if size < VARIANTS_FROM_BYTES:
            continue
        yield Case(transport, op, size, verify=False, memory=usual)
        if transport == "tcp":
            yield from (Case(transport, op, size, streams, memory=usual) for streams in (1, 2))
        else:
            yield Case(transport, op, size, memory="foreign")
        if op == "write" and size >= GIB:
            yield Case(transport, op, size, memory=usual, first=True)


def full_cases(op: Op, size: int, transports: Sequence[Transport]) -> Iterator[Case]:
    """Every combination, and what the default grid has beyond that.

    Scattered only where a request has several fragments; streams only of tcp, since shm moves no bytes over
    its connections.
    """
    combined = [
        Case(transport, op, size, streams, verify, scattered, home(transport))
        for transport in transports
        for streams, verify, scattered in product(
            (1, 2, STREAMS, 8) if transport == "tcp" else (STREAMS,), (True, False), (False, True)
        )
        if not scattered or size > FRAGMENT_BYTES
    ]
    yield from combined
    yield from (case for case in default_cases(op, size, transports) if case not in combined)
