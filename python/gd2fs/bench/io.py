"""`gd2fs bench io`: what is measured in which order."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gd2fs import errors
from gd2fs.bench import ceilings
from gd2fs.bench.buffers import ordinary, pattern
from gd2fs.bench.cases import (
    DEFAULT_SIZES,
    FULL_SIZES,
    GIB,
    KIB,
    OPS,
    RAW_FROM_BYTES,
    STREAMS,
    TRANSPORTS,
    Case,
    Ceiling,
    Key,
    Op,
    Peer,
    Transport,
    default_cases,
    full_cases,
    home,
    scattered_bytes,
    span,
)
from gd2fs.bench.ceilings import RawSockets
from gd2fs.bench.cluster import Cluster
from gd2fs.bench.peers import PeerUnavailable, mooncake, nixl
from gd2fs.bench.peers.pair import Pair
from gd2fs.bench.ratios import usual
from gd2fs.bench.redis import Redis
from gd2fs.bench.redis_server import RedisUnavailable, version
from gd2fs.bench.result import machine, to_json
from gd2fs.bench.samples import Contender, Sample, Samples, interleave, median_gb_per_s
from gd2fs.bench.table import size_name
from gd2fs.cli.output import CommandFailed
from gd2fs.cli.processes import forget_configuration, terminate_as_interrupt

#: Medians of seven hold off three disturbed rounds; the full grid has a hundred times as many measurements.
ROUNDS, FULL_ROUNDS = 7, 3
#: Memory that a run needs for each byte of its span: two buffers, that of two shm clients, the raw server's,
#: the node's three files and a half, up to three loads of Redis.
MEMORY_PER_SPAN = 12
#: What Mooncake and NIXL need beside that: a gigabyte in each of their processes, and Mooncake's segment.
PEERS_BYTES = 5 * GIB

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """``sizes``: of requests, in bytes; empty for those of the grid. ``rounds``: 0 for the grid's."""

    full: bool = False
    peers: bool = False
    transports: Sequence[Transport] = TRANSPORTS
    sizes: Sequence[int] = ()
    rounds: int = 0

    @property
    def all_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.sizes or (FULL_SIZES if self.full else DEFAULT_SIZES))))

    @property
    def all_rounds(self) -> int:
        return self.rounds or (FULL_ROUNDS if self.full else ROUNDS)


def run_io(options: Options, tell: Tell) -> dict[str, Any]:
    """Measures; returns the JSON object. What could not run is null in it, with the reason through ``tell``.

    Raises CommandFailed where this machine has too little memory, ProcessFailed, the errors of GD2FS, and
    RuntimeError for bytes that are not what they must be. Leaves nothing behind.
    """
    facts = machine()
    _require_memory(options)
    with (
        terminate_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="gd2fs-bench-") as name,
        ExitStack() as stack,
    ):
        directory = Path(name)
        forget_configuration(directory)
        return _Run(options, tell, stack, directory).measure(facts)


def _require_memory(options: Options) -> None:
    need = MEMORY_PER_SPAN * span(options.all_sizes) + (PEERS_BYTES if options.peers else 0)
    lines = Path("/proc/meminfo").read_text().splitlines()
    there = next(int(line.split()[1]) * KIB for line in lines if line.startswith("MemAvailable"))
    if there < need:
        raise CommandFailed(
            f"this run needs about {need / GIB:.1f} GiB of free memory and there are {there / GIB:.1f}; "
            "use smaller --sizes"
        )


class _Run:
    """What is running, and the samples so far."""

    def __init__(self, options: Options, tell: Tell, stack: ExitStack, directory: Path) -> None:
        self._options, self._tell, self._stack, self._directory = options, tell, stack, directory
        self._span = span(options.all_sizes)
        tell(f"Preparing: buffers and files of {size_name(self._span)}, control, a node, raw sockets")
        self._source, self._target = pattern(self._span), ordinary(self._span)
        self._raw = stack.enter_context(RawSockets(self._span, self._source, self._target))
        self._cluster = stack.enter_context(Cluster(directory, self._span, self._source, self._target))
        self._transports = [t for t in options.transports if self._usable(t)]
        self._samples: Samples = {}
        self._tried: Samples = {}

    def measure(self, facts: dict[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        for streams in self._stream_counts():
            self._raw.tune(streams)
        self._raw.check(self._source, self._target)
        redis = self._redis(facts)
        for size in self._options.all_sizes:
            for op in OPS:
                contenders = self._own(op, size)
                if redis is not None and op == "read":
                    contenders |= self._beside(redis, size)
                if self._options.peers and op == "read" and size == GIB:
                    contenders |= self._peers(size)
                self._rounds(f"{op} {size_name(size)}", contenders)
        self._scattered()
        facts["seconds"] = round(time.monotonic() - started, 1)
        return to_json(facts, self._samples, self._tried, self._best_raw())

    def _usable(self, transport: Transport) -> bool:
        try:
            self._cluster.user(transport, STREAMS, True).probe()
        except errors.Gd2fsError as error:
            self._tell(f"{transport} is not measured: {error}")
            return False
        return True

    def _cases(self, op: Op, size: int) -> list[Case]:
        make = full_cases if self._options.full else default_cases
        return list(make(op, size, self._transports))

    def _stream_counts(self) -> list[int]:
        """Of raw sockets: those of every case over tcp, and the default's in any case."""
        cases = [case for size in self._options.all_sizes for case in self._cases("read", size)]
        return sorted({STREAMS, *(case.streams for case in cases if case.transport == "tcp")})

    def _own(self, op: Op, size: int) -> dict[Key, Contender]:
        """GD2FS and the ceilings."""
        cases = self._cases(op, size)
        found = ceilings.copies(self._source, self._target, op, size, self._span)
        if size >= RAW_FROM_BYTES:
            for streams in sorted({STREAMS, *(case.streams for case in cases if case.transport == "tcp")}):
                found[Ceiling("raw_tcp", op, size, streams)] = self._raw.contender(op, size, streams)
        return found | {case: self._cluster.contender(case) for case in cases}

    def _scattered(self) -> None:
        """Loading fragments from GD2FS into scattered places: against one range, and against local memory."""
        size = scattered_bytes(self._span)
        if not size:
            return
        contenders = ceilings.scattered_copies(self._source, self._target, self._span, size)
        for transport in self._transports:
            cases = [usual(transport, "read", size)]
            cases += [Case(transport, "read", size, scattered=True, memory=home(transport))]
            if transport == "shm":
                cases.append(Case(transport, "read", size, scattered=True, memory="foreign"))
            contenders |= {case: self._cluster.contender(case) for case in cases}
        self._rounds(f"scattered {size_name(size)}", contenders)

    def _rounds(self, name: str, contenders: dict[Key, Contender]) -> None:
        started, rounds = time.monotonic(), self._options.all_rounds
        self._samples |= interleave(contenders, rounds)
        spent = time.monotonic() - started
        self._tell(f"{name}: {len(contenders)} ways, {rounds} rounds, {spent:.1f} s")

    def _redis(self, facts: dict[str, Any]) -> Redis | None:
        if not {4 * KIB, GIB} & set(self._options.all_sizes):
            return None
        try:
            redis = Redis(self._directory, self._source, self._target, self._span)
        except RedisUnavailable as error:
            self._tell(f"Redis is not measured: {error}")
            return None
        facts["redis"] = version()
        return self._stack.enter_context(redis)

    def _beside(self, redis: Redis, size: int) -> dict[Key, Contender]:
        """Redis, doing the same as the requests of this size."""
        if size == 4 * KIB:
            return redis.small()
        if size == GIB:
            best, self._tried = redis.tournament(size, self._tell)
            return best
        return {}

    def _peers(self, size: int) -> dict[Key, Contender]:
        """Mooncake and NIXL, each in processes and an environment of its own."""
        found: dict[Key, Contender] = {}
        for kind in (mooncake.Peer, nixl.Peer):
            self._tell(f"Starting {kind.name} (the first time it is downloaded)")
            try:
                peer = kind.start(self._directory)
            except PeerUnavailable as error:
                self._tell(f"{kind.name} is not measured: {error}")
                continue
            self._stack.callback(peer.close)
            found[Peer(kind.name, "read", size, size)] = _peer_reads(peer, size)
        return found

    def _best_raw(self) -> dict[str, Any]:
        """The fastest read of any number of streams at the biggest size, with its settings."""
        size = max(self._options.all_sizes)
        rates = {
            streams: median_gb_per_s(self._samples[Ceiling("raw_tcp", "read", size, streams)])
            for streams in self._stream_counts()
            if Ceiling("raw_tcp", "read", size, streams) in self._samples
        }
        if not rates:
            return {}
        streams = max(rates, key=lambda count: rates[count])
        return {"gb_per_s": round(rates[streams], 3), **self._raw.settings("read", streams)}


def _peer_reads(peer: Pair, size: int) -> Contender:
    return lambda: Sample(size, peer.read(size))
