"""Where the bytes of a file are: in memory, on NVMe, or nowhere any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gd2fs import errors

#: "lost": it was there, or may have been, and is not any more; "hole": it was never written.
Tier = Literal["dram", "nvme", "lost", "hole"]

#: ``[start, end)`` in bytes of the file.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[start, end)`` of a file, all of one kind."""

    start: int
    end: int
    tier: Tier

    @property
    def length(self) -> int:
        """Bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Warmth:
    """Bytes of ranges by where they were when their nodes were asked."""

    dram: int = 0
    nvme: int = 0
    missing: int = 0
    unreadable: int = 0
    """Of ``nvme``, what the nodes have tried to read last and could not: a disk fails."""

    def __add__(self, other: Warmth) -> Warmth:
        return Warmth(
            self.dram + other.dram,
            self.nvme + other.nvme,
            self.missing + other.missing,
            self.unreadable + other.unreadable,
        )


def checked(ranges: Sequence[Range]) -> list[Range]:
    """The ranges that are not empty. Raises Invalid for one that no file has."""
    for start, end in ranges:
        if not 0 <= start <= end < 1 << 63:
            raise errors.Invalid(
                f"ranges: [{start}, {end}) does not lie in 0..2^63-1, or ends before it starts"
            )
    return [(start, end) for start, end in ranges if start < end]
