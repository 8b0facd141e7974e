"""Cutting, joining and merging of segments. Every function returns new lists and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gd2fs.kv.segment import TO_THE_END, KvFormat, Segment, SegmentError, resized, validate


def tokens_of(segments: Sequence[Segment]) -> int:
    """Tokens that contiguous segments from 0 cover."""
    return segments[-1].token_end if segments else 0


def merge(segments: Sequence[Segment], kv_format: KvFormat | None = None) -> list[Segment]:
    """Joins neighbours that lie in one file, contiguous in tokens and bytes, the first ending on a granule.

    Without a format the granule is one token, and both must have the same number of bytes per token, so that
    a later cut is still exact.
    """
    merged: list[Segment] = []
    for segment in segments:
        if merged and _mergeable(merged[-1], segment, kv_format):
            first = merged[-1]
            assert first.kv_length is not None and segment.kv_length is not None
            merged[-1] = replace(
                first,
                token_length=first.token_length + segment.token_length,
                kv_length=first.kv_length + segment.kv_length,
            )
        else:
            merged.append(segment)
    return merged


def _mergeable(first: Segment, second: Segment, kv_format: KvFormat | None) -> bool:
    if first.kv_length is None or second.kv_length is None or first.kv_uri != second.kv_uri:
        return False
    if TO_THE_END in (first.token_length, second.token_length):
        return False
    if first.token_end != second.token_start or first.kv_end != second.kv_start:
        return False
    if kv_format is None:
        return first.kv_length * second.token_length == second.kv_length * first.token_length
    return kv_format.merges and first.token_length % kv_format.granule == 0


def cut(segments: Sequence[Segment], tokens: int, kv_format: KvFormat | None = None) -> list[Segment]:
    """What is left of the segments below `tokens` (counted in the session); an open end is closed there.

    Raises SegmentError if a segment's bytes can't be divided there and no format says how.
    """
    if tokens < 0:
        raise SegmentError("tokens", f"{tokens} must not be negative")
    kept: list[Segment] = []
    for segment in segments:
        left = tokens - segment.token_start
        if left <= 0:
            break
        if segment.token_length != TO_THE_END and segment.token_length <= left:
            kept.append(segment)
        else:
            kept.append(resized(segment, left, kv_format))
    return kept


def append(
    stored: Sequence[Segment], fresh: Sequence[Segment], kv_format: KvFormat | None = None
) -> list[Segment]:
    """Stored segments followed by fresh ones whose lengths are known, merged: what is stored after a
    commit."""
    validate(stored, field="stored_kvcache")
    validate(fresh, field="fresh_kvcache", start=tokens_of(stored), fresh=True)
    for i, segment in enumerate(fresh):
        if segment.token_length == TO_THE_END or segment.kv_length is None:
            raise SegmentError(
                f"fresh_kvcache[{i}]", "needs its token_length and kv_length before it can be stored"
            )
    return merge([*stored, *fresh], kv_format)
