"""Explicit KV cache metadata: segments, their arithmetic and their JSON. Pure: no I/O, numpy and the stdlib
only."""

from __future__ import annotations

from gd2fs.kv.arithmetic import append, cut, merge, tokens_of
from gd2fs.kv.ids import ID_BYTES, Ids, RunningDigest, as_ids, digest, ids_from_bytes, ids_to_bytes, lcp
from gd2fs.kv.metadata import KvMetadata, Spelling, parse, segment_from_json, segment_to_json
from gd2fs.kv.segment import TO_THE_END, KvFormat, Segment, SegmentError, validate
from gd2fs.kv.splice import splice

__all__ = [
    "ID_BYTES",
    "TO_THE_END",
    "Ids",
    "KvFormat",
    "KvMetadata",
    "RunningDigest",
    "Segment",
    "SegmentError",
    "Spelling",
    "append",
    "as_ids",
    "cut",
    "digest",
    "ids_from_bytes",
    "ids_to_bytes",
    "lcp",
    "merge",
    "parse",
    "segment_from_json",
    "segment_to_json",
    "splice",
    "tokens_of",
    "validate",
]
