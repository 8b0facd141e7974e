"""What a run says to people."""

from __future__ import annotations

from typing import Any

from gd2fs.bench.cases import GIB, KIB, MIB, STREAMS
from gd2fs.bench.ratios import LOWER_IS_BETTER, TARGETS
from gd2fs.cli.output import print_table


def print_tables(result: dict[str, Any]) -> None:
    """Throughput beside the ceilings, every case with its latencies, competitors, and the ratios."""
    ceilings = result["ceilings_by_size"]
    print_table(
        "Ceilings, GB/s",
        ("op", ">size", "what", ">width", ">GB/s", ">core-s/GB"),
        (
            (
                row["op"],
                size_name(row["size"]),
                row["name"].replace("_", " "),
                row.get("streams", row.get("threads")),
                _number(row["gb_per_s"]),
                _number(row["cpu_s_per_gb"], 3),
            )
            for row in ceilings
        ),
    )
    print_table(
        "GD2FS",
        ("op", ">size", "transport", "how", ">GB/s", ">of ceiling", ">p50 µs", ">p99 µs", ">core-s/GB"),
        (
            (
                row["op"],
                size_name(row["size"]),
                row["transport"],
                _how(row),
                _number(row["gb_per_s"]),
                _of_ceiling(row, ceilings),
                f"{row['p50_us']:,.0f}",
                f"{row['p99_us']:,.0f}",
                _number(row["cpu_s_per_gb"], 3),
            )
            for row in result["results"]
        ),
    )
    print_table(
        "Competitors",
        ("name", "op", ">value size", ">GB/s"),
        ((p["name"], p["op"], size_name(p["size"]), _number(p["gb_per_s"])) for p in result["peers"]),
    )
    print_table("Ratios", ("what", ">is", ">target"), _ratio_rows(result["ratios"]))


def size_name(size: int) -> str:
    """As people write it: "64 KiB"; sizes that are no whole number of a unit in MB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size / 1e6:.0f} MB"


def _how(row: dict[str, Any]) -> str:
    """How the case differs from the usual one."""
    words = []
    if row["streams"] != STREAMS:
        words.append(f"{row['streams']} stream(s)")
    if not row["verify"]:
        words.append("no verification")
    if row["scattered"]:
        words.append("scattered")
    if row["first"]:
        words.append("new file")
    if row["transport"] == "shm" and row["memory"] == "foreign":
        words.append("foreign memory")
    return ", ".join(words)


def _of_ceiling(row: dict[str, Any], ceilings: list[dict[str, Any]]) -> str:
    """Over raw sockets with as many streams, or over the faster copy with all threads."""
    beside = [c for c in ceilings if (c["op"], c["size"]) == (row["op"], row["size"])]
    if row["transport"] == "tcp":
        rates = [c["gb_per_s"] for c in beside if c.get("streams") == row["streams"]]
    else:
        threads = max((c.get("threads", 0) for c in beside), default=0)
        rates = [c["gb_per_s"] for c in beside if c.get("threads") == threads]
    return f"{row['gb_per_s'] / max(rates):.2f}" if rates else ""


def _ratio_rows(values: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for name, value in values.items():
        target = TARGETS[name]
        limit = "at most" if name in LOWER_IS_BETTER else "at least"
        for part, one in value.items() if isinstance(value, dict) else (("", value),):
            wanted = target.get(part) if isinstance(target, dict) else target
            rows.append((
                f"{name} {part}".strip(),
                "not run" if one is None else f"{one:.2f}",
                "reported" if wanted is None else f"{limit} {wanted:g}",
            ))  # fmt: skip
    return rows


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
