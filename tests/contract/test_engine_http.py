"""The engine's HTTP face with the real model: OpenAI-style answers, explicit KV cache, and what must not
happen.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gd2fs
from gd2fs import errors
from gd2fs.engine import generate
from gd2fs.engine.loaded import LoadedModel
from tests.engine_doubles import MemoryStorage, ServedEngine, until, uri
from tests.fleet import fleet

pytest_plugins = ["tests.engine_fixtures"]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = (
    "It was a bright cold day in the town by the river. The market had opened before dawn, and the bakers "
    "were carrying their baskets over the bridge while the fishermen mended nets and told each other stories "
    "of storms, of whales, and of a lighthouse keeper who had once counted every star above the cold sea. "
)


@pytest.fixture(scope="module")
def memory() -> Iterator[MemoryStorage]:
    storage = MemoryStorage()
    yield storage
    storage.close()


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel, memory: MemoryStorage) -> Iterator[ServedEngine]:
    with ServedEngine(loaded, memory) as served:
        yield served


@pytest.fixture(autouse=True)
def no_faults(memory: MemoryStorage) -> None:
    memory.reset_counts()
    memory.delay_s.clear()
    memory.control_errors.clear()


def report(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["kv_transfer_params"]["report"]


def greedy(
    engine: ServedEngine, ids: list[int], kv: Any = None, count: int = 8, **more: Any
) -> dict[str, Any]:
    params = {"kv_transfer_params": {"kvcache_params": kv}} if kv is not None else {}
    return engine.post(COMPLETIONS, {"prompt": ids, "max_tokens": count, "temperature": 0, **params, **more})


class Conversation:
    """Prompt ids and stored segments of a session whose turns are stored in file `name`."""

    def __init__(self, engine: ServedEngine, model: LoadedModel, storage: MemoryStorage, name: str) -> None:
        self.engine, self.model, self.storage, self.name = engine, model, storage, name
        self.ids = model.tokenizer.encode(PROMPT)
        self.stored: list[dict[str, Any]] = []

    def turn(self, count: int = 8) -> dict[str, Any]:
        plan = self.storage.plan(self.model, self.stored, uri(self.name))
        answer = greedy(self.engine, self.ids, plan, count, ignore_eos=True)
        self.ids = [*self.ids, *report(answer)["token_ids"]]
        params = answer["kv_transfer_params"]["kvcache_params"]
        self.stored = [*self.stored, *params["fresh_kvcache"]]
        return answer


# --- OpenAI-style answers
# -----------------------------------------------------------------------------------------


def test_a_chat_completion_answers(engine: ServedEngine) -> None:
    answer = engine.post(CHAT, {"messages": MESSAGES, "max_tokens": 12, "temperature": 0})
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant" and "Paris" in choice["message"]["content"]
    assert "<|im_end|>" not in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert report(answer)["token_ids"][-1] == 2


def test_a_stream_says_the_same_in_pieces(engine: ServedEngine) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = engine.post(CHAT, body)
    chunks = engine.events(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
    assert len({c["id"] for c in chunks}) == 1
    last = chunks[-1]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert report(last)["token_ids"] == report(whole)["token_ids"]


def test_a_plain_stream_has_choices_in_every_chunk(engine: ServedEngine) -> None:
    chunks = engine.events(CHAT, {"messages": MESSAGES, "max_tokens": 3})
    assert chunks and all(len(chunk["choices"]) == 1 for chunk in chunks)


def test_prompts_are_text_ids_or_messages(engine: ServedEngine) -> None:
    ids = engine.post("/tokenize", {"prompt": "The capital of France is", "add_special_tokens": False})[
        "tokens"
    ]
    assert engine.post("/detokenize", {"tokens": ids}) == {"prompt": "The capital of France is"}
    answers = [
        engine.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 3, "temperature": 0, **more})
        for prompt, more in [
            ("The capital of France is", {}),
            (ids, {}),
            ([ids], {}),
            (["The capital of France is"], {}),
            ("something else", {"kv_transfer_params": {"prompt_token_ids": ids}}),
        ]
    ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert "Paris" in answers[0]["choices"][0]["text"]
    rendered = engine.post("/v1/chat/completions/render", {"messages": MESSAGES, "temperature": 3})[
        "token_ids"
    ]
    direct = engine.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "temperature": 0})
    assert direct["usage"]["prompt_tokens"] == len(rendered)
    parts = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is the capital"},
                {"type": "text", "text": " of France?"},
            ],
        }
    ]
    assert engine.post("/v1/chat/completions/render", {"messages": parts})["token_ids"] == rendered


def test_stop_strings_end_the_text_before_them(engine: ServedEngine) -> None:
    body = {"prompt": "Count: one, two, three,", "max_tokens": 20, "temperature": 0}
    full = engine.post(COMPLETIONS, body)["choices"][0]["text"]
    stop = full[6:9]
    for answer in (
        engine.post(COMPLETIONS, {**body, "stop": [stop, "never"]})["choices"],
        [
            {
                "text": "".join(
                    c["choices"][0]["text"] for c in engine.events(COMPLETIONS, {**body, "stop": stop})
                ),
                "finish_reason": "stop",
            }
        ],
    ):
        assert answer[0]["text"] == full[: full.index(stop)]
        assert answer[0]["finish_reason"] == "stop"


def test_a_seed_repeats_a_sampled_answer(engine: ServedEngine) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5, "top_p": 0.95}
    first, again, other = (
        report(engine.post(COMPLETIONS, {**body, "seed": s}))["token_ids"] for s in (5, 5, 6)
    )
    assert first == again != other


def test_log_probabilities_of_an_answer_equal_those_of_the_same_text_as_a_prompt(
    engine: ServedEngine,
) -> None:
    """The decode path and the prefill path say the same: the check that conversations are verified with."""
    ids = engine.post("/tokenize", {"prompt": PROMPT})["tokens"]
    answer = greedy(engine, ids, count=10, logprobs=2, ignore_eos=True)
    decoded = answer["choices"][0]["logprobs"]
    full = [*ids, *report(answer)["token_ids"]]
    forced = engine.post(COMPLETIONS, {"prompt": full, "max_tokens": 0, "echo": True, "logprobs": 2})
    noted = forced["choices"][0]["logprobs"]
    assert noted["token_ids"] == full and noted["token_logprobs"][0] is None
    assert forced["choices"][0]["text"] == engine.post("/detokenize", {"tokens": full})["prompt"]
    assert forced["usage"]["completion_tokens"] == 0
    assert np.abs(np.array(noted["token_logprobs"][len(ids) :]) - decoded["token_logprobs"]).max() <= 1e-3
    assert all(len(top) == 2 for top in decoded["top_logprobs"])
    assert all(
        max(top.values()) == pytest.approx(logprob)
        for top, logprob in zip(decoded["top_logprobs"], decoded["token_logprobs"], strict=True)
    )


def test_chat_log_probabilities_name_tokens_and_bytes(engine: ServedEngine) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    content = engine.post(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0


REFUSED = [
    (CHAT, {"messages": MESSAGES, "n": 2}, "n=2"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
    (CHAT, {"messages": MESSAGES, "temperature": -1}, "temperature"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 9000}, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "stop": [""]}, "stop"),
    (CHAT, {}, "messages"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [49_152]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 8193}, "context"),
    (COMPLETIONS, {"prompt": "a", "kv_transfer_params": {"prompt_token_ids": "x"}}, "token ids"),
    ("/detokenize", {"tokens": [70_000]}, "tokens"),
    # Half an emoji, as clients send that cut text at a length.
    (CHAT, {"messages": [{"role": "user", "content": "cut \ud83d"}]}, "messages: holds half a surrogate"),
    (COMPLETIONS, {"prompt": "cut \ud83d"}, "prompt: holds half a surrogate"),
    (COMPLETIONS, {"prompt": "7" * 700_000}, "prompt: 700000 bytes of text can't fit"),
]


@pytest.mark.parametrize(("path", "body", "named"), REFUSED)
def test_what_is_wrong_or_not_built_is_refused_by_name(
    engine: ServedEngine, path: str, body: dict[str, Any], named: str
) -> None:
    error = engine.post(path, body, status=400)["error"]
    assert named in error["message"] and error["type"] == "invalid_request_error"


def test_what_is_no_json_and_what_is_no_path_is_refused_in_the_same_form(engine: ServedEngine) -> None:
    for path, data, status in ((CHAT, b"[" * 100_000, 400), ("/v1/nothing", b"{}", 404)):
        answer, body = engine.send(path, data)
        error = json.loads(body)["error"]
        assert answer.status == error["code"] == status and path in error["message"]


def test_nulls_mean_defaults(engine: ServedEngine) -> None:
    nulls = {
        key: None
        for key in ("temperature", "top_p", "n", "stop", "seed", "stream", "tools", "kv_transfer_params")
    }
    assert engine.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, **nulls})["choices"]


def test_an_unknown_model_is_404_and_the_known_one_is_listed(
    engine: ServedEngine, loaded: LoadedModel
) -> None:
    engine.post(CHAT, {"messages": MESSAGES, "model": "gpt-9"}, status=404)
    (entry,) = json.loads(engine.get("/v1/models"))["data"]
    assert entry["id"] == loaded.name == "SmolLM2-135M-Instruct"
    health = json.loads(engine.get("/health"))
    assert health["status"] == "ok" and health["kv_identity"] == loaded.kv_identity
    assert health["kv_format"] == {"name": "token", "bytes_per_token": 46_080, "granule": 1}
    assert health["max_context"] == 8192 and health["keep_local"] is False and health["rss_mib"] > 500


def test_a_body_over_the_limit_is_413_with_and_without_a_length(engine: ServedEngine) -> None:
    huge = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'
    for body in (huge, iter([huge])):
        with engine.connection() as connection:
            # It may be refused before all of it was sent.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
            assert connection.getresponse().status == 413


# --- Explicit KV cache
# ---------------------------------------------------------------------------------------------


def test_turns_continue_from_stored_kv_with_the_same_output(
    engine: ServedEngine,
    loaded: LoadedModel,
    memory: MemoryStorage,
) -> None:
    talk = Conversation(engine, loaded, memory, "talk")
    first = talk.turn(6)
    prompt = first["usage"]["prompt_tokens"]
    assert report(first)["cached_tokens"] == 0 and report(first)["committed"]
    # The last sampled token's KV does not exist yet.
    assert talk.stored[0]["token_length"] == prompt + 5
    assert talk.stored[0]["kv_length"] == (prompt + 5) * 46_080
    saved = report(first)
    talk.ids += loaded.tokenizer.encode("\nAnd then the rain came, and")
    second = talk.turn(6)
    told = report(second)
    assert told["cached_tokens"] == told["stored_tokens"] == prompt + 5
    assert told["loaded_bytes"] == (prompt + 5) * 46_080 and told["miss"] is None
    assert told["loaded_crc32c"] == saved["saved_crc32c"] is not None
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt + 5
    # Against recomputation (I7 c): the same ids, and log-probabilities within the bound.
    full = talk.ids
    start = len(full) - 6
    again = greedy(engine, full[:start], count=6, logprobs=0, ignore_eos=True)
    assert report(again)["token_ids"] == told["token_ids"] and report(again)["cached_tokens"] == 0
    assert len(memory.commits) >= 2 and memory.commits[-1]["fresh"][0]["token_start"] == prompt + 5


def test_turns_through_a_real_node_and_control(loaded: LoadedModel, tmp_path: Path) -> None:
    """Nothing stands in for storage here: three turns, each on an engine that knows nothing of the last."""
    with fleet(tmp_path, nodes=1, memory="128MiB") as running, gd2fs.connect(running.control) as client:
        kv_format = {"name": "token", "bytes_per_token": loaded.kv_format.bytes_per_token, "granule": 1}
        body = {"kv_identity": loaded.kv_identity, "kv_format": kv_format, "model": loaded.name}
        session = f"/v1/kv/sessions/{client.control('POST', '/v1/kv/sessions', body)['session']}"
        ids, stored, saved = loaded.tokenizer.encode(PROMPT), 0, None
        for turn, own in enumerate([client, None, client]):
            wanted = {"max_tokens": 4, "request_id": f"turn-{turn}", "kv_identity": loaded.kv_identity}
            plan = client.control("POST", f"{session}/plan", {"token_ids": ids, **wanted})
            # Without a client of its own, the engine makes one for the control that the plan names.
            with ServedEngine(loaded, own) as engine:
                answer = greedy(engine, ids, plan["kv_transfer"], count=4, ignore_eos=True)
            told = report(answer)
            assert told["committed"] and told["miss"] is None, told
            assert told["cached_tokens"] == told["stored_tokens"] == stored
            if turn == 1:
                assert told["loaded_crc32c"] == saved
            stored, saved = len(ids) + 3, told["saved_crc32c"]
            ids = [*ids, *told["token_ids"], 198]
        state = client.control("GET", session)
        (segment,) = state["stored_kv_cache"]
        assert segment["token_length"] == state["tokens"] == stored
        assert segment["kv_length"] == stored * loaded.kv_format.bytes_per_token


def test_a_stream_carries_the_same_report_after_the_commit(
    engine: ServedEngine,
    loaded: LoadedModel,
    memory: MemoryStorage,
) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 4,
        "kv_transfer_params": {"kvcache_params": memory.plan(loaded, [], uri("streamed"))},
    }
    last = engine.events(COMPLETIONS, body)[-1]
    assert report(last)["committed"] and last["usage"]["completion_tokens"] == len(report(last)["token_ids"])
    assert last["kv_transfer_params"]["kvcache_params"]["fresh_kvcache"][0]["token_length"] >= 65


def test_prefill_only_stores_every_token_of_the_prompt(
    engine: ServedEngine,
    loaded: LoadedModel,
    memory: MemoryStorage,
) -> None:
    ids = loaded.tokenizer.encode(PROMPT)
    answer = greedy(engine, ids, memory.plan(loaded, [], uri("warm")), count=0)
    (fresh,) = answer["kv_transfer_params"]["kvcache_params"]["fresh_kvcache"]
    assert fresh["token_length"] == len(ids) and report(answer)["token_ids"] == []
    # Loaded as prefill wrote it: bit-equal to a run without storage, so the very same log-probabilities.
    kw = {"count": 4, "logprobs": 0, "ignore_eos": True}
    cached = greedy(engine, [*ids, 9], memory.plan(loaded, [fresh]), **kw)
    plain = greedy(engine, [*ids, 9], **kw)
    assert report(cached)["cached_tokens"] == len(ids)
    assert cached["choices"] == plain["choices"]


def test_the_wrong_kv_changes_the_output(
    engine: ServedEngine, loaded: LoadedModel, memory: MemoryStorage
) -> None:
    """The negative control: the same ids with KV shifted by one token are told apart, so the tests above can
    fail.
    """
    ids = loaded.tokenizer.encode(PROMPT)
    answer = greedy(engine, ids, memory.plan(loaded, [], uri("shifted")), count=0)
    (fresh,) = answer["kv_transfer_params"]["kvcache_params"]["fresh_kvcache"]
    data = memory.files["/.kv/s/shifted.kv"].data
    data[46_080:] = data[:-46_080]
    kw = {"count": 1, "logprobs": 0}
    cached = greedy(engine, [*ids, 9], memory.plan(loaded, [fresh]), **kw)
    plain = greedy(engine, [*ids, 9], **kw)
    assert report(cached)["cached_tokens"] == len(ids)
    assert (
        cached["choices"][0]["logprobs"]["token_logprobs"]
        != plain["choices"][0]["logprobs"]["token_logprobs"]
    )
    assert report(cached)["loaded_crc32c"] != report(answer)["saved_crc32c"]


def test_prompt_log_probabilities_are_null_where_kv_was_loaded(
    engine: ServedEngine,
    loaded: LoadedModel,
    memory: MemoryStorage,
) -> None:
    ids = loaded.tokenizer.encode(PROMPT)
    answer = greedy(engine, ids, memory.plan(loaded, [], uri("echo")), count=0)
    stored = answer["kv_transfer_params"]["kvcache_params"]["fresh_kvcache"]
    longer = [*ids, 9, 10, 11]
    forced = greedy(engine, longer, memory.plan(loaded, stored), count=0, echo=True, logprobs=0)
    noted = forced["choices"][0]["logprobs"]["token_logprobs"]
    plain = greedy(engine, longer, count=0, echo=True, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"]
    assert noted[: len(ids) + 1] == [None] * (len(ids) + 1) and noted[-2:] == plain[-2:]


@pytest.mark.parametrize(
    ("way", "suffix", "error", "reason"),
    [
        ("read", ".kv", errors.Corrupt("flipped"), "corrupt"),
        ("read", ".kv", errors.Lost("restarted"), "lost"),
        ("read", ".tokens", errors.Disconnected("killed"), "disconnected"),
        ("read", ".tokens", RuntimeError("a fault of the client itself"), "internal"),
    ],
)
def test_a_storage_failure_is_a_recomputation_with_the_same_answer(
    engine: ServedEngine,
    loaded: LoadedModel,
    memory: MemoryStorage,
    way: str,
    suffix: str,
    error: Exception,
    reason: str,
) -> None:
    ids = loaded.tokenizer.encode(PROMPT)
    name = f"fail-{reason}"
    first = greedy(engine, ids, memory.plan(loaded, [], uri(name)), count=0)
    stored = first["kv_transfer_params"]["kvcache_params"]["fresh_kvcache"]
    plain = greedy(engine, [*ids, 9], count=4, ignore_eos=True)
    counted = engine.metric(f'gd2fs_engine_kv_misses_total{{reason="{reason}"}}')
    memory.reset_counts()
    memory.fail[way, suffix, 0] = error
    answer = greedy(engine, [*ids, 9], memory.plan(loaded, stored), count=4, ignore_eos=True)
    assert answer["choices"] == plain["choices"]
    assert report(answer)["miss"] == reason and report(answer)["cached_tokens"] < len(ids)
    assert engine.metric(f'gd2fs_engine_kv_misses_total{{reason="{reason}"}}') == counted + 1


@pytest.mark.parametrize(
    "params",
    [
        17,
        [],
        {"stored_kvcache": 5},
        {"plan": {"token": 5}, "fresh_kvcache": []},
        {"id": 1},
        {"id": "\ud800"},
        {"id": "x", "other": float("nan")},
        {"id": "x", "other": ["\ud800"]},
    ],
)
def test_malformed_metadata_never_fails_an_answer(engine: ServedEngine, params: Any) -> None:
    answer = greedy(engine, [1, 2, 3], params, count=1)
    assert report(answer)["miss"] == "bad_params" and answer["choices"][0]["finish_reason"] in (
        "length",
        "stop",
    )


def test_a_cache_salt_runs_without_stored_kv(
    engine: ServedEngine, loaded: LoadedModel, memory: MemoryStorage
) -> None:
    answer = greedy(engine, [1, 2, 3], memory.plan(loaded, [], uri("salt")), count=1, cache_salt="pepper")
    assert report(answer)["miss"] == "cache_salt" and "/.kv/s/salt.kv" not in memory.files


# --- Overload, disconnects, memory
# --------------------------------------------------------------------------------


def start_stream(engine: ServedEngine, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, Any]:
    """A stream of which the first token has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    data = json.dumps({**body, "stream": True}).encode()
    connection.request("POST", COMPLETIONS, data, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data:")
    return connection, answer


def test_a_client_that_leaves_stops_the_generation_and_its_kv_is_committed(
    engine: ServedEngine,
    loaded: LoadedModel,
    memory: MemoryStorage,
) -> None:
    commits = len(memory.commits)
    params = {"kvcache_params": memory.plan(loaded, [], uri("left"))}
    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "kv_transfer_params": params}
    connection, answer = start_stream(engine, body)
    answer.close()
    connection.close()
    until(lambda: len(memory.commits) > commits, "what was computed is committed")
    assert loaded.tokenizer.encode(PROMPT) and memory.commits[-1]["fresh"][0]["token_length"] < 1000
    assert memory.commits[-1]["fresh"][0]["token_length"] >= len(loaded.tokenizer.encode(PROMPT))
    until(lambda: engine.metric('gd2fs_engine_requests_total{end="cancelled"}') >= 1, "it is counted")
    # The same without streaming.
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    plain = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    connection.request("POST", COMPLETIONS, json.dumps(plain), {"content-type": "application/json"})
    until(lambda: engine.metric("gd2fs_engine_active") == 1, "it runs")
    connection.close()
    until(lambda: engine.metric("gd2fs_engine_active") == 0, "it stops")


def test_the_line_has_an_end(loaded: LoadedModel) -> None:
    with ServedEngine(loaded, None, queue_max=1) as engine:
        long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
        connection, answer = start_stream(engine, long)
        waiting = threading.Thread(target=lambda: greedy(engine, [1, 2], count=1))
        waiting.start()
        until(lambda: engine.metric("gd2fs_engine_waiting") == 1, "one request waits")
        refused, data = engine.send(COMPLETIONS, json.dumps(long).encode())
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        assert json.loads(data)["error"]["type"] == "overloaded"
        answer.close()
        connection.close()
        waiting.join(20)
        assert not waiting.is_alive()
        assert greedy(engine, [1, 2], count=1)["choices"], "it recovers"


def test_the_end_of_the_process_ends_generations_and_commits_them(
    loaded: LoadedModel, memory: MemoryStorage
) -> None:
    commits = len(memory.commits)
    with ServedEngine(loaded, memory) as engine:
        params = {"kvcache_params": memory.plan(loaded, [], uri("ended"))}
        body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "kv_transfer_params": params}
        connection, _ = start_stream(engine, body)
        started = time.monotonic()
    assert time.monotonic() - started < 15
    connection.close()
    assert len(memory.commits) == commits + 1


def test_a_fault_of_the_engine_is_an_error_and_the_next_request_runs(
    engine: ServedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(generate.Generation, "_decode", broken)
        engine.post(COMPLETIONS, {"prompt": "a"}, status=500)
        _, data = engine.send(COMPLETIONS, json.dumps({"prompt": "a", "stream": True}).encode())
        assert b'"internal_error"' in data and b"[DONE]" not in data
    assert greedy(engine, [1, 2], count=1)["choices"]


def test_nothing_is_kept_between_requests_unless_asked(
    engine: ServedEngine,
    loaded: LoadedModel,
    memory: MemoryStorage,
) -> None:
    ids = loaded.tokenizer.encode(PROMPT)
    first = greedy(engine, ids, count=4, ignore_eos=True)
    again = greedy(engine, ids, count=4, ignore_eos=True)
    assert report(again)["local_cached_tokens"] == report(again)["cached_tokens"] == 0
    with ServedEngine(loaded, memory, keep_local=True) as keeping:
        one = greedy(keeping, ids, memory.plan(loaded, [], uri("kept")), count=4, ignore_eos=True)
        longer = [*ids, *report(one)["token_ids"], 9]
        stored = one["kv_transfer_params"]["kvcache_params"]["fresh_kvcache"]
        two = greedy(keeping, longer, memory.plan(loaded, stored), count=4, ignore_eos=True)
        assert report(two)["local_cached_tokens"] == len(ids) + 3 and report(two)["loaded_bytes"] == 0
        assert two["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) + 3
        assert report(two)["committed"], "what is fresh is saved all the same"
    # Bit-equal (I7 b): KV from storage and KV kept locally give the same output under the same schedule.
    loaded_instead = greedy(
        engine, longer, memory.plan(loaded, stored, uri("b")), count=4, ignore_eos=True, logprobs=1
    )
    with ServedEngine(loaded, memory, keep_local=True) as keeping:
        greedy(keeping, ids, count=4, ignore_eos=True)
        local = greedy(keeping, longer, count=4, ignore_eos=True, logprobs=1)
    assert report(local)["local_cached_tokens"] == report(loaded_instead)["cached_tokens"]
    assert local["choices"] == loaded_instead["choices"]
    assert report(first)["token_ids"] == report(one)["token_ids"]
