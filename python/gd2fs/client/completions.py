"""One reaper per client: results go from the native queue to whoever waits, thread or event loop.

Blocking callers take turns: one of them, the leader, waits in native code and hands out what arrives; the
others sleep until their result is there or the leader leaves. Event loops watch the queue's descriptor.
Queued requests are kept for `reap` as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from gd2fs import errors

if TYPE_CHECKING:
    from gd2fs import _native

BATCH = 1024
#: A leader looks around this often: its own result may have been handed out by somebody else.
SLICE_S = 0.1
#: A leadership that is not renewed for this long is void: an exception may have hit between any two steps.
LEAD_S = 2 * SLICE_S
#: Queued requests that are under way or not reaped: more is a caller that does not reap.
QUEUED_MAX = 65_536


class Request:
    """A transfer under way. Its buffers are in use until it is done, whatever its outcome."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._number = 0
        self._queued = False
        self._outcome: tuple[int, int, str] | None = None
        self._futures: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, and its memory is the caller's again."""
        return self._outcome is not None

    def wait(self, timeout_s: float | None = None) -> int:
        """Blocks until it is done; the bytes moved. Raises what it failed with.

        Raises Timeout when ``timeout_s`` seconds pass first; the transfer then goes on, and ``done`` is
        false.
        """
        self._completions.wait(self, timeout_s)
        return self._result()

    def __await__(self):  # type: ignore[no-untyped-def]  # what a coroutine's __await__ returns has no public name
        return self._completions.wait_async(self).__await__()

    def cancel(self) -> None:
        """Asks for an early end. It still completes, as CANCELLED or with its result; wait for that before
        using its memory."""
        if not self.done:
            self._completions.cancel(self)

    def give_up(self) -> None:
        """Cancels it and blocks until its memory is free: a matter of milliseconds, which Ctrl-C does not
        cut short."""
        while not self.done:
            with contextlib.suppress(KeyboardInterrupt):
                self.cancel()
                self._completions.wait(self, None)

    def _result(self) -> int:
        assert self._outcome is not None
        code, moved, message = self._outcome
        if code:
            raise errors.from_code(code, message)
        return moved

    def _finish(self, code: int, moved: int, message: str) -> None:
        """Idempotent: an exception in the middle of handing out makes it run again."""
        self._outcome = (code, moved, message)
        for loop, future in self._futures:
            # The loop may be closed, even between two steps here; then nobody waits there.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Completions:
    """Requests under way of one native client."""

    def __init__(self, native: _native.Client) -> None:
        self._native = native
        # Asked for when a loop waits: until then no completion costs a system call for it.
        self._descriptor = -1
        # Reentrant, since a finaliser may cancel a request while the lock is held.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: dict[int, Request] = {}
        # Native code appends to it, so that a signal between two Python steps can lose nothing.
        self._reaped: list[tuple[int, int, int, str]] = []
        self._lead_until = 0.0
        self._watched: dict[asyncio.AbstractEventLoop, int] = {}
        # Queued requests: how many there are, and those that have ended and are not reaped.
        self._queued = 0
        self._ended: dict[int, Request] = {}
        # Readable while some wait here; the poller is readable too while completions wait in native code.
        self._signal = -1
        self._poller: select.epoll | None = None
        self._closed = False
        self._process = os.getpid()

    def submit(self, call: Callable[[], int], queued: bool) -> Request:
        """Starts what ``call`` submits; the lock keeps its completion from being handed out before it is
        known. One that is ``queued`` comes back from `reap`."""
        self._refuse_fork()
        request = Request(self)
        with self._changed:
            if queued and self._queued >= QUEUED_MAX:
                raise errors.Overloaded(
                    f"{QUEUED_MAX} queued requests are under way or not reaped; reap before submitting more"
                )
            request._number = call()
            request._queued = queued
            self._queued += queued
            self._waiting[request._number] = request
        return request

    def cancel(self, request: Request) -> None:
        self._native.cancel(request._number)

    def wait(self, request: Request, timeout_s: float | None) -> None:
        self._refuse_fork()
        if not self._wait_until(lambda: request.done, timeout_s):
            raise errors.Timeout(f"still under way after {timeout_s} s of waiting")

    def fileno(self) -> int:
        """See `Client.fileno`."""
        self._refuse_fork()
        with self._changed:
            if self._poller is None:
                poller = select.epoll()
                poller.register(self._native.fileno(), select.EPOLLIN)
                self._signal = os.eventfd(len(self._ended), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                weakref.finalize(self, os.close, self._signal)
                poller.register(self._signal, select.EPOLLIN)
                self._poller = poller
            return self._poller.fileno()

    def reap(self, timeout_s: float | None) -> list[Request]:
        """See `Client.reap`."""
        self._refuse_fork()
        if timeout_s is not None and math.isnan(timeout_s):
            raise errors.Invalid("timeout_s: not a number; use None to wait for ever")
        self._on_readable()
        self._wait_until(lambda: bool(self._ended) or self._closed, timeout_s)
        with self._changed:
            if not self._ended and self._closed:
                raise errors.ClosedError("the client is closed, and no request is left to reap")
            ended = list(self._ended.values())
            self._ended.clear()
            self._queued -= len(ended)
            # A closed client's stays readable: a loop that polls it has to learn that from `reap`.
            if self._signal >= 0 and not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._signal)
        return ended

    def _wait_until(self, is_over: Callable[[], bool], timeout_s: float | None) -> bool:
        """Takes part in the waiting until ``is_over``; false if ``timeout_s`` seconds pass first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_over():
            left = SLICE_S if deadline is None else min(SLICE_S, deadline - time.monotonic())
            if left <= 0:
                return False
            with self._changed:
                if is_over():
                    return True
                leader = time.monotonic() >= self._lead_until
                if leader:
                    self._lead_until = time.monotonic() + LEAD_S
                else:
                    self._changed.wait(left)
            if leader:
                try:
                    self._reap(left)
                finally:
                    self._lead_until = 0.0
                    self._hand_out()
        return True

    async def wait_async(self, request: Request) -> int:
        """Waits in the running loop. A cancelled wait cancels the transfer and returns when its memory is
        free again."""
        self._refuse_fork()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if request.done:
                return request._result()
            request._futures.append((loop, future))
        self._watch(loop)
        cancelled: asyncio.CancelledError | None = None
        try:
            while not request.done:
                try:
                    await asyncio.shield(future)
                except asyncio.CancelledError as error:
                    cancelled = error
                    request.cancel()
        finally:
            self._unwatch(loop)
        if cancelled is not None:
            raise cancelled
        return request._result()

    def end(self) -> None:
        """After the native client was closed: hands out everything that is left."""
        self._reap(0)
        self._hand_out()
        with self._changed:
            rest = list(self._waiting)
            self._reaped.extend(
                (number, errors.Cancelled.code, 0, "the client was closed") for number in rest
            )
            self._closed = True
        self._hand_out()

    def _refuse_fork(self) -> None:
        """A fork copies locks as they are, held or not: a child must not touch them."""
        if os.getpid() != self._process:
            raise errors.ForkedError("the client was made before a fork; connect again in the child")

    def _reap(self, timeout_s: float) -> None:
        try:
            while self._native.reap(BATCH, int(timeout_s * 1000), self._reaped):
                if len(self._reaped) < BATCH:
                    return
                self._hand_out()
                timeout_s = 0
        except errors.ClosedError:
            # Closed and empty: `end` has the rest.
            time.sleep(min(timeout_s, 0.001))

    def _hand_out(self) -> None:
        with self._changed:
            # A copy first: reaping appends without the lock. Removed last: an exception makes it run again.
            batch = self._reaped[:]
            for number, code, moved, message in batch:
                request = self._waiting.get(number)
                if request is not None:
                    request._finish(code, moved, message)
                    if request._queued:
                        self._ended[number] = request
                    self._waiting.pop(number, None)
            if (self._ended or self._closed) and self._signal >= 0:
                os.eventfd_write(self._signal, 1)
            del self._reaped[: len(batch)]
            self._changed.notify_all()

    def _on_readable(self) -> None:
        # A leader wakes for the same completion and hands it out; taking it away would leave the leader
        # asleep.
        if time.monotonic() >= self._lead_until:
            self._reap(0)
            self._hand_out()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            count = self._watched.get(loop, 0)
            if not count:
                self._descriptor = self._native.fileno()
                loop.add_reader(self._descriptor, self._on_readable)
            self._watched[loop] = count + 1

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            self._watched[loop] -= 1
            if not self._watched[loop]:
                del self._watched[loop]
                loop.remove_reader(self._descriptor)
