"""The forward pass: llama architecture in numpy, float32.

Two step shapes exist. *Prefill* computes a chunk of `CHUNK_TOKENS` rows that begins at a multiple of
`CHUNK_TOKENS`, padded to the full size, in two halves. *Decode* computes one row. Every matrix shape of a
prefill step thus follows from the chunk's absolute index alone, so that BLAS does the same arithmetic for a
row whether the rows before it were computed or loaded: loading the first S tokens (as prefill wrote them) and
computing the rest gives the same bits for every S.

The halves of a chunk run on two threads of ours, BLAS itself on one: the second half waits for the first
one's keys and values, once a layer, asleep. BLAS's own threads wait for each other in every product, awake;
where cores are shared that made a prefill of 2,200 tokens take 59 s instead of 8.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from gd2fs.engine.kv import CHUNK_TOKENS, Sequence
from gd2fs.engine.weights import F32, LayerWeights, ModelConfig, Weights

HALF_TOKENS = CHUNK_TOKENS // 2


class Model:
    """Weights and arithmetic. Holds nothing of any request; one request at a time.

    Limits BLAS to one thread for the whole process.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        threadpool_limits(limits=1, user_api="blas")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="prefill")
        self.config = config
        self.weights = weights
        half = config.head_dim // 2
        frequencies = config.rope_base ** (-np.arange(half, dtype=np.float64) / half)
        angles = np.arange(config.context_max, dtype=np.float64)[:, None] * frequencies
        self._cos = np.cos(angles).astype(np.float32)[:, None, :]  # [context, 1, half]
        self._sin = np.sin(angles).astype(np.float32)[:, None, :]
        # Added to the last HALF x HALF block of the scores: row i sees columns 0..i.
        self._causal = np.triu(np.full((HALF_TOKENS, HALF_TOKENS), -np.inf, np.float32), 1)

    def prefill(self, seq: Sequence, ids: Ids[int], end: int) -> Iterator[tuple[int, F32]]:
        """Compute the KV of tokens [seq.length, end) of `ids`, chunk by chunk.

        After each chunk `seq.length` has advanced and `(first, hidden)` is yielded: `hidden[i]` is the final
        hidden state of token `first + i`, for the tokens that this chunk computed. Rows that were there
        before are used, not overwritten, even where a chunk computes them again.
        """
        while seq.length < end:
            first = seq.length
            start = first - first % CHUNK_TOKENS
            stop = min(end, start + CHUNK_TOKENS)
            padded = np.zeros(CHUNK_TOKENS, np.int64)
            padded[: stop - start] = ids[start:stop]
            # Padding rows are masked out, but 0 x NaN would not be 0: a load that failed may have left
            # anything here.
            seq.kv[stop : start + CHUNK_TOKENS] = 0
            hidden = self._chunk(seq, padded, start, first, stop)
            seq.length = stop
            yield first, hidden[first - start : stop - start]

    def decode(self, seq: Sequence, token: int) -> F32:
        """Append one token; returns its final hidden state, shape [hidden]."""
        position = seq.length
        if position >= seq.capacity:
            raise ValueError(f"the sequence is full ({seq.capacity} tokens)")
        hidden = self._rows(seq, np.array([token]), position, (position, position + 1))
        seq.length = position + 1
        return hidden[0]

    def logits(self, hidden: F32) -> F32:
        """Logits of one hidden state [hidden] or of several [rows, hidden]."""
        return hidden @ self.weights.lm_head.T

    def _chunk(self, seq: Sequence, ids: NDArray[np.int64], start: int, first: int, stop: int) -> F32:
        """Rows [start, start + CHUNK_TOKENS); stores K, V of tokens [first, stop). Returns [rows, hidden]."""
        middle = start + HALF_TOKENS
        stored = [threading.Event() for _ in self.weights.layers]

        def upper_half() -> F32:
            try:
                return self._rows(seq, ids[:HALF_TOKENS], start, (first, min(stop, middle)), done=stored)
            finally:
                # However it ends, the other half must not wait for ever; its result is then thrown away.
                for event in stored:
                    event.set()

        upper = self._beside.submit(upper_half)
        lower = self._rows(seq, ids[HALF_TOKENS:], middle, (max(first, middle), stop), after=stored)
        return np.concatenate((upper.result(), lower))

    def _rows(
        self,
        seq: Sequence,
        ids: NDArray[np.int64],
        start: int,
        store: tuple[int, int],
        *,
        done: list[threading.Event] | None = None,
        after: list[threading.Event] | None = None,
    ) -> F32:
        """Rows [start, start + len(ids)); stores K and V of the tokens `store`. Returns [rows, hidden].

        `done` is set layer by layer as K and V are stored; `after` is waited for before they are used.
        """
        config = self.config
        rows = len(ids)
        first, stop = store
        cos, sin = self._cos[start : start + rows], self._sin[start : start + rows]
        x = self.weights.embedding[ids]
        for index, layer in enumerate(self.weights.layers):
            normed = _norm(x, layer.attn_norm, config.norm_eps)
            qkv = (normed @ layer.qkv.T).reshape(rows, -1, config.head_dim)
            queries = _rope(qkv[:, : config.heads], cos, sin)
            if first < stop:
                keys = _rope(qkv[:, config.heads : config.heads + config.kv_heads], cos, sin)
                values = qkv[:, config.heads + config.kv_heads :]
                seq.kv[first:stop, index, 0] = keys[first - start : stop - start]
                seq.kv[first:stop, index, 1] = values[first - start : stop - start]
            if done:
                done[index].set()
            if after:
                after[index].wait()
            x += self._attention(seq, index, queries, start + rows) @ layer.attn_out.T
            x += _feed_forward(_norm(x, layer.ffn_norm, config.norm_eps), layer)
        return _norm(x, self.weights.out_norm, config.norm_eps)

    def _attention(self, seq: Sequence, layer: int, queries: F32, end: int) -> F32:
        """Causal attention of `queries` [rows, heads, dim] over tokens [0, end): [rows, heads * dim]."""
        config = self.config
        rows, group, dim = queries.shape[0], config.group, config.head_dim
        # [kv head][query head of its group][row]: the queries that read the same keys are one matrix.
        by_head = queries.reshape(rows, config.kv_heads, group, dim).transpose(1, 2, 0, 3)
        scaled = np.multiply(by_head, np.float32(dim**-0.5), order="C")
        grouped = scaled.reshape(config.kv_heads, group * rows, dim)
        out = np.empty((rows, config.kv_heads, group, dim), np.float32)
        scores = np.empty((group * rows, end), np.float32)  # one head's at a time, so that it stays in cache
        ones = np.ones(end, np.float32)
        for head in range(config.kv_heads):
            np.matmul(grouped[head], seq.keys(layer, head, end).T, out=scores)
            if rows > 1:
                scores.reshape(group, rows, end)[:, :, end - rows :] += self._causal
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = scores @ seq.values(layer, head, end)
            mixed /= (scores @ ones)[:, None]
            out[:, head] = mixed.reshape(group, rows, dim).swapaxes(0, 1)
        return out.reshape(rows, -1)


def _norm(x: F32, weight: F32, eps: float) -> F32:
    scale = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(eps))
    normed: F32 = x / scale * weight
    return normed


def _rope(x: F32, cos: F32, sin: F32) -> F32:
    """Turn the two halves of every head of `x` [rows, heads, dim] by the angle of its row."""
    half = x.shape[2] // 2
    low, high = x[..., :half], x[..., half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=2)


def _feed_forward(x: F32, layer: LayerWeights) -> F32:
    both = x @ layer.gate_up.T
    width = both.shape[1] // 2
    gate, up = both[:, :width], both[:, width:]
    # silu(gate) * up in one buffer; exp(-gate) overflows to inf for very negative gates, and gate / inf is
    # the right 0.
    activated = np.negative(gate)
    with np.errstate(over="ignore"):
        np.exp(activated, out=activated)
    activated += 1
    np.divide(gate, activated, out=activated)
    activated *= up
    return activated @ layer.down.T
