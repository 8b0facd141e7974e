"""By path: no file is shorter than what was acknowledged, unless it says that nobody knows how long it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from gd2fs import errors
from gd2fs.bench.torture.check import AGAIN_S, MISSING, PASSING, Allowance, Violation
from gd2fs.bench.torture.model import FileModel
from gd2fs.client import FileInfo

PATIENCE_S = 10.0


class Asked(Protocol):
    """What a client is asked by path."""

    def stat(self, path: str) -> FileInfo: ...

    def read(self, path: str) -> bytes: ...


@dataclass(slots=True)
class _Answer:
    """The length and the bytes read as a whole, None each where the answer was that something is lost."""

    length: int | None
    read: int | None


def check_end(client: Asked, model: FileModel, allowed: Allowance) -> list[Violation]:
    """Asks for the length of a file that has a name, and for all of it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            answer = _ask(client, model.path)
            break
        except errors.NotFound:
            return []  # judged with its bytes
        except PASSING as error:
            if time.monotonic() > until:
                return [_violation("unreadable", model, f"for {PATIENCE_S:g} s: {error}")]
            time.sleep(AGAIN_S)
    return [_violation("lost_after_flush", model, what) for what in _faults(answer, model, allowed)]


def _ask(client: Asked, path: str) -> _Answer:
    length: int | None = None
    try:
        length = client.stat(path).known_length()
        return _Answer(length, len(client.read(path)))
    except (*MISSING, errors.Hole):
        return _Answer(length, None)


def _faults(answer: _Answer, model: FileModel, allowed: Allowance) -> list[str]:
    told = []
    least, most = model.acknowledged_end, model.length
    for what, end in (("stat says", answer.length), ("a read of all brings", answer.read)):
        if end is not None and end < least:
            told.append(f"{what} {end} bytes, and {least} were acknowledged")
        if end is not None and end > most and not model.session:
            told.append(f"{what} {end} bytes, and nobody wrote beyond {most}")
    timeline = None if model.session or allowed.damage else allowed.timeline
    if answer.length is None and timeline is not None and model.end_is_durable(timeline):
        told.append("nobody knows where it ends, and a node should")
    return told


def _violation(kind: str, model: FileModel, what: str) -> Violation:
    return Violation(kind, model.path, 0, model.length, what)
