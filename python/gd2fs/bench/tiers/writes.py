"""Writes: beyond the watermark beside fio, and before it beside a node that has no log."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gd2fs.bench.cases import MIB
from gd2fs.bench.samples import Contender, Sample, interleave
from gd2fs.bench.tiers.figures import latencies_ms, over, rates
from gd2fs.bench.tiers.fio import Fio, Job
from gd2fs.bench.tiers.plan import Sizes
from gd2fs.bench.tiers.stage import Stage
from gd2fs.bench.tiers.traffic import Memory, Traffic

REQUEST_BYTES = 4 * MIB
#: Several writers' worth, over as many connections.
STREAMS = OUTSTANDING = 8
#: Deep enough for any disk with blocks of 4 MiB.
FIO_DEPTH = 16
#: Bytes between two syncs of the log under writes alone: a checkpoint is made after so many.
SYNC_BYTES = 1 << 30
#: Files of fio, and the log is as large as all of them: both go round as much of the disk.
FILES = 3
#: Share of the watermark that is written in one go, so that no write waits for the log.
BEFORE_WATERMARK = 0.9


class _Writer:
    """Writes one new file after the other; the one before is deleted first."""

    def __init__(self, stage: Stage, traffic: Traffic) -> None:
        self._stage, self._traffic, self._number = stage, traffic, 0

    def write(self, lead: int, size: int) -> Sample:
        """``lead`` bytes for nothing, then ``size`` that are measured. Ends when all is in the log."""
        self._number += 1
        path = f"/file-{self._number}"
        self._traffic.client.create(path)
        if lead:
            self._traffic.write(path, range(0, lead, REQUEST_BYTES), REQUEST_BYTES)
        sample = self._traffic.write(path, range(lead, lead + size, REQUEST_BYTES), REQUEST_BYTES)
        self._stage.settle()
        self._traffic.client.delete(path)
        return sample


def sustained(directory: Path, sizes: Sizes, memory: Memory) -> dict[str, Any]:
    """As fast as the log takes it: everything waits at the watermark before the time begins."""
    size = sizes.written
    with ExitStack() as stack:
        stage = stack.enter_context(Stage(directory / "write", sizes.memory, FILES * size))
        fio = Fio(stage.directory)
        client = stack.enter_context(stage.connect(streams=STREAMS))
        writer = _Writer(stage, Traffic(client, memory, OUTSTANDING))
        lead = sizes.memory // 2 + 16 * REQUEST_BYTES
        job = Job("write", size, REQUEST_BYTES, FIO_DEPTH, size, FILES)
        synced = replace(job, sync_every=max(1, min(SYNC_BYTES, size) // REQUEST_BYTES))
        # Once round the log, so that no place is written for the first time.
        for _ in range(FILES):
            writer.write(lead, size)
            fio.run(job)
        ways = {
            "gd2fs": _paid(lambda: writer.write(lead, size)),
            "fio": _paid(lambda: fio.run(synced)),
            "fio_never_synced": _paid(lambda: fio.run(job)),
        }
        samples = interleave(ways, sizes.disk_rounds)
    return {
        "ratio": over(samples["gd2fs"], samples["fio"]),
        "ratio_to_never_synced": over(samples["gd2fs"], samples["fio_never_synced"]),
        "gd2fs": rates(samples["gd2fs"]) | latencies_ms(samples["gd2fs"]),
        "fio": rates(samples["fio"]),
        "fio_never_synced": rates(samples["fio_never_synced"]),
        "size": size,
        "request": REQUEST_BYTES,
    }


def _paid(way: Contender) -> Contender:
    """What one has written and never synced, the next one's first sync would pay for."""

    def run() -> Sample:
        sample = way()
        os.sync()
        return sample

    return run


def ingest(directory: Path, sizes: Sizes, memory: Memory) -> dict[str, Any]:
    """Into memory, while the log follows behind, and into the same memory of a node without one."""
    size = int(BEFORE_WATERMARK * sizes.ingest_memory / 2) // REQUEST_BYTES * REQUEST_BYTES
    with ExitStack() as stack:
        ways = {}
        for name, log in (("with_log", 4 * sizes.ingest_memory), ("memory_only", None)):
            stage = stack.enter_context(Stage(directory / f"ingest-{name}", sizes.ingest_memory, log))
            client = stack.enter_context(stage.connect(streams=STREAMS))
            ways[name] = _ingester(stage, Traffic(client, memory, OUTSTANDING), size)
        # Memory that was used once is there afterwards, on both.
        for _ in range(2):
            for way in ways.values():
                way()
        samples = interleave(ways, sizes.rounds)
    return {
        "ratio": over(samples["with_log"], samples["memory_only"]),
        **{name: rates(found) | latencies_ms(found) for name, found in samples.items()},
        "size": size,
        "request": REQUEST_BYTES,
    }


def _ingester(stage: Stage, traffic: Traffic, size: int) -> Any:
    writer = _Writer(stage, traffic)
    return lambda: writer.write(0, size)
