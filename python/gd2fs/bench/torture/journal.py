"""What a client was about to do and what it was told: lines appended to a file, which outlives its writer."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gd2fs.errors import Gd2fsError

MESSAGE_CHARACTERS_MAX = 200


@dataclass(slots=True)
class Operation:
    """One operation. Times are of CLOCK_MONOTONIC, in seconds, the same for all processes of a machine.

    ``ended`` is None, and ``ok`` false, where the writer died before it was told. ``facts`` are what it asked
    for and what it was answered.
    """

    number: int
    kind: str
    begun: float
    facts: dict[str, Any]
    ended: float | None = None
    ok: bool = False
    error: str = ""


@dataclass(slots=True)
class Journal:
    """For all threads of one process. Every record is one appended line, so that a killed writer leaves whole
    lines, the last one perhaps excepted."""

    path: Path
    _descriptor: int = -1
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> list[Operation]:
        """Goes on after whatever is there, which it returns."""
        before = read(self.path)
        self._number = max((operation.number for operation in before), default=0)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # The last line may have been cut short.
        if self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n"):
            os.write(self._descriptor, b"\n")
        return before

    def begin(self, kind: str, **facts: Any) -> Operation:
        """Written before the operation is asked for."""
        with self._lock:
            self._number += 1
            operation = Operation(self._number, kind, time.monotonic(), facts)
            self._append({"n": operation.number, "t": operation.begun, "op": kind} | facts)
        return operation

    def end(self, operation: Operation, error: Gd2fsError | str = "", **answer: Any) -> None:
        """Written as soon as the answer is there."""
        if isinstance(error, Gd2fsError):
            # The name is what counts; the message is for whoever has to find out why.
            answer["message"], error = error.message[:MESSAGE_CHARACTERS_MAX], error.name
        operation.ended, operation.ok, operation.error = time.monotonic(), not error, error
        operation.facts |= answer
        with self._lock:
            record = {"n": operation.number, "t": operation.ended, "error": error} | answer
            self._append(record)

    def _append(self, record: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(record, separators=(",", ":")).encode() + b"\n")


def read(path: Path) -> list[Operation]:
    """The operations of a journal in the order of their begin; [] for one that was never begun."""
    operations: dict[int, Operation] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        number, moment = record.pop("n"), record.pop("t")
        if "op" in record:
            operations[number] = Operation(number, record.pop("op"), moment, record)
        elif number in operations:
            operation = operations[number]
            operation.ended, operation.error = moment, record.pop("error")
            operation.ok = not operation.error
            operation.facts |= record
    return sorted(operations.values(), key=lambda operation: operation.number)
