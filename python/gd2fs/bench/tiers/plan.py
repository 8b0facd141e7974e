"""The parts of `gd2fs bench tiers`, and how much each of them moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gd2fs.bench.cases import GIB, MIB

PARTS = ("cold", "random", "write", "ingest", "full", "turn", "recovery", "memory", "torture", "mutants")
#: Left out of a quick run: a model, 10 GiB, and a build of its own take longer than all others together.
SLOW = ("turn", "recovery", "mutants")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How much each part moves, in bytes. What is read cold is many times ``memory``."""

    memory: int = 256 * MIB
    cold: tuple[int, ...] = (GIB, 4 * GIB)
    random: int = GIB
    random_read: int = GIB
    written: int = 2 * GIB
    ingest_memory: int = 2 * GIB
    full_memory: int = 512 * MIB
    full_log: int = 2 * GIB
    resident_memory: int = GIB
    connections: int = 1000
    recovered: int = 10 * GIB
    rounds: int = 5
    #: Where one round on a shared disk may take several times as long as the next.
    disk_rounds: int = 15
    torture_loops: int = 100


#: Seconds instead of minutes, with the same paths through the system.
QUICK = Sizes(
    memory=128 * MIB,
    cold=(512 * MIB,),
    random=512 * MIB,
    random_read=64 * MIB,
    written=512 * MIB,
    ingest_memory=512 * MIB,
    full_memory=128 * MIB,
    full_log=256 * MIB,
    resident_memory=256 * MIB,
    connections=200,
    recovered=GIB,
    rounds=3,
    disk_rounds=3,
    torture_loops=3,
)


@dataclass(frozen=True)
class Options:
    """``directory`` lies on the disk that is measured. ``parts``: in the order of PARTS."""

    directory: Path
    parts: tuple[str, ...]
    sizes: Sizes = Sizes()
    loops: int = 100
    seed: int = 0
