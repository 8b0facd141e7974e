"""The chart: read throughput by request size, of GD2FS, its ceilings and Redis."""

from __future__ import annotations

from collections.abc import Iterable
from math import log2, log10
from typing import Any

from gd2fs.bench.cases import STREAMS
from gd2fs.bench.redis import PLAIN
from gd2fs.bench.table import size_name

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 52, 20, 74, 40
#: Gigabytes per second at the lower and upper edge; what lies outside is drawn at the edge.
FLOOR, TOP_MIN = 0.1, 10.0
MARKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def chart(result: dict[str, Any]) -> str:
    """The SVG of one run. The scale is logarithmic: what is compared differs a hundredfold."""
    series = _series(result)
    sizes = sorted({size for _, _, points in series for size in points})
    top = max([TOP_MIN, *(rate for _, _, points in series for rate in points.values())])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" fill="#111">Reading, GB/s, by size of request</text>',
    ]
    for mark in MARKS:
        if mark <= top:
            y = _y(mark, top)
            ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
            parts.append(f'<line {ends} stroke="#e5e7eb"/>')
            parts.append(_text(LEFT - 6, y + 4, f"{mark:g}", "end", "#555"))
    for size in sizes:
        parts.append(_text(_x(size, sizes), HEIGHT - BOTTOM + 18, size_name(size), "middle", "#333"))
    for index, (label, style, points) in enumerate(series):
        x, y = LEFT + index % 3 * 230, 38 + index // 3 * 17
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" {style}/>')
        parts.append(_text(x + 28, y + 4, label, "start", "#333"))
        places = [(_x(size, sizes), _y(rate, top)) for size, rate in sorted(points.items())]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" {style}/>')
        colour = style.split('"')[1]
        parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _series(result: dict[str, Any]) -> list[tuple[str, str, dict[int, float]]]:
    """Label, style and points (size → GB/s) of every line that has points."""
    reads = [row for row in result["ceilings_by_size"] if row["op"] == "read"]
    threads, peers = result["ceilings"]["threads_n"], result["peers"]
    found = [
        ("memcpy, all cores", "#b8bcc6", _ceiling(reads, "memcpy", threads)),
        ("raw TCP sockets", "#6b7280", _ceiling(reads, "raw_tcp", STREAMS)),
        ("GD2FS over shared memory", "#16a34a", _gd2fs(result["results"], "shm", "library")),
        ("GD2FS over TCP", "#2563eb", _gd2fs(result["results"], "tcp", "foreign")),
        (
            "Redis, compiled reader",
            "#dc2626",
            _best(peer for peer in peers if peer["name"].startswith("redis ")),
        ),
        ("Redis, redis-py", "#f59e0b", _best(peer for peer in peers if peer["name"] in PLAIN)),
    ]
    return [
        (label, f'stroke="{colour}" stroke-width="{3 if "GD2FS" in label else 2}"', points)
        for label, colour, points in found
        if points
    ]


def _ceiling(rows: list[dict[str, Any]], name: str, width: int | None) -> dict[int, float]:
    return {
        row["size"]: row["gb_per_s"]
        for row in rows
        if row["name"] == name and row.get("streams", row.get("threads")) == width
    }


def _gd2fs(rows: list[dict[str, Any]], transport: str, memory: str) -> dict[int, float]:
    """The usual cases; the size of the scattered load is left out, as it is no step of the scale."""
    loads = {row["size"] for row in rows if row["scattered"]}
    return {
        row["size"]: row["gb_per_s"]
        for row in rows
        if (row["transport"], row["op"], row["memory"], row["streams"])
        == (transport, "read", memory, STREAMS)
        and row["verify"]
        and not row["scattered"]
        and (row["size"] not in loads or row["size"] & (row["size"] - 1) == 0)
    }


def _best(peers: Iterable[dict[str, Any]]) -> dict[int, float]:
    best: dict[int, float] = {}
    for peer in peers:
        best[peer["size"]] = max(peer["gb_per_s"], best.get(peer["size"], 0.0))
    return best


def _x(size: int, sizes: list[int]) -> float:
    """Sizes grow by factors, so that their logarithms are spread evenly."""
    low, high = log2(sizes[0]), log2(sizes[-1])
    share = (log2(size) - low) / (high - low) if high > low else 0.5
    return LEFT + 24 + share * (WIDTH - LEFT - RIGHT - 48)


def _y(rate: float, top: float) -> float:
    share = (log10(max(rate, FLOOR)) - log10(FLOOR)) / (log10(top) - log10(FLOOR))
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, anchor: str, colour: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="11" fill="{colour}">{text}</text>'
