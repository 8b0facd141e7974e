"""Draws the README's chart, time to first token of every turn three ways, from a recorded demo.

.venv/bin/python benchmarks/record.py demo .venv/bin/gd2fs demo --json
.venv/bin/python benchmarks/chart_demo.py benchmarks/results/DATE-demo.json docs/ttft.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 320, 64, 46, 54
SERIES = (
    ("recompute_ttft_ms", "recomputed", "#b8bcc6"),
    ("ttft_ms", "from GD2FS, on another engine", "#2563eb"),
    ("local_ttft_ms", "kept in the engine", "#16a34a"),
)


def chart(result: dict[str, Any]) -> str:
    """The SVG of one demo result."""
    turns = result["turns"]
    top_ms = max(turn[key] or 0 for turn in turns for key, _, _ in SERIES)
    scale = (HEIGHT - TOP - BOTTOM) / top_ms
    slot = (WIDTH - LEFT - 20) / len(turns)
    bar = slot / (len(SERIES) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" fill="#111">Time to first token of each turn, ms</text>',
    ]
    for i, (_, label, colour) in enumerate(SERIES):
        x = LEFT + i * 220
        parts.append(f'<rect x="{x}" y="30" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="40" font-size="12" fill="#333">{label}</text>')
    step = next(s for s in (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000) if top_ms / s <= 6)
    for mark in range(step, int(top_ms) + 1, step):
        y = HEIGHT - BOTTOM - mark * scale
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" font-size="11" text-anchor="end" fill="#555">'
            f"{mark:,}</text>"
        )
    for i, turn in enumerate(turns):
        x = LEFT + i * slot + bar / 2
        for j, (key, _, colour) in enumerate(SERIES):
            height = (turn[key] or 0) * scale
            parts.append(
                f'<rect x="{x + j * bar:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{bar * 0.9:.1f}" '
                f'height="{height:.1f}" fill="{colour}"/>'
            )
        middle = x + 1.5 * bar
        parts.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" font-size="11" text-anchor="middle" '
            f'fill="#333">turn {turn["turn"]}</text>'
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 31}" font-size="10" text-anchor="middle" '
            f'fill="#777">{turn["cached_tokens"]:,} of {turn["prompt_tokens"]:,}</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    source, target = (Path(argument) for argument in sys.argv[1:3])
    target.write_text(chart(json.loads(source.read_text())["result"]))
