"""Text to token ids and back, as the GGUF file's own metadata says: byte-level BPE and the chat template."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from gd2fs.engine.gguf import GgufError

# Token types of GGUF: control tokens are never text; user-defined ones are matched whole, but are text.
_CONTROL, _USER_DEFINED = 3, 4


class Tokenizer:
    """Encode and decode. `eos_ids` are the ids that end an answer."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if model != "gpt2" or pre != "smollm":
            raise GgufError(
                f"tokenizer {model!r} with pre-tokenizer {pre!r} is not supported, only 'gpt2' with 'smollm'"
            )
        self._tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types: list[int] = metadata["tokenizer.ggml.token_type"]
        self._special = {
            token: i for i, token in enumerate(self._tokens) if types[i] in (_CONTROL, _USER_DEFINED)
        }
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        vocab = {token: i for i, token in enumerate(self._tokens)}
        self._bpe = BpeTokenizer(models.BPE(vocab, merges, fuse_unk=False))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._bpe.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in self._special]
        )
        self._bytes = _token_bytes(self._tokens, types)
        self.token_bytes_max = max(map(len, self._bytes))
        control = {token: i for token, i in self._special.items() if types[i] == _CONTROL}
        self._control = frozenset(control.values())
        ends = {
            metadata["tokenizer.ggml.eos_token_id"],
            *(control[t] for t in ("<|endoftext|>",) if t in control),
        }
        self.eos_ids: frozenset[int] = frozenset(ends)
        # The switches that public tokenizers render chat templates with: templates are written for them.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(metadata["tokenizer.chat_template"])
        self._template_names = {
            "bos_token": self._tokens[metadata["tokenizer.ggml.bos_token_id"]],
            "eos_token": self._tokens[metadata["tokenizer.ggml.eos_token_id"]],
        }

    @property
    def vocab(self) -> int:
        return len(self._tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Names of special tokens inside it become those tokens; nothing is added."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The chat template over `messages` (each with `role` and text `content`).

        Raises ValueError when the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._template_names
            )
        except TemplateError as error:
            raise ValueError(f"messages: the model's chat template refused them: {error}") from error

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; a special token's are its name."""
        return self._bytes[token]

    def decode(self, ids: Iterable[int], *, skip_control: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        decoder = StreamDecoder(self, skip_control=skip_control)
        return "".join([decoder.push(token) for token in ids]) + decoder.finish()

    def is_control(self, token: int) -> bool:
        return token in self._control


class StreamDecoder:
    """Decodes ids one by one. A character whose bytes span several tokens comes out whole, with the last of
    them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_control: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if self._skip_control and self._tokenizer.is_control(token):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left: an unfinished character as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def _token_bytes(tokens: list[str], types: list[int]) -> list[bytes]:
    """Undo the printable alphabet in which byte-level BPE writes bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return [
        token.encode() if kind in (_CONTROL, _USER_DEFINED) else bytes([table[char] for char in token])
        for token, kind in zip(tokens, types, strict=True)
    ]


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
