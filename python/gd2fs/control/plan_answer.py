"""A plan as JSON: what the gateway reads, and the metadata that travels to the engine with its
capabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gd2fs.control.files import FileView
from gd2fs.control.layouts import layout
from gd2fs.control.plans import Forecast, Plan
from gd2fs.control.sessions import uri_of
from gd2fs.kv import ID_BYTES, TO_THE_END, segment_to_json
from gd2fs.signing import Keys, PlanToken, Right

_OPEN_END = -1


def counts(made: Forecast) -> dict[str, Any]:
    """The answer of `estimate`, and what a plan says of the same."""
    cached = made.prefix.cached
    return {
        "session": made.view.session,
        "version": made.view.row["version"],
        "prompt_tokens": made.prompt_tokens,
        "stored_tokens": made.view.tokens,
        "reusable_tokens": made.prefix.reusable,
        "cached_tokens": cached,
        "miss": made.prefix.miss,
        "estimate": {
            "cached_tokens": cached,
            "fresh_tokens": made.prompt_tokens - cached,
            "cached_bytes": sum(segment.kv_length or 0 for segment in made.cached),
            "max_output_tokens": made.max_tokens,
        },
    }


def answer(made: Plan, tenant: str, keys: Keys, cluster: str, control: Sequence[str]) -> dict[str, Any]:
    """The answer of `plan`; `control` are the addresses that take the commit."""
    said = counts(made)
    # Whether some of it may be evicted before it is read, because nodes pin no more.
    said["estimate"]["best_effort"] = made.best_effort
    return said | {
        "plan": made.plan,
        "request_id": made.request_id,
        "expires_at": made.expires_at,
        "kv_transfer": _metadata(made, tenant, keys, cluster, control),
    }


def _metadata(made: Plan, tenant: str, keys: Keys, cluster: str, control: Sequence[str]) -> dict[str, Any]:
    fresh = []
    if made.fresh:
        fresh.append(
            {
                "token_start": made.prefix.cached,
                "token_length": TO_THE_END,
                "kv_uri": uri_of(cluster, made.fresh.kv.path),
                "kv_start": made.fresh.kv_start,
            }
        )
    token = PlanToken(made.plan, made.view.session, tenant, made.expires_at)
    return {
        "id": made.view.session,
        "stored_kvcache": [segment_to_json(segment) for segment in made.cached],
        "fresh_kvcache": fresh,
        "load_threshold": 0,
        "plan": {
            "token": keys.sign(token),
            "control": list(control),
            "kv_identity": made.kv_identity,
            "kv_format": {
                "name": made.kv_format.name,
                "bytes_per_token": made.kv_format.bytes_per_token,
                "granule": made.kv_format.granule,
            },
            "layouts": _layouts(made, keys, cluster),
        },
    }


def _layouts(made: Plan, keys: Keys, cluster: str) -> dict[str, Any]:
    """A layout for each KV file and its `.tokens`: reading the stored ranges only, writing from the fresh
    start on only."""
    bytes_per_token = made.kv_format.bytes_per_token
    pairs: dict[str, tuple[FileView, FileView]] = {}
    ranges: dict[str, list[tuple[int, int]]] = {}
    for segment, stored in zip(made.cached, made.view.segments, strict=False):
        pairs[stored.file] = made.view.files[stored.file], made.view.tokens_file(stored.file)
        ranges.setdefault(stored.file, []).append((segment.kv_start, segment.kv_end))
    if made.fresh:
        pairs.setdefault(made.fresh.kv.file, (made.fresh.kv, made.fresh.tokens))
        ranges.setdefault(made.fresh.kv.file, []).append((made.fresh.kv_start, _OPEN_END))
    layouts: dict[str, Any] = {}
    for file, (kv, tokens) in pairs.items():
        writes = made.fresh is not None and made.fresh.kv.file == file
        rights: list[Right] = ["read", "write"] if writes else ["read"]
        ids = [
            (_id_offset(start, bytes_per_token), _id_offset(end, bytes_per_token))
            for start, end in ranges[file]
        ]
        for view, reach in ((kv, ranges[file]), (tokens, ids)):
            layouts[uri_of(cluster, view.path)] = layout(
                keys,
                view,
                rights=rights,
                ranges=reach,
                grant=made.fresh.grant if writes and made.fresh else 0,
                expires_at=made.expires_at,
                length=view.sealed,
                travels=True,
            )
    return layouts


def _id_offset(kv_offset: int, bytes_per_token: int) -> int:
    """Where the ids of the tokens at `kv_offset` lie in the `.tokens` file."""
    return _OPEN_END if kv_offset == _OPEN_END else kv_offset // bytes_per_token * ID_BYTES
