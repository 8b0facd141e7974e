"""One measurement, and rounds of them in which every contender has its turn."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from gd2fs.bench.cases import Key


@dataclass(frozen=True)
class Sample:
    """``cpu_s``: seconds of processor time of both ends; None where an end is not ours to ask."""

    bytes: int
    seconds: float
    cpu_s: float | None = None
    latencies_s: list[float] = field(default_factory=list)

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e9


Contender = Callable[[], Sample]
Name = TypeVar("Name", bound=Hashable)
Samples = dict[Key, list[Sample]]


def cpu_seconds(*pids: int) -> float:
    """Processor time that these processes have used, to the nanosecond."""
    # How Linux numbers the clock of another process (CPUCLOCK_SCHED of clock_getcpuclockid).
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def timed(bytes_moved: int, pids: tuple[int, ...], work: Callable[[], tuple[float, list[float]]]) -> Sample:
    """A sample of ``work``, which tells its seconds and latencies itself; ``pids`` are the other ends."""
    before = cpu_seconds(os.getpid(), *pids)
    seconds, latencies = work()
    used = cpu_seconds(os.getpid(), *pids) - before
    return Sample(bytes_moved, seconds, used, latencies)


def interleave(contenders: Mapping[Name, Contender], rounds: int) -> dict[Name, list[Sample]]:
    """Every contender once a round, in an order that changes: what disturbs the machine disturbs all.

    The samples of one key are in the order of the rounds, so that those of two keys can be paired.
    """
    order, samples = list(contenders), {key: list[Sample]() for key in contenders}
    shuffled = random.Random(len(order))
    for _ in range(rounds):
        shuffled.shuffle(order)
        for key in order:
            samples[key].append(contenders[key]())
    return samples


def median_gb_per_s(samples: list[Sample]) -> float:
    return statistics.median(sample.gb_per_s for sample in samples)


def median_cpu_s_per_gb(samples: list[Sample]) -> float | None:
    used = [sample.cpu_s / sample.bytes * 1e9 for sample in samples if sample.cpu_s is not None]
    return statistics.median(used) if used else None
