"""The other end of `process.Process`, in the peer's environment, which has numpy but nothing of ours."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Handler = Callable[[dict[str, Any]], dict[str, Any]]

# Odd, so that no two of 2^64 words are equal: bytes at a wrong place are seen as well as wrong bytes.
_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_WORD = 8
# Compared at once: bounds the memory for what is expected.
_PIECE_BYTES = 64 << 20


def pattern(size: int, start: int = 0) -> Bytes:
    """The bytes [start, start + size) of the endless pattern; `start` is a multiple of 8."""
    words = np.arange(start // _WORD, start // _WORD + -(-size // _WORD), dtype=np.uint64)
    words *= _STEP
    return words.view(np.uint8)[:size]


def blank(size: int) -> Bytes:
    """Memory of zeros, touched: no read pays for its page faults."""
    memory = np.empty(size, dtype=np.uint8)
    memory[:] = 0
    return memory


def first_wrong(memory: Bytes) -> int | None:
    """The index of the first byte that differs from the pattern, if one does."""
    for start in range(0, memory.size, _PIECE_BYTES):
        piece = memory[start : start + _PIECE_BYTES]
        different = piece != pattern(piece.size, start)
        if different.any():
            return start + int(different.argmax())
    return None


def serve(
    handlers: Mapping[str, Handler], idle: Callable[[], object] | None = None, idle_s: float = 1.0
) -> None:
    """Answers commands from stdin until it ends. `idle` is called every `idle_s` in between.

    What else is printed to stdout, also by native code, goes to stderr: answers have the pipe to themselves.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    received = b""
    while True:
        if idle is not None and not select.select([0], [], [], idle_s)[0]:
            idle()
            continue
        more = os.read(0, 1 << 16)
        if not more:
            return
        *lines, received = (received + more).split(b"\n")
        for line in lines:
            os.write(answers, json.dumps(_answer(handlers, json.loads(line))).encode() + b"\n")


def _answer(handlers: Mapping[str, Handler], command: dict[str, Any]) -> dict[str, Any]:
    try:
        return handlers[command["do"]](command)
    except Exception as error:  # whatever it is, the other end must hear of it instead of waiting
        return {"error": f"{type(error).__name__}: {error}"}
