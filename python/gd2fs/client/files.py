"""A file addressed by its layout: byte ranges between its nodes and the caller's memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from gd2fs import errors
from gd2fs.client.buffers import as_list
from gd2fs.client.completions import Completions, Request
from gd2fs.client.tiers import Extent, Range, Tier, Warmth, checked

if TYPE_CHECKING:
    from gd2fs import _native

TIMEOUT_S_MAX = 24 * 3600.0


def milliseconds(timeout_s: float) -> int:
    """A timeout for native calls. Raises Invalid for one that is not above 0."""
    if not timeout_s > 0:
        raise errors.Invalid(f"timeout_s: {timeout_s} is not above 0")
    return max(1, int(min(timeout_s, TIMEOUT_S_MAX) * 1000))


def position(offset: int) -> int:
    """A byte offset for native calls. Raises Invalid for one that no file has."""
    if not 0 <= offset < 1 << 63:
        raise errors.Invalid(f"offset: {offset} is not in 0..2^63-1")
    return offset


class File:
    """Made by `Client.open_layout`. Methods may be called from any thread and event loop.

    A request fails with the errors of `gd2fs.errors`: ``Hole`` or ``Lost`` for bytes that do not exist,
    ``Checksum`` for bytes that arrive damaged, ``Disconnected`` for a node that can't be reached,
    ``Timeout``, the layout and auth errors.
    """

    def __init__(
        self,
        native: _native.Client,
        completions: Completions,
        layout: dict[str, Any],
        timeout_s: float,
    ) -> None:
        self._native = native
        self._completions = completions
        self._native_file = native.file(json.dumps(layout))
        self._timeout_s = timeout_s
        self.path: str = layout.get("path") or f"file {layout.get('file')}"

    def submit_read(
        self, offset: int, buffers: Any, *, timeout_s: float | None = None, queued: bool = False
    ) -> Request:
        """Starts filling ``buffers`` (one or a list) from byte ``offset`` on.

        The buffers must not be used until the request is done, not even after its timeout of ``timeout_s``
        seconds. ``queued``: `Client.reap` returns the request when it is done. Raises Overloaded for too many
        requests at once.
        """
        objects, limit = as_list(buffers), self._limit(timeout_s)
        return self._completions.submit(
            lambda: self._native.submit_read(self._native_file, position(offset), objects, limit), queued
        )

    def submit_write(
        self, offset: int, buffers: Any, *, timeout_s: float | None = None, queued: bool = False
    ) -> Request:
        """Starts writing ``buffers`` (one or a list) at byte ``offset``; they must not change until the
        request is done."""
        objects, limit = as_list(buffers), self._limit(timeout_s)
        return self._completions.submit(
            lambda: self._native.submit_write(self._native_file, position(offset), objects, limit), queued
        )

    def submit_read_at(
        self,
        offset: int,
        addresses: Any,
        lengths: Any,
        *,
        iomem: _native.IOMEM | None = None,
        timeout_s: float | None = None,
        queued: bool = False,
    ) -> Request:
        """As `submit_read`, into fragments given by two uint64 arrays of addresses and lengths in bytes: one
        call for any number of them.

        They must lie in ``iomem`` (`Client.alloc`, `Client.register`), which is kept until the request is
        done. Without it nothing is checked or kept alive.
        """
        limit = self._limit(timeout_s)
        return self._completions.submit(
            lambda: self._native.submit_read_at(
                self._native_file, position(offset), addresses, lengths, limit, iomem
            ),
            queued,
        )

    def submit_write_at(
        self,
        offset: int,
        addresses: Any,
        lengths: Any,
        *,
        iomem: _native.IOMEM | None = None,
        timeout_s: float | None = None,
        queued: bool = False,
    ) -> Request:
        """As `submit_write`, from fragments given as in `submit_read_at`."""
        limit = self._limit(timeout_s)
        return self._completions.submit(
            lambda: self._native.submit_write_at(
                self._native_file, position(offset), addresses, lengths, limit, iomem
            ),
            queued,
        )

    def read_into(self, offset: int, buffers: Any, *, timeout_s: float | None = None) -> int:
        """Fills ``buffers`` from byte ``offset`` on; the bytes read, fewer only at the end of the file."""
        return _finished(self.submit_read(offset, buffers, timeout_s=timeout_s))

    def write(self, offset: int, buffers: Any, *, timeout_s: float | None = None) -> int:
        """Writes ``buffers`` at byte ``offset``; the bytes written, acknowledged by the nodes."""
        return _finished(self.submit_write(offset, buffers, timeout_s=timeout_s))

    async def aread_into(self, offset: int, buffers: Any, *, timeout_s: float | None = None) -> int:
        """As `read_into`, in the running event loop."""
        return await self.submit_read(offset, buffers, timeout_s=timeout_s)

    async def awrite(self, offset: int, buffers: Any, *, timeout_s: float | None = None) -> int:
        """As `write`, in the running event loop."""
        return await self.submit_write(offset, buffers, timeout_s=timeout_s)

    def length(self, *, timeout_s: float | None = None) -> int | None:
        """The highest acknowledged end in bytes, as the nodes say; None if one can't be reached or has lost
        the file."""
        return self._native.lengths([self._native_file], self._limit(timeout_s))[0]

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Returns when everything that was written before through this client is durable on the file's nodes.

        Raises Unsupported where a node keeps nothing beyond its memory; Lost, once, where a node was started
        anew after it had acknowledged writes that no flush covers.
        """
        self._native.flush(self._native_file, self._limit(timeout_s))

    def warm(self, ranges: Sequence[Range], *, timeout_s: float | None = None) -> Warmth:
        """Has the nodes lift ``ranges`` into memory, without waiting for it; where their bytes were just
        now."""
        total = Warmth()
        for start, end, limit in self._asked(ranges, timeout_s):
            total += Warmth(*self._native.warm(self._native_file, start, end, limit))
        return total

    def where(self, ranges: Sequence[Range], *, timeout_s: float | None = None) -> list[Extent]:
        """Where the bytes of ``ranges`` are: one range after the other, in each neighbours of one kind
        merged."""
        found: list[Extent] = []
        for start, end, limit in self._asked(ranges, timeout_s):
            extents = self._native.whereabouts(self._native_file, start, end, limit)
            found += [Extent(at, upto, cast(Tier, tier)) for at, upto, tier in extents]
        return found

    def _asked(self, ranges: Sequence[Range], timeout_s: float | None) -> Iterator[tuple[int, int, int]]:
        """Start, end and the milliseconds that are left of the time for all of them."""
        until = time.monotonic() + self._limit(timeout_s) / 1000
        for start, end in checked(ranges):
            yield start, end, max(1, int((until - time.monotonic()) * 1000))

    def _limit(self, timeout_s: float | None) -> int:
        return milliseconds(self._timeout_s if timeout_s is None else timeout_s)


def _finished(request: Request) -> int:
    """Waits. When interrupted (Ctrl-C), gives the transfer up, and returns only when its memory is free
    again."""
    try:
        return request.wait()
    except BaseException:
        request.give_up()
        raise
