"""Segment arithmetic, by property, and the metadata's spellings, by golden vectors."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gd2fs.kv import (
    KvFormat,
    KvMetadata,
    Segment,
    SegmentError,
    Spelling,
    append,
    cut,
    merge,
    parse,
    segment_from_json,
    segment_to_json,
    tokens_of,
    validate,
)

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "kv_metadata.json").read_text())
SPELLINGS = {"kvcache": Spelling.KVCACHE, "kv_cache": Spelling.KV_CACHE, "old_new": Spelling.OLD_NEW}

formats = st.one_of(
    st.builds(KvFormat, st.just("token"), st.integers(1, 50_000)),
    st.builds(KvFormat, st.just("block"), st.integers(1, 50_000), st.sampled_from([1, 2, 16, 128])),
    st.builds(KvFormat, st.just("rank2"), st.integers(1, 50_000), st.sampled_from([1, 16])),
)


@st.composite
def stored(draw: st.DrawFn) -> tuple[KvFormat, list[Segment]]:
    """What a session may hold: contiguous segments of whole granules over a few files, each file only
    growing."""
    kv_format = draw(formats)
    segments: list[Segment] = []
    ends = {"a": 0, "b": 0}
    token = 0
    for _ in range(draw(st.integers(0, 6))):
        uri = draw(st.sampled_from("ab"))
        skipped = draw(st.sampled_from([0, 0, 1])) * kv_format.granule * kv_format.bytes_per_token
        tokens = draw(st.integers(1, 5)) * kv_format.granule
        start = ends[uri] + skipped
        segments.append(Segment(token, tokens, uri, start, kv_format.bytes_of(tokens)))
        ends[uri] = segments[-1].kv_end
        token += tokens
    return kv_format, segments


def _places(kv_format: KvFormat, segments: list[Segment]) -> list[tuple[str, int]]:
    """File and token index of every token: what arithmetic on segments must never change."""
    return [
        (segment.kv_uri, segment.token_index(kv_format, token))
        for segment in segments
        for token in range(segment.token_start, segment.token_end)
    ]


@given(stored())
def test_merging_keeps_every_tokens_place(case: tuple[KvFormat, list[Segment]]) -> None:
    kv_format, segments = case
    merged = merge(segments, kv_format)
    assert _places(kv_format, merged) == _places(kv_format, segments)
    assert merge(merged, kv_format) == merged
    validate(merged, field="merged")
    if kv_format.merges:
        for first, second in pairwise(merged):
            assert (first.kv_uri, first.kv_end) != (second.kv_uri, second.kv_start), "as few as possible"
    else:
        assert merged == segments


@given(stored(), st.data())
def test_cutting_keeps_a_prefix_of_places(case: tuple[KvFormat, list[Segment]], data: st.DataObject) -> None:
    kv_format, segments = case
    tokens = data.draw(st.integers(0, tokens_of(segments) + 3))
    kept = cut(segments, tokens, kv_format)
    assert tokens_of(kept) == min(tokens, tokens_of(segments))
    assert _places(kv_format, kept) == _places(kv_format, segments)[:tokens]
    assert all(segment.kv_length == kv_format.bytes_of(segment.token_length) for segment in kept)
    if kv_format.granule == 1:
        assert cut(segments, tokens) == kept, "evenly shared bytes need no format"


@given(stored(), st.data())
def test_cutting_and_appending_gives_the_whole_back(
    case: tuple[KvFormat, list[Segment]], data: st.DataObject
) -> None:
    kv_format, segments = case
    at = kv_format.round_down(data.draw(st.integers(0, tokens_of(segments))))
    head = cut(segments, at, kv_format)
    tail = []
    for segment in segments:
        start = max(segment.token_start, at)
        if start < segment.token_end:
            skipped = kv_format.bytes_of(start - segment.token_start)
            tail.append(
                Segment(
                    start,
                    segment.token_end - start,
                    segment.kv_uri,
                    segment.kv_start + skipped,
                    kv_format.bytes_of(segment.token_end - start),
                )
            )
    joined = append(head, tail, kv_format)
    assert _places(kv_format, joined) == _places(kv_format, segments)
    if kv_format.merges:
        assert joined == merge(segments, kv_format)


@given(stored(), st.sampled_from(Spelling), st.text(max_size=5), st.integers(0, 99))
def test_metadata_round_trips_in_every_spelling(
    case: tuple[KvFormat, list[Segment]], spelling: Spelling, id: str, threshold: int
) -> None:
    id = id.replace("\0", "")
    _, segments = case
    fresh = (Segment(tokens_of(segments), -1, "f", 77),)
    metadata = KvMetadata(id, tuple(segments), fresh, threshold, spelling, {"other": {"left": "alone"}})
    text = json.dumps(metadata.to_json())
    assert parse(json.loads(text)) == metadata
    assert json.dumps(parse(json.loads(text)).to_json()) == text
    for wrapped in ({"kvcache_params": json.loads(text)}, {"session_params": json.loads(text), "more": 1}):
        assert parse({"kv_transfer_params": wrapped, "model": "m"}) == metadata


@given(stored(), st.integers(0, 5), st.integers(-3, 3).filter(bool))
def test_gaps_and_overlaps_are_refused(case: tuple[KvFormat, list[Segment]], place: int, by: int) -> None:
    _, segments = case
    if not segments:
        return
    place %= len(segments)
    moved = [segment_to_json(segment) for segment in segments]
    moved[place]["token_start"] += by
    with pytest.raises(SegmentError, match=rf"stored_kvcache\[{place}\]\.token_start"):
        parse({"id": "s", "stored_kvcache": moved})


@pytest.mark.parametrize("spelling", VECTORS["requests"])
def test_the_articles_example(spelling: str) -> None:
    body = VECTORS["requests"][spelling]
    metadata = parse(body)
    assert metadata.spelling is SPELLINGS[spelling]
    assert metadata == KvMetadata(
        **{**_fields(parse(VECTORS["requests"]["kvcache"])), "spelling": metadata.spelling}
    )
    inner = body.get("session_params") or body["kv_transfer_params"]["kvcache_params"]
    assert metadata.to_json() == inner
    assert json.dumps(metadata.to_json()) == json.dumps(inner), "also in the order of its keys"
    written = [segment_from_json(item, "written") for item in VECTORS["written"]]
    for kv_format in (None, KvFormat("token", VECTORS["bytes_per_token"])):
        after = append(metadata.stored, written, kv_format)
        assert [segment_to_json(segment) for segment in after] == VECTORS["stored"]
    next_turn = KvMetadata(metadata.id, tuple(after), spelling=metadata.spelling)
    assert parse(json.loads(json.dumps(next_turn.to_json()))) == next_turn


def _fields(metadata: KvMetadata) -> dict[str, Any]:
    return {name: getattr(metadata, name) for name in KvMetadata.__dataclass_fields__}


GOOD = {"token_start": 0, "token_length": 4, "kv_uri": "u", "kv_start": 0, "kv_length": 8}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([], "kv metadata"),
        ({"kvcache_params": 1}, "kvcache_params"),
        ({"stored_kvcache": [], "fresh_kv_cache": []}, "fresh_kv_cache"),
        ({"id": 5}, "id"),
        ({"load_threshold": "0"}, "load_threshold"),
        ({"load_threshold": True}, "load_threshold"),
        ({"stored_kvcache": {}}, "stored_kvcache"),
        ({"stored_kvcache": [5]}, "stored_kvcache[0]"),
        ({"stored_kvcache": [GOOD] * 4097}, "stored_kvcache"),
        ({"stored_kvcache": [{**GOOD, "color": 1}]}, "stored_kvcache[0].color"),
        ({"stored_kvcache": [{k: v for k, v in GOOD.items() if k != "kv_uri"}]}, "stored_kvcache[0].kv_uri"),
        ({"stored_kvcache": [{**GOOD, "kv_uri": ""}]}, "stored_kvcache[0].kv_uri"),
        ({"stored_kvcache": [{**GOOD, "kv_uri": 7}]}, "stored_kvcache[0].kv_uri"),
        ({"stored_kvcache": [{**GOOD, "kv_start": -1}]}, "stored_kvcache[0].kv_start"),
        ({"stored_kvcache": [{**GOOD, "kv_start": 2**63}]}, "stored_kvcache[0].kv_start"),
        ({"stored_kvcache": [{**GOOD, "kv_length": -1}]}, "stored_kvcache[0].kv_length"),
        ({"stored_kvcache": [{**GOOD, "kv_start": 1.0}]}, "stored_kvcache[0].kv_start"),
        ({"stored_kvcache": [{**GOOD, "token_length": 0}]}, "stored_kvcache[0].token_length"),
        ({"stored_kvcache": [{**GOOD, "token_length": -1}]}, "stored_kvcache[0].token_length"),
        ({"stored_kvcache": [{**GOOD, "token_start": 1}]}, "stored_kvcache[0].token_start"),
        ({"stored_kvcache": [GOOD], "fresh_kvcache": [GOOD]}, "fresh_kvcache[0].token_start"),
        (
            {"fresh_kvcache": [{**GOOD, "token_length": -1}, {**GOOD, "token_start": 4}]},
            "fresh_kvcache[0].token_length",
        ),
        ({"old_kv_cache": [{**GOOD, "token_start": 1}]}, "old_kv_cache[0].token_start"),
    ],
)
def test_what_is_wrong_is_named(body: Any, field: str) -> None:
    with pytest.raises(SegmentError) as caught:
        parse(body)
    assert caught.value.field == field


def test_a_begun_block_is_never_merged_into_the_middle() -> None:
    block = KvFormat("block", 10, 16)
    segments = [Segment(0, 10, "u", 0, 160), Segment(10, 16, "u", 160, 160)]
    assert merge(segments, block) == segments
    assert len(merge([Segment(0, 16, "u", 0, 160), Segment(16, 16, "u", 160, 160)], block)) == 1


def test_formats_are_checked() -> None:
    for name, bytes_per_token, granule in [("", 1, 1), ("token", 0, 1), ("token", 1, 2), ("block", 1, 0)]:
        with pytest.raises(SegmentError):
            KvFormat(name, bytes_per_token, granule)
    block = KvFormat("block", 10, 16)
    assert [block.bytes_of(tokens) for tokens in (0, 1, 16, 17)] == [0, 160, 160, 320]
    assert [block.round_down(tokens) for tokens in (0, 15, 16, 33)] == [0, 0, 16, 32]


def test_what_can_not_be_cut_or_appended() -> None:
    uneven = Segment(0, 3, "u", 0, 10)
    with pytest.raises(SegmentError, match="kv_format"):
        cut([uneven], 2)
    with pytest.raises(SegmentError, match="tokens"):
        cut([uneven], -1)
    with pytest.raises(SegmentError, match=r"fresh_kvcache\[0\]"):
        append([uneven], [Segment(3, -1, "u", 10)])
    with pytest.raises(SegmentError, match="token_start"):
        append([uneven], [Segment(4, 1, "u", 10, 4)])
    assert len(append([uneven], [Segment(3, 1, "u", 10, 4)])) == 2, "another number of bytes per token"
