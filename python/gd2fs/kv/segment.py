"""A segment: which tokens lie in which bytes of which file, and how tokens become bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

TO_THE_END = -1
"""`token_length` of a fresh segment whose output length is not known yet."""

_INT_MAX = 2**63 - 1
"""Tokens and bytes travel as signed 64-bit numbers through SQL and JSON."""

_MERGED_FORMATS = frozenset({"token", "block"})
"""Formats whose bytes follow each other in token order. Rank-major segments have another name and never
merge."""


class SegmentError(ValueError):
    """Segments that do not say what they must; `field` names the place, as in
    `stored_kvcache[1].kv_start`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How tokens become bytes. `granule` tokens are stored whole: a usable prefix is a multiple of it."""

    name: str
    bytes_per_token: int
    granule: int = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise SegmentError("kv_format.name", "must not be empty")
        if not 1 <= self.bytes_per_token <= 2**40:
            raise SegmentError("kv_format.bytes_per_token", f"{self.bytes_per_token} is not in 1..2^40")
        if not 1 <= self.granule <= 2**20:
            raise SegmentError("kv_format.granule", f"{self.granule} is not in 1..2^20")
        if self.name == "token" and self.granule != 1:
            raise SegmentError("kv_format.granule", "is 1 in the format 'token'")

    @property
    def merges(self) -> bool:
        """Whether neighbouring segments of this format may become one entry."""
        return self.name in _MERGED_FORMATS

    def bytes_of(self, tokens: int) -> int:
        """Bytes that `tokens` tokens take from a granule's start on; a granule begun takes its whole
        place."""
        return -(-tokens // self.granule) * self.granule * self.bytes_per_token

    def round_down(self, tokens: int) -> int:
        return tokens - tokens % self.granule


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[token_start, token_start + token_length)` in bytes `[kv_start, kv_start + kv_length)` of
    `kv_uri`.

    A fresh segment may have `token_length` -1 (to the end) and no `kv_length` until it is written.
    """

    token_start: int
    token_length: int
    kv_uri: str
    kv_start: int
    kv_length: int | None = None

    @property
    def token_end(self) -> int:
        """One past the last token; only for a segment whose length is known."""
        if self.token_length == TO_THE_END:
            raise SegmentError("token_length", "is not known yet (-1)")
        return self.token_start + self.token_length

    @property
    def kv_end(self) -> int:
        """One past the last byte; only for a segment whose length in bytes is known."""
        if self.kv_length is None:
            raise SegmentError("kv_length", "is not known yet")
        return self.kv_start + self.kv_length

    def token_index(self, kv_format: KvFormat, token: int) -> int:
        """Place of `token` (counted in the session) in the file's token order: its id is at 4 x this in
        `.tokens`."""
        first, rest = divmod(self.kv_start, kv_format.bytes_per_token)
        if rest:
            raise SegmentError(
                "kv_start", f"{self.kv_start} is not a multiple of {kv_format.bytes_per_token}"
            )
        return first + token - self.token_start


def validate(segments: Sequence[Segment], *, field: str, start: int = 0, fresh: bool = False) -> None:
    """Checks each segment and that together they are sorted and contiguous in tokens from `start`.

    Only the last of a `fresh` list may be open (-1). Raises SegmentError naming `field[i].name`.
    """
    expected: int | None = start
    for i, segment in enumerate(segments):
        where = f"{field}[{i}]"
        _validate_one(segment, where, fresh)
        if expected is None:
            raise SegmentError(f"{field}[{i - 1}].token_length", "-1 is for the last segment only")
        if segment.token_start != expected:
            raise SegmentError(
                f"{where}.token_start",
                f"is {segment.token_start}, but the tokens before it end at {expected}",
            )
        expected = None if segment.token_length == TO_THE_END else segment.token_end


def _validate_one(segment: Segment, where: str, fresh: bool) -> None:
    numbers = {"token_start": segment.token_start, "kv_start": segment.kv_start}
    if segment.kv_length is not None:
        numbers["kv_length"] = segment.kv_length
    for name, value in numbers.items():
        if not 0 <= value <= _INT_MAX:
            raise SegmentError(f"{where}.{name}", f"{value} is not in 0..2^63-1")
    if not segment.kv_uri:
        raise SegmentError(f"{where}.kv_uri", "must not be empty")
    if segment.token_length == TO_THE_END and fresh:
        return
    if not 1 <= segment.token_length <= _INT_MAX - segment.token_start:
        allowed = "at least 1, or -1 for 'to the end'" if fresh else "at least 1"
        raise SegmentError(f"{where}.token_length", f"{segment.token_length} must be {allowed}")


def resized(segment: Segment, tokens: int, kv_format: KvFormat | None = None) -> Segment:
    """The first `tokens` tokens of `segment`; without a format its bytes are shared out evenly, exactly or
    not at all."""
    if kv_format is not None:
        return replace(segment, token_length=tokens, kv_length=kv_format.bytes_of(tokens))
    if segment.kv_length is None or segment.token_length == TO_THE_END:
        return replace(segment, token_length=tokens)
    kv_length, rest = divmod(segment.kv_length * tokens, segment.token_length)
    if rest:
        raise SegmentError(
            "kv_length",
            f"{segment.kv_length} bytes do not divide into {segment.token_length} tokens; name the kv_format",
        )
    return replace(segment, token_length=tokens, kv_length=kv_length)
