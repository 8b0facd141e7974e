"""The stub, the compiled module and the Python tables beside it say the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
native = pytest.importorskip("gd2fs._native", reason="the compiled module is not built (make build)")


def stub_names() -> dict[str, set[str]]:
    """Top-level names of the stub, each with the names of its methods (empty for functions and constants)."""
    names: dict[str, set[str]] = {}
    for node in ast.parse((ROOT / "python" / "gd2fs" / "_native.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = set()
    return names


def public(owner: object) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def test_the_stub_names_what_the_module_has() -> None:
    assert {name for name in stub_names() if not name.startswith("_")} == public(native)


def test_the_stub_names_the_methods_of_every_class() -> None:
    for name, methods in stub_names().items():
        member = getattr(native, name)
        if isinstance(member, type):
            assert {m for m in methods if not m.startswith("_")} == public(member), name
