"""The bytes that stand in a file: computed from the file, the version of the write, and the place."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_WORD = 8
_MASK = (1 << 64) - 1
_STEP = 0x9E37_79B9_7F4A_7C15
_FIRST, _SECOND = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB


def _mixed(value: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014) of one number."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def pattern(file: str, version: int, start: int, length: int) -> Bytes:
    """Bytes ``[start, start + length)`` of ``file`` (32 hex digits) as the write ``version`` (1 and up) wrote
    them.

    Each eight bytes depend on all three, so that bytes of another place, version or file, zeros and torn
    pieces all differ from them.
    """
    base = _mixed(_mixed(int(file, 16) & _MASK) ^ version)
    first, last = start // _WORD, -(-(start + length) // _WORD)
    words: Any = np.arange(first, last, dtype=np.uint64)
    words *= np.uint64(_STEP)
    words += np.uint64(base)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    inside = start - first * _WORD
    found: Bytes = words.view(np.uint8)[inside : inside + length]
    return found
