"""A server-sent-event response that notices when nobody listens any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """Sends `events` as they come; `gone` is called when the client disconnects, and the sending ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], gone: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(disconnected(Request(scope, receive)))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sender.done() or sender.cancelled() or sender.exception() is not None:
                self._gone()
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(request: Request) -> None:
    """Returns when the client of a request whose body was read is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def until_gone(request: Request, work: asyncio.Task[object], gone: Callable[[], None]) -> bool:
    """Wait for `work`. False, after calling `gone`, when the client disconnects first; the work goes on."""
    watcher = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        if not work.done():
            gone()
    return work.done()
