"""Keeping sampled ids: the prompt is rendered from text again each turn, but what was sampled is what is
stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
_BROKEN_TOKENS_MAX = 4
"""A character has at most 4 bytes, so at most that many byte tokens at the end decode to no whole
character."""


def splice(
    stored_ids: Sequence[int],
    rendered_text: str,
    *,
    detokenize: Callable[[Sequence[int]], str],
    tokenize: Callable[[str], Sequence[int]],
) -> list[int] | None:
    """Prompt ids that begin with the stored ones and decode to the rendered text, or None where there are
    none.

    `stored_ids` are as many stored ids as the prompt may reuse. If their text ends inside a character
    (byte-level tokens), up to 4 of them are given back to the tokenizer. `tokenize` must add no special
    tokens of its own.
    """
    for given_back in range(min(_BROKEN_TOKENS_MAX, len(stored_ids)) + 1):
        kept = list(stored_ids[: len(stored_ids) - given_back])
        if not kept:
            return None
        text = detokenize(kept)
        if rendered_text.startswith(text):
            ids = kept + list(tokenize(rendered_text[len(text) :]))
            # A tokenizer that normalises (spaces, unicode) may not give the same text back: then nothing is
            # spliced.
            return ids if detokenize(ids) == rendered_text else None
        if not text.endswith(_BROKEN):
            return None
    return None
