"""Requests of one size through the compiled loop, and a check of every byte that was read."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gd2fs import _native
from gd2fs.bench.buffers import addresses as numbers
from gd2fs.bench.buffers import ordinary, pattern
from gd2fs.bench.cases import MIB
from gd2fs.bench.samples import Sample
from gd2fs.client import Client

#: Bytes of one call of the loop: its requests go to places of their own, and are checked between the calls.
WINDOW_BYTES = 512 * MIB
FILL_REQUEST_BYTES = 4 * MIB
TIMEOUT_S = 60.0


class Memory:
    """What files hold, and where reads go. A file's byte at ``offset`` is the source's at ``offset`` modulo
    its length, a whole number of the largest requests."""

    def __init__(self, length: int = WINDOW_BYTES) -> None:
        self.length = self.window = length
        self.source, self.target = pattern(length), ordinary(length)

    def beside(self, window: int) -> Memory:
        """The same source, and ``window`` bytes to read into beside others."""
        other = copy.copy(self)
        other.window, other.target = window, ordinary(window)
        return other

    def wrong(self, offset: int, place: int, length: int) -> bool:
        """Whether the target at ``place`` has other bytes than a file at ``offset``."""
        start = offset % self.length
        ours = self.target.array[place : place + length]
        return not np.array_equal(ours, self.source.array[start : start + length])


class Traffic:
    """One client and the requests that are made with it; ``outstanding`` of them are under way."""

    def __init__(
        self, client: Client, memory: Memory, outstanding: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.client, self._memory, self._outstanding = client, memory, outstanding
        self._timeout_ms = int(timeout_s * 1000)

    def fill(self, path: str, size: int, stripe_unit: int | None = None) -> None:
        """Makes a file of ``size`` bytes."""
        self.client.create(path, stripe_unit=stripe_unit)
        self.write(path, range(0, size, FILL_REQUEST_BYTES), min(FILL_REQUEST_BYTES, size))

    def write(self, path: str, offsets: Sequence[int], request: int) -> Sample:
        """One request for each of ``offsets``."""
        # Requests under way may come from the same place: nobody changes it.
        starts = [self._memory.source.address + offset % self._memory.length for offset in offsets]
        seconds, latencies = self._run(True, path, list(offsets), starts, request)
        return Sample(len(offsets) * request, seconds, None, latencies)

    def read(self, path: str, offsets: Sequence[int], request: int) -> Sample:
        """The same; checks between windows, outside of the time, that the bytes are those of the file.

        Raises RuntimeError for others.
        """
        seconds, latencies = 0.0, []
        for window in _windows(offsets, self._memory.window // request):
            places = [index * request for index in range(len(window))]
            target = self._memory.target
            target.array[: len(window) * request] = 0
            took, each = self._run(False, path, window, [target.address + place for place in places], request)
            seconds += took
            latencies += each
            for offset, place in zip(window, places, strict=True):
                if self._memory.wrong(offset, place, request):
                    raise RuntimeError(f"{path}: other bytes than were written in {request} from {offset} on")
        return Sample(len(offsets) * request, seconds, None, latencies)

    def _run(
        self, write: bool, path: str, offsets: list[int], addresses: list[int], request: int
    ) -> tuple[float, list[float]]:
        places: Any = numbers(*addresses)
        lengths: Any = numbers(*[request] * len(addresses))
        # Looked up each time: a node that was started again has other addresses.
        layout: dict[str, Any] = self.client.namespace.layout(path, "read,write")
        return _native.bench_requests(
            self.client._native,
            write,
            json.dumps(layout),
            offsets,
            places,
            lengths,
            self._outstanding,
            self._timeout_ms,
        )


def _windows(offsets: Sequence[int], count: int) -> Iterator[list[int]]:
    for start in range(0, len(offsets), count):
        yield list(offsets[start : start + count])
