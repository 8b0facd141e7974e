"""From logits to the next token, and the log-probabilities a caller may ask for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gd2fs.engine.weights import F32

TOP_LOGPROBS_MAX = 20  # what the OpenAI API allows


@dataclass(frozen=True)
class SamplingParams:
    """How to choose. `temperature` 0 is greedy; `top_logprobs` None means that no log-probabilities are
    computed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token under the model itself (before temperature), and the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Chooses tokens for one request. With the same seed and logits it makes the same choices."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = np.random.Generator(np.random.PCG64(params.seed))

    def choose(self, logits: F32) -> int:
        params = self._params
        if params.temperature == 0:
            return int(logits.argmax())
        # float64, so that the probabilities of 49,152 tokens sum to one closely enough for `top_p` near 1.
        scaled = (logits.astype(np.float64) - float(logits.max())) / params.temperature
        weights = np.exp(scaled)
        if params.top_p < 1:
            weights = _nucleus(weights, params.top_p)
        cumulative = np.cumsum(weights)
        # `right`: a token of weight 0 has the same cumulative weight as the one before it and is never
        # chosen.
        return int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))

    def logprob(self, logits: F32, token: int) -> TokenLogprob | None:
        if self._params.top_logprobs is None:
            return None
        return token_logprob(logits, token, self._params.top_logprobs)


def token_logprob(logits: F32, token: int, top: int) -> TokenLogprob:
    """Log-probability of `token` and of the `top` likeliest tokens, likeliest first."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    logprobs = wide - (peak + np.log(np.exp(wide - peak).sum()))
    best = np.argpartition(logprobs, -top)[-top:] if top else np.empty(0, np.int64)
    ranked = sorted(((int(i), float(logprobs[i])) for i in best), key=lambda item: (-item[1], item[0]))
    return TokenLogprob(token, float(logprobs[token]), tuple(ranked))


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """Keep the fewest likeliest tokens whose share reaches `top_p` (at least one), zero for the others."""
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order]) >= top_p * weights.sum()
    kept = order[: int(reached.argmax()) + 1] if reached.any() else order
    nucleus = np.zeros_like(weights)
    nucleus[kept] = weights[kept]
    return nucleus
