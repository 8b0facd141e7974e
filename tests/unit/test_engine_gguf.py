"""What the engine needs of a GGUF file, and what it says about files that it can't use."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from gd2fs.engine.gguf import GgufError, GgufFile
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
