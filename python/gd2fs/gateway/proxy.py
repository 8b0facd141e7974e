"""Forwarding to an engine: one retry before the first token, then bytes straight through."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from gd2fs.gateway.engines import Engine, Pool
from gd2fs.gateway.planning import EngineFailed, EngineRefused, Planned, Planner, check_status

log = logging.getLogger("gd2fs.gateway")

# The first choice and one more: a request that kills engines must not walk through the whole pool.
ATTEMPTS_MAX = 2
# One server-sent event; the longest real ones carry log-probabilities or the final report.
EVENT_BYTES_MAX = 4 << 20
CHAT_PATH = "/v1/chat/completions"
# What an engine's last chunk tells besides its choices.
ENDING_KEYS = ("usage", "kv_transfer_params")
_NO_FINISH = re.compile(rb'"finish_reason"\s*:\s*null')


class NoEngine(Exception):
    """No engine could begin an answer; the message says why the last one did not."""


@dataclass
class Answer:
    """An answer that has begun. `events` is for streams; `body` is the whole JSON otherwise."""

    engine: Engine
    planned: Planned
    body: dict[str, Any] = field(default_factory=dict)
    events: AsyncIterator[bytes] | None = None
    close: Callable[[], Any] | None = None

    def headers(self) -> dict[str, str]:
        plan = self.planned.plan
        headers = {"x-gd2fs-session": self.planned.session or "", "x-gd2fs-engine": self.engine.url}
        if plan:
            headers["x-gd2fs-reusable-tokens"] = str(plan["reusable_tokens"])
            headers["x-gd2fs-cached-tokens"] = str(plan["cached_tokens"])
        return headers


class Proxy:
    def __init__(
        self, pool: Pool, planner: Planner, http: httpx2.AsyncClient, count: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._planner = planner
        self._http = http
        self._count = count

    async def begin(self, body: dict[str, Any], session: str | None, request_id: str) -> Answer:
        """Chooses an engine, plans, and waits for the first token (stream) or the whole answer.

        The second attempt uses the same request id, so that its plan takes over the first one's grant and
        nothing the first engine still writes can count. Raises NoEngine, EngineRefused, SessionUnknown.
        """
        reason = "no engine is healthy"
        tried: set[str] = set()
        for attempt in range(ATTEMPTS_MAX):
            engine = self._pool.choose(body.get("model"), tried)
            if engine is None:
                break
            if attempt:
                self._count("retried")
            tried.add(engine.url)
            planned = Planned(session)
            try:
                planned = await self._planner.prepare(engine, body, session, request_id)
                session = planned.session
                return await self._send(engine, body, planned)
            except EngineRefused:
                await self._planner.abort(planned)
                raise
            except EngineFailed as error:
                reason = f"{engine.url}: {error}"
                log.warning("request %s: %s", request_id, reason)
                if error.dead:
                    self._pool.failed(engine, str(error))
                if attempt + 1 == ATTEMPTS_MAX or self._pool_is_exhausted(tried):
                    await self._planner.abort(planned)
        raise NoEngine(reason)

    def _pool_is_exhausted(self, tried: set[str]) -> bool:
        return all(engine.url in tried or not engine.healthy for engine in self._pool.engines)

    async def _send(self, engine: Engine, body: dict[str, Any], planned: Planned) -> Answer:
        wanted = dict(body)
        if planned.kv_transfer_params is not None:
            wanted["kv_transfer_params"] = planned.kv_transfer_params
        if not wanted.get("stream"):
            try:
                response = await self._http.post(engine.url + CHAT_PATH, json=wanted)
            except httpx2.HTTPError as error:
                raise EngineFailed(str(error) or type(error).__name__) from error
            check_status(response.status_code, response.content)
            try:
                whole = response.json()
            except ValueError as error:
                raise EngineFailed("the answer is not JSON") from error
            return Answer(engine, planned, body={**whole, "session_id": planned.session})
        # The report of what came from where travels with the usage, so it is always asked for.
        wanted["stream_options"] = {**(wanted.get("stream_options") or {}), "include_usage": True}
        request = self._http.build_request("POST", engine.url + CHAT_PATH, json=wanted)
        try:
            response = await self._http.send(request, stream=True)
        except httpx2.HTTPError as error:
            raise EngineFailed(str(error) or type(error).__name__) from error
        try:
            if response.status_code >= 400:
                check_status(response.status_code, await response.aread())
            source = events(response)
            head = await _until_token(source)
        except httpx2.HTTPError as error:
            await response.aclose()
            raise EngineFailed(str(error) or type(error).__name__) from error
        except BaseException:
            await response.aclose()
            raise
        asked = bool((body.get("stream_options") or {}).get("include_usage"))
        relayed = self._relayed(head, source, engine, planned, usage_asked=asked)
        return Answer(engine, planned, events=relayed, close=response.aclose)

    async def _relayed(
        self,
        head: list[bytes],
        source: AsyncIterator[bytes],
        engine: Engine,
        planned: Planned,
        *,
        usage_asked: bool,
    ) -> AsyncIterator[bytes]:
        """`relay`, and the end of a plan whose engine ended first: the next turn then goes on in its file."""
        try:
            async for event in relay(head, source, planned.session, usage_asked=usage_asked):
                yield event
        except (httpx2.HTTPError, EngineFailed) as error:
            log.warning("engine %s ended in mid-answer: %s", engine.url, error or type(error).__name__)
            # The headers are gone: the only honest way to say it is an event, which clients take as an error.
            message = "the engine ended in the middle of the answer; send the request again"
            yield _event({"error": {"message": message, "type": "engine_failed"}})
            await self._planner.abort(planned)


async def events(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The server-sent events of a response, each with its closing blank line. Raises EngineFailed if one is
    too long.
    """
    pending = b""
    async for part in response.aiter_raw():
        pending += part
        while (end := pending.find(b"\n\n")) >= 0:
            yield pending[: end + 2]
            pending = pending[end + 2 :]
        if len(pending) > EVENT_BYTES_MAX:
            raise EngineFailed(f"an event is longer than {EVENT_BYTES_MAX} bytes")


async def _until_token(source: AsyncIterator[bytes]) -> list[bytes]:
    """The events up to and with the first that shows a token, or ends the answer. Raises EngineFailed if
    none comes.
    """
    head: list[bytes] = []
    async for event in source:
        head.append(event)
        chunk = parse_event(event)
        if chunk is None:
            continue
        if "error" in chunk:
            raise EngineFailed(str(chunk["error"]))
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("tool_calls") or choice.get("finish_reason"):
                return head
    raise EngineFailed("the answer ended before its first token")


def parse_event(event: bytes) -> dict[str, Any] | None:
    """The JSON object of a `data:` event; None for comments, [DONE] and what is not an object."""
    if not event.startswith(b"data:"):
        return None
    try:
        chunk = json.loads(event[5:])
    except ValueError:
        return None
    return chunk if isinstance(chunk, dict) else None


async def relay(
    head: list[bytes], source: AsyncIterator[bytes], session: str | None, *, usage_asked: bool
) -> AsyncIterator[bytes]:
    """Passes events on as they come; the last chunk gets the session id. Raises EngineFailed, HTTPError where
    the engine ends before its answer.

    usage_asked False: the user's client may not know chunks without choices, so what the engine says at its
    very end (usage, KV report) goes into the chunk with the finish reason, which waits for it.
    """
    waiting: dict[str, Any] | None = None
    ended = False
    # To the very end, so that the connection can be used again.
    async for event in _chain(head, source):
        chunk = parse_event(event) if _may_be_last(event) else None
        if chunk is not None and "error" in chunk:
            ended = True
            yield event
        elif chunk is not None and chunk.get("choices") and not usage_asked:
            waiting = chunk
        elif chunk is not None and not chunk.get("choices"):
            ending = {key: chunk[key] for key in ENDING_KEYS if key in chunk}
            yield _event({**(waiting or chunk), **ending, "session_id": session})
            waiting = None
        elif event.startswith(b"data: [DONE]"):
            ended = True
            if waiting is not None:
                yield _event({**waiting, "session_id": session})
            yield event
        else:
            yield event
    if not ended:
        raise EngineFailed("the stream ended without [DONE]")


async def _chain(head: list[bytes], source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for event in head:
        yield event
    async for event in source:
        yield event


def _may_be_last(event: bytes) -> bool:
    """Cheap and without false negatives, since parsing every token's event would cost more than passing it
    on.
    """
    return event.startswith(b"data: {") and not _NO_FINISH.search(event)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
