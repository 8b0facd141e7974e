"""Token ids: bytes, prefixes, digests, and keeping what was sampled."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gd2fs.kv import RunningDigest, SegmentError, as_ids, digest, ids_from_bytes, ids_to_bytes, lcp, splice

id_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(id_lists)
def test_ids_are_little_endian_u32(ids: list[int]) -> None:
    data = ids_to_bytes(ids)
    assert data == struct.pack(f"<{len(ids)}I", *ids)
    assert ids_from_bytes(data).tolist() == ids
    assert digest(ids) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("ids", [[-1], [2**32], [2**70], [[1, 2]], ["x"], np.array([[1]]), np.array([-1])])
def test_what_is_no_id_is_refused(ids: list[int]) -> None:
    with pytest.raises(SegmentError, match="token_ids"):
        as_ids(ids)


@given(id_lists, id_lists, id_lists)
def test_lcp_is_the_longest(common: list[int], a: list[int], b: list[int]) -> None:
    left, right = common + a, common + b
    found = lcp(left, right)
    assert found >= len(common)
    assert left[:found] == right[:found]
    assert found in (len(left), len(right)) or left[found] != right[found]
    assert lcp(np.array(right), left) == found


@given(id_lists, st.data())
def test_a_running_digest_hashes_prefixes(ids: list[int], data: st.DataObject) -> None:
    running = RunningDigest(as_ids(ids))
    ends = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    for end in ends:
        branch = running.copy()
        assert running.at(end) == digest(ids[:end]) == branch.at(end)
        assert running.tokens == end
    with pytest.raises(ValueError, match="beyond"):
        running.at(len(ids) + 1)


WORDS = {1: "Hello", 2: " wor", 3: "ld", 4: " world", 5: "!", 6: " again"}
PIECES = {7: "é".encode()[:1], 8: "é".encode()[1:]}


def _detokenize(ids: Sequence[int]) -> str:
    return b"".join(PIECES.get(i) or WORDS[i].encode() for i in ids).decode(errors="replace")


def _tokenize(text: str) -> list[int]:
    """Greedy, longest first: it never gives back what was sampled as ' wor', 'ld'."""
    ids: list[int] = []
    while text:
        if text.startswith("é"):
            ids, text = [*ids, 7, 8], text[1:]
            continue
        word = max((w for w in WORDS.values() if text.startswith(w)), key=len)
        ids.append(next(i for i, w in WORDS.items() if w == word))
        text = text[len(word) :]
    return ids


def _splice(stored: Sequence[int], text: str) -> list[int] | None:
    return splice(stored, text, detokenize=_detokenize, tokenize=_tokenize)


def test_sampled_ids_are_kept_where_the_text_is_the_same() -> None:
    assert _tokenize("Hello world! again") == [1, 4, 5, 6]
    assert _splice([1, 2, 3], "Hello world! again") == [1, 2, 3, 5, 6]
    assert _splice([1, 2, 3], "Hello world") == [1, 2, 3]


def test_an_edited_text_is_not_spliced() -> None:
    assert _splice([1, 2, 3], "Hello again") is None
    assert _splice([1, 2, 3], "Hello wor") is None
    assert _splice([], "Hello") is None


def test_a_character_cut_in_half_is_given_back() -> None:
    assert _splice([1, 7], "Helloé!") == [1, 7, 8, 5]
    assert _splice([1, 7], "Hello!") == [1, 5]
    assert _splice([7], "é") is None, "nothing is left to keep"


def test_a_tokenizer_that_changes_the_text_is_not_trusted() -> None:
    assert splice([1], "Hello world", detokenize=_detokenize, tokenize=lambda text: [5]) is None
