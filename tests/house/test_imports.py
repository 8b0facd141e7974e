"""Which parts may know each other (ARCHITECTURE.md): a new edge is a decision, not an accident."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "gd2fs"

# Package → the packages of gd2fs that it may import. `cli` and `demo` start everything and may know all.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "signing": {"errors"},
    "kv": {"errors"},
    "config": {"errors", "signing"},
    "client": {"_native", "errors", "kv"},
    "control": {"_native", "client", "config", "errors", "kv", "signing"},
    "node": {"_native", "client", "config", "errors", "signing"},
    "connectors": {"client", "errors", "kv"},
    "engine": {"_native", "client", "config", "connectors", "errors", "kv"},
    # It starts a cluster of its own, as the commands do; the torture also signs as control would, and the
    # last turn of the demo is measured, too.
    "bench": {"_native", "cli", "client", "config", "demo", "errors", "kv", "signing"},
    "gateway": {"client", "config", "errors", "kv"},
}

CRATES = {
    "gd2fs-wire": set(),
    "gd2fs-transport": {"gd2fs-wire"},
    "gd2fs-device": {"gd2fs-transport"},
    "gd2fs-store": {"gd2fs-wire", "gd2fs-transport", "gd2fs-device", "gd2fs-log"},
    "gd2fs-log": {"gd2fs-wire", "gd2fs-transport", "gd2fs-device"},
    "gd2fs-node": {"gd2fs-wire", "gd2fs-transport", "gd2fs-device", "gd2fs-store"},
    "gd2fs-client": {"gd2fs-wire", "gd2fs-transport"},
    "gd2fs-bench": {"gd2fs-wire", "gd2fs-transport", "gd2fs-client"},
    # For tests alone; nothing that ships knows it.
    "gd2fs-disk": {"gd2fs-device"},
    "gd2fs-py": {"gd2fs-wire", "gd2fs-transport", "gd2fs-node", "gd2fs-client", "gd2fs-bench"},
}


def imported_parts(source: Path) -> set[str]:
    """The first component below ``gd2fs`` of every import in a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == "gd2fs":
                names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gd2fs.")}
    return names


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_python_parts_know_only_what_lies_below_them(part: str) -> None:
    module = PACKAGE / f"{part}.py"
    files = [module] if module.exists() else sorted((PACKAGE / part).rglob("*.py"))
    assert files, f"{part} has no file"
    for file in files:
        foreign = imported_parts(file) - ALLOWED[part] - {part, "__version__"}
        assert not foreign, f"{file.relative_to(ROOT)} imports {sorted(foreign)}"


def test_every_python_part_is_listed() -> None:
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and list(p.glob("*.py")))}
    assert parts - {"__init__", "cli", "demo"} == set(ALLOWED)


@pytest.mark.parametrize("crate", sorted(CRATES))
def test_crates_know_only_what_lies_below_them(crate: str) -> None:
    manifest = tomllib.loads((ROOT / "crates" / crate / "Cargo.toml").read_text())
    ours = {name for name in manifest.get("dependencies", {}) if name.startswith("gd2fs-")}
    assert ours <= CRATES[crate]


def test_every_crate_is_listed() -> None:
    assert {p.name for p in (ROOT / "crates").iterdir() if (p / "Cargo.toml").exists()} == set(CRATES)
