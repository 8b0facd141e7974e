"""The gateway against a scripted engine on a real socket and a control that is a dictionary."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gd2fs import errors
from gd2fs.config import GatewayConfig, Listen, bind
from gd2fs.config.listen import bound
from gd2fs.gateway import create_app

WAIT_S = 10.0


class FakeEngine:
    """Renders one id a character, except that the letters "ab" together are one id; answers with a script."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.broken = ""  # "status", "stream": fails before the first token
        self.release = threading.Event()  # while clear, answers wait after their first token
        self.release.set()
        self.disconnected = threading.Event()
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/chat/completions/render", self.render, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    @staticmethod
    def encode(text: str) -> list[int]:
        ids: list[int] = []
        while text:
            taken = 2 if text.startswith("ab") else 1
            ids.append(1000 if taken == 2 else ord(text[0]))
            text = text[taken:]
        return ids

    @staticmethod
    def decode(ids: list[int]) -> str:
        return "".join("ab" if token == 1000 else chr(token) for token in ids)

    async def health(self, _: Request) -> Response:
        kv_format = {"name": "token", "bytes_per_token": 8, "granule": 1}
        report = {
            "status": "ok",
            "model": "fake",
            "kv_identity": "id",
            "kv_format": kv_format,
            "max_context": 100,
        }
        return JSONResponse(report)

    async def render(self, request: Request) -> Response:
        messages = (await request.json())["messages"]
        return JSONResponse({"token_ids": self.encode("".join(f"<{m['content']}>" for m in messages))})

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": self.encode((await request.json())["prompt"])})

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": self.decode((await request.json())["tokens"])})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.broken == "status":
            return JSONResponse({"error": "out of order"}, 500)
        if self.broken == "refuses":
            return JSONResponse({"error": {"message": "the prompt is too long"}}, 400)
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
        if not body.get("stream"):
            await asyncio.to_thread(self.release.wait, WAIT_S)
            message = {"role": "assistant", "content": "hi"}
            return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})
        return StreamingResponse(self.stream(usage), media_type="text/event-stream")

    async def stream(self, usage: dict[str, Any]) -> AsyncIterator[bytes]:
        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            choices = [{"finish_reason": None, **choice} for choice in choices]
            return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"

        try:
            yield event([{"delta": {"role": "assistant"}}])
            if self.broken == "stream":
                raise RuntimeError("the fake engine dies here on purpose")
            yield event([{"delta": {"content": "h"}}])
            while not self.release.is_set():
                await asyncio.sleep(0.01)
            if self.broken == "dies":
                raise RuntimeError("the fake engine dies here on purpose")
            if self.broken == "says so":
                yield b'data: {"error":{"message":"out of memory"}}\n\n'
                return
            yield event([{"delta": {"content": "i"}, "finish_reason": "stop"}])
            yield event([], usage=usage)
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.disconnected.set()
            raise


class FakeControl:
    """Sessions by id; the plan is the longest common prefix with the ids that `stored` says."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any] | None]] = []
        self.sessions: dict[str, list[int]] = {}
        self.down = False
        self.tokens_lost = False

    def control(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        self.calls.append((method, path, body))
        if self.down:
            raise errors.Unavailable("control can't be reached")
        if (method, path) == ("POST", "/v1/kv/sessions"):
            session = f"s{len(self.sessions) + 1}"
            self.sessions[session] = []
            return {"session": session}
        if path == "/v1/kv/abort":
            return {}
        session, verb = path.removeprefix("/v1/kv/sessions/").split("/")
        if session not in self.sessions:
            raise errors.NotFound(f"session {session} does not exist")
        stored = self.sessions[session]
        if verb == "tokens":
            if self.tokens_lost:
                raise errors.Lost("the node of the ids was started again")
            return {"token_ids": stored}
        assert body is not None
        ids = body["token_ids"]
        same = next(
            (i for i, (a, b) in enumerate(zip(stored, ids, strict=False)) if a != b),
            min(len(stored), len(ids)),
        )
        same = min(same, len(ids) - 1)
        counts = {"prompt_tokens": len(ids), "stored_tokens": len(stored), "reusable_tokens": same}
        transfer = {
            "id": session,
            "stored_kvcache": [],
            "fresh_kvcache": [],
            "plan": {"token": f"t{len(self.calls)}"},
        }
        return {**counts, "cached_tokens": same, "kv_transfer": transfer}

    def plans(self) -> list[dict[str, Any]]:
        return [body for _, path, body in self.calls if path.endswith("/plan") and body]


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """The URL of `app`, served from a thread."""
    listener = bind(Listen("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        url = bound(listener).url
        deadline = time.monotonic() + WAIT_S
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        yield url
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive()


class World:
    """Two fake engines, a fake control, and a gateway over them."""

    def __init__(self, stack: contextlib.ExitStack, **knobs: Any) -> None:
        self.engines = [FakeEngine("one"), FakeEngine("two")]
        for engine in self.engines:
            engine.url = stack.enter_context(serving(engine.app))
        self.control = FakeControl()
        config = GatewayConfig(probe_s=60.0, **knobs)
        self.app = create_app([engine.url for engine in self.engines], self.control, config)
        self.url = stack.enter_context(serving(self.app))
        self.http = stack.enter_context(httpx2.Client(base_url=self.url, timeout=WAIT_S))

    def chat(self, text: str = "hello", **more: Any) -> httpx2.Response:
        body = {"model": "fake", "messages": [{"role": "user", "content": text}], **more}
        return self.http.post("/v1/chat/completions", json=body)

    def sent(self) -> list[dict[str, Any]]:
        return [body for engine in self.engines for body in engine.bodies]

    def admission(self) -> Any:
        return self.app.state.gateway.admission


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(stack)


def eventually(holds: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def stream_events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def test_a_new_session_is_made_and_returned(world: World) -> None:
    answer = world.chat()
    assert answer.status_code == 200
    assert answer.json()["session_id"] == answer.headers["x-gd2fs-session"] == "s1"
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    _, _, created = world.control.calls[0]
    assert created == {
        "kv_identity": "id",
        "kv_format": {"name": "token", "bytes_per_token": 8, "granule": 1},
        "model": "fake",
        "ttl_s": 86_400,
    }


def test_ids_are_planned_and_the_same_ids_are_sent(world: World) -> None:
    answer = world.chat("xyz", max_tokens=7)
    ids = FakeEngine.encode("<xyz>")
    (plan,) = world.control.plans()
    assert plan["token_ids"] == ids and plan["max_tokens"] == 7 and plan["kv_identity"] == "id"
    (sent,) = world.sent()
    assert sent["kv_transfer_params"]["prompt_token_ids"] == ids
    assert sent["kv_transfer_params"]["kvcache_params"]["id"] == "s1"
    assert answer.headers["x-gd2fs-reusable-tokens"] == "0"
    assert answer.headers["x-gd2fs-cached-tokens"] == "0"


def test_engines_take_turns(world: World) -> None:
    used = [world.chat().headers["x-gd2fs-engine"] for _ in range(4)]
    assert used == [world.engines[0].url, world.engines[1].url] * 2


def test_a_retokenised_turn_is_spliced(world: World) -> None:
    # The engine sampled "a" and "b" apart; the tokenizer makes one id of the text.
    stored = [ord("<"), ord("a"), ord("b")]
    world.control.sessions["s"] = stored
    answer = world.chat("ab!", session_id="s")
    assert answer.status_code == 200
    first, second = world.control.plans()
    assert first["token_ids"] == FakeEngine.encode("<ab!>")
    assert second["token_ids"] == [*stored, ord("!"), ord(">")]
    assert first["request_id"] == second["request_id"]
    (sent,) = world.sent()
    assert sent["kv_transfer_params"]["prompt_token_ids"] == second["token_ids"]
    assert answer.headers["x-gd2fs-reusable-tokens"] == "3"


def test_an_edited_history_is_not_spliced(world: World) -> None:
    world.control.sessions["s"] = FakeEngine.encode("<old")
    answer = world.chat("new", session_id="s")
    (plan,) = world.control.plans()
    assert plan["token_ids"] == FakeEngine.encode("<new>")
    assert answer.headers["x-gd2fs-reusable-tokens"] == "1"


def test_a_splice_that_fails_keeps_the_plan_there_is(world: World) -> None:
    world.control.sessions["s"] = [ord("<"), ord("a"), ord("b")]
    world.control.tokens_lost = True
    answer = world.chat("ab!", session_id="s")
    assert answer.status_code == 200 and answer.headers["x-gd2fs-reusable-tokens"] == "1"
    (sent,) = world.sent()
    assert sent["kv_transfer_params"]["kvcache_params"]["id"] == "s"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_reaches_the_user_and_ends_the_plan(world: World, stream: bool) -> None:
    world.engines[0].broken = "refuses"
    answer = world.chat(stream=stream)
    assert answer.status_code == 400 and "too long" in answer.json()["error"]["message"]
    assert world.control.calls[-1][1] == "/v1/kv/abort"
    assert len(world.sent()) == 1 and world.admission().active == 0


def test_without_control_the_answer_comes_without_a_plan(world: World) -> None:
    world.control.down = True
    answer = world.chat(session_id="s9")
    assert answer.status_code == 200 and answer.json()["session_id"] == "s9"
    (sent,) = world.sent()
    assert "kvcache_params" not in sent["kv_transfer_params"]
    assert 'gd2fs_gateway_planning_total{outcome="unplanned"} 1.0' in world.http.get("/metrics").text


def test_an_unknown_session_is_said_to_be_unknown(world: World) -> None:
    answer = world.chat(session_id="nobody")
    assert answer.status_code == 404 and "nobody" in answer.json()["error"]["message"]


@pytest.mark.parametrize("how", ["status", "stream"])
def test_an_engine_that_dies_before_its_first_token_is_replaced_once(world: World, how: str) -> None:
    world.engines[0].broken = how
    answer = world.chat(stream=True)
    assert answer.status_code == 200 and answer.headers["x-gd2fs-engine"] == world.engines[1].url
    first, second = world.control.plans()
    assert first["request_id"] == second["request_id"]
    events = stream_events(answer.text)
    assert "".join(c["delta"].get("content", "") for e in events for c in e["choices"]) == "hi"
    # It is left out until a health report brings it back.
    assert world.chat().headers["x-gd2fs-engine"] == world.engines[1].url


def test_two_dead_engines_end_the_request_and_its_plan(world: World) -> None:
    for engine in world.engines:
        engine.broken = "status"
    answer = world.chat()
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert world.control.calls[-1][1] == "/v1/kv/abort"
    assert len(world.sent()) == 2


def test_kv_metadata_of_users_is_dropped(world: World) -> None:
    evil = {"kvcache_params": {"id": "other", "stored_kvcache": [{"kv_uri": "gd2fs://c/secret"}]}}
    world.chat(kv_transfer_params=evil, cache_salt="x", kvcache_params=evil)
    (sent,) = world.sent()
    assert sent["kv_transfer_params"]["kvcache_params"]["id"] == "s1"
    assert "cache_salt" not in sent and "kvcache_params" not in sent


def test_what_ids_do_not_cover_runs_without_kv(world: World) -> None:
    assert world.chat(n=2).status_code == 200
    assert "kv_transfer_params" not in world.sent()[0]
    assert world.control.calls == []


def test_streaming_passes_tokens_on_as_they_come(world: World) -> None:
    engine = world.engines[0]
    engine.release.clear()
    body = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    body["stream_options"] = {"include_usage": True}
    with world.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["x-gd2fs-session"] == "s1"
        chunks = answer.iter_text()
        seen = ""
        while '"h"' not in seen:
            seen += next(chunks)  # the first token is here while the engine still waits with the second
        assert '"i"' not in seen
        engine.release.set()
        seen += "".join(chunks)
    assert engine.bodies[0]["stream_options"]["include_usage"] is True
    events = stream_events(seen)
    assert [e.get("session_id") for e in events] == [None] * (len(events) - 1) + ["s1"]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert seen.endswith("data: [DONE]\n\n")
    eventually(lambda: world.admission().active == 0)


def test_an_engine_that_dies_in_the_middle_is_said_and_its_plan_ends(world: World) -> None:
    for engine in world.engines:
        engine.broken = "dies"
    *tokens, error = stream_events(world.chat(stream=True).text)
    assert error["error"]["type"] == "engine_failed" and tokens
    eventually(lambda: [path for _, path, _ in world.control.calls].count("/v1/kv/abort") == 1)
    eventually(lambda: world.admission().active == 0)


def test_an_error_in_the_middle_is_passed_on_once(world: World) -> None:
    for engine in world.engines:
        engine.broken = "says so"
    *tokens, error = stream_events(world.chat(stream=True).text)
    assert error == {"error": {"message": "out of memory"}}
    assert tokens and not any("error" in chunk for chunk in tokens)


def test_without_usage_asked_for_every_chunk_has_a_choice(world: World) -> None:
    events = stream_events(world.chat(stream=True).text)
    assert all(event["choices"] for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "stop" and events[-1]["session_id"] == "s1"
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


def test_a_user_who_leaves_is_passed_on_to_the_engine(world: World) -> None:
    engine = world.engines[0]
    engine.release.clear()
    body = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    with world.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_raw())
    assert engine.disconnected.wait(WAIT_S)
    eventually(lambda: world.admission().active == 0)


def test_overload_is_refused_at_once_and_recovers() -> None:
    with contextlib.ExitStack() as stack:
        world = World(stack, active_max=1, waiting_max=1, waiting_s=WAIT_S)
        for engine in world.engines:
            engine.release.clear()
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(world.chat().status_code)) for _ in range(2)
        ]
        threads[0].start()
        eventually(lambda: world.admission().active == 1)
        threads[1].start()
        eventually(lambda: world.admission().waiting == 1)
        refused = world.chat()
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        for engine in world.engines:
            engine.release.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert answers == [200, 200]
        assert world.chat().status_code == 200


def test_waiting_has_an_end() -> None:
    with contextlib.ExitStack() as stack:
        world = World(stack, active_max=1, waiting_max=4, waiting_s=0.1)
        world.engines[0].release.clear()
        thread = threading.Thread(target=world.chat)
        thread.start()
        eventually(lambda: world.admission().active == 1)
        assert world.chat().status_code == 429
        world.engines[0].release.set()
        thread.join(WAIT_S)
        assert not thread.is_alive() and world.admission().waiting == 0


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "session_id": 5}, "session_id"),
        ({"messages": [{"role": "user", "content": "x"}], "session_id": "a\nb"}, "session_id"),
        ({"messages": [{"role": "user", "content": "x"}], "session_id": "\u65e5"}, "session_id"),
        ({"messages": [{"role": "user", "content": "x"}], "model": ["fake"]}, "model"),
        ({"messages": [{"role": "user", "content": "x"}], "stream": "false"}, "stream"),
        ({"messages": [{"role": "user", "content": "x"}], "stream_options": "x"}, "stream_options"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "the body is not JSON"),
        ({"messages": [{"role": "user", "content": "x"}], "top_p": float("nan")}, "the body is not JSON"),
    ],
)
def test_bad_requests_name_the_field(world: World, body: dict[str, Any], named: str) -> None:
    # Not by the client, which itself refuses what is no JSON.
    answer = world.http.post("/v1/chat/completions", content=json.dumps(body))
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(named)
    assert world.sent() == []
    assert world.http.get("/health").json()["engines"][0]["healthy"], "no engine is blamed for it"


def test_a_body_of_brackets_is_a_bad_request(world: World) -> None:
    answer = world.http.post("/v1/chat/completions", content=b"[" * 100_000)
    assert answer.status_code == 400 and "not JSON" in answer.json()["error"]["message"]


def test_a_plan_names_the_format_of_the_engine_that_it_is_for(world: World) -> None:
    world.chat()
    [plan] = world.control.plans()
    assert plan["kv_format"] == {"name": "token", "bytes_per_token": 8, "granule": 1}


def test_an_unknown_model_is_not_sent_anywhere(world: World) -> None:
    assert world.chat(model="other").status_code == 404
    assert world.sent() == []


def test_models_and_health(world: World) -> None:
    assert [model["id"] for model in world.http.get("/v1/models").json()["data"]] == ["fake"]
    health = world.http.get("/health").json()
    assert health["status"] == "ok" and all(engine["healthy"] for engine in health["engines"])


def test_a_wrong_address_is_answered_like_every_error(world: World) -> None:
    for answer, status in ((world.http.get("/v1/chat"), 404), (world.http.get("/v1/chat/completions"), 405)):
        assert answer.status_code == status and answer.json()["error"]["code"] == status
        assert "POST /v1/chat/completions" in answer.json()["error"]["message"]


def test_api_keys_are_asked_for() -> None:
    with contextlib.ExitStack() as stack:
        world = World(stack, api_keys=["sesame"])
        assert world.chat().status_code == 401
        assert world.http.get("/metrics").status_code == 401
        assert "engines" not in world.http.get("/health").json()
        world.http.headers["authorization"] = "Bearer sesame"
        assert world.chat().status_code == 200
