"""What makes KV cache of this engine usable: one digest over everything its bytes depend on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from gd2fs.engine.kv import GRANULE_TOKENS, KV_FORMAT, kv_shape
from gd2fs.engine.weights import ModelConfig

# Raised when the forward pass or the byte layout changes so that older KV no longer fits.
KV_REVISION = 1
_READ_BYTES = 8 << 20


def weights_digest(path: Path) -> str:
    """SHA-256 of the model file: weights, their quantisation and the tokenizer with them."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def kv_identity(config: ModelConfig, weights_sha256: str) -> str:
    """Hex digest. Equal digests mean: the same tokens have interchangeable KV bytes.

    The model's name is left out on purpose (it follows from the file's name); so is the chunk size of
    prefill, which moves a result by rounding only, as another BLAS would.
    """
    facts = {
        "revision": KV_REVISION,
        "weights": weights_sha256,
        "config": {key: value for key, value in asdict(config).items() if key != "name"},
        "rope": "halves",  # which elements of a head rope turns against each other; Keys are stored after it
        "kv": {
            "format": KV_FORMAT,
            "granule": GRANULE_TOKENS,
            "token_bytes": kv_shape(config).token_bytes,
            "order": "layer,key_value,kv_head,head_dim",
            "dtype": "float32",
            "byte_order": "little",
            "scales": None,
        },
        "parallel": {"tensor": 1, "pipeline": 1},
        "layer_groups": 1,
        "adapter": None,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
