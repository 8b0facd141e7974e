"""The judgement of one loop: files, conversations, and what must be gone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gd2fs import errors
from gd2fs.bench.torture.check import Allowance, Violation, check_file
from gd2fs.bench.torture.cluster import STAT, Cluster
from gd2fs.bench.torture.ends import check_end
from gd2fs.bench.torture.journal import Operation
from gd2fs.bench.torture.model import FileModel, models
from gd2fs.bench.torture.turns import IDENTITY, ids_of
from gd2fs.bench.torture.writer import ROOT

if TYPE_CHECKING:
    from gd2fs.client import Client

GONE_S = 15.0
"""Control frees at once what it can reach, and asks again every few seconds where a node was away."""
AGAIN_S = 0.25
SESSIONS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Gone:
    """A file that was deleted."""

    file: str
    path: str
    nodes: tuple[str, ...]


@dataclass(slots=True)
class Verdict:
    """Gathers the violations of a loop, one journal after the other."""

    cluster: Cluster
    client: Client
    allowed: Allowance
    violations: list[Violation] = field(default_factory=list)
    bytes_checked: int = 0
    bytes_missing: int = 0
    stale_attempts: int = 0
    _files: list[FileModel] = field(default_factory=list)

    def judge(self, operations: list[Operation]) -> None:
        """Checks everything that one client did."""
        files = models(operations, self.allowed.timeline)
        self._files += files.values()
        for model in files.values():
            reader = check_file(self.client, model, self.allowed)
            self.violations += reader.violations
            self.bytes_checked += reader.bytes_read
            self.bytes_missing += reader.bytes_missing
            if not model.deleted:
                self.violations += check_end(self.client, model, self.allowed)
        for operation in operations:
            self._own_words(operation, files)
        self._conversations(operations, files)

    def _own_words(self, operation: Operation, files: dict[str, FileModel]) -> None:
        """What the client saw itself: wrong bytes in its reads, stale writes that were acknowledged."""
        facts = operation.facts
        if operation.kind == "violation":
            what = f"{facts['what']} (seen by its writer)"
            self.violations.append(
                Violation(facts["blame"], facts["path"], facts["start"], facts["end"], what)
            )
        elif operation.kind == "stale":
            self.stale_attempts += 1
            if operation.ok:
                path = files[facts["file"]].path if facts["file"] in files else facts["file"]
                what = f"a write that the {facts['guard']} forbids was acknowledged"
                self.violations.append(Violation("stale_writes", path, facts["start"], facts["start"], what))

    def _conversations(self, operations: list[Operation], files: dict[str, FileModel]) -> None:
        """A commit that was acknowledged can be planned with, as far as its bytes could not be lost."""
        committed: dict[str, int] = {}
        for operation in operations:
            if operation.kind == "commit" and operation.ok:
                committed[operation.facts["session"]] = operation.facts["tokens"]
        for session, tokens in committed.items():
            mine = [model for model in files.values() if model.session == session]
            if any(model.doomed for model in mine):
                continue
            prompt = ids_of(session, tokens + 1)
            try:
                plan = self.client.sessions.plan(
                    session, prompt, max_tokens=1, request_id=f"check-{session}", kv_identity=IDENTITY
                )
                self.client.sessions.abort(plan.token)
            except errors.Gd2fsError as error:
                self._blame("unreadable", session, 0, tokens, f"no plan: {error}")
                continue
            if plan.cached_tokens < tokens and not self._may_shrink(mine):
                what = f"of {tokens} committed tokens {plan.cached_tokens} can be planned ({plan.miss})"
                self._blame("lost_after_flush", session, plan.cached_tokens, tokens, what)

    def _may_shrink(self, mine: list[FileModel]) -> bool:
        if self.allowed.damage or self.allowed.evicted is not None:
            return True
        return any(
            self.allowed.missing(model, piece)
            for model in mine
            for _, pieces in model.pieces()
            for piece in pieces
            if piece.start < model.sealed
        )

    def gone(self, before: list[Gone]) -> None:
        """What was deleted, in this loop and ``before`` it, has no byte on any node."""
        deleted = [_gone(model) for model in self._files if model.deleted]
        waiting = [*before, *deleted]
        until = time.monotonic() + GONE_S
        while waiting and (waiting := [one for one in waiting if self._there(one)]):
            if time.monotonic() > until:
                for one in waiting:
                    self._blame(
                        "phantoms",
                        one.path,
                        0,
                        0,
                        f"file {one.file} was deleted, and a node holds bytes of it",
                    )
                return
            time.sleep(AGAIN_S)

    def _there(self, one: Gone) -> bool:
        for ordinal, node in enumerate(one.nodes):
            (found,) = self.cluster.ask(node, STAT, [{"file": one.file, "column": ordinal}])
            if found is not None and (found["bytes"] or found["length"]):
                return True
        return False

    def files(self) -> list[Gone]:
        """All that were judged: what the next loop's verdict must find gone once they are deleted."""
        return [_gone(model) for model in self._files]

    def _blame(self, kind: str, path: str, start: int, end: int, what: str) -> None:
        self.violations.append(Violation(kind, path, start, end, what))


def _gone(model: FileModel) -> Gone:
    return Gone(model.file, model.path, model.nodes)


def delete_all(client: Client) -> None:
    """Ends a loop: nothing of it is needed any more."""
    client.delete(ROOT, recursive=True)
    for session in client.sessions.list(limit=SESSIONS_MAX):
        client.sessions.delete(session.session)
