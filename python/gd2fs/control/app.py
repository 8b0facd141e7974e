"""The REST service: `create_app` wires routes, errors, limits and metrics. OpenAPI is at /openapi.json."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import gd2fs
from gd2fs import errors
from gd2fs.control import http_fs, http_kv, http_nodes
from gd2fs.control.clock import Clock, ClusterTime
from gd2fs.control.http_edge import BodyLimit, Measured
from gd2fs.control.node_link import NodeLink
from gd2fs.control.plans import PLAN_TTL_S
from gd2fs.control.requests import BODY_BYTES_MAX
from gd2fs.control.service import Service
from gd2fs.kv import SegmentError
from gd2fs.signing import Keys

_log = logging.getLogger(__name__)

_HTTP_STATUS: dict[type[errors.Gd2fsError], int] = {
    errors.Unauthenticated: 401,
    errors.BadSignature: 401,
    errors.Expired: 401,
    errors.Forbidden: 403,
    errors.WrongCluster: 403,
    errors.NotFound: 404,
    errors.Deleted: 404,
    errors.Exists: 409,
    errors.NotEmpty: 409,
    errors.IsADirectory: 409,
    errors.NotADirectory: 409,
    errors.Conflict: 409,
    errors.StaleWriter: 409,
    errors.StaleLayout: 409,
    errors.StaleIncarnation: 409,
    errors.Lost: 409,
    errors.Hole: 409,
    errors.Sealed: 409,
    errors.PlanSuperseded: 409,
    errors.PlanExpired: 410,
    errors.TooLarge: 413,
    errors.Overloaded: 429,
    errors.Internal: 500,
    errors.Unsupported: 501,
    errors.Timeout: 504,
    errors.NoSpace: 507,
    errors.NoNodes: 507,
}
"""The code in the body is what counts; the HTTP status is the nearest there is. 503 where a retry may help,
else 400."""


def create_app(
    db_url: str,
    keys: Keys,
    link: NodeLink | Callable[[str, Clock], NodeLink],
    cluster_id: str | None = None,
    *,
    plan_ttl_s: int = PLAN_TTL_S,
    advertise: Sequence[str] = (),
    time: ClusterTime | None = None,
    background: bool = True,
) -> FastAPI:
    """The app over one database, brought to this version's schema first.

    `link` is the line to the nodes, or makes it from the cluster's id and time. `advertise`: addresses of all
    control processes (http://HOST:PORT), which travel with plans; none: the address each request came to.
    `background`: run the worker that frees bytes and ends what is overdue. Raises WrongCluster, Unavailable.
    """
    service = Service(db_url, keys, link, cluster_id, plan_ttl_s=plan_ttl_s, advertise=advertise, time=time)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if background:
            service.reclaimer.start()
        yield
        service.close()

    app = FastAPI(title="GD2FS control", version=gd2fs.__version__, lifespan=lifespan, docs_url="/docs")
    app.state.service = service
    for router in (http_nodes.router, http_fs.router, http_kv.router):
        app.include_router(router)
    app.add_middleware(BodyLimit, bytes_max=BODY_BYTES_MAX)
    app.add_middleware(Measured, metrics=service.metrics)
    _answer_errors(app)
    return app


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(errors.Gd2fsError)
    def known(request: Request, error: errors.Gd2fsError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        # The first part says body, query or path; the rest is the field.
        field = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
        more = len(error.errors()) - 1
        return error_response(
            errors.Invalid(f"{field}: {first['msg']}" + (f" (and {more} more problems)" if more else ""))
        )

    @app.exception_handler(SegmentError)
    def segment(request: Request, error: SegmentError) -> JSONResponse:
        return error_response(errors.Invalid(str(error)))

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> JSONResponse:
        kind = {404: errors.NotFound, 413: errors.TooLarge}.get(error.status_code, errors.Invalid)
        return error_response(kind(f"{request.method} {request.url.path}: {error.detail}"), error.status_code)

    @app.exception_handler(Exception)
    def fault(request: Request, error: Exception) -> JSONResponse:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(errors.Internal("a fault of control; its log has the details"))


def error_response(error: errors.Gd2fsError, status: int | None = None) -> JSONResponse:
    """`{"error": {"code", "name", "message"}}`."""
    if status is None:
        status = _HTTP_STATUS.get(type(error), 503 if error.retryable else 400)
    body = {"error": {"code": error.code, "name": error.name, "message": error.message}}
    return JSONResponse(body, status_code=status)
