"""The OpenAI-style bodies this engine takes. What it can't do is refused by name, never ignored."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gd2fs.engine.sampling import TOP_LOGPROBS_MAX

STOPS_MAX = 16
STOP_CHARS_MAX = 256
# What changes an answer and is not built: accepted at its neutral value only.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "top_k": (-1, 0),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "prompt_embeds": (),
    "use_beam_search": (False,),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class _Generation(BaseModel):
    """What chat and completions share. Unknown keys are ignored, as public servers do."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**64)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, body: Any) -> Any:
        if isinstance(body, dict):
            # Public clients write null for "the default".
            body = {key: value for key, value in body.items() if value is not None}
            for key, neutral in _NEUTRAL.items():
                if key in body and not any(body[key] == value for value in neutral):
                    raise ValueError(f"{key}={body[key]!r:.60} is not supported by this engine; leave it out")
        return body

    @field_validator("stop")
    @classmethod
    def _bounded_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > STOPS_MAX or any(not 1 <= len(text) <= STOP_CHARS_MAX for text in stops):
            raise ValueError(f"takes at most {STOPS_MAX} strings of 1 to {STOP_CHARS_MAX} characters")
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def prompt_token_ids(self) -> list[int] | None:
        return (self.kv_transfer_params or {}).get("prompt_token_ids")

    @property
    def kvcache_params(self) -> Any:
        """The KV metadata as it came, whatever its spelling; None when there is none."""
        params = {
            key: value for key, value in (self.kv_transfer_params or {}).items() if key != "prompt_token_ids"
        }
        for wrapper in ("kvcache_params", "session_params"):
            if wrapper in params:
                return params[wrapper]
        return params if any("kvcache" in key or "kv_cache" in key for key in params) else None


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: str
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return "" if content is None else content
        parts = [part if isinstance(part, dict) else {} for part in content]
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
            raise ValueError("has a part that is not text; this model reads text only")
        return "".join(part["text"] for part in parts)


class RenderBody(BaseModel):
    """Messages to token ids. Other keys of a chat body are ignored: they do not change the ids."""

    model_config = ConfigDict(extra="ignore")

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool = True


class ChatBody(_Generation):
    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=TOP_LOGPROBS_MAX)

    @property
    def output_max(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionBody(_Generation):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)
    echo: bool = False

    @property
    def prompt_ids(self) -> list[int] | None:
        """The prompt when it is token ids; None when it is text."""
        return None if isinstance(self.prompt, str) else cast(list[int], self.prompt)

    @property
    def prompt_text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else ""

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) != 1:
                raise ValueError(
                    f"{len(prompt)} prompts in one request are not supported; send one request each"
                )
            return prompt[0]
        return prompt


class TokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    prompt: str
    add_special_tokens: Literal[False] | bool = False  # this tokenizer adds none, so both mean the same


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    tokens: list[int]
