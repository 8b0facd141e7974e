"""Reads everything back: each byte is what the journals say, or an error that is allowed there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gd2fs import errors
from gd2fs.bench.torture.model import HOLE, FileModel, Piece, Timeline
from gd2fs.bench.torture.pattern import Bytes, pattern

if TYPE_CHECKING:
    from gd2fs.client import Client

#: Bytes that do not exist, and the node says so.
MISSING = (errors.Lost, errors.Corrupt)
#: Nothing about the bytes: asked again while something is still coming back. Internal: a disk has failed a
#: read.
PASSING = (
    errors.Disconnected,
    errors.Unavailable,
    errors.Timeout,
    errors.LayoutError,
    errors.Overloaded,
    errors.Internal,
)
AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never be. ``kind`` is the counter it belongs to."""

    kind: str
    path: str
    start: int
    end: int
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.path} [{self.start}, {self.end}): {self.what}"


@dataclass(slots=True)
class Allowance:
    """Which losses are allowed. Without a timeline (a writer that checks what it reads while nodes may die)
    all are."""

    timeline: Timeline | None = None
    damage: bool = False
    """Bits were flipped: anything may be missing, nothing may be wrong."""
    evicted: Callable[[FileModel, int], bool] | None = None
    """Whether control was told that the byte is gone."""

    def missing(self, model: FileModel, piece: Piece) -> bool:
        if self.timeline is None or self.damage:
            return True
        node = model.node_of(piece.start // model.unit)
        if self.evicted is not None and self.evicted(model, piece.start):
            return True
        if HOLE in piece.versions:
            # A node that was started anew does not know what was never written, and without its columns
            # nobody knows where the file ends.
            return any(self.timeline.restarted(each, model.created) for each in model.nodes)
        return not piece.durable and self.timeline.died(node, piece.since)


class Reader:
    """Compares one file with its model, through ``fill(offset, buffer)``, which returns the bytes read."""

    def __init__(self, fill: Callable[[int, Bytes], int], model: FileModel, allowed: Allowance) -> None:
        self._fill, self._model, self._allowed = fill, model, allowed
        self.violations: list[Violation] = []
        self.bytes_read = 0
        self.bytes_missing = 0
        self._patience_s = 10.0

    def everything(self) -> None:
        """Every chunk that was ever written to, and that no write to a chunk is there in part."""
        for _, pieces in self._model.pieces():
            seen: dict[int, set[bool]] = {}
            for run in _runs(pieces):
                for piece, data in self._read(run):
                    version = self._compare(piece, data) if len(data) else HOLE
                    if version == HOLE and piece.dropped:
                        continue
                    for later in piece.versions:
                        # Under a later version nobody sees whether this one is there.
                        if version is not None and version <= later:
                            seen.setdefault(later, set()).add(version == later)
            for version, found in seen.items():
                if len(found) == 2:
                    where = f"write {version} is there in part: it must be atomic in a chunk"
                    self._blame("wrong_bytes", pieces[0].start, pieces[-1].end, where)

    def part(self, start: int, end: int) -> None:
        """A range, while its owner may still have writes on the way."""
        for run in _runs(self._model.within(start, end)):
            for piece, data in self._read(run):
                if len(data):
                    self._compare(piece, data)

    def _read(self, run: list[Piece]) -> Iterator[tuple[Piece, Bytes]]:
        """Reads pieces that lie one behind the other at once; one by one where not all of them is there. A
        hole has no bytes; what is lost is left out."""
        start, end = run[0].start, run[-1].end
        data = self._ask(start, end, last=len(run) == 1, piece=run[0])
        if data is None and len(run) > 1:
            for piece in run:
                yield from self._read([piece])
        elif data is not None:
            for piece in run:
                yield piece, data[piece.start - start : piece.end - start]

    def _ask(self, start: int, end: int, last: bool, piece: Piece) -> Bytes | None:
        """The bytes, none of a hole, or None where not all are there; ``last``: then that is judged."""
        buffer = np.zeros(end - start, np.uint8)
        until = time.monotonic() + self._patience_s
        while True:
            try:
                moved = self._fill(start, buffer)
                break
            except PASSING as error:
                if self._allowed.timeline is None:
                    return None
                if time.monotonic() > until:
                    self._blame("unreadable", start, end, f"for {self._patience_s:g} s: {error}")
                    # One file that can't be read must not make the check take for ever.
                    self._patience_s = 0.5
                    return None
                time.sleep(AGAIN_S)
            except (errors.Hole, *MISSING) as error:
                if not last:
                    return None
                self._judge(piece, start, end, error)
                return np.empty(0, np.uint8) if isinstance(error, errors.Hole) else None
            except errors.Expired as error:
                # Whoever reads has asked control for a new capability before he is told.
                self._blame("unreadable", start, end, str(error))
                return None
            except errors.Checksum as error:
                self._blame("wrong_bytes", start, end, f"the node sends bytes that do not match: {error}")
                return None
        if moved < end - start and last:
            self._judge(piece, start + moved, end, None)
            return np.empty(0, np.uint8)
        self.bytes_read += moved
        return buffer if moved == end - start else None

    def _judge(self, piece: Piece, start: int, end: int, error: errors.Gd2fsError | None) -> None:
        """What is not there: is that allowed? ``error`` is None for a read that ended early."""
        self.bytes_missing += 0 if HOLE in piece.versions else end - start
        if error is None or isinstance(error, errors.Hole):
            if HOLE not in piece.versions:
                what = "is a hole" if error else "lies beyond the end"
                self._blame("lost_after_flush", start, end, f"{_story(piece)}; now it {what}")
        elif not self._allowed.missing(self._model, piece):
            # Where nodes evict, the fault may be that nobody was told.
            kind = "lost_after_flush" if self._allowed.evicted is None else "unreported"
            self._blame(kind, start, end, f"{_story(piece)}; now {error}")

    def _compare(self, piece: Piece, data: Bytes) -> int | None:
        """The version that stands there; None, and a violation, for other bytes."""
        for version in reversed(piece.versions):
            if version != HOLE:
                expected = pattern(self._model.file, version, piece.start, piece.end - piece.start)
                if np.array_equal(data, expected):
                    return version
        newest = pattern(self._model.file, piece.versions[-1], piece.start, piece.end - piece.start)
        first = int(np.argmax(data != newest))
        what = f"{_story(piece)}; other bytes from {piece.start + first} on{self._guess(piece, data)}"
        self._blame("wrong_bytes", piece.start, piece.end, what)
        return None

    def _guess(self, piece: Piece, data: Bytes) -> str:
        """What they may be, for whoever has to find out why."""
        if not data.any():
            return " (zeros)"
        length = min(64, len(data))
        for version in range(1, max(piece.versions) + 1):
            if np.array_equal(data[:length], pattern(self._model.file, version, piece.start, length)):
                return f" (they begin as version {version})"
        return ""

    def _blame(self, kind: str, start: int, end: int, what: str) -> None:
        self.violations.append(Violation(kind, self._model.path, start, end, what))


def _story(piece: Piece) -> str:
    versions = "/".join("hole" if version == HOLE else str(version) for version in piece.versions)
    return f"version {versions}{', flushed' if piece.durable else ''}"


def _runs(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces that surely exist and follow one another, together; all others alone."""
    run: list[Piece] = []
    for piece in pieces:
        if run and not (piece.certain and run[-1].certain and run[-1].end == piece.start):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def check_file(client: Client, model: FileModel, allowed: Allowance) -> Reader:
    """Reads all of a file that was not deleted, by its path."""
    reader = Reader(lambda offset, buffer: client.read_into(model.path, offset, buffer), model, allowed)
    try:
        client.namespace.layout(model.path, "read")
    except errors.NotFound:
        if not (model.doomed or model.session):
            reader.violations.append(
                Violation("lost_after_flush", model.path, 0, model.length, "its name is gone")
            )
        return reader
    if model.deleted:
        what = "its deletion was acknowledged, and it has a name again"
        reader.violations.append(Violation("phantoms", model.path, 0, model.length, what))
    reader.everything()
    return reader
