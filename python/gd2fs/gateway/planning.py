"""From messages to token ids and a plan: render once, ask control what is stored, splice sampled ids back
in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import httpx2

from gd2fs.gateway.engines import Engine
from gd2fs.kv import splice

log = logging.getLogger("gd2fs.gateway")

# Calls to control at once. Each is short and bounded in time; more would only queue up in control's database.
CONTROL_THREADS = 16
# Rendering is string work; an engine that needs longer is in trouble.
RENDER_TIMEOUT_S = 10.0
# What of a chat body decides the token ids; the rest (sampling) does not matter for rendering.
RENDERED_KEYS = ("model", "messages", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt")


class Control(Protocol):
    """What the gateway needs of gd2fs.Client. Blocking; raises FileNotFoundError for an unknown session."""

    def control(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]: ...


class EngineFailed(Exception):
    """The engine did not do its part; another one may. dead: leave it out until it is seen healthy again."""

    def __init__(self, message: str, *, dead: bool = True) -> None:
        super().__init__(message)
        self.dead = dead


class EngineRefused(Exception):
    """The engine says that the request itself is wrong; its answer goes to the user as it is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body


class SessionUnknown(Exception):
    """The user named a session that does not exist."""


@dataclass
class Planned:
    """What goes to the engine besides the user's body. token_ids None: the engine renders by itself,
    without KV.
    """

    session: str | None = None
    token_ids: list[int] | None = None
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        if self.token_ids is None:
            return None
        params: dict[str, Any] = {"prompt_token_ids": self.token_ids}
        if self.plan:
            params["kvcache_params"] = self.plan["kv_transfer"]
        return params

    @property
    def plan_token(self) -> str | None:
        return self.plan["kv_transfer"]["plan"]["token"] if self.plan else None


class Planner:
    """Plans requests. Nothing control or storage does wrong fails a request: it then goes on without KV
    metadata.
    """

    def __init__(
        self,
        control: Control,
        http: httpx2.AsyncClient,
        plan_s: float,
        session_ttl_s: int,
        count: Callable[[str], None],
    ) -> None:
        self._control = control
        self._http = http
        self._plan_s = plan_s
        self._session_ttl_s = session_ttl_s
        self._count = count  # counts an outcome by name, for /metrics
        self._threads = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="gd2fs-control")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prepare(
        self, engine: Engine, body: dict[str, Any], session: str | None, request_id: str
    ) -> Planned:
        """Ids, session and plan for one request on `engine`.

        Raises EngineFailed, EngineRefused (rendering) and SessionUnknown.
        """
        if engine.kv_identity is None or not _coverable(body):
            self._count("not_covered")
            return Planned(session)
        token_ids = await self._render(engine, body)
        try:
            session = session or await self._create_session(engine)
            plan = await self._plan(engine, session, token_ids, body, request_id)
        except FileNotFoundError as error:
            raise SessionUnknown(str(error)) from error
        except Exception as error:
            # Whatever control's trouble is, the user gets an answer; it only costs a recomputation.
            log.warning("request %s goes on without a plan: %s", request_id, error)
            self._count("unplanned")
            return Planned(session, token_ids)
        self._count("planned")
        planned = Planned(session, token_ids, plan)
        if plan["stored_tokens"] > plan["reusable_tokens"]:
            try:
                return await self._spliced(engine, planned, body, request_id)
            except EngineFailed:
                raise
            except Exception as error:
                # The plan there is already is good, only shorter.
                log.warning("request %s goes on without a splice: %s", request_id, error)
        return planned

    async def _spliced(
        self, engine: Engine, planned: Planned, body: dict[str, Any], request_id: str
    ) -> Planned:
        """A plan on sampled ids instead of re-tokenised ones, if the text allows it; else the same plan."""
        assert planned.session is not None and planned.token_ids is not None
        token_ids = await self._splice(engine, planned.session, planned.token_ids)
        if token_ids is None or token_ids == planned.token_ids:
            return planned
        # The same request id: this plan takes the grant of the first one over.
        plan = await self._plan(engine, planned.session, token_ids, body, request_id)
        self._count("spliced")
        return Planned(planned.session, token_ids, plan)

    async def abort(self, planned: Planned) -> None:
        """Ends a plan that no engine will use. A failure is only logged: the plan expires by itself."""
        if planned.plan_token is None:
            return
        try:
            await self._call("POST", "/v1/kv/abort", {"plan_token": planned.plan_token})
        except Exception as error:
            log.warning("could not abort a plan of session %s: %s", planned.session, error)

    async def _render(self, engine: Engine, body: dict[str, Any]) -> list[int]:
        wanted = {key: body[key] for key in RENDERED_KEYS if key in body}
        reply = await self._engine_call(engine, "/v1/chat/completions/render", wanted)
        return [int(token) for token in reply["token_ids"]]

    async def _create_session(self, engine: Engine) -> str:
        body = {
            "kv_identity": engine.kv_identity,
            "kv_format": engine.kv_format,
            "model": engine.model,
            # Users forget their sessions: without an end, storage would fill up with them.
            "ttl_s": self._session_ttl_s,
        }
        session = await self._call("POST", "/v1/kv/sessions", body)
        return str(session["session"])

    async def _plan(
        self, engine: Engine, session: str, token_ids: list[int], body: dict[str, Any], request_id: str
    ) -> dict[str, Any]:
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        room = max(engine.max_context - len(token_ids), 1)
        wanted = {
            "token_ids": token_ids,
            "max_tokens": min(max_tokens, room) if max_tokens else room,
            "request_id": request_id,
            "kv_identity": engine.kv_identity,
            # A session that moves to another model takes its bytes per token on as well.
            "kv_format": engine.kv_format,
        }
        return await self._call("POST", f"/v1/kv/sessions/{quote(session, safe='')}/plan", wanted)

    async def _splice(self, engine: Engine, session: str, token_ids: list[int]) -> list[int] | None:
        """The prompt with the stored ids in place of their re-tokenised text; None if the text differs.

        A tokenizer does not map text back to the ids that were sampled. Where the stored ids decode to
        exactly the text the prompt begins with, they mean the same and are what KV cache exists for.
        """
        reply = await self._call("GET", f"/v1/kv/sessions/{quote(session, safe='')}/tokens", None)
        prompt_text = await self._detokenize(engine, token_ids)
        loop = asyncio.get_running_loop()

        # kv.splice is pure and plain; it runs in a thread and asks the engine through this loop.
        def detokenize(tokens: Sequence[int]) -> str:
            return asyncio.run_coroutine_threadsafe(self._detokenize(engine, tokens), loop).result()

        def tokenize(text: str) -> list[int]:
            return asyncio.run_coroutine_threadsafe(self._tokenize(engine, text), loop).result()

        return await loop.run_in_executor(
            self._threads,
            lambda: splice(reply["token_ids"], prompt_text, detokenize=detokenize, tokenize=tokenize),
        )

    async def _detokenize(self, engine: Engine, tokens: Sequence[int]) -> str:
        return str((await self._engine_call(engine, "/detokenize", {"tokens": list(tokens)}))["prompt"])

    async def _tokenize(self, engine: Engine, text: str) -> list[int]:
        reply = await self._engine_call(engine, "/tokenize", {"prompt": text, "add_special_tokens": False})
        return [int(token) for token in reply["tokens"]]

    async def _engine_call(self, engine: Engine, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._http.post(engine.url + path, json=body, timeout=RENDER_TIMEOUT_S)
        except httpx2.HTTPError as error:
            raise EngineFailed(f"{path}: {error or type(error).__name__}") from error
        check_status(response.status_code, response.content)
        try:
            reply: dict[str, Any] = response.json()
        except ValueError as error:
            raise EngineFailed(f"{path}: the answer is not JSON") from error
        return reply

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(
            self._threads, lambda: self._control.control(method, path, body, timeout_s=self._plan_s)
        )
        # The call has its own limit; this one also covers the wait for a thread.
        return await asyncio.wait_for(work, 2 * self._plan_s)


def check_status(status: int, body: bytes) -> None:
    """Raises EngineFailed for what another engine may do better, EngineRefused for users' own mistakes."""
    if status in (429, 503):
        raise EngineFailed(f"HTTP {status}: busy", dead=False)
    if status >= 500:
        raise EngineFailed(f"HTTP {status}: {body[:200].decode(errors='replace')}")
    if status >= 400:
        raise EngineRefused(status, body)


def _coverable(body: dict[str, Any]) -> bool:
    """False if something in the request decides KV cache beyond its token ids, or would write one file
    twice.
    """
    if body.get("n") not in (None, 1):
        return False
    for message in body["messages"]:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(
            not isinstance(part, dict) or part.get("type") != "text" for part in content
        ):
            return False
    return True
