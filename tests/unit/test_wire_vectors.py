"""The golden headers that Rust reads too: both languages put the same fields into the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

native = pytest.importorskip("gd2fs._native", reason="the compiled module is not built (make build)")
VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "header.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_headers(vector: dict[str, Any]) -> None:
    golden = bytes.fromhex(vector["hex"])
    assert native.header_encode(**vector["fields"]) == golden
    decoded = native.header_decode(golden)
    assert {name: decoded[name] for name in vector["fields"]} == vector["fields"]
