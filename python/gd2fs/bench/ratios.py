"""What the figures come to: GD2FS over the ceilings and the competitors of the same run.

A ratio is made round by round, so that both sides met the same machine, and is the median of the rounds; over
several sizes it is the worst one. None stands for what did not run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from gd2fs.bench.cases import (
    GIB,
    KIB,
    MIB,
    TRANSPORTS,
    Case,
    Ceiling,
    Key,
    Op,
    Peer,
    Transport,
    home,
)
from gd2fs.bench.samples import Sample

#: Sizes from which on a transport has to come near its ceiling.
TCP_FROM_BYTES = 4 * MIB
SHM_FROM_BYTES = 64 * MIB

#: What each ratio must reach, as the project has set itself: at least, but for the last two, at most.
TARGETS: dict[str, float | dict[str, float]] = {
    "tcp_read": 0.90,
    "tcp_write": 0.85,
    "shm_read": 0.80,
    "shm_write": 0.80,
    "scattered_read": {"tcp": 0.85, "shm": 0.85},
    "read_1gib_vs_redis": {"tcp": 1.2, "shm": 4.0},
    "read_1gib_vs_redis_py": {"tcp": 4.0, "shm": 14.0},
    "read_4kib_vs_redis": 1.0,
    "read_1gib_vs_mooncake": 1.8,
    "read_1gib_vs_nixl_shm": 1.5,
    "cpu_tcp_read": 1.12,
    "load_vs_local_dram": {"shm": 1.5},
}
LOWER_IS_BETTER = ("cpu_tcp_read", "load_vs_local_dram")

Rounds = list[float]
Measured = Mapping[Key, list[Sample]]


def ratios(samples: Measured) -> dict[str, Any]:
    """All ratios of a run, by their names in the JSON."""
    return {
        "tcp_read": _tcp(samples, "read"),
        "tcp_write": _tcp(samples, "write"),
        "shm_read": _shm(samples, "read"),
        "shm_write": _shm(samples, "write"),
        "scattered_read": {t: _scattered(samples, t) for t in TRANSPORTS},
        "read_1gib_vs_redis": {t: _against(samples, t, GIB, "redis") for t in TRANSPORTS},
        "read_1gib_vs_redis_py": {t: _against(samples, t, GIB, "redis-py") for t in TRANSPORTS},
        "read_4kib_vs_redis": _against(samples, "tcp", 4 * KIB, "redis "),
        "read_1gib_vs_mooncake": _against(samples, "tcp", GIB, "mooncake"),
        "read_1gib_vs_nixl_shm": _against(samples, "shm", GIB, "nixl"),
        "cpu_tcp_read": _cpu(samples),
        "load_vs_local_dram": {t: _load(samples, t) for t in TRANSPORTS},
    }


def usual(transport: Transport, op: Op, size: int) -> Case:
    """What ratios are about: default streams, verification, the memory that a transport is meant for."""
    return Case(transport, op, size, memory=home(transport))


def fastest(samples: Measured, keys: Iterable[Key]) -> Rounds | None:
    """In each round the rate of the fastest of ``keys``."""
    there = [[sample.gb_per_s for sample in samples[key]] for key in keys if key in samples]
    return [max(rates) for rates in zip(*there, strict=True)] if there else None


def over(above: Rounds | None, below: Rounds | None) -> float | None:
    """The median of the quotients of the rounds."""
    if above is None or below is None:
        return None
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def copies(samples: Measured, op: Op, size: int) -> list[Key]:
    """Copies of this size with as many threads as there were."""
    found = [
        key
        for key in samples
        if isinstance(key, Ceiling)
        and key.name in ("memcpy", "stream_copy")
        and (key.op, key.size) == (op, size)
    ]
    most = max((key.width for key in found), default=0)
    return [key for key in found if key.width == most]


def _sizes(samples: Measured, transport: Transport, op: Op, from_bytes: int) -> list[int]:
    return sorted({
        key.size
        for key in samples
        if isinstance(key, Case) and key == usual(transport, op, key.size) and key.size >= from_bytes
    })  # fmt: skip


def _worst(values: Iterable[float | None], pick: Any = min) -> float | None:
    there = [value for value in values if value is not None]
    return pick(there) if there else None


def _tcp(samples: Measured, op: Op) -> float | None:
    def one(size: int) -> float | None:
        case = usual("tcp", op, size)
        ceiling = Ceiling("raw_tcp", op, size, case.streams)
        return over(fastest(samples, [case]), fastest(samples, [ceiling]))

    return _worst(one(size) for size in _sizes(samples, "tcp", op, TCP_FROM_BYTES))


def _shm(samples: Measured, op: Op) -> float | None:
    def one(size: int) -> float | None:
        return over(fastest(samples, [usual("shm", op, size)]), fastest(samples, copies(samples, op, size)))

    return _worst(one(size) for size in _sizes(samples, "shm", op, SHM_FROM_BYTES))


def _scattered(samples: Measured, transport: Transport) -> float | None:
    def one(case: Case) -> float | None:
        contiguous = usual(transport, "read", case.size)
        return over(fastest(samples, [case]), fastest(samples, [contiguous]))

    return _worst(one(case) for case in _loads(samples, transport))


def _loads(samples: Measured, transport: Transport) -> list[Case]:
    """The load of 10,000 fragments: the scattered case that has a local copy beside it."""
    copied = {key.size for key in samples if isinstance(key, Ceiling) and key.name == "scattered_memcpy"}
    cases = [Case(transport, "read", size, scattered=True, memory=home(transport)) for size in sorted(copied)]
    return [case for case in cases if case in samples]


def _load(samples: Measured, transport: Transport) -> float | None:
    def one(case: Case) -> float | None:
        local = [
            key
            for key in samples
            if isinstance(key, Ceiling) and key.name.startswith("scattered_") and key.size == case.size
        ]
        return over(fastest(samples, local), fastest(samples, [case]))

    return _worst((one(case) for case in _loads(samples, transport)), max)


def _against(samples: Measured, transport: Transport, size: int, name: str) -> float | None:
    """Time of the fastest competitor whose name begins so over GD2FS's, for as many bytes."""
    case = usual(transport, "read", size)
    if case not in samples:
        return None
    total = samples[case][0].bytes
    peers = [
        key for key in samples if isinstance(key, Peer) and key.name.startswith(name) and key.total == total
    ]
    return over(fastest(samples, [case]), fastest(samples, peers))


def _cpu(samples: Measured) -> float | None:
    def one(size: int) -> float | None:
        case = usual("tcp", "read", size)
        return over(
            _cpu_rounds(samples, case), _cpu_rounds(samples, Ceiling("raw_tcp", "read", size, case.streams))
        )

    return _worst((one(size) for size in _sizes(samples, "tcp", "read", TCP_FROM_BYTES)), max)


def _cpu_rounds(samples: Measured, key: Key) -> Rounds | None:
    if key not in samples or any(sample.cpu_s is None for sample in samples[key]):
        return None
    return [(sample.cpu_s or 0.0) / sample.bytes for sample in samples[key]]
