"""What a run says to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gd2fs.bench.tiers.figures import verdicts
from gd2fs.cli.output import print_table

_SKIPPED = ("rounds", "violations", "guards")


def print_tables(result: Mapping[str, Any]) -> None:
    """Everything that was measured, then what it comes to beside the targets."""
    for part, details in result["details"].items():
        print_table(part, ("what", ">is"), _rows(details))
    print_table(
        "Targets",
        ("what", ">is", "target", ""),
        (
            (name, "not run" if value is None else f"{value:g}", target, _mark(met))
            for name, value, target, met in verdicts(result)
        ),
    )
    for part, reason in result["failed"].items():
        print_table("", ("not measured", "why"), [(part, reason)])


def _mark(met: bool | None) -> str:
    return "" if met is None else "met" if met else "MISSED"


def _rows(details: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in details.items():
        if name in _SKIPPED:
            continue
        if isinstance(value, Mapping):
            rows += _rows(value, f"{before}{name} ")
        elif isinstance(value, list):
            for entry in value:
                rows += _rows(entry, f"{before}{name} ") if isinstance(entry, Mapping) else []
        else:
            rows.append((before + name, f"{value:,}" if isinstance(value, int) else str(value)))
    return rows
