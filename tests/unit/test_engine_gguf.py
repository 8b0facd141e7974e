"""What the engine needs of a GGUF file, and what it says about files that it can't use."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gd2fs.engine.gguf import GgufError, GgufFile
from gd2fs.engine.loaded import load_model
from gd2fs.engine.weights import packaged_model, read_config


@pytest.fixture(scope="module")
def model() -> GgufFile:
    return GgufFile(packaged_model())


def test_the_shape_is_read_from_the_metadata(model: GgufFile) -> None:
    config = read_config(model)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.context_max == 8192
    assert "<|im_start|>" in model.metadata["tokenizer.chat_template"]


def test_a_missing_tensor_and_a_wrong_shape_are_named(model: GgufFile) -> None:
    with pytest.raises(GgufError, match=r"'nose\.weight' is missing"):
        model.read("nose.weight", np.empty(1, np.float32))
    with pytest.raises(GgufError, match=r"'output_norm\.weight' has shape \(576,\), expected \(5,\)"):
        model.read("output_norm.weight", np.empty(5, np.float32))


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, 1_000_000])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    with packaged_model().open("rb") as whole:
        start = whole.read(keep)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(start or b"\0")
    with pytest.raises(GgufError, match=r"damaged\.gguf"):
        GgufFile(damaged)


def test_absurd_counts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "many.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 10, 2**60) + bytes(64))
    with pytest.raises(GgufError, match=r"many\.gguf"):
        GgufFile(file)


SIZES = {
    "llama.block_count": 1,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 8,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.context_length": 64,
}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
LAYER = {
    "attn_q": (8, 8),
    "attn_k": (4, 8),
    "attn_v": (4, 8),
    "attn_output": (8, 8),
    "ffn_gate": (8, 8),
    "ffn_up": (8, 8),
    "ffn_down": (8, 8),
    "attn_norm": (8,),
    "ffn_norm": (8,),
}


def write_model(path: Path, changes: dict[str, Any]) -> Path:
    """A whole model of one layer, with `changes` in its metadata (None: the key is left out)."""
    metadata = {**SIZES, "llama.attention.layer_norm_rms_epsilon": 1e-5, **TOKENIZER, **changes}
    writer = gguf.GGUFWriter(path, "llama")
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        if value is not None:
            add[type(value)](key, value)
    shapes = {f"blk.0.{name}.weight": shape for name, shape in LAYER.items()}
    for name, shape in {"token_embd.weight": (4, 8), "output_norm.weight": (8,), **shapes}.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_small_whole_model_is_read(tmp_path: Path) -> None:
    loaded = load_model(write_model(tmp_path / "small.gguf", {}))
    assert loaded.tokenizer.encode("abb") == [2, 1] and loaded.kv_format.bytes_per_token == 2 * 4 * 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.attention.head_count": 3}, "3 heads"),
        ({"llama.attention.head_count_kv": 3}, "3 KV heads"),
        ({"llama.block_count": 0}, "block_count"),
        ({"llama.embedding_length": "8"}, "embedding_length"),
        ({"llama.feed_forward_length": 1 << 20}, r"ffn_gate\.weight"),
        ({"llama.context_length": 2**32 - 1}, "context_length"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon"),
        ({"tokenizer.ggml.tokens": None}, "tokens"),
        ({"tokenizer.ggml.tokens": ["\n", "a", "b", "ab"]}, "tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer"),
        ({"tokenizer.ggml.merges": ["a z"]}, "tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 99}, "tokenizer"),
        ({"tokenizer.chat_template": "{% if"}, "tokenizer"),
    ],
)
def test_metadata_that_can_not_be_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    file = write_model(tmp_path / "wrong.gguf", changes)
    with pytest.raises(GgufError, match=rf"wrong\.gguf: .*{named}"):
        load_model(file)
