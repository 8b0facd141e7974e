"""The gateway's HTTP face."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import httpx2
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from gd2fs.config.tree import GatewayConfig
from gd2fs.gateway.admission import Admission, Overloaded
from gd2fs.gateway.body import BadRequest, read_body
from gd2fs.gateway.engines import Pool
from gd2fs.gateway.metrics import Metrics
from gd2fs.gateway.planning import Control, EngineRefused, Planner, SessionUnknown
from gd2fs.gateway.proxy import Answer, NoEngine, Proxy

T = TypeVar("T")


class ClientGone(Exception):
    """The user closed the connection; whatever was under way for it has been cancelled."""


class Gateway:
    """The parts of one gateway, and how a chat request goes through them."""

    def __init__(self, engines: list[str], control: Control, config: GatewayConfig) -> None:
        # As many connections as requests may be active, and some for rendering and probes.
        limits = httpx2.Limits(
            max_connections=2 * config.active_max + 8, max_keepalive_connections=config.active_max
        )
        timeout = httpx2.Timeout(config.read_s, connect=config.connect_s, pool=config.waiting_s)
        self.config = config
        self.http = httpx2.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        self.pool = Pool(engines, self.http, config.probe_s)
        self.admission = Admission(config.active_max, config.waiting_max, config.waiting_s)
        self.metrics = Metrics(self.admission, self.pool)
        self.planner = Planner(control, self.http, config.plan_s, config.session_ttl_s, self.metrics.outcome)
        self.proxy = Proxy(self.pool, self.planner, self.http, self.metrics.outcome)

    async def chat(self, request: Request) -> Response:
        try:
            self._authenticate(request)
            body, session = await self._read(request)
            if not self.pool.serves(body.get("model")):
                return self._error(404, f"no engine serves the model {body['model']!r}; see /v1/models")
            await unless_gone(request, self.admission.enter())
        except BadRequest as error:
            return self._error(400, str(error))
        except PermissionError as error:
            return self._error(401, str(error))
        except Overloaded as error:
            return self._error(429, f"too many requests: {error}", retry_after_s=error.retry_after_s)
        except ClientGone:
            return self._error(499, "the client closed the connection")
        streaming = False
        try:
            answer = await self._begin(request, body, session)
            if isinstance(answer, Response):
                return answer
            self.metrics.answered(200)
            if answer.events is None:
                return JSONResponse(answer.body, headers=answer.headers())
            streaming = True
            return RelayResponse(answer, self.admission)
        finally:
            if not streaming:
                self.admission.leave()

    async def _begin(self, request: Request, body: dict[str, Any], session: str | None) -> Answer | Response:
        start = time.perf_counter()
        try:
            answer = await unless_gone(request, self.proxy.begin(body, session, uuid.uuid4().hex))
        except NoEngine as error:
            return self._error(503, f"no engine could answer: {error}", retry_after_s=2, session=session)
        except SessionUnknown as error:
            return self._error(404, f"{error}; leave session_id out to begin a new session", session=session)
        except EngineRefused as error:
            self.metrics.answered(error.status)
            headers = {"x-gd2fs-session": session or ""}
            return Response(error.body, error.status, headers, media_type="application/json")
        except ClientGone:
            return self._error(499, "the client closed the connection", session=session)
        self.metrics.began(answer.planned.plan, time.perf_counter() - start)
        return answer

    def _authenticate(self, request: Request) -> None:
        keys = self.config.api_keys
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip().encode()
        if keys and not any(hmac.compare_digest(given, key.encode()) for key in keys):
            raise PermissionError(
                "Authorization: Bearer with a key of this gateway (gateway.api_keys) is needed"
            )

    def guarded(self, request: Request, answer: Callable[[], Response]) -> Response:
        """`answer()` for a user that may see it."""
        try:
            self._authenticate(request)
        except PermissionError as error:
            return self._error(401, str(error))
        return answer()

    async def _read(self, request: Request) -> tuple[dict[str, Any], str | None]:
        """The user's body without KV metadata, and the session it names."""
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self.config.body_bytes_max:
                raise BadRequest(
                    f"the body is longer than {self.config.body_bytes_max} bytes (gateway.body_bytes_max)"
                )
        return read_body(data)

    def _error(
        self, status: int, message: str, *, retry_after_s: int | None = None, session: str | None = None
    ) -> Response:
        self.metrics.answered(status)
        headers = {"x-gd2fs-session": session or ""}
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        return JSONResponse(
            {"error": {"message": message, "type": "gateway", "code": status}}, status, headers
        )

    def no_such_route(self, request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}; there is POST /v1/chat/completions"
        return self._error(error.status_code, f"{message}, GET /v1/models, /health and /metrics")

    def health(self) -> Response:
        ok = any(engine.healthy for engine in self.pool.engines)
        answer: dict[str, Any] = {"status": "ok" if ok else "no_engine"}
        if not self.config.api_keys:  # strangers need not learn the addresses behind
            answer["engines"] = [engine.describe() for engine in self.pool.engines]
        return JSONResponse(answer, 200 if ok else 503)

    def models(self) -> dict[str, Any]:
        names = sorted({engine.model for engine in self.pool.engines if engine.healthy and engine.model})
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "owned_by": "gd2fs"} for name in names],
        }

    async def close(self) -> None:
        self.planner.close()
        await self.http.aclose()


class RelayResponse(StreamingResponse):
    """A stream that always gives back its connection and its place, also if the user left before the first
    byte.
    """

    def __init__(self, answer: Answer, admission: Admission) -> None:
        assert answer.events is not None and answer.close is not None
        super().__init__(answer.events, media_type="text/event-stream", headers=answer.headers())
        self._close = answer.close
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._admission.leave()
            # Closing the connection is how the engine learns that nobody listens any more.
            await asyncio.shield(self._close())


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, and ClientGone raised, if the user closes the connection
    meanwhile.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.wait({task, watch})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(engines: list[str], control: Control, config: GatewayConfig | None = None) -> FastAPI:
    """The gateway as an ASGI app over `engines` (http URLs), planning through `control` (a gd2fs.Client)."""
    gateway = Gateway(engines, control, config or GatewayConfig())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.pool.probe()
        watch = asyncio.create_task(gateway.pool.watch())
        try:
            yield
        finally:
            watch.cancel()
            await gateway.close()

    app = FastAPI(title="GD2FS gateway", lifespan=lifespan)
    app.state.gateway = gateway

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        return gateway.no_such_route(request, error)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await gateway.chat(request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return gateway.guarded(request, lambda: JSONResponse(gateway.models()))

    @app.get("/health")
    async def health() -> Response:
        return gateway.health()

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return gateway.guarded(request, lambda: Response(gateway.metrics.text(), media_type="text/plain"))

    return app
