"""What happens around every request: who asks, how large it may be, how long it took."""

from __future__ import annotations

import json
import time
from typing import Annotated

from fastapi import Depends, Header, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gd2fs import errors
from gd2fs.control.auth import Principal, authenticate
from gd2fs.control.metrics import Metrics
from gd2fs.control.service import Service


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def principal_of(
    request: Request,
    authorization: Annotated[str | None, Header()] = None,
    x_gd2fs_tenant: Annotated[str | None, Header()] = None,
) -> Principal:
    service = service_of(request)
    return authenticate(service.keys, service.database.time.now(), authorization, x_gd2fs_tenant)


Control = Annotated[Service, Depends(service_of)]
Caller = Annotated[Principal, Depends(principal_of)]


class BodyLimit:
    """Refuses a body beyond `bytes_max`, as soon as its length is known or that much has arrived."""

    def __init__(self, app: ASGIApp, bytes_max: int) -> None:
        self._app = app
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self._bytes_max:
            return await self._refuse(send)
        body: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body.append(message.get("body", b""))
            size += len(body[-1])
            if size > self._bytes_max:
                return await self._refuse(send)
            if not message.get("more_body", False):
                break
        whole: Message | None = {"type": "http.request", "body": b"".join(body), "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            message, whole = whole, None
            return message if message is not None else await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, send: Send) -> None:
        error = errors.TooLarge(f"the body is larger than {self._bytes_max} bytes")
        content = json.dumps({"error": {"code": error.code, "name": error.name, "message": error.message}})
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": content.encode()})


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Measured:
    """Counts requests and their time by route, never by path: paths have no bound."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 500
        start = time.perf_counter()

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observe)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            # Servers pass on whatever word stands in a method's place.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.requests.labels(method, route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - start)
