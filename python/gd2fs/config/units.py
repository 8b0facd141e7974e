"""Sizes with units, as people write them: "1GiB", "64 MiB", 4096."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "t": 1000**4,
    "tb": 1000**4,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
# Beyond every machine, and exact in every number that a size becomes on its way.
_BYTES_MAX = 1 << 60
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(value: int | str) -> int:
    """Bytes in `value`: a number, or text such as "1GiB" or "500 MB".

    Raises ValueError that names the text and shows a correct one.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size; write for example 1GiB or 1073741824")
    if isinstance(value, int):
        return _bounded(value, value)
    match = _SIZE.match(value)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{value!r} is not a size; write for example 1GiB or 1073741824")
    return _bounded(float(match.group(1)) * factor, value)


def _bounded(count: float, value: int | str) -> int:
    if count > _BYTES_MAX:
        raise ValueError(f"{value!r} is more than 1 EiB; write for example 1GiB or 1073741824")
    return int(count)


def format_bytes(count: int | float) -> str:
    """Text for people, in binary units: 1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
