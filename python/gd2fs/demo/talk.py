"""Talking to engines and the gateway, with the time to the first token measured where the user would: in the
stream.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx2

# Alternatives asked for beside each token; the first two decide whether a greedy choice was a near tie.
TOP = 2


class Score(NamedTuple):
    """Log-probability of a token that is there, and of the likeliest one in its place."""

    own: float
    best: float


@dataclass
class Answer:
    """One streamed answer. logprobs: of each sampled token, in order."""

    ttft_ms: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    session: str = ""


class Talker:
    """HTTP to the demo's services; greedy, at most `max_tokens` each. `model` is set once it is known."""

    def __init__(self, max_tokens: int, timeout_s: float) -> None:
        self._http = httpx2.Client(timeout=timeout_s, trust_env=False)
        self._max_tokens = max_tokens
        self.model = ""

    @property
    def _sampling(self) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": self._max_tokens, "temperature": 0}

    def close(self) -> None:
        self._http.close()

    def chat(self, url: str, messages: Sequence[Mapping[str, str]], session: str | None) -> Answer:
        """A chat completion through the gateway."""
        body = {**self._sampling, "messages": messages, "logprobs": True, "top_logprobs": TOP}
        if session:
            body["session_id"] = session
        return self._stream(f"{url}/v1/chat/completions", body)

    def complete(self, url: str, ids: Sequence[int], **more: Any) -> Answer:
        """A completion of token ids, straight from an engine."""
        return self._stream(
            f"{url}/v1/completions", {**self._sampling, "prompt": ids, "logprobs": TOP, **more}
        )

    def score(
        self, url: str, ids: Sequence[int], kv: dict[str, Any] | None = None
    ) -> tuple[list[Score | None], dict[str, Any]]:
        """How likely each id is, given all before it, in one pass; and the report.

        kv: kvcache_params. None where there is no score: the first id, and those whose KV was loaded.
        """
        body = {**self._sampling, "prompt": ids, "echo": True, "logprobs": TOP, "max_tokens": 0}
        body["kv_transfer_params"] = {"kvcache_params": kv} if kv else {}
        reply = self.post(f"{url}/v1/completions", body)
        noted = reply["choices"][0]["logprobs"]
        pairs = zip(noted["token_logprobs"], noted["top_logprobs"], strict=True)
        scores = [None if own is None else Score(own, max(own, *top.values())) for own, top in pairs]
        return scores, reply["kv_transfer_params"]["report"]

    def get(self, url: str) -> dict[str, Any]:
        response = self._http.get(url)
        response.raise_for_status()
        reply: dict[str, Any] = response.json()
        return reply

    def text(self, url: str) -> str:
        response = self._http.get(url)
        response.raise_for_status()
        return response.text

    def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(url, json=body)
        _check(response)
        reply: dict[str, Any] = response.json()
        return reply

    def _stream(self, url: str, body: dict[str, Any]) -> Answer:
        answer = Answer()
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        with self._http.stream("POST", url, json=body) as response:
            if response.status_code >= 400:
                response.read()
            _check(response)
            answer.headers = response.headers
            for chunk in _chunks(response.iter_lines()):
                self._take(answer, chunk, start)
        answer.token_ids = answer.report.get("token_ids", answer.token_ids)
        return answer

    @staticmethod
    def _take(answer: Answer, chunk: dict[str, Any], start: float) -> None:
        if "error" in chunk:
            raise RuntimeError(f"the answer ended early: {chunk['error']}")
        for choice in chunk["choices"]:
            delta = choice.get("delta") or choice
            answer.text += delta.get("content") or choice.get("text") or ""
            noted = choice.get("logprobs")
            if noted and not answer.ttft_ms:
                answer.ttft_ms = (time.perf_counter() - start) * 1e3
            if noted and "content" in noted:
                answer.logprobs += [entry["logprob"] for entry in noted["content"]]
            elif noted:
                answer.logprobs += noted["token_logprobs"]
        answer.session = chunk.get("session_id") or answer.session
        answer.report = (chunk.get("kv_transfer_params") or {}).get("report") or answer.report


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def _check(response: httpx2.Response) -> None:
    if response.status_code >= 400:
        raise RuntimeError(f"{response.request.url} answered {response.status_code}: {response.text[:500]}")
