"""Turns of conversations through real control, nodes and engines, with what may go wrong on the way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gd2fs
from gd2fs import errors
from tests.fleet import Fleet, eventually, fleet, get, post, stream

pytestmark = pytest.mark.timeout(300)

TEXT = (
    "The harbour pilot keeps three notebooks. The first holds depths, measured by hand at low water. The "
    "second holds names of ships and who steered them. The third is private, and holds only weather. "
)


class Stack:
    """A fleet with two stateless engines, and the calls a gateway would make."""

    def __init__(self, running: Fleet) -> None:
        self.fleet = running
        self.engines = [running.start(f"engine-{n}", "engine", "--listen", "127.0.0.1:0") for n in (1, 2)]
        self.client = gd2fs.connect(running.control)
        self.health = get(self.engines[0] + "/health")
        self.bytes_per_token = self.health["kv_format"]["bytes_per_token"]

    def ids(self, text: str) -> list[int]:
        return list(
            post(self.engines[0] + "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        )

    def session(self, **changes: Any) -> str:
        wanted = {key: self.health[key] for key in ("kv_identity", "kv_format", "model")} | changes
        return str(self.client.control("POST", "/v1/kv/sessions", wanted)["session"])

    def plan(self, session: str, ids: list[int], request_id: str, **changes: Any) -> dict[str, Any]:
        wanted = {
            "token_ids": ids,
            "max_tokens": 8,
            "request_id": request_id,
            "kv_identity": self.health["kv_identity"],
        } | changes
        return self.client.control("POST", f"/v1/kv/sessions/{session}/plan", wanted)

    def body(
        self, ids: list[int], kvcache_params: dict[str, Any] | None, max_tokens: int = 6
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1}
        return body | ({"kv_transfer_params": {"kvcache_params": kvcache_params}} if kvcache_params else {})

    def turn(
        self, engine: int, ids: list[int], plan: dict[str, Any] | None, max_tokens: int = 6
    ) -> dict[str, Any]:
        kv = plan["kv_transfer"] if plan else None
        return post(self.engines[engine] + "/v1/completions", self.body(ids, kv, max_tokens))

    def stored(self, session: str) -> dict[str, Any]:
        return self.client.control("GET", f"/v1/kv/sessions/{session}")

    def kv_bytes(self, session: str) -> bytes:
        """Everything the session has stored, read back as any holder of a plan would."""
        ids = self.client.control("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"]
        plan = self.plan(session, [*ids, 0], f"read-{np.random.default_rng().integers(1 << 62)}")
        parts = []
        for segment in plan["kv_transfer"]["stored_kvcache"]:
            buffer = bytearray(segment["kv_length"])
            file = self.client.open_layout(plan["kv_transfer"]["plan"]["layouts"][segment["kv_uri"]])
            assert file.read_into(segment["kv_start"], buffer) == len(buffer)
            parts.append(bytes(buffer))
        self.client.control("POST", "/v1/kv/abort", {"plan_token": plan["kv_transfer"]["plan"]["token"]})
        return b"".join(parts)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with fleet(tmp_path_factory.mktemp("turns")) as running:
        stack = Stack(running)
        yield stack
        stack.client.close()


def report_of(answer: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = answer["kv_transfer_params"]["report"]
    return report


def first_turn(stack: Stack, repeat: int = 4) -> tuple[str, list[int]]:
    """A session with one committed turn; returns it with the ids it has stored."""
    session, ids = stack.session(), stack.ids(TEXT * repeat)
    answer = stack.turn(0, ids, stack.plan(session, ids, "first"))
    assert report_of(answer)["committed"], report_of(answer)
    stored = stack.client.control("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"]
    assert stored[: len(ids)] == ids
    return session, stored


def same_answer(cached: dict[str, Any], recomputed: dict[str, Any]) -> None:
    """I7 (c): the same ids, and log probabilities within 1e-3."""
    assert report_of(cached)["token_ids"] == report_of(recomputed)["token_ids"]
    ours, theirs = (np.array(a["choices"][0]["logprobs"]["token_logprobs"]) for a in (cached, recomputed))
    assert np.abs(ours - theirs).max() <= 1e-3


def test_every_turn_on_another_engine_hits_all_it_can(stack: Stack) -> None:
    session, history = first_turn(stack)
    for turn in range(2, 6):
        prompt = history + stack.ids(f" On day {turn} the wind turned. What did the pilot write?")
        plan = stack.plan(session, prompt, f"turn-{turn}")
        assert plan["cached_tokens"] == plan["reusable_tokens"] == plan["stored_tokens"] == len(history)
        answer = stack.turn(turn % 2, prompt, plan)
        report = report_of(answer)
        assert report["cached_tokens"] == len(history) and report["miss"] is None
        assert report["loaded_bytes"] == len(history) * stack.bytes_per_token
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(history)
        same_answer(answer, stack.turn((turn + 1) % 2, prompt, None))
        history = prompt + report["token_ids"][:-1]
        state = stack.stored(session)
        assert state["tokens"] == len(history), "KV of the last sampled token does not exist"
        assert len(state["stored_kv_cache"]) == 1 and state["control_rows"]["segments"] == 1


def test_kv_is_bit_equal_to_what_was_saved(stack: Stack) -> None:
    """I7 (a): the sum of what engine 2 loaded is that of the bytes on the nodes, which engine 1 saved."""
    session, history = first_turn(stack)
    stored = stack.kv_bytes(session)
    from gd2fs._native import crc32c

    answer = stack.turn(1, [*history, 198], stack.plan(session, [*history, 198], "second"))
    assert report_of(answer)["loaded_crc32c"] == crc32c(stored)


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_an_edited_history_hits_exactly_the_common_prefix(stack: Stack, percent: int) -> None:
    session, history = first_turn(stack)
    at = len(history) * percent // 100
    edited = [*history[:at], (history[at] + 1) % 40000 + 100, *history[at + 1 :], 198]
    assert edited[at] != history[at]
    plan = stack.plan(session, edited, f"edit-{percent}")
    assert (plan["cached_tokens"], plan["reusable_tokens"], plan["miss"]) == (at, at, "edited")
    answer = stack.turn(1, edited, plan)
    assert report_of(answer)["cached_tokens"] == at
    assert report_of(answer)["loaded_bytes"] == at * stack.bytes_per_token
    same_answer(answer, stack.turn(0, edited, None))
    again = [*edited, *report_of(answer)["token_ids"], 198]
    assert stack.plan(session, again, "after-edit")["cached_tokens"] == len(again) - 2


def test_the_engine_checks_ids_itself(stack: Stack) -> None:
    """A plan made for other ids (a confused gateway) loads only what they share with the prompt."""
    session, history = first_turn(stack)
    plan = stack.plan(session, [*history, 198], "confused")
    at = len(history) // 3
    other = [*history[:at], (history[at] + 1) % 40000 + 100, *history[at + 1 :], 198]
    answer = stack.turn(1, other, plan)
    assert report_of(answer)["cached_tokens"] == at and report_of(answer)["miss"] is not None
    same_answer(answer, stack.turn(0, other, None))


def test_kv_of_another_model_is_never_used(stack: Stack) -> None:
    session, history = first_turn(stack)
    prompt = [*history, 198]
    foreign = stack.plan(session, prompt, "foreign", kv_identity="0" * 64)
    assert (foreign["cached_tokens"], foreign["miss"]) == (0, "identity")
    plan = stack.plan(session, prompt, "forged")
    plan["kv_transfer"]["plan"]["kv_identity"] = "0" * 64
    answer = stack.turn(1, prompt, plan)
    assert report_of(answer)["cached_tokens"] == 0 and report_of(answer)["miss"] == "identity"
    same_answer(answer, stack.turn(0, prompt, None))


def test_forged_capabilities_load_nothing_and_harm_nothing(stack: Stack) -> None:
    session, history = first_turn(stack)
    prompt = [*history, 198]
    plan = stack.plan(session, prompt, "forged-capability")
    for layout in plan["kv_transfer"]["plan"]["layouts"].values():
        head, key, payload, signature = layout["capability"].split(".")
        layout["capability"] = ".".join((head, key, payload, signature[::-1]))
    answer = stack.turn(1, prompt, plan)
    report = report_of(answer)
    assert report["cached_tokens"] == 0 and report["miss"] and not report["committed"]
    same_answer(answer, stack.turn(0, prompt, None))
    assert stack.stored(session)["tokens"] == len(history)


def test_nothing_is_stored_before_its_bytes_are(stack: Stack) -> None:
    """I6: a commit of bytes that nobody wrote is refused, and the session stays as it was."""
    session, history = first_turn(stack)
    prompt = [*history, 198]
    plan = stack.plan(session, prompt, "liar")
    fresh = plan["kv_transfer"]["fresh_kvcache"][0] | {
        "token_length": 1,
        "kv_length": stack.bytes_per_token,
    }
    layout = plan["kv_transfer"]["plan"]["layouts"][fresh["kv_uri"]]
    column = layout["columns"][0]
    claim = {
        "plan_token": plan["kv_transfer"]["plan"]["token"],
        "fresh": [fresh],
        "digest": "0" * 64,
        "acks": [
            {"column": 0, "epoch": column["epoch"], "incarnation": column["replicas"][0]["incarnation"]}
        ],
    }
    # Nobody has opened the file under the plan's grant: the node refuses before it looks for bytes.
    with pytest.raises((errors.Hole, errors.StaleWriter)):
        stack.client.control("POST", "/v1/kv/commit", claim)
    tokens = plan["kv_transfer"]["plan"]["layouts"][fresh["kv_uri"] + ".tokens"]
    stack.client.open_layout(tokens).write(fresh["kv_start"] // stack.bytes_per_token * 4, b"\0" * 4)
    stack.client.open_layout(layout).write(fresh["kv_start"], b"x")
    with pytest.raises(errors.Hole):
        stack.client.control("POST", "/v1/kv/commit", claim)
    assert stack.stored(session)["tokens"] == len(history)


def test_a_paused_engine_changes_nothing_after_its_turn_was_taken_over(stack: Stack) -> None:
    """I5: engine 1 stops in mid-save, engine 2 serves the retry and commits, engine 1 wakes up."""
    session, history = first_turn(stack)
    prompt = history + stack.ids(" " + TEXT * 2)
    plan = stack.plan(session, prompt, "same-request")
    chunks: list[dict[str, Any]] = []
    first = threading.Event()

    def slow_turn() -> None:
        for chunk in stream(
            stack.engines[0] + "/v1/completions", stack.body(prompt, plan["kv_transfer"], 40), 120
        ):
            chunks.append(chunk)
            first.set()

    thread = threading.Thread(target=slow_turn, daemon=True)
    thread.start()
    assert first.wait(60), "engine 1 did not begin to answer"
    stack.fleet.signal("engine-1", signal.SIGSTOP)
    try:
        retry = stack.plan(session, prompt, "same-request")
        assert retry["cached_tokens"] == len(history)
        assert (
            retry["kv_transfer"]["fresh_kvcache"][0]["kv_uri"]
            == plan["kv_transfer"]["fresh_kvcache"][0]["kv_uri"]
        )
        answer = stack.turn(1, prompt, retry)
        assert report_of(answer)["committed"], report_of(answer)
        before, version = stack.kv_bytes(session), stack.stored(session)["version"]
    finally:
        stack.fleet.signal("engine-1", signal.SIGCONT)
    thread.join(120)
    assert not thread.is_alive(), "engine 1 hung after it woke up"
    late = report_of(next(chunk for chunk in reversed(chunks) if chunk.get("kv_transfer_params")))
    assert not late["committed"] and late["commit_error"], late
    assert stack.kv_bytes(session) == before
    assert stack.stored(session)["version"] == version


def test_delete_frees_the_bytes_on_the_nodes(stack: Stack) -> None:
    def used() -> int:
        return sum(node["stats"]["arena_used"] for node in stack.client.control("GET", "/v1/nodes")["nodes"])

    session, _ = first_turn(stack)
    eventually(lambda: used() > 0, 10, "a heartbeat with bytes in it")
    for other in stack.client.control("GET", "/v1/kv/sessions?limit=1000")["sessions"]:
        stack.client.control("DELETE", f"/v1/kv/sessions/{other['session']}")
    eventually(lambda: used() == 0, 10, "freeing all bytes")
    with pytest.raises(FileNotFoundError):
        stack.stored(session)


def test_one_plan_on_two_engines_never_mixes_their_kv(stack: Stack) -> None:
    """A proxy that repeats a request runs it twice under one grant; sampling makes the answers differ."""
    session, ids = stack.session(), stack.ids(TEXT)
    plan = stack.plan(session, ids, "repeated", max_tokens=24)
    answers: dict[int, dict[str, Any]] = {}

    def run(engine: int) -> None:
        body = stack.body(ids, plan["kv_transfer"], 24) | {
            "temperature": 1.5,
            "seed": engine,
            "ignore_eos": True,
        }
        answers[engine] = post(stack.engines[engine] + "/v1/completions", body)

    threads = [threading.Thread(target=run, args=(engine,), daemon=True) for engine in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sampled = [report_of(answers[engine])["token_ids"] for engine in (0, 1)]
    assert sampled[0] != sampled[1], "the two answers should differ, else this shows nothing"
    stored = stack.client.control("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"]
    assert any(stored == (ids + ours)[: len(stored)] for ours in sampled)
    prompt = [*stored, 198] if len(stored) > len(ids) else [*ids, 198]
    following = stack.plan(session, prompt, "following")
    assert following["cached_tokens"] == len(stored)
    same_answer(stack.turn(0, prompt, following), stack.turn(1, prompt, None))
