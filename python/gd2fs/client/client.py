"""The client: one object for a cluster, for all threads and event loops of a process."""

from __future__ import annotations

import atexit
import builtins
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from gd2fs import _native, errors
from gd2fs.client import transfer
from gd2fs.client.buffers import as_list
from gd2fs.client.completions import Completions, Request
from gd2fs.client.control import Control
from gd2fs.client.files import File, milliseconds, position
from gd2fs.client.namespace import FileInfo, Namespace
from gd2fs.client.sessions import Sessions
from gd2fs.client.tiers import Extent, Range, Warmth

#: Paths whose layouts are remembered.
PATHS_MAX = 1024
#: How long: what another client renames or replaces is noticed after this many seconds at most.
PATH_LIFE_S = 2.0
#: A `read` without a length, or of more than this, asks for the file's length first.
READ_UNASKED_BYTES_MAX = 16 << 20

# The file that a remembered layout belongs to is gone, its node has moved, or its capability is over: look
# the path up again.
_OUTDATED = (
    errors.Deleted,
    errors.Disconnected,
    errors.Expired,
    errors.StaleIncarnation,
    errors.StaleLayout,
    errors.WrongNode,
)

T = TypeVar("T")

_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """Made by `gd2fs.connect`. A context manager; ``close`` ends everything that is under way with
    `Cancelled`.

    Paths are absolute (``/models/a.bin``). Buffers are objects with the buffer protocol, numpy arrays or
    CPU tensors, or lists of them; they are in use until the call returns, or the request of a ``submit_…``
    is done. All methods raise errors of `gd2fs.errors`; in a forked child they all raise `ForkedError`,
    after ``close`` `ClosedError`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        cluster: str | None,
        token: str,
        nics: Sequence[str] = (),
        io_threads: int = 0,
        memory_threads: int = 0,
        streams: int = 4,
        transport: str = "auto",
        timeout_s: float = 30.0,
        verify: bool = True,
    ) -> None:
        self._timeout_s = timeout_s
        milliseconds(timeout_s)  # refused here rather than by the first call
        self._identity: dict[str, Any] | None = None
        if cluster is None:
            asker = _native.Client(list(addresses), "", token, io_threads=1, streams=1)
            try:
                self._identity = Control(asker, timeout_s)("GET", "/v1/cluster")
            finally:
                asker.close()
            cluster = self._identity["cluster"]
        self.cluster: str = cluster
        self._native = _native.Client(
            list(addresses),
            cluster,
            token,
            nics=list(nics),
            io_threads=io_threads,
            memory_threads=memory_threads,
            streams=streams,
            transport=transport,
            verify=verify,
        )
        self._completions = Completions(self._native)
        self._process = os.getpid()
        self._closed = False
        self._files: OrderedDict[tuple[str, str], tuple[float, File]] = OrderedDict()
        self._control = Control(self._native, timeout_s)
        self.namespace = Namespace(self._control)
        self.sessions = Sessions(self._control)
        _open_clients.add(self)

    @property
    def tenant(self) -> str:
        """Whose files these are; control says so."""
        if self._identity is None:
            self._identity = self.control("GET", "/v1/cluster")
        tenant: str = self._identity["tenant"]
        return tenant

    def control(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """A JSON call to control, over to its next address when one does not answer. Raises what its error
        says."""
        return self._control(method, path, body, timeout_s)

    # Memory

    def alloc(self, length: int) -> _native.IOMEM:
        """Memory of ``length`` bytes for transfers: a writable buffer (``numpy.frombuffer(iomem, …)``).

        A node on this host reaches it by itself, so reads of whole pages and writes are moved once, without
        a copy by the client; elsewhere it serves as any other memory. Raises NoSpace.

        A forked child does not have it, as it does not have memory that is registered with a NIC: its own
        writes would be its parent's, and a node's would be both's. There a new view of it raises
        BufferError, and an old one must not be touched: that ends the child with SIGSEGV. Allocate in the
        child.
        """
        if length <= 0:
            raise errors.Invalid(f"length: {length} is not above 0")
        return self._native.alloc(length)

    def register(self, buffer: Any) -> _native.IOMEM:
        """Registers memory that is there already, a writable buffer in one piece, for requests by address
        (`File.submit_read_at`). It is kept until ``close`` of the result. Raises BadRequest."""
        (registered,) = as_list(buffer)
        return self._native.register(registered)

    def register_at(self, address: int, length: int) -> _native.IOMEM:
        """As `register`, for ``length`` bytes at ``address``, which the caller keeps alive."""
        return self._native.register_at(address, length)

    # Paths

    def mkdir(self, path: str, file_class: str = "cache", parents: bool = True) -> None:
        """Makes a directory, whose files are of ``file_class``; no error if it exists with that class."""
        self.namespace.mkdir(path, file_class, parents)

    def create(self, path: str, *, stripe_unit: int | None = None, width: int | None = None) -> FileInfo:
        """Makes an empty file. ``stripe_unit`` is in bytes, ``width`` counts nodes; the defaults are its
        class's."""
        info, layout = self.namespace.create(path, stripe_unit, width)
        self._remember(path, "read,write", self.open_layout(layout))
        return info

    def stat(self, path: str) -> FileInfo:
        return self.namespace.stat(path)

    def exists(self, path: str) -> bool:
        return self.namespace.exists(path)

    def list(self, path: str, *, limit: int = 1000, after: str | None = None) -> builtins.list[FileInfo]:
        """At most ``limit`` entries of a directory, in the order of their names, from behind the name
        ``after`` on."""
        return self.namespace.list(path, limit, after)

    def rename(self, a: str, b: str) -> None:
        """Gives the file or directory ``a`` the name ``b``, which must be free."""
        self._files.clear()
        self.namespace.rename(a, b)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Deletes a file or directory; its bytes on the nodes are freed at once."""
        self._files.clear()
        self.namespace.delete(path, recursive)

    # Bytes by path

    def write(self, path: str, offset: int, buffers: Any, *, timeout_s: float | None = None) -> int:
        """Writes ``buffers`` into an existing file at byte ``offset``; returns the bytes written, which any
        reader now sees.

        A write is atomic per stripe unit, not as a whole.
        """
        return self._on_path(
            path, "read,write", lambda file, left_s: file.write(offset, buffers, timeout_s=left_s), timeout_s
        )

    def read_into(self, path: str, offset: int, buffers: Any, *, timeout_s: float | None = None) -> int:
        """Fills ``buffers`` from byte ``offset`` on; returns the bytes read, fewer only at the end of the
        file."""
        return self._on_path(
            path, "read", lambda file, left_s: file.read_into(offset, buffers, timeout_s=left_s), timeout_s
        )

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """At most ``length`` bytes from byte ``offset`` on, or all to the end of the file.

        Never short without a word: raises Lost for bytes that are gone, and, without ``length``, where nobody
        knows the end of the file any more (`FileInfo.end_lost`).
        """
        position(offset)
        if length is not None and length < 0:
            raise errors.Invalid(f"length: {length} is below 0")
        if length is None or length > READ_UNASKED_BYTES_MAX:
            info = self.stat(path)
            # Where the end is lost, a range that was named may be there all the same.
            if length is None or not info.end_lost:
                rest = max(0, info.known_length() - offset)
                length = rest if length is None else min(length, rest)
        buffer = np.empty(length, np.uint8)
        return buffer[: self.read_into(path, offset, buffer)].tobytes()

    async def awrite(self, path: str, offset: int, buffers: Any, *, timeout_s: float | None = None) -> int:
        """As `write`, in the running event loop."""
        file, left_s = await self._afile(path, "read,write", timeout_s)
        return await file.awrite(offset, buffers, timeout_s=left_s)

    async def aread_into(
        self, path: str, offset: int, buffers: Any, *, timeout_s: float | None = None
    ) -> int:
        """As `read_into`, in the running event loop. Cancelling the task returns when the buffers are free
        again."""
        file, left_s = await self._afile(path, "read", timeout_s)
        return await file.aread_into(offset, buffers, timeout_s=left_s)

    def upload(self, local: str | os.PathLike[str], path: str, *, progress: transfer.Progress = None) -> None:
        """Copies a local file to ``path``, replacing what was there once the copy is complete.

        ``progress``: True for a bar, or a function of (bytes done, bytes in total).
        """
        transfer.upload(self, local, path, progress)

    def download(
        self, path: str, local: str | os.PathLike[str], *, progress: transfer.Progress = None
    ) -> None:
        """Copies ``path`` to a local file, which appears once the copy is complete. ``progress`` as in
        `upload`."""
        transfer.download(self, path, local, progress)

    # Where bytes are

    def flush(self, path: str, *, timeout_s: float | None = None) -> None:
        """Returns when everything that this client has written to ``path`` before is durable: it survives a
        node that is killed.

        Raises Unsupported where a node keeps nothing beyond its memory; Lost, once, where a node was started
        anew after it had acknowledged writes that no flush covers.
        """
        self._on_path(path, "read", lambda file, left_s: file.flush(timeout_s=left_s), timeout_s)

    def warm(
        self, path: str, ranges: Sequence[Range] | None = None, *, timeout_s: float | None = None
    ) -> Warmth:
        """Has the nodes lift ``ranges`` (pairs of start and end in bytes; None: all) into memory in the
        background. Returns at once how many of their bytes are in memory, on NVMe and nowhere; ask again to
        see the progress."""
        wanted = self._ranges(path, ranges)
        return self._on_path(
            path, "read", lambda file, left_s: file.warm(wanted, timeout_s=left_s), timeout_s
        )

    def where(
        self, path: str, ranges: Sequence[Range] | None = None, *, timeout_s: float | None = None
    ) -> builtins.list[Extent]:
        """Where the bytes of ``ranges`` (None: all) are: extents of "dram", "nvme", "lost" or "hole", in the
        order of the ranges."""
        wanted = self._ranges(path, ranges)
        return self._on_path(
            path, "read", lambda file, left_s: file.where(wanted, timeout_s=left_s), timeout_s
        )

    async def aflush(self, path: str, *, timeout_s: float | None = None) -> None:
        """As `flush`, in the running event loop; the waiting is done by a thread."""
        import asyncio

        await asyncio.to_thread(self.flush, path, timeout_s=timeout_s)

    async def awarm(
        self, path: str, ranges: Sequence[Range] | None = None, *, timeout_s: float | None = None
    ) -> Warmth:
        """As `warm`, in the running event loop."""
        import asyncio

        return await asyncio.to_thread(self.warm, path, ranges, timeout_s=timeout_s)

    async def awhere(
        self, path: str, ranges: Sequence[Range] | None = None, *, timeout_s: float | None = None
    ) -> builtins.list[Extent]:
        """As `where`, in the running event loop."""
        import asyncio

        return await asyncio.to_thread(self.where, path, ranges, timeout_s=timeout_s)

    # Bytes by layout

    def open_layout(self, layout: dict[str, Any]) -> File:
        """A file addressed by a layout, such as one that travelled with a request; nothing is asked of
        control."""
        return File(self._native, self._completions, layout, self._timeout_s)

    # Queued requests

    def fileno(self) -> int:
        """A descriptor for ``poll``, ``select`` and ``epoll``, the same at each call: readable while `reap`
        has something to return, now and then when it has not, and for good once the client is closed. It
        belongs to the client."""
        if self._closed:
            raise errors.ClosedError("the client is closed")
        return self._completions.fileno()

    def reap(self, timeout_s: float | None = 0.0) -> builtins.list[Request]:
        """The requests submitted with ``queued=True`` that are done and were not returned before, in the
        order of their ends.

        Waits for the first one at most ``timeout_s`` seconds, with None for ever. What a request brought,
        or failed with, its ``wait`` tells at once. Raises ClosedError when the client is closed and none is
        left.
        """
        return self._completions.reap(timeout_s)

    # The client itself

    def stats(self) -> dict[str, int]:
        """What this client has done so far: bytes, requests, retries, failures, connections."""
        return self._native.stats()

    def close(self) -> None:
        """Ends everything under way with `Cancelled`, closes the connections and ends the threads, within
        about a second."""
        if not self._closed:
            self._native.close()
            self._completions.end()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A child that leaves the block of its parent's client has nothing to close.
        if os.getpid() == self._process:
            self.close()

    def _ranges(self, path: str, ranges: Sequence[Range] | None) -> Sequence[Range]:
        return [(0, self.stat(path).known_length())] if ranges is None else ranges

    def _on_path(
        self, path: str, rights: str, work: Callable[[File, float], T], timeout_s: float | None
    ) -> T:
        """What ``work`` makes of the file and the seconds that it may take: what is left of ``timeout_s``,
        which finding the file counts towards, too."""
        left_s = self._countdown(timeout_s)
        known = self._remembered(path, rights)
        if known is not None:
            with suppress(*_OUTDATED):
                return work(known, left_s())
            self._files.pop((path, rights), None)
        file = self._look_up(path, rights, left_s())
        return work(file, left_s())

    async def _afile(self, path: str, rights: str, timeout_s: float | None) -> tuple[File, float]:
        """The file, and what is left of the time."""
        import asyncio

        left_s = self._countdown(timeout_s)
        known = self._remembered(path, rights)
        if known is None:
            known = await asyncio.to_thread(self._look_up, path, rights, left_s())
        return known, left_s()

    def _countdown(self, timeout_s: float | None) -> Callable[[], float]:
        """The seconds that are left, above 0: what has none left ends at once, with its own message."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        milliseconds(limit_s)
        until = time.monotonic() + limit_s
        return lambda: max(0.001, until - time.monotonic())

    def _look_up(self, path: str, rights: str, timeout_s: float) -> File:
        file = self.open_layout(self.namespace.layout(path, rights, timeout_s))
        self._remember(path, rights, file)
        return file

    def _remembered(self, path: str, rights: str) -> File | None:
        since, file = self._files.get((path, rights), (0.0, None))
        return file if time.monotonic() - since < PATH_LIFE_S else None

    def _remember(self, path: str, rights: str, file: File) -> None:
        self._files[path, rights] = (time.monotonic(), file)
        while len(self._files) > PATHS_MAX:
            with suppress(KeyError):  # another thread was faster
                self._files.popitem(last=False)


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes: native threads must not outlive the memory they fill."""
    for client in list(_open_clients):
        if client._process == os.getpid():
            with suppress(errors.Gd2fsError):
                client.close()
