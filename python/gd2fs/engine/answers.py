"""Results as OpenAI-style JSON, whole or in server-sent events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

from gd2fs.engine.generate import Result, Token
from gd2fs.engine.sampling import TokenLogprob
from gd2fs.engine.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def report_of(result: Result, prompt_tokens: int) -> dict[str, Any]:
    """`kv_transfer_params.report` of the response."""
    kv = asdict(result.kv)
    return {
        "prompt_tokens": prompt_tokens,
        **{key: round(value, 3) if isinstance(value, float) else value for key, value in kv.items()},
        "local_cached_tokens": result.local_cached_tokens,
        "queue_ms": round(result.queue_ms, 3),
        "prefill_ms": round(result.prefill_ms, 3),
        "ttft_ms": round(result.ttft_ms, 3),
        "decode_ms": round(result.decode_ms, 3),
        "token_ids": result.token_ids,
    }


def usage_of(result: Result, prompt_tokens: int) -> dict[str, Any]:
    output = len(result.token_ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output,
        "total_tokens": prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": result.kv.cached_tokens + result.local_cached_tokens},
    }


class Answer(ABC):
    """Common to both kinds: id, model, and the fields that end an answer."""

    object_name = ""
    chunk_name = ""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self.prompt_tokens = len(prompt_ids)

    def whole(self, tokens: list[Token], result: Result) -> dict[str, Any]:
        choice = {"index": 0, **self._choice(tokens, result), "finish_reason": result.finish_reason}
        return {**self._head, "object": self.object_name, "choices": [choice], **self._end(result)}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        return []

    def chunk(self, token: Token) -> dict[str, Any]:
        return self._chunk(self._delta(token), None)

    def closing(self, result: Result, *, with_end: bool) -> list[dict[str, Any]]:
        """The chunk with the finish reason, and `with_end` one more with usage and the KV report.

        The last has no choices; a plain client that asked for neither usage nor KV never sees it, since some
        read `choices[0]` of whatever comes.
        """
        chunks = [self._chunk(self._last_delta(result), result.finish_reason)]
        if with_end:
            chunks.append({**self._head, "object": self.chunk_name, "choices": [], **self._end(result)})
        return chunks

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **delta, "finish_reason": finish_reason}
        return {**self._head, "object": self.chunk_name, "choices": [choice]}

    def _end(self, result: Result) -> dict[str, Any]:
        params: dict[str, Any] = {"report": report_of(result, self.prompt_tokens)}
        if result.kvcache_params is not None:
            params["kvcache_params"] = result.kvcache_params
        return {"usage": usage_of(result, self.prompt_tokens), "kv_transfer_params": params}

    def _name(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    @abstractmethod
    def _choice(self, tokens: list[Token], result: Result) -> dict[str, Any]:
        """What a whole answer's only choice holds besides its index."""

    @abstractmethod
    def _delta(self, token: Token) -> dict[str, Any]:
        """What a chunk's choice holds for one token."""

    @abstractmethod
    def _last_delta(self, result: Result) -> dict[str, Any]:
        """What the last chunk's choice holds."""


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None)]

    def _choice(self, tokens: list[Token], result: Result) -> dict[str, Any]:
        text = "".join(token.text for token in tokens) + result.text_left
        noted = [self._logprob(token.logprob) for token in tokens if token.logprob is not None]
        return {
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": noted} if noted else None,
        }

    def _delta(self, token: Token) -> dict[str, Any]:
        logprobs = None if token.logprob is None else {"content": [self._logprob(token.logprob)]}
        return {"delta": {"content": token.text}, "logprobs": logprobs}

    def _last_delta(self, result: Result) -> dict[str, Any]:
        return {"delta": {"content": result.text_left} if result.text_left else {}}

    def _logprob(self, noted: TokenLogprob) -> dict[str, Any]:
        return {
            **self._entry(noted.token, noted.logprob),
            "top_logprobs": [self._entry(*top) for top in noted.top],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(raw),
            "token_id": token,
        }


class CompletionAnswer(Answer):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, *head: Any, echo: bool, top_logprobs: int | None) -> None:
        super().__init__(*head)
        self._echo = echo
        self._top = top_logprobs

    def opening(self) -> list[dict[str, Any]]:
        # With log-probabilities the prompt comes with the last chunk, since they are known only then.
        return [self._chunk({"text": self._prompt_text(), "logprobs": None}, None)] if self._echo else []

    def _choice(self, tokens: list[Token], result: Result) -> dict[str, Any]:
        text = "".join(token.text for token in tokens) + result.text_left
        entries: list[tuple[int, TokenLogprob | None]] = [(token.token, token.logprob) for token in tokens]
        if self._echo:
            text = self._prompt_text() + text
            prompt = result.prompt_logprobs or [None] * self.prompt_tokens
            entries = [*zip(self._prompt_ids, prompt, strict=True), *entries]
        return {"text": text, "logprobs": self._logprobs(entries)}

    def _delta(self, token: Token) -> dict[str, Any]:
        return {"text": token.text, "logprobs": self._logprobs([(token.token, token.logprob)])}

    def _last_delta(self, result: Result) -> dict[str, Any]:
        prompt = result.prompt_logprobs
        logprobs = self._logprobs(list(zip(self._prompt_ids, prompt, strict=True))) if prompt else None
        return {"text": result.text_left, "logprobs": logprobs}

    def _prompt_text(self) -> str:
        return self._tokenizer.decode(self._prompt_ids, skip_control=False)

    def _logprobs(self, entries: list[tuple[int, TokenLogprob | None]]) -> dict[str, Any] | None:
        if self._top is None:
            return None
        return {
            "tokens": [self._name(token) for token, _ in entries],
            "token_ids": [token for token, _ in entries],
            "token_logprobs": [None if noted is None else noted.logprob for _, noted in entries],
            "top_logprobs": [
                None if noted is None else {self._name(token): logprob for token, logprob in noted.top}
                for _, noted in entries
            ],
        }
