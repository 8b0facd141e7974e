"""The forward pass against an independent one, and the properties that stored KV rests on."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from gd2fs.engine.kv import CHUNK_TOKENS, Sequence
from gd2fs.engine.loaded import LoadedModel
from gd2fs.engine.weights import packaged_model

pytest_plugins = ["tests.engine_fixtures"]

TEXT = "The library of Alexandria was one of the largest of the ancient world. It held scrolls from"
F64 = NDArray[np.float64]


def prefilled(model: LoadedModel, ids: list[int], start: Sequence | None = None) -> tuple[Sequence, NDArray]:
    """A sequence with all of `ids`, and the final hidden states that were computed."""
    sequence = start or Sequence(model.shape, len(ids) + 8)
    hidden = [rows for _, rows in model.model.prefill(sequence, ids, len(ids))]
    return sequence, np.concatenate(hidden)


def log_softmax(logits: NDArray) -> F64:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


class NaiveLlama:
    """The architecture as its paper has it: float64, whole matrices, one layer after another, weights as the
    public reader gives them (so rope turns neighbouring pairs here, where the engine turns halves).
    """

    def __init__(self) -> None:
        reader = gguf.GGUFReader(str(packaged_model()))
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def weight(self, name: str) -> F64:
        tensor = self.tensors[name + ".weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    def rope(self, x: F64) -> F64:
        positions = np.arange(len(x))[:, None, None]
        angles = positions * 100000.0 ** (-np.arange(0, 64, 2) / 64)
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
        out[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
        return out

    def norm(self, x: F64, name: str) -> F64:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * self.weight(name)

    def logprobs(self, ids: list[int]) -> tuple[F64, list[tuple[F64, F64]]]:
        """Log-probabilities of every position, and K (after rope) and V of every layer: [token, kv head,
        dim].
        """
        embedding = self.weight("token_embd")
        x, length, cache = embedding[ids], len(ids), []
        for layer in range(30):
            name = f"blk.{layer}."
            h = self.norm(x, name + "attn_norm")
            q = self.rope((h @ self.weight(name + "attn_q").T).reshape(length, 9, 64))
            k = self.rope((h @ self.weight(name + "attn_k").T).reshape(length, 3, 64))
            v = (h @ self.weight(name + "attn_v").T).reshape(length, 3, 64)
            cache.append((k, v))
            scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 3, axis=1)) / 8.0
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
            share = np.exp(log_softmax(scores))
            mixed = np.einsum("hqk,khd->qhd", share, np.repeat(v, 3, axis=1)).reshape(length, 576)
            x = x + mixed @ self.weight(name + "attn_output").T
            h = self.norm(x, name + "ffn_norm")
            gate, up = h @ self.weight(name + "ffn_gate").T, h @ self.weight(name + "ffn_up").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weight(name + "ffn_down").T
        return log_softmax(self.norm(x, "output_norm") @ embedding.T), cache


@pytest.fixture(scope="module")
def naive() -> NaiveLlama:
    return NaiveLlama()


def test_log_probabilities_and_kv_equal_a_naive_forward_pass(loaded: LoadedModel, naive: NaiveLlama) -> None:
    ids = loaded.tokenizer.encode(TEXT)
    expected, cache = naive.logprobs(ids)
    sequence, hidden = prefilled(loaded, ids)
    computed = log_softmax(loaded.model.logits(hidden))
    assert np.abs(computed - expected).max() <= 1e-3
    # The same through decode steps: one token, then one by one.
    decoded = Sequence(loaded.shape, len(ids))
    rows = np.stack([loaded.model.decode(decoded, token) for token in ids])
    assert np.abs(log_softmax(loaded.model.logits(rows)) - expected).max() <= 1e-3
    # The engine's halves are GGUF's even and odd elements.
    halves = [*range(0, 64, 2), *range(1, 64, 2)]
    for layer, (keys, values) in enumerate(cache):
        assert np.abs(sequence.kv[: len(ids), layer, 0] - keys[..., halves]).max() <= 2e-3
        assert np.abs(sequence.kv[: len(ids), layer, 1] - values).max() <= 2e-3


def test_a_shifted_cache_is_told_apart(loaded: LoadedModel, naive: NaiveLlama) -> None:
    """The negative control of the bound above: KV of every token moved by one place fails it by far."""
    ids = loaded.tokenizer.encode(TEXT)
    sequence, _ = prefilled(loaded, ids[:-1])
    sequence.kv[1 : len(ids) - 1] = sequence.kv[: len(ids) - 2].copy()
    shifted = log_softmax(loaded.model.logits(loaded.model.decode(sequence, ids[-1])))
    expected, _ = naive.logprobs(ids)
    assert np.abs(shifted - expected[-1]).max() > 0.1


def test_it_knows_the_capital_of_france(loaded: LoadedModel) -> None:
    ids = loaded.tokenizer.encode("The capital of France is")
    sequence, hidden = prefilled(loaded, ids)
    answer = []
    logits = loaded.model.logits(hidden[-1])
    for _ in range(4):
        answer.append(int(logits.argmax()))
        logits = loaded.model.logits(loaded.model.decode(sequence, answer[-1]))
    assert "Paris" in loaded.tokenizer.decode(answer)


@pytest.fixture(scope="module")
def long_ids() -> list[int]:
    return np.random.default_rng(7).integers(100, 49_000, 3 * CHUNK_TOKENS + 5).tolist()


@pytest.fixture(scope="module")
def whole(loaded: LoadedModel, long_ids: list[int]) -> tuple[Sequence, NDArray]:
    return prefilled(loaded, long_ids)


@pytest.mark.parametrize(
    "stored", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 30, -1]
)
def test_results_do_not_depend_on_how_much_was_stored(
    loaded: LoadedModel,
    long_ids: list[int],
    whole: tuple[Sequence, NDArray],
    stored: int,
) -> None:
    stored %= len(long_ids)
    sequence = Sequence(
        loaded.shape, 500
    )  # another capacity, so other memory and other strides behind the end
    sequence.rows(0, stored)[:] = whole[0].rows(0, stored)
    sequence.length = stored
    _, hidden = prefilled(loaded, long_ids, sequence)
    assert bytes(sequence.rows(0, len(long_ids))) == bytes(whole[0].rows(0, len(long_ids)))
    assert np.array_equal(hidden, whole[1][stored:])


def test_a_prefix_does_not_depend_on_what_follows(
    loaded: LoadedModel,
    long_ids: list[int],
    whole: tuple[Sequence, NDArray],
) -> None:
    short = CHUNK_TOKENS + 9
    sequence, hidden = prefilled(loaded, long_ids[:short])
    assert bytes(sequence.rows(0, short)) == bytes(whole[0].rows(0, short))
    assert np.array_equal(hidden, whole[1][:short])


def test_stored_rows_are_used_and_never_overwritten(loaded: LoadedModel, long_ids: list[int]) -> None:
    """Rows that decode wrote differ in their last bits from what prefill would write: they must stay."""
    stored = CHUNK_TOKENS + 20
    sequence, _ = prefilled(loaded, long_ids[:CHUNK_TOKENS])
    for token in long_ids[CHUNK_TOKENS:stored]:
        loaded.model.decode(sequence, token)
    before = bytes(sequence.rows(0, stored))
    assert before != bytes(prefilled(loaded, long_ids[:stored])[0].rows(0, stored)), "the test shows nothing"
    grown = Sequence(loaded.shape, 400)
    grown.rows(0, stored)[:] = before
    grown.length = stored
    for _ in loaded.model.prefill(grown, long_ids, len(long_ids)):
        assert bytes(grown.rows(0, stored)) == before


def test_what_a_failed_load_left_behind_does_no_harm(
    loaded: LoadedModel,
    long_ids: list[int],
    whole: tuple[Sequence, NDArray],
) -> None:
    sequence = Sequence(loaded.shape, len(long_ids) + 8)
    sequence.kv[:] = np.nan
    _, hidden = prefilled(loaded, long_ids, sequence)
    assert np.array_equal(hidden, whole[1])


def test_the_bytes_of_a_token_are_layer_then_key_value_then_head(loaded: LoadedModel, whole: tuple) -> None:
    sequence, _ = whole
    assert loaded.kv_format.bytes_per_token == 30 * 2 * 3 * 64 * 4 == 46_080
    row = np.frombuffer(sequence.rows(9, 10), "<f4")
    assert len(row) * 4 == 46_080
    place = ((17 * 2 + 1) * 3 + 2) * 64 + 5  # layer 17, value, head 2, element 5
    assert row[place] == sequence.values(17, 2, 10)[9, 5]
    assert row[place - 3 * 64] == sequence.keys(17, 2, 10)[9, 5]
    both = bytes(sequence.rows(9, 11))
    assert both == bytes(sequence.rows(9, 10)) + bytes(sequence.rows(10, 11))


def test_a_full_sequence_says_so(loaded: LoadedModel) -> None:
    sequence = Sequence(loaded.shape, 3)
    assert sequence.capacity == CHUNK_TOKENS
    sequence.length = sequence.capacity
    with pytest.raises(ValueError, match="full"):
        loaded.model.decode(sequence, 1)
    with pytest.raises(ValueError, match="do not lie inside"):
        sequence.rows(0, CHUNK_TOKENS + 1)
