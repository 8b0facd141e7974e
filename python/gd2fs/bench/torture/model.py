"""What each byte of a file may be, from the operations on it.

One client owns a file: its operations on it come one after the other. A write that was acknowledged is what
stands there. One that was not (an error, a death of anybody on the way) stands there or not, but as a whole
within each chunk.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gd2fs.bench.torture.journal import Operation

INFINITE = float("inf")
HOLE = 0
"""The version of what was never written."""


@dataclass(slots=True)
class Timeline:
    """When each node was away: from the moment that ended it until it served again.

    ``stops`` are those ends that were in order.
    """

    deaths: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    stops: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def died(self, node: str, since: float, until: float = INFINITE) -> bool:
        """Whether the node may have died in ``[since, until]``."""
        return any(end >= since and begin <= until for begin, end in self.deaths.get(node, ()))

    def restarted(self, node: str, since: float) -> bool:
        """Whether it is another process than it was at ``since``."""
        ends = [*self.deaths.get(node, ()), *self.stops.get(node, ())]
        return any(end >= since for _, end in ends)

    def back(self, node: str, moment: float) -> None:
        """It serves again: its last absence is over."""
        for absences in (self.deaths.get(node, []), self.stops.get(node, [])):
            if absences and absences[-1][1] == INFINITE:
                absences[-1] = absences[-1][0], moment


@dataclass(slots=True)
class Piece:
    """Bytes of one chunk, as file offsets, that have the same past."""

    start: int
    end: int
    versions: tuple[int, ...]
    """What may stand there, oldest first: the last that was acknowledged, and later ones that were not."""
    since: float
    """When the first of them began to be written: a death of the node after it may have taken it."""
    acknowledged: float
    """When it was acknowledged; infinite if it was not."""
    durable: bool = False
    """Whether a flush was acknowledged after it."""
    dropped: bool = False
    """Whether a new grant may have made a hole of it, whatever became of the rest of the chunk."""

    @property
    def certain(self) -> bool:
        return len(self.versions) == 1 and self.versions[0] != HOLE


@dataclass(slots=True)
class FileModel:
    """One file; ``nodes`` holds the node of each column."""

    file: str
    path: str
    unit: int
    nodes: tuple[str, ...]
    created: float
    deleted: bool = False
    """Whether a deletion was acknowledged."""
    doomed: bool = False
    """Whether one was begun."""
    length: int = 0
    """No write went further."""
    grown: float = 0.0
    """When it began to grow since a flush made its end durable; infinite if it has not."""
    unanswered: bool = False
    """Whether a write that would have made it grow has got no answer: it may still come."""
    session: str = ""
    """Of a conversation's file, which control deletes when the conversation has no use for it any more."""
    grant: int = 0
    sealed: int = 0
    """What a commit was acknowledged for."""
    chunks: dict[int, list[Piece]] = field(default_factory=dict)

    def node_of(self, chunk: int) -> str:
        return self.nodes[chunk % len(self.nodes)]

    def pieces(self) -> Iterator[tuple[int, list[Piece]]]:
        for chunk in sorted(self.chunks):
            yield chunk, self.chunks[chunk]

    def within(self, start: int, end: int) -> list[Piece]:
        """The pieces that cover ``[start, end)``, cut to it; none where a chunk was never written to."""
        found = []
        for chunk in range(start // self.unit, -(-end // self.unit)):
            for piece in self.chunks.get(chunk, ()):
                if piece.start < end and start < piece.end:
                    found.append(replace(piece, start=max(start, piece.start), end=min(end, piece.end)))
        return found

    @property
    def acknowledged_end(self) -> int:
        """No file that has a known end ends before this: bytes were acknowledged up to here. Of a
        conversation's file only what was committed counts."""
        if self.session:
            return self.sealed
        written = (
            piece.end for _, pieces in self.pieces() for piece in pieces if piece.acknowledged < INFINITE
        )
        return max(written, default=0)

    def end_is_durable(self, timeline: Timeline) -> bool:
        """Whether a node that was started anew must still know where the file ends."""
        # A stop in order keeps the ends of what the node has; of a column without bytes it has nothing.
        forgot = timeline.died if len(self.nodes) == 1 and self.length else timeline.restarted
        return not self.unanswered and not any(forgot(node, self.grown) for node in self.nodes)

    def write(self, start: int, end: int, version: int, begun: float, acknowledged: float) -> None:
        """``acknowledged``: when, infinite if it was not."""
        if end > self.length:
            self.grown = min(self.grown, begun)
            self.unanswered = self.unanswered or acknowledged == INFINITE
        self.length = max(self.length, end)
        for chunk in range(start // self.unit, -(-end // self.unit)):
            first = chunk * self.unit
            pieces = self.chunks.get(chunk)
            if pieces is None:
                hole = Piece(first, first + self.unit, (HOLE,), self.created, INFINITE)
                pieces = self.chunks[chunk] = [hole]
            _cut(pieces, start)
            _cut(pieces, end)
            for piece in pieces:
                if start <= piece.start and piece.end <= end:
                    _overwrite(piece, version, begun, acknowledged)
            _join(pieces)

    def flush(self, begun: float, timeline: Timeline | None) -> None:
        """A flush that began at ``begun`` was acknowledged: what the node had by then is durable."""
        if timeline is None or not any(timeline.died(node, self.grown, begun) for node in self.nodes):
            self.grown = INFINITE
        for chunk, pieces in self.chunks.items():
            for piece in pieces:
                gone = timeline is not None and timeline.died(self.node_of(chunk), piece.since, begun)
                piece.durable = piece.durable or not gone
            _join(pieces)

    def stopped(self, node: str, moment: float, timeline: Timeline) -> None:
        """The node was told to end, at ``moment``, and did: a flush of what it had."""
        for chunk, pieces in self.chunks.items():
            if self.node_of(chunk) != node:
                continue
            for piece in pieces:
                if piece.acknowledged < moment and not timeline.died(node, piece.since, moment):
                    piece.durable = True

    def apply(self, operation: Operation, timeline: Timeline | None) -> None:
        """The effect of one operation of the journal on this file. Without a timeline no node died."""
        facts = operation.facts
        if operation.kind == "write":
            if facts.get("grant", 0) > self.grant:
                self._supersede(facts["grant"])
            ended = operation.ended if operation.ok and operation.ended is not None else INFINITE
            self.write(facts["start"], facts["end"], facts["version"], operation.begun, ended)
        elif operation.kind == "flush" and operation.ok:
            self.flush(operation.begun, timeline)
        elif operation.kind == "commit" and operation.ok:
            self.sealed = max(self.sealed, facts["end"])
        elif operation.kind == "delete":
            self.doomed = True
            self.deleted = self.deleted or operation.ok

    def _supersede(self, grant: int) -> None:
        """With a new grant goes what the one before wrote beyond the seal."""
        self.grant = grant
        for _, pieces in self.pieces():
            _cut(pieces, self.sealed)
            for piece in pieces:
                if piece.start >= self.sealed and piece.versions[0] != HOLE:
                    piece.versions, piece.durable, piece.dropped = (HOLE, *piece.versions), False, True


def _overwrite(piece: Piece, version: int, begun: float, acknowledged: float) -> None:
    if acknowledged == INFINITE:
        piece.versions = (*piece.versions, version)
        return
    # What lies in the log is overwritten only durably; what stood there in memory alone was not.
    piece.durable = piece.durable and piece.versions[0] != HOLE
    piece.versions, piece.since, piece.acknowledged = (version,), begun, acknowledged
    piece.dropped = False


def _cut(pieces: list[Piece], at: int) -> None:
    """Makes ``at`` a border between two pieces."""
    index = bisect_right(pieces, at, key=lambda piece: piece.start) - 1
    piece = pieces[index] if index >= 0 else None
    if piece is not None and piece.start < at < piece.end:
        insort(pieces, replace(piece, start=at), key=lambda other: other.start)
        piece.end = at


def _join(pieces: list[Piece]) -> None:
    """Neighbours with the same past become one."""
    kept: list[Piece] = []
    for piece in pieces:
        last = kept[-1] if kept else None
        if last is not None and piece == replace(last, start=piece.start, end=piece.end):
            last.end = piece.end
        else:
            kept.append(piece)
    pieces[:] = kept


def models(operations: list[Operation], timeline: Timeline | None = None) -> dict[str, FileModel]:
    """All files of one journal, by their ids, after its operations."""
    files: dict[str, FileModel] = {}
    stops = sorted(
        (begin, node)
        for node, absences in (timeline.stops if timeline else {}).items()
        for begin, _ in absences
    )
    for operation in operations:
        while timeline and stops and stops[0][0] <= operation.begun:
            moment, node = stops.pop(0)
            for model in files.values():
                model.stopped(node, moment, timeline)
        facts = operation.facts
        if operation.kind == "create" and operation.ok:
            files[facts["file"]] = FileModel(
                facts["file"], facts["path"], facts["unit"], tuple(facts["nodes"]), operation.begun
            )
            files[facts["file"]].session = facts.get("session", "")
            files[facts["file"]].grown = operation.begun
        elif (known := files.get(facts.get("file", ""))) is not None:
            known.apply(operation, timeline)
    for moment, node in stops if timeline else ():
        for model in files.values():
            model.stopped(node, moment, timeline)  # type: ignore[arg-type]
    return files
