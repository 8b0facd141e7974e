"""Reads of what lies in the log alone, in turns with fio."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from gd2fs.bench.cases import GIB, KIB, MIB, STREAMS
from gd2fs.bench.samples import Contender, Sample, interleave
from gd2fs.bench.tiers.figures import latencies_ms, over, rates
from gd2fs.bench.tiers.fio import Fio, Job
from gd2fs.bench.tiers.plan import Sizes
from gd2fs.bench.tiers.stage import Stage
from gd2fs.bench.tiers.traffic import Memory, Traffic

SEQUENTIAL_BYTES, RANDOM_BYTES = 4 * MIB, 64 * KIB
SEQUENTIAL_WINDOW = 2 * GIB
#: A node works on one request of a connection at a time, so that this many are under way at its disk.
RANDOM_DEPTH = 32
#: Reads that may still find their chunk in memory.
WARM_MAX = 0.02
PATHS = ("/a", "/b")


def sequential(directory: Path, sizes: Sizes, memory: Memory) -> dict[str, Any]:
    """4 MiB after 4 MiB through files that are larger than the node's memory: the worst of several sizes."""
    swept = [_sequential(directory / f"cold-{size // MIB}", size, sizes, memory) for size in sizes.cold]
    return {"ratio": min(row["ratio"] for row in swept), "sizes": swept}


def random(directory: Path, sizes: Sizes, memory: Memory) -> dict[str, Any]:
    """64 KiB here and there, 32 at a time."""
    chosen = np.random.default_rng(5)

    def places() -> list[int]:
        order = chosen.permutation(sizes.random // RANDOM_BYTES)[: sizes.random_read // RANDOM_BYTES]
        return [int(place) * RANDOM_BYTES for place in order]

    job = Job("randread", sizes.random, RANDOM_BYTES, RANDOM_DEPTH, sizes.random_read, len(PATHS))
    row = _beside_fio(directory / "random", sizes, memory, job, places, sizes.disk_rounds)
    return row | {"depth": RANDOM_DEPTH}


def _sequential(directory: Path, size: int, sizes: Sizes, memory: Memory) -> dict[str, Any]:
    job = Job("read", size, SEQUENTIAL_BYTES, STREAMS, size, len(PATHS))
    # Of few windows: at the end of each the requests run out, which fio's do once.
    wide = memory.beside(min(size, SEQUENTIAL_WINDOW))
    row = _beside_fio(
        directory, sizes, wide, job, lambda: list(range(0, size, SEQUENTIAL_BYTES)), sizes.rounds
    )
    return {"size": size, **row, "depth": STREAMS}


def _beside_fio(
    directory: Path, sizes: Sizes, memory: Memory, job: Job, places: Callable[[], list[int]], rounds: int
) -> dict[str, Any]:
    """Rounds of GD2FS and fio on as much data; ``places``: where the requests of a round go."""
    with ExitStack() as stack:
        stage = stack.enter_context(Stage(directory, sizes.memory, _log_for(2 * job.size)))
        fio = Fio(directory)
        with stage.connect() as client:
            for path in PATHS:
                Traffic(client, memory, 16).fill(path, job.size)
        # Everything is flushed, and nothing in memory.
        stage.restart_node()
        client = stack.enter_context(stage.connect(streams=job.depth))
        traffic = Traffic(client, memory, max(job.depth, 16))
        ours = _cold(stage, traffic, places, job.block)
        ours()
        for _ in PATHS:
            fio.run(job)
        samples = interleave({"gd2fs": ours, "fio": lambda: fio.run(job)}, rounds)
    return {
        "ratio": over(samples["gd2fs"], samples["fio"]),
        "gd2fs": rates(samples["gd2fs"]) | latencies_ms(samples["gd2fs"]),
        "fio": rates(samples["fio"]),
        "request": job.block,
    }


def _cold(stage: Stage, traffic: Traffic, places: Callable[[], list[int]], request: int) -> Contender:
    """Reads one of two files each time: what of the other is still in memory was used longer ago, and goes
    first."""
    turn = cycle(PATHS)

    def run() -> Sample:
        before = stage.metrics()
        sample = traffic.read(next(turn), places(), request)
        after = stage.metrics()
        warm, cold = (after[name] - before[name] for name in ("hits_dram_total", "hits_nvme_total"))
        if warm > WARM_MAX * (warm + cold):
            raise RuntimeError(f"{warm:.0f} of {warm + cold:.0f} reads found their bytes in memory")
        return sample

    return run


def _log_for(live: int) -> int:
    """Enough that nothing of it is given up: a log keeps some segments free, which in a small one count."""
    return 2 * live + GIB
