"""Redis as a competitor: a gigabyte, and 4 KiB values, through redis-py and through a compiled reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gd2fs import _native
from gd2fs.bench.buffers import Buffer
from gd2fs.bench.cases import KIB, MIB, REQUESTS_UNDER_WAY_MAX, Key, Peer, requests
from gd2fs.bench.redis_py import key, seconds_of
from gd2fs.bench.redis_server import RedisServer, RedisUnavailable
from gd2fs.bench.samples import Contender, Sample, Samples, median_gb_per_s, timed

if TYPE_CHECKING:
    import redis

VALUE_SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
#: (connections, GETs unanswered on each) of the compiled reader that are tried for big values.
SHAPES = ((1, 2), (2, 2), (4, 1))
#: Commands in one pipeline of redis-py; more were slower with every size.
PIPELINE = 4
#: Values of one pipeline while loading.
LOAD_BYTES = 16 * MIB
TRIES = 2
#: The names of redis-py as it is.
PLAIN = ("redis-py", "redis-py pipelined")
#: How many of the compiled reader's best settings stay in the comparison.
FINALISTS = 2
SMALL = 4 * KIB


class Redis:
    """A server, what is loaded into it, and its clients. A context manager. Raises RedisUnavailable.

    Values are the bytes of ``source``, read into ``target`` and compared once per client and size.
    """

    def __init__(self, directory: Path, source: Buffer, target: Buffer, span_bytes: int) -> None:
        try:
            import redis
        except ImportError as error:
            raise RedisUnavailable("redis-py is not installed; pip install 'gd2fs[bench]'") from error
        self._source, self._target, self._span = source, target, span_bytes
        self._server = RedisServer(directory)
        self._client: redis.Redis = redis.Redis(port=self._server.port)
        self._readers: dict[int, _native.RedisReader] = {}

    def __enter__(self) -> Redis:
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.clear()
        self._client.close()
        self._server.__exit__()

    def small(self) -> dict[Key, Contender]:
        """GETs of 4 KiB on one connection, 64 unanswered: the shape of GD2FS's own small reads."""
        total = SMALL * requests(SMALL, self._span)
        self._load(SMALL, total)
        contender = self._compiled(SMALL, total, 1, REQUESTS_UNDER_WAY_MAX)
        self._check(total, contender)
        return {Peer(f"redis 1x{REQUESTS_UNDER_WAY_MAX}", "read", SMALL, total): contender}

    def tournament(self, total: int, tell: Callable[[str], None]) -> tuple[dict[Key, Contender], Samples]:
        """Reads ``total`` bytes with every client and value size; the best of them for the comparison, and
        all samples.

        The values of the best stay loaded.
        """
        tried: list[tuple[float, Peer, Contender]] = []
        samples: Samples = {}
        for size in [size for size in VALUE_SIZES if size <= total]:
            tell(f"Redis: {total / 1e9:.2f} GB in values of {size // KIB} KiB")
            self._load(size, total)
            for peer, contender in self._clients(size, total):
                tries = TRIES if peer.name.startswith("redis ") else 1
                samples[peer] = [contender() for _ in range(tries)]
                tried.append((median_gb_per_s(samples[peer]), peer, contender))
            self._client.flushall()
        tried.sort(key=lambda one: one[0], reverse=True)
        best = [one for one in tried if one[1].name.startswith("redis ")][:FINALISTS]
        best += [one for one in tried if one[1].name in PLAIN][:1]
        for size in {peer.size for _, peer, _ in best}:
            self._load(size, total)
        return {peer: contender for _, peer, contender in best}, samples

    def _clients(self, size: int, total: int) -> Iterator[tuple[Peer, Contender]]:
        for connections, depth in SHAPES:
            contender = self._compiled(size, total, connections, depth)
            self._check(total, contender)
            yield Peer(f"redis {connections}x{depth}", "read", size, total), contender
        yield Peer("redis-py", "read", size, total), self._python(size, total, 1)
        yield Peer("redis-py pipelined", "read", size, total), self._python(size, total, PIPELINE)
        # Told beside them, but not what a program gets that does not tune its allocator.
        yield Peer("redis-py, memory kept", "read", size, total), self._python(size, total, 1, True)

    def _compiled(self, size: int, total: int, connections: int, depth: int) -> Contender:
        if connections not in self._readers:
            self._readers[connections] = _native.RedisReader(self._server.port, connections)
        reader, keys = self._readers[connections], _keys(size, total)
        place = self._target.at(0, total)
        return lambda: timed(total, (self._server.pid,), lambda: (reader.get(keys, size, place, depth), []))

    def _python(self, size: int, total: int, batch: int, keep_memory: bool = False) -> Contender:
        port = self._server.port
        return lambda: Sample(total, seconds_of(port, size, total, batch, keep_memory))

    def _load(self, size: int, total: int) -> None:
        keys, values = _keys(size, total), self._source.array.data
        batch = max(1, LOAD_BYTES // size)
        for first in range(0, len(keys), batch):
            with self._client.pipeline(transaction=False) as pipeline:
                for number in range(first, min(first + batch, len(keys))):
                    pipeline.set(keys[number], values[number * size : (number + 1) * size].tobytes())
                pipeline.execute()

    def _check(self, total: int, contender: Contender) -> None:
        self._target.array[:total] = 0
        contender()
        if not np.array_equal(self._target.array[:total], self._source.array[:total]):
            raise RuntimeError("Redis delivered other bytes than were stored")


def _keys(size: int, total: int) -> list[bytes]:
    return [key(size, number) for number in range(total // size)]
