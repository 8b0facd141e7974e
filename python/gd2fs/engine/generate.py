"""One request from prompt to report: load, prefill, decode, and save what is new on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gd2fs.connectors.reference import KvReport, ReferenceConnector, RequestKv
from gd2fs.engine.kv import KvShape, Sequence
from gd2fs.engine.local import LocalKv
from gd2fs.engine.model import Model
from gd2fs.engine.sampling import Sampler, SamplingParams, TokenLogprob, token_logprob
from gd2fs.engine.stopping import StopStrings
from gd2fs.engine.tokenizer import StreamDecoder, Tokenizer
from gd2fs.engine.weights import F32


@dataclass(frozen=True)
class Job:
    """What a request asks for. `received` is time.monotonic() of its arrival; `prompt_logprobs` the number of
    alternatives for every prompt token, None for no log-probabilities of the prompt; `not_covered` names what
    makes its KV cache its own (see ReferenceConnector.begin).
    """

    ids: list[int]
    max_tokens: int
    sampling: SamplingParams
    received: float
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    kvcache_params: object = None
    not_covered: str | None = None


@dataclass(frozen=True)
class Token:
    """One sampled token. `text` is what can be shown after it; it may be empty, or end with earlier text."""

    token: int
    text: str
    logprob: TokenLogprob | None


@dataclass
class Result:
    """The end of a request. `prompt_logprobs[i]` is of token i, None where its logits were not computed."""

    finish_reason: str = "length"
    text_left: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    kvcache_params: dict[str, Any] | None = None
    kv: KvReport = field(default_factory=KvReport)
    local_cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0


class Engine:
    """What all requests share: model, tokenizer and connector, and local KV when it is asked for."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        shape: KvShape,
        connector: ReferenceConnector,
        keep_local: bool,
    ) -> None:
        self.model, self.tokenizer, self.shape, self.connector = model, tokenizer, shape, connector
        self.local = LocalKv() if keep_local else None


class Generation:
    """One request. `compute` needs the model to itself; `finish` only waits for storage.

    `emit` gets every Token as it is sampled, in the computing thread. Setting `cancelled` ends the decoding
    after the step under way; what was computed until then is saved and committed like any other answer.
    """

    def __init__(self, engine: Engine, job: Job, emit: Callable[[Token], None]) -> None:
        self.result = Result()
        self.cancelled = threading.Event()
        self._engine, self._job, self._emit = engine, job, emit
        self._ids = list(job.ids)  # the connector reads it while it grows
        self._kv: RequestKv | None = None
        self._sequence: Sequence | None = None

    def compute(self) -> None:
        """Load, prefill and decode."""
        job, result = self._job, self.result
        result.queue_ms = (time.monotonic() - job.received) * 1e3
        kv = self._begin()
        sequence = self._sequence = self._prefix(kv)
        kv.start_saving(sequence)
        hidden = self._prefill(sequence, kv)
        if hidden is not None and job.max_tokens > 0:
            self._decode(sequence, kv, hidden)

    def finish(self) -> Result:
        """Save, commit, and complete the result. Called once, also when `compute` failed or never ran."""
        result, sequence, kv = self.result, self._sequence, self._begin()
        result.kvcache_params = kv.finish()
        result.kv = kv.report
        result.token_ids = self._ids[len(self._job.ids) :]
        local = self._engine.local
        # Memory that a straggling write still reads must not be used again.
        if local is not None and sequence is not None and kv.memory_is_free:
            local.keep(self._ids, sequence)
        self._sequence = None
        return result

    def _begin(self) -> RequestKv:
        # Not in the constructor, which runs in the event loop: this may connect to control.
        if self._kv is None:
            job = self._job
            self._kv = self._engine.connector.begin(job.kvcache_params, self._ids, job.not_covered)
        return self._kv

    def _prefix(self, kv: RequestKv) -> Sequence:
        """A sequence with as much of the prompt as the engine's own memory or GD2FS has."""
        job, engine = self._job, self._engine
        stored = kv.verify()
        if engine.local is not None:
            place, tokens = engine.local.match(job.ids)
            if tokens >= max(stored, 1):
                self.result.local_cached_tokens = tokens
                return engine.local.take(place, tokens)
        # A kept sequence may grow with the conversation; untouched memory costs nothing.
        tokens_max = (
            engine.model.config.context_max if engine.local is not None else len(job.ids) + job.max_tokens
        )
        sequence = Sequence(engine.shape, tokens_max)
        loaded = kv.load(sequence)
        if loaded.in_doubt:
            safe = Sequence(engine.shape, tokens_max)
            safe.kv[: loaded.tokens] = sequence.kv[: loaded.tokens]
            sequence = safe
        sequence.length = loaded.tokens
        return sequence

    def _prefill(self, sequence: Sequence, kv: RequestKv) -> F32 | None:
        """Compute the rest of the prompt. Returns the last token's hidden state; None when cancelled on the
        way.
        """
        job, model = self._job, self._engine.model
        started = time.monotonic()
        first_new = sequence.length
        if job.prompt_logprobs is not None:
            self.result.prompt_logprobs = [None] * len(job.ids)
        last: F32 | None = None
        for first, hidden in model.prefill(sequence, job.ids, len(job.ids)):
            kv.computed(sequence.length)
            if job.prompt_logprobs is not None:
                self._note_prompt_logprobs(first, hidden, job.prompt_logprobs)
            last = hidden[-1]
            if self.cancelled.is_set():
                self.result.finish_reason = "cancelled"
                return None
        seconds = time.monotonic() - started
        self.result.prefill_ms = seconds * 1e3
        self._engine.connector.pace.prefilled(len(job.ids) - first_new, seconds)
        return last

    def _note_prompt_logprobs(self, first: int, hidden: F32, top: int) -> None:
        ids, noted = self._job.ids, self.result.prompt_logprobs
        assert noted is not None
        # The row of token i says how likely token i + 1 is; the last row belongs to the answer.
        rows = min(len(hidden), len(ids) - 1 - first)
        for row, logits in enumerate(self._engine.model.logits(hidden[:rows])):
            position = first + row + 1
            noted[position] = token_logprob(logits, ids[position], top)

    def _decode(self, sequence: Sequence, kv: RequestKv, hidden: F32) -> None:
        job, result, model = self._job, self.result, self._engine.model
        tokenizer = self._engine.tokenizer
        sampler, decoder, stops = Sampler(job.sampling), StreamDecoder(tokenizer), StopStrings(job.stop)
        started = time.monotonic()
        for count in range(1, job.max_tokens + 1):
            logits = model.logits(hidden)
            token = sampler.choose(logits)
            self._ids.append(token)
            ended = token in tokenizer.eos_ids and not job.ignore_eos
            text = stops.push("" if ended else decoder.push(token))
            if count == 1:
                result.ttft_ms = (time.monotonic() - job.received) * 1e3
            self._emit(Token(token, text, sampler.logprob(logits, token)))
            if ended or stops.stopped:
                result.finish_reason = "stop"
                break
            if self.cancelled.is_set():
                result.finish_reason = "cancelled"
                break
            if count < job.max_tokens:
                # The last token's KV is not computed: nothing needs it before the next turn does.
                hidden = model.decode(sequence, token)
                kv.computed(sequence.length)
        result.decode_ms = (time.monotonic() - started) * 1e3
        result.text_left = stops.push(decoder.finish()) + stops.finish()
