"""Text, ids and the chat template."""

from __future__ import annotations

import pytest

from gd2fs.engine.loaded import LoadedModel
from gd2fs.engine.tokenizer import StreamDecoder

pytest_plugins = ["tests.engine_fixtures"]

TEXTS = [
    "Hello, wörld! 12345 don't  stop\n\n\tx 🎉 日本語",
    "  leading and trailing  ",
    "naïve café — “quotes” … 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "",
    "\x00\x01 control \x7f",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(loaded: LoadedModel, text: str) -> None:
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text


def test_ids_are_those_of_the_published_tokenizer(loaded: LoadedModel) -> None:
    # Golden values of HuggingFaceTB/SmolLM2: digits stand alone, special tokens are one id.
    assert loaded.tokenizer.encode("Hello, world! 123") == [19556, 28, 905, 17, 216, 33, 34, 35]
    assert loaded.tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert loaded.tokenizer.eos_ids == {0, 2}


def test_a_character_of_several_tokens_comes_out_whole(loaded: LoadedModel) -> None:
    text = "a🎉b日本語"
    ids = loaded.tokenizer.encode(text)
    decoder = StreamDecoder(loaded.tokenizer)
    pieces = [decoder.push(token) for token in ids]
    assert "" in pieces, "no character of this text spans several tokens: the test shows nothing"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert "".join(pieces) + decoder.finish() == text
    cut = StreamDecoder(loaded.tokenizer)
    shown = "".join(cut.push(token) for token in ids[:-1]) + cut.finish()
    assert shown.startswith("a🎉b日本") and shown.endswith("\N{REPLACEMENT CHARACTER}")


def test_control_tokens_are_not_text(loaded: LoadedModel) -> None:
    ids = [1, *loaded.tokenizer.encode("hi"), 2]
    assert loaded.tokenizer.decode(ids) == "hi"
    assert loaded.tokenizer.decode(ids, skip_control=False) == "<|im_start|>hi<|im_end|>"


def test_the_chat_template_is_the_models_own(loaded: LoadedModel) -> None:
    rendered = loaded.tokenizer.render(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {{ 7 * 7 }}"}]
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi {{ 7 * 7 }}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    default = loaded.tokenizer.render([{"role": "user", "content": "x"}], add_generation_prompt=False)
    assert default.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert default.endswith("user\nx<|im_end|>\n")
