"""The JSON that travels with a request, in every spelling that public clients use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gd2fs.kv.arithmetic import tokens_of
from gd2fs.kv.segment import Segment, SegmentError, validate

SEGMENTS_MAX = 4096
"""Per list: far above what a session has (one or two), far below what could make a request expensive."""
_TEXT_MAX = 4096


class Spelling(Enum):
    """Names of the stored and the fresh list."""

    KVCACHE = ("stored_kvcache", "fresh_kvcache")
    KV_CACHE = ("stored_kv_cache", "fresh_kv_cache")
    OLD_NEW = ("old_kv_cache", "new_kv_cache")


_WRAPPERS = ("kv_transfer_params", "kvcache_params", "session_params")
_OWN_KEYS = frozenset({"id", "load_threshold"} | {name for spelling in Spelling for name in spelling.value})


@dataclass(frozen=True, slots=True)
class KvMetadata:
    """Stored and fresh segments of one request. `extra` holds the keys that are not ours, untouched."""

    id: str
    stored: tuple[Segment, ...] = ()
    fresh: tuple[Segment, ...] = ()
    load_threshold: int = 0
    spelling: Spelling = Spelling.KVCACHE
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, spelling: Spelling | None = None) -> dict[str, Any]:
        """The object inside `kvcache_params` (or `session_params`), in its own spelling or another."""
        stored, fresh = (spelling or self.spelling).value
        return {
            "id": self.id,
            stored: [segment_to_json(segment) for segment in self.stored],
            fresh: [segment_to_json(segment) for segment in self.fresh],
            "load_threshold": self.load_threshold,
            **self.extra,
        }


def parse(obj: object) -> KvMetadata:
    """Reads the metadata, bare or inside `kv_transfer_params`, `kvcache_params` or `session_params`.

    Raises SegmentError, naming the field, where the object does not follow CLIENTS' rules: segments sorted,
    contiguous from token 0, the fresh ones beginning where the stored ones end.
    """
    body = _unwrapped(obj)
    spelling = _spelling(body)
    stored_name, fresh_name = spelling.value
    stored = _segments(body.get(stored_name), stored_name)
    fresh = _segments(body.get(fresh_name), fresh_name)
    validate(stored, field=stored_name)
    validate(fresh, field=fresh_name, start=tokens_of(stored), fresh=True)
    extra = {key: value for key, value in body.items() if key not in _OWN_KEYS}
    _require_json(extra)
    return KvMetadata(
        id=_text(body.get("id", ""), "id", empty=True),
        stored=tuple(stored),
        fresh=tuple(fresh),
        load_threshold=_whole(body.get("load_threshold", 0), "load_threshold"),
        spelling=spelling,
        extra=extra,
    )


def segment_from_json(obj: object, where: str) -> Segment:
    """One segment; raises SegmentError naming `where.field`. Lists are validated by `validate`."""
    body = _mapping(obj, where)
    unknown = sorted(set(body) - {"token_start", "token_length", "kv_uri", "kv_start", "kv_length"})
    if unknown:
        raise SegmentError(f"{where}.{unknown[0]}", "is not a field of a segment")
    missing = [name for name in ("token_start", "token_length", "kv_uri", "kv_start") if name not in body]
    if missing:
        raise SegmentError(f"{where}.{missing[0]}", "is missing")
    kv_length = body.get("kv_length")
    return Segment(
        token_start=_whole(body["token_start"], f"{where}.token_start"),
        token_length=_whole(body["token_length"], f"{where}.token_length"),
        kv_uri=_text(body["kv_uri"], f"{where}.kv_uri"),
        kv_start=_whole(body["kv_start"], f"{where}.kv_start"),
        kv_length=None if kv_length is None else _whole(kv_length, f"{where}.kv_length"),
    )


def segment_to_json(segment: Segment) -> dict[str, Any]:
    body: dict[str, Any] = {
        "token_start": segment.token_start,
        "token_length": segment.token_length,
        "kv_uri": segment.kv_uri,
        "kv_start": segment.kv_start,
    }
    if segment.kv_length is not None:
        body["kv_length"] = segment.kv_length
    return body


def _unwrapped(obj: object) -> Mapping[str, Any]:
    body = _mapping(obj, "kv metadata")
    for name in _WRAPPERS:
        if name in body:
            body = _mapping(body[name], name)
    return body


def _spelling(body: Mapping[str, Any]) -> Spelling:
    used = [spelling for spelling in Spelling if any(name in body for name in spelling.value)]
    if len(used) > 1:
        names = [name for spelling in used for name in spelling.value if name in body]
        raise SegmentError(names[1], f"comes together with {names[0]}; use one spelling")
    return used[0] if used else Spelling.KVCACHE


def _segments(value: object, where: str) -> list[Segment]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise SegmentError(where, "must be a list of segments")
    if len(value) > SEGMENTS_MAX:
        raise SegmentError(where, f"has {len(value)} segments, more than {SEGMENTS_MAX}")
    return [segment_from_json(item, f"{where}[{i}]") for i, item in enumerate(value)]


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SegmentError(where, "must be a JSON object")
    return value


def _whole(value: object, where: str) -> int:
    # bool is an int in Python, but `true` is not a number in JSON.
    if not isinstance(value, int) or isinstance(value, bool):
        raise SegmentError(where, f"must be a whole number, not {value!r:.80}")
    if not -1 <= value < 2**63:
        raise SegmentError(where, f"{value} is not in 0..2^63-1")
    return value


def _text(value: object, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise SegmentError(where, f"must be a string, not {value!r:.80}")
    if len(value) > _TEXT_MAX or "\0" in value or not (value or empty):
        raise SegmentError(where, f"must have 1 to {_TEXT_MAX} characters and no NUL")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SegmentError(where, "holds half a surrogate pair, which is no character") from error
    return value


def _require_json(extra: Mapping[str, Any]) -> None:
    """What travels on must be able to: lenient readers let NaN and broken characters in."""
    try:
        json.dumps(extra, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise SegmentError("kv metadata", f"is not JSON ({error})") from error
