"""The engine's HTTP service: OpenAI-style completions over one model, KV cache in GD2FS, none of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from gd2fs.connectors.commit import CALL_TIMEOUT_S
from gd2fs.connectors.reference import ReferenceConnector
from gd2fs.connectors.storage import Client
from gd2fs.engine.answers import DONE, Answer, ChatAnswer, CompletionAnswer, event
from gd2fs.engine.generate import Engine, Generation, Job, Result, Token
from gd2fs.engine.limits import BodyLimit
from gd2fs.engine.loaded import LoadedModel
from gd2fs.engine.memory import rss_mib
from gd2fs.engine.metrics import Metrics
from gd2fs.engine.protocol import ChatBody, CompletionBody, DetokenizeBody, RenderBody, TokenizeBody
from gd2fs.engine.sampling import SamplingParams
from gd2fs.engine.scheduler import Busy, Scheduler
from gd2fs.engine.streaming import EventStream, until_gone

log = logging.getLogger("gd2fs.engine")

# How long the end of the process waits for generations to stop and commit what they computed.
SHUTDOWN_S = 10.0


class Refused(Exception):
    """A request that is wrong; `param` names the field."""

    def __init__(self, message: str, param: str, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


def create_app(
    model: LoadedModel, client: Client | None, *, keep_local: bool = False, queue_max: int = 32
) -> FastAPI:
    """The ASGI application.

    `client` is the engine's own connection to GD2FS; without one, a client is made for the control service
    that the first plan names, and requests that bring no plan run without stored KV. `keep_local` keeps the
    last few sequences in memory, for comparison. At most `queue_max` requests wait for the model; more are
    answered 429.
    """
    service = Service(model, client, keep_local, queue_max)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(title="GD2FS reference engine", lifespan=lifespan)
    app.add_middleware(BodyLimit)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(Busy, functools.partial(_on_busy, service))
    app.post("/v1/chat/completions")(service.chat)
    app.post("/v1/completions")(service.complete)
    app.post("/v1/chat/completions/render")(service.render)
    app.post("/tokenize")(service.tokenize)
    app.post("/detokenize")(service.detokenize)
    app.get("/v1/models")(service.models)
    app.get("/health")(service.health)
    app.get("/metrics")(service.show_metrics)
    app.state.service = service
    return app


class Service:
    """One method for each route."""

    def __init__(self, model: LoadedModel, client: Client | None, keep_local: bool, queue_max: int) -> None:
        from gd2fs._native import crc32c  # the engine's pure parts work without the compiled module

        connector = ReferenceConnector(client, model.kv_identity, model.kv_format, crc32c, _connect)
        self._model = model
        self._engine = Engine(model.model, model.tokenizer, model.shape, connector, keep_local)
        self._scheduler = Scheduler(queue_max)
        self._metrics = Metrics(self._scheduler, connector.committer)
        self._running: dict[asyncio.Task[Result], Generation] = {}
        self._started = int(time.time())

    async def close(self) -> None:
        """Stop what runs, let it commit, within SHUTDOWN_S."""
        for generation in self._running.values():
            generation.cancelled.set()
        if self._running:
            await asyncio.wait(set(self._running), timeout=SHUTDOWN_S)
        self._scheduler.close()
        await asyncio.to_thread(self._engine.connector.close)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Chat completion, whole or streamed."""
        received = time.monotonic()
        self._check_model(body.model)
        ids = body.prompt_token_ids
        if ids is None:
            ids = await self._render(body)
        top = body.top_logprobs if body.logprobs else None
        job = self._job(body, ids, body.output_max, top, received)
        answer = ChatAnswer(f"chatcmpl-{uuid.uuid4().hex}", self._model.name, self._model.tokenizer, ids)
        return await self._answer(request, job, answer, body)

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Completion of a text or of token ids, whole or streamed."""
        received = time.monotonic()
        self._check_model(body.model)
        ids = body.prompt_token_ids
        if ids is None:
            ids = body.prompt_ids
        if ids is None:
            ids = await self._encode(body.prompt_text, "prompt")
        prompt_logprobs = body.logprobs if body.echo else None
        job = self._job(body, ids, body.max_tokens, body.logprobs, received, prompt_logprobs)
        head = (f"cmpl-{uuid.uuid4().hex}", self._model.name, self._model.tokenizer, ids)
        answer = CompletionAnswer(*head, echo=body.echo, top_logprobs=body.logprobs)
        return await self._answer(request, job, answer, body)

    async def render(self, body: RenderBody) -> dict[str, Any]:
        """The token ids that a chat completion of these messages would have."""
        return {"token_ids": await self._render(body)}

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a text."""
        ids = await self._encode(body.prompt, "prompt")
        return {"tokens": ids, "count": len(ids), "max_model_len": self._model.model.config.context_max}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """Text of token ids, special tokens by name."""
        self._check_ids(body.tokens, "tokens")
        decode = functools.partial(self._model.tokenizer.decode, skip_control=False)
        return {"prompt": await asyncio.to_thread(decode, body.tokens)}

    async def models(self) -> dict[str, Any]:
        """The one model, as the OpenAI API lists it."""
        entry = {"id": self._model.name, "object": "model", "created": self._started, "owned_by": "gd2fs"}
        return {"object": "list", "data": [{**entry, "max_model_len": self._model.model.config.context_max}]}

    async def health(self) -> dict[str, Any]:
        """What this engine is: model, KV identity and format. Engines of equal identity form a pool."""
        kv_format = self._model.kv_format
        return {
            "status": "ok",
            "model": self._model.name,
            "kv_identity": self._model.kv_identity,
            "kv_format": {
                "name": kv_format.name,
                "bytes_per_token": kv_format.bytes_per_token,
                "granule": kv_format.granule,
            },
            "keep_local": self._engine.local is not None,
            "max_context": self._model.model.config.context_max,
            "rss_mib": rss_mib(),
        }

    async def show_metrics(self) -> Response:
        """Prometheus text."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    def count_refused(self, reason: str) -> None:
        self._metrics.refused(reason)

    async def _render(self, body: ChatBody | RenderBody) -> list[int]:
        messages = [message.model_dump() for message in body.messages]
        tokenizer, prompt = self._model.tokenizer, body.add_generation_prompt
        try:
            text = tokenizer.render(messages, add_generation_prompt=prompt)
        except ValueError as error:
            raise Refused(str(error), "messages") from error
        return await self._encode(text, "messages")

    async def _encode(self, text: str, param: str) -> list[int]:
        """Token ids of `text`. Raises Refused for what is no text, and for more than any context can hold:
        tokenising megabytes of it would take seconds.
        """
        context, tokenizer = self._model.model.config.context_max, self._model.tokenizer
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise Refused("holds half a surrogate pair, which is no character", param) from error
        if size > context * tokenizer.token_bytes_max:
            raise Refused(f"{size} bytes of text can't fit into the model's context of {context}", param)
        return await asyncio.to_thread(tokenizer.encode, text)

    def _job(
        self,
        body: ChatBody | CompletionBody,
        ids: Any,
        max_tokens: int | None,
        top_logprobs: int | None,
        received: float,
        prompt_logprobs: int | None = None,
    ) -> Job:
        self._check_ids(ids, "prompt")
        context = self._model.model.config.context_max
        room = context - len(ids)
        if room < (0 if max_tokens == 0 else 1):
            raise Refused(f"the prompt has {len(ids)} tokens; the model's context is {context}", "prompt")
        if max_tokens is not None and max_tokens > room:
            message = (
                f"max_tokens is {max_tokens}, but after a prompt of {len(ids)} tokens only {room} are left"
            )
            raise Refused(f"{message} of the model's context of {context}", "max_tokens")
        return Job(
            ids=ids,
            max_tokens=room if max_tokens is None else max_tokens,
            sampling=SamplingParams(body.temperature, body.top_p, body.seed, top_logprobs),
            received=received,
            stop=body.stops,
            ignore_eos=body.ignore_eos,
            prompt_logprobs=prompt_logprobs,
            kvcache_params=body.kvcache_params,
            not_covered="cache_salt" if body.cache_salt else None,
        )

    def _check_ids(self, ids: Any, param: str) -> None:
        vocab = self._model.tokenizer.vocab
        if not isinstance(ids, list) or not ids:
            raise Refused("must be a list of at least one of the token ids", param)
        if not all(type(token) is int and 0 <= token < vocab for token in ids):
            raise Refused(f"token ids must be whole numbers below {vocab}", param)

    def _check_model(self, name: str | None) -> None:
        if name and name != self._model.name:
            raise Refused(
                f"the model {name!r} is not served here; this engine has {self._model.name!r}", "model", 404
            )

    async def _answer(
        self, request: Request, job: Job, answer: Answer, body: ChatBody | CompletionBody
    ) -> Response:
        loop = asyncio.get_running_loop()
        # At most max_tokens entries, so the queue is bounded by the context. None is the end.
        tokens: asyncio.Queue[Token | None] = asyncio.Queue()
        self._scheduler.admit()

        def emit(token: Token) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, token)

        generation = Generation(self._engine, job, emit)
        # A task of its own: it outlives the connection, so that what was computed is committed.
        work = asyncio.create_task(self._scheduler.run(generation))
        self._running[work] = generation
        work.add_done_callback(lambda task: self._done(task, job, tokens))
        if body.stream:
            with_end = body.include_usage or body.kv_transfer_params is not None
            return EventStream(self._events(work, answer, tokens, with_end), generation.cancelled.set)
        if not await until_gone(request, work, generation.cancelled.set):
            return Response(status_code=499)
        if work.exception() is not None:
            return _error(
                500, "the engine failed on this request; its log has the reason", None, "internal_error"
            )
        everything = [token async for token in _until_end(tokens)]
        return JSONResponse(answer.whole(everything, work.result()))

    async def _events(
        self, work: asyncio.Task[Result], answer: Answer, tokens: asyncio.Queue[Token | None], with_end: bool
    ) -> AsyncIterator[bytes]:
        for chunk in answer.opening():
            yield event(chunk)
        async for token in _until_end(tokens):
            yield event(answer.chunk(token))
        if work.cancelled() or work.exception() is not None:
            yield event({"error": {"message": "the engine failed on this request", "type": "internal_error"}})
            return
        for chunk in answer.closing(work.result(), with_end=with_end):
            yield event(chunk)
        yield DONE

    def _done(self, work: asyncio.Task[Result], job: Job, tokens: asyncio.Queue[Token | None]) -> None:
        self._running.pop(work, None)
        if work.cancelled() or work.exception() is not None:
            log.error("a generation failed", exc_info=None if work.cancelled() else work.exception())
            self._metrics.refused("internal_error")
        else:
            self._metrics.ended(work.result(), len(job.ids))
        tokens.put_nowait(None)


async def _until_end(tokens: asyncio.Queue[Token | None]) -> AsyncIterator[Token]:
    while (token := await tokens.get()) is not None:
        yield token


def _connect(controls: Sequence[str]) -> Client:
    """A client of the control service that a plan names; it is asked for its cluster, briefly."""
    from gd2fs.client import connect

    addresses = ",".join(urlsplit(url).netloc for url in controls)
    return connect(f"gd2fs://{addresses}", timeout_s=CALL_TIMEOUT_S)


def _error(status: int, message: str, param: str | None, kind: str = "invalid_request_error") -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"] if part != "body") or None
    return _error(400, f"{param or 'body'}: {first['msg'].removeprefix('Value error, ')}", param)


def _on_http(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths, bodies that are not JSON."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}", None)


def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(error.status, f"{error.param}: {error}", error.param)


def _on_busy(service: Service, _: Request, error: Exception) -> Response:
    assert isinstance(error, Busy)
    service.count_refused("busy")
    response = _error(429, f"{error}; try again later", None, "overloaded")
    response.headers["retry-after"] = str(error.retry_after_s)
    return response
