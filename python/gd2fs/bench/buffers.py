"""Memory of the measurements: populated beforehand, on huge pages where the machine has them."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from gd2fs.bench.cases import FRAGMENT_BYTES

#: Writes alternate between two places of the source, so that a write that changed nothing is found. A
#: multiple of every page and stripe unit, so that both are equally aligned.
SHIFT_BYTES = 4 << 20


class Buffer:
    """Bytes at a fixed address. ``owner`` is kept alive with them."""

    def __init__(self, array: np.ndarray[Any, Any], owner: Any = None) -> None:
        self.array, self.owner = array, owner
        self.address: int = array.ctypes.data

    def at(self, offset: int, length: int) -> tuple[int, int]:
        """Address and length of a range, as the native loops take it."""
        assert offset + length <= len(self.array)
        return self.address + offset, length


def ordinary(length: int) -> Buffer:
    """Memory as an application has it, foreign to the library."""
    mapping = mmap.mmap(-1, length)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, np.uint8)
    array[:] = 0xA5  # every page exists before anything is measured
    return Buffer(array, mapping)


def pattern(length: int) -> Buffer:
    """Random bytes, the same in every run: no range of them looks like another."""
    buffer = ordinary(length + SHIFT_BYTES)
    words = buffer.array[: len(buffer.array) // 8 * 8].view(np.uint64)
    random = np.random.default_rng(7)
    step = 1 << 23
    for start in range(0, len(words), step):
        part = words[start : start + step]
        part[:] = random.integers(0, 1 << 64, len(part), np.uint64)
    return buffer


def addresses(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.uint64)


def slots(span_bytes: int, count: int) -> np.ndarray[Any, Any]:
    """The first ``count`` of all places for fragments in a span, in an order without neighbours, always the
    same."""
    return np.random.default_rng(11).permutation(span_bytes // FRAGMENT_BYTES)[:count].astype(np.uint64)
