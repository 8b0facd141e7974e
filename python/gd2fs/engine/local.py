"""KV kept between requests in the engine's own memory: off by default, there to compare GD2FS with."""

from __future__ import annotations

from gd2fs.engine.kv import Sequence
from gd2fs.kv import as_ids, lcp

# Each holds up to a whole context in memory (377 MB for the reference model), so few are kept.
SEQUENCES_MAX = 4


class LocalKv:
    """The last few sequences with their ids. A sequence is taken out while a request uses it."""

    def __init__(self) -> None:
        self._kept: list[tuple[list[int], Sequence]] = []  # the oldest first

    def match(self, ids: list[int]) -> tuple[int, int]:
        """(place, tokens) of the kept sequence with the longest common prefix; tokens are 0 when there is
        none.
        """
        best = (-1, 0)
        for place, (kept, _) in enumerate(self._kept):
            tokens = min(lcp(as_ids(kept), as_ids(ids)), len(ids) - 1)
            if tokens > best[1]:
                best = (place, tokens)
        return best

    def take(self, place: int, tokens: int) -> Sequence:
        """The sequence at `place`, cut to its first `tokens` tokens."""
        _, sequence = self._kept.pop(place)
        sequence.length = tokens
        return sequence

    def keep(self, ids: list[int], sequence: Sequence) -> None:
        self._kept.append((ids[: sequence.length], sequence))
        del self._kept[:-SEQUENCES_MAX]
