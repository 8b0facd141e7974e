"""Choosing tokens, log-probabilities, and stop strings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gd2fs.engine.sampling import Sampler, SamplingParams, token_logprob
from gd2fs.engine.stopping import StopStrings

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))


def draws(count: int = 4000, **params: float) -> np.ndarray:
    sampler = Sampler(SamplingParams(seed=3, **params))
    return np.bincount([sampler.choose(LOGITS) for _ in range(count)], minlength=4) / count


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(50, temperature=0).tolist() == [1, 0, 0, 0]


def test_draws_follow_the_distribution() -> None:
    assert np.abs(draws() - [0.5, 0.25, 0.15, 0.1]).max() < 0.03
    squared = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    assert np.abs(draws(temperature=0.5) - squared / squared.sum()).max() < 0.03


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert draws(top_p=0.5)[1:].sum() == 0
    assert np.abs(draws(top_p=0.7) - [2 / 3, 1 / 3, 0, 0]).max() < 0.03
    assert draws(top_p=1e-9)[0] == 1


def test_a_seed_repeats_and_another_differs() -> None:
    def run(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler.choose(LOGITS) for _ in range(64)]

    assert run(1) == run(1) != run(2)
    assert run(None) != run(None)


def test_log_probabilities_are_of_the_model_itself() -> None:
    noted = Sampler(SamplingParams(temperature=0.2, top_logprobs=2)).logprob(LOGITS, 2)
    assert noted is not None
    assert noted.logprob == pytest.approx(np.log(0.15), abs=1e-6)
    assert [token for token, _ in noted.top] == [0, 1]
    assert token_logprob(LOGITS, 0, 0).top == ()
    assert Sampler(SamplingParams()).logprob(LOGITS, 2) is None


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_stop_strings_do_not_depend_on_where_tokens_end(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    watcher = StopStrings(stops)
    shown = "".join(watcher.push(piece) for piece in pieces) + watcher.finish()
    # Which stop appears first as the text grows, character by character.
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert watcher.stopped == bool(ends)
    if ends:
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
    else:
        assert shown == text
