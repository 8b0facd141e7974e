"""Torture: one loop after the other, each with clients, events and a check of everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from gd2fs.bench.torture.check import Allowance, Violation
from gd2fs.bench.torture.clients import ClientProcess
from gd2fs.bench.torture.cluster import Cluster
from gd2fs.bench.torture.events import Events
from gd2fs.bench.torture.fill import fill
from gd2fs.bench.torture.journal import Journal, read
from gd2fs.bench.torture.stale import StaleWriters
from gd2fs.bench.torture.verdict import Gone, Verdict, delete_all
from gd2fs.bench.torture.writer import ROOT, THREADS
from gd2fs.client.connect import connect
from gd2fs.config.units import parse_bytes

if TYPE_CHECKING:
    from gd2fs.client import Client

CHECK_TIMEOUT_S = 10.0
REPORT_S = 2.5
VIOLATIONS_MAX = 500
"""Described; all are counted."""
CLUSTERS = ((1, 1, 0.6), (2, 2, 0.4))
"""Nodes, logs of each, and the share of a torture's loops: two nodes with two logs take longer."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One torture. ``directory`` must exist; ``environment`` is the nodes'."""

    directory: Path
    seed: int = 0
    nodes: int = 1
    logs: int = 0
    """Disks of each node; 0: the nodes live in memory alone."""
    data_disks: bool = False
    """The power of data directories is cut without logs, too."""
    memory: str = "24MiB"
    log_bytes: int = 128 << 20
    clients: int = 2
    seconds: float = 2.0
    """Of one loop, without what the processes need to be back and the check."""
    pressure: float = 0.2
    """Share of the loops whose data is more than the logs hold."""
    damage: float = 0.2
    """Share of the loops whose disks flip bits when the check reads from them."""
    stop_at_first: bool = False
    hooks: bool = False
    """The nodes' build lets their clocks be set."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Counters:
    """What happened. The first seven must stay 0; bytes are those of the checks.

    ``unreported`` counts what a full node gave up without control knowing it, ``data_lost`` the names and
    files of data directories that power cuts took back.
    """

    wrong_bytes: int = 0
    phantoms: int = 0
    lost_after_flush: int = 0
    stale_writes: int = 0
    unreported: int = 0
    unreadable: int = 0
    crashed: int = 0
    loops: int = 0
    power_cuts: int = 0
    sectors_lost: int = 0
    data_lost: int = 0
    kills: int = 0
    clocks_set: int = 0
    operations: int = 0
    stale_attempts: int = 0
    bytes_checked: int = 0
    bytes_missing: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.violations

    def blame(self, found: Iterable[Violation], where: str) -> None:
        seen = set()
        for violation in found:
            setattr(self, violation.kind, getattr(self, violation.kind) + 1)
            # The first of each kind in a file says it all.
            if (violation.kind, violation.path) not in seen and len(self.violations) < VIOLATIONS_MAX:
                self.violations.append(f"{where}: {violation}")
            seen.add((violation.kind, violation.path))

    def add(self, other: Counters) -> None:
        """Counts what another cluster's loops have found, too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def __str__(self) -> str:
        shown = (f"{f.name} {getattr(self, f.name)}" for f in fields(self) if f.name != "violations")
        return ", ".join(shown)


class Torture:
    """A cluster and the loops on it. A context manager."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.counters = settings, Counters()
        self._stack = ExitStack()
        self._gone: list[Gone] = []
        try:
            self.cluster = self._stack.enter_context(
                Cluster(
                    settings.directory,
                    nodes=settings.nodes,
                    logs=settings.logs,
                    memory=settings.memory,
                    log_bytes=settings.log_bytes,
                    data_disks=settings.data_disks,
                    seed=settings.seed,
                    environment=settings.environment,
                )
            )
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Torture:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, loops: int, told: Callable[[str], None] = lambda line: None) -> Counters:
        """Runs loops with the seeds from the settings' on; ``told`` gets a line for each."""
        for seed in range(self.settings.seed, self.settings.seed + loops):
            begun, before = time.monotonic(), len(self.counters.violations)
            story = self._loop(seed)
            self.counters.loops += 1
            found = self.counters.violations[before:]
            told(f"loop {seed}: {time.monotonic() - begun:.1f} s, {story}")
            for line in found:
                told(line)
            if found and self.settings.stop_at_first:
                break
        return self.counters

    def _loop(self, seed: int) -> str:
        random = Random(seed)
        directory = self.settings.directory / f"loop-{seed}"
        directory.mkdir()
        disks = self.settings.logs > 0
        pressure = disks and random.random() < self.settings.pressure
        damage = disks and random.random() < self.settings.damage
        clients = self._clients(directory, seed, pressure)
        events = Events(self.cluster, clients, random, self.counters, damage, self.settings.hooks)
        with connect(self.cluster.control, timeout_s=CHECK_TIMEOUT_S) as client:
            client.mkdir(ROOT)
            stale = StaleWriters(self.cluster, client)
            stale.prepare(ROOT)
            journal = Journal(directory / "fill.journal")
            journal.open()
            fill(client, journal, ROOT, self._fill_bytes(pressure))
            try:
                for process in clients:
                    process.start()
                events.run(self.settings.seconds)
            finally:
                for process in clients:
                    process.stop()
            events.mend()
            story = f"{events.story}{', full' if pressure else ''}"
            evicted = self.cluster.evicted if pressure else None
            if pressure:
                # A node tells control with its heartbeats what it gave up.
                time.sleep(REPORT_S)
            allowed = Allowance(self.cluster.timeline, damage, evicted)
            self._check(client, directory, clients, stale, allowed, f"seed {seed} ({story})")
            events.calm()
            # What is gone must stay gone through the next loop's deaths, too.
            delete_all(client)
        return story

    def _fill_bytes(self, pressure: bool) -> int:
        """More than memory holds, so that what was written first is cold; under pressure about what the logs
        hold, so that they must give something up."""
        settings = self.settings
        if not settings.logs:
            return 0
        memory, logs = parse_bytes(settings.memory), settings.logs * settings.log_bytes
        return settings.nodes * (logs if pressure else min(memory * 5 // 4, logs // 2))

    def _clients(self, directory: Path, seed: int, pressure: bool) -> list[ClientProcess]:
        settings = self.settings
        share = (0.5 if pressure else 0.2) if settings.logs else 0.08
        room = settings.nodes * max(settings.logs, 1) * settings.log_bytes
        budget = int(share * room) // (THREADS * settings.clients)
        return [
            ClientProcess(
                name, self.cluster.control, directory / f"{name}.journal", seed, budget, settings.nodes
            )
            for name in (f"c{number}" for number in range(settings.clients))
        ]

    def _check(
        self,
        client: Client,
        directory: Path,
        clients: list[ClientProcess],
        stale: StaleWriters,
        allowed: Allowance,
        where: str,
    ) -> None:
        counters = self.counters
        for process in clients:
            crashed = [Violation("crashed", process.name, 0, 0, what) for what in process.failures]
            counters.blame(crashed, where)
        stale.attempt(losses=allowed.damage or allowed.evicted is not None)
        counters.blame(stale.violations, where)
        counters.stale_attempts += stale.attempts
        verdict = Verdict(self.cluster, client, allowed)
        for journal in sorted(directory.glob("*.journal")):
            operations = read(journal)
            counters.operations += len(operations)
            verdict.judge(operations)
        verdict.gone(self._gone)
        counters.blame(verdict.violations, where)
        counters.bytes_checked += verdict.bytes_checked
        counters.bytes_missing += verdict.bytes_missing
        counters.stale_attempts += verdict.stale_attempts
        self._gone = verdict.files()
