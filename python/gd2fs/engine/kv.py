"""The KV cache of one sequence, held in memory exactly as it is stored: kv_format `token`.

The bytes of token *t* are `[layer][key, value][kv head][head dim]` float32 little-endian, Keys after rope.
The sequence's array has the same order, so a range of tokens *is* a range of bytes: a load receives straight
into it and a save sends straight from it, with no copy and no conversion. Attention reads it with a row
stride of one token, which BLAS takes as a leading dimension; measured against per-layer arrays that costs
nothing in prefill and about a tenth of a decode step's attention, far less than re-sorting the bytes of every
load would.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gd2fs.engine.weights import ModelConfig

KV_FORMAT = "token"
GRANULE_TOKENS = 1  # any range of tokens is a range of bytes
# Rows of one prefill step (model.py says why it is fixed). Measured on 2 cores: 2,560 tokens take 10.5 s in
# chunks of 32, 9.2 s of 64, 8.6 s of 128; 20 new tokens behind 2,500 loaded ones take 0.17, 0.31 and 0.59 s.
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class KvShape:
    """Sizes of one token's KV."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


def kv_shape(config: ModelConfig) -> KvShape:
    return KvShape(config.layers, config.kv_heads, config.head_dim)


class Sequence:
    """KV of one request: rows [0, length) are valid, the rows behind them are free.

    `kv` has shape [capacity, layers, 2, kv_heads, head_dim]. The memory comes from the operating system when
    rows are first touched and goes back when the sequence is dropped; nothing of it outlives the request.
    """

    def __init__(self, shape: KvShape, tokens_max: int) -> None:
        if sys.byteorder != "little":
            raise RuntimeError(
                "kv_format `token` is little-endian and this engine stores its own memory as it is"
            )
        self.shape = shape
        # Whole chunks, because the last prefill step computes a padded chunk.
        self.capacity = -(-max(tokens_max, 1) // CHUNK_TOKENS) * CHUNK_TOKENS
        self.kv: NDArray[np.float32] = np.zeros(
            (self.capacity, shape.layers, 2, shape.kv_heads, shape.head_dim), np.float32
        )
        self.length = 0

    def rows(self, start: int, end: int) -> memoryview:
        """The bytes of tokens [start, end), writable, one contiguous piece."""
        if not 0 <= start <= end <= self.capacity:
            raise ValueError(f"tokens [{start}, {end}) do not lie inside a sequence of {self.capacity}")
        return self.kv[start:end].reshape(-1).view(np.uint8).data

    def keys(self, layer: int, head: int, end: int) -> NDArray[np.float32]:
        """Keys of one head for tokens [0, end): shape [end, head_dim], row stride one token."""
        return self.kv[:end, layer, 0, head]

    def values(self, layer: int, head: int, end: int) -> NDArray[np.float32]:
        """Values of one head for tokens [0, end): shape [end, head_dim], row stride one token."""
        return self.kv[:end, layer, 1, head]
