"""A conversation whose KV cache a client stores turn by turn, sometimes with a stale writer beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from gd2fs import errors, kv
from gd2fs.bench.torture.journal import Journal, Operation
from gd2fs.bench.torture.model import FileModel, models
from gd2fs.bench.torture.pattern import Bytes, pattern

if TYPE_CHECKING:
    from gd2fs.client import Client
    from gd2fs.client.completions import Request
    from gd2fs.client.files import File
    from gd2fs.client.sessions import Plan

BYTES_PER_TOKEN = 4096
TOKENS_MAX = 48
"""Fresh tokens of one turn."""
TAKEOVER_CHANCE = 0.35
IDENTITY = "torture"


@dataclass(slots=True)
class Target:
    """Where a plan's fresh tokens go."""

    plan: Plan
    fresh: kv.Segment
    layout: dict[str, Any]
    file: File
    tokens_file: File

    @property
    def file_id(self) -> str:
        return str(self.layout["file"])


@dataclass(slots=True)
class Conversation:
    """One session. ``adopt`` makes the files it writes known to its owner."""

    client: Client
    journal: Journal
    random: Random
    adopt: Callable[[FileModel], None]
    versions: Callable[[str], int]
    """The next version of a file."""
    applied: Callable[[Operation], None]
    """Told every operation that changes what its owner knows of a file."""
    timeout_s: float
    session: str = ""
    stored: int = 0
    """Tokens whose commit was acknowledged, or that control named since."""
    _files: set[str] = field(default_factory=set)

    def turn(self) -> None:
        """Plans, writes and commits some tokens. Raises errors of gd2fs.errors; the next turn goes on from
        what control has stored."""
        if not self.session:
            self._begin()
        self.stored = self.client.sessions.get(self.session).tokens
        ids = ids_of(self.session, self.stored + self.random.randint(1, TOKENS_MAX))
        request = f"{self.session}-{self.random.getrandbits(48)}"
        target = self._plan(ids, request)
        before: tuple[Target, Request] | None = None
        if self.random.random() < TAKEOVER_CHANCE:
            # The first writer's bytes are on their way while the second takes its grant over.
            before = target, self._submit(target, len(ids))
            target = self._plan(ids, request)
        try:
            self._write(target, ids)
            self._commit(target, ids)
        finally:
            if before is not None:
                _settle(before[1])
        if before is not None:
            self._try_stale(before[0], target, len(ids))

    @property
    def stored_bytes(self) -> int:
        return self.stored * BYTES_PER_TOKEN

    def files(self) -> set[str]:
        """Those that its turns went to."""
        return set(self._files)

    def forget(self) -> None:
        """Deletes the session with its files."""
        session, self.session, self.stored = self.session, "", 0
        files, self._files = self._files, set()
        if not session:
            return
        operations = [self.journal.begin("delete", file=file) for file in sorted(files)]
        error: errors.Gd2fsError | str = ""
        try:
            self.client.sessions.delete(session)
        except errors.Gd2fsError as failure:
            error = failure
            raise
        finally:
            for operation in operations:
                self.journal.end(operation, error)

    def _begin(self) -> None:
        self.session = self.client.sessions.create(IDENTITY, kv.KvFormat("token", BYTES_PER_TOKEN)).session
        self.stored = 0
        self._files.clear()

    def _plan(self, ids: list[int], request: str) -> Target:
        plan = self.client.sessions.plan(
            self.session, ids, max_tokens=1, request_id=request, kv_identity=IDENTITY
        )
        if not plan.metadata.fresh:
            raise errors.NoNodes("no node has room for what is fresh")
        (fresh,) = plan.metadata.fresh
        layouts = plan.kv_transfer["plan"]["layouts"]
        layout = layouts[fresh.kv_uri]
        if layout["file"] not in self._files:
            self._files.add(layout["file"])
            operation = self.journal.begin("create", path=layout["path"], session=self.session)
            columns = [column["replicas"][0]["node"] for column in layout["columns"]]
            self.journal.end(operation, file=layout["file"], unit=layout["stripe_unit"], nodes=columns)
            (model,) = models([operation]).values()
            self.adopt(model)
        tokens_layout = layouts[fresh.kv_uri + ".tokens"]
        return Target(
            plan, fresh, layout, self.client.open_layout(layout), self.client.open_layout(tokens_layout)
        )

    def _bytes(self, target: Target, end: int) -> tuple[int, int, int, Bytes]:
        """Start, end, version and bytes of the KV cache up to the token ``end``."""
        start = target.fresh.kv_start
        length = (end - target.fresh.token_start) * BYTES_PER_TOKEN
        version = self.versions(target.file_id)
        return start, start + length, version, pattern(target.file_id, version, start, length)

    def _submit(self, target: Target, end: int) -> Request:
        start, stop, version, data = self._bytes(target, end)
        operation = self.journal.begin(
            "write", file=target.file_id, start=start, end=stop, version=version, grant=target.layout["grant"]
        )
        # Whether it is in time is nobody's to say: it is overwritten, or stands there until it is.
        self.journal.end(operation, "SUPERSEDED")
        self.applied(operation)
        return target.file.submit_write(start, data, timeout_s=self.timeout_s)

    def _write(self, target: Target, ids: list[int]) -> None:
        start, stop, version, data = self._bytes(target, len(ids))
        operation = self.journal.begin(
            "write", file=target.file_id, start=start, end=stop, version=version, grant=target.layout["grant"]
        )
        try:
            target.file.write(start, data, timeout_s=self.timeout_s)
            self.journal.end(operation)
        except errors.Gd2fsError as error:
            self.journal.end(operation, error)
            raise
        finally:
            self.applied(operation)
        place = start // BYTES_PER_TOKEN * kv.ID_BYTES
        fresh_ids = kv.ids_to_bytes(ids[target.fresh.token_start :])
        target.tokens_file.write(place, fresh_ids, timeout_s=self.timeout_s)

    def _commit(self, target: Target, ids: list[int]) -> None:
        first, count = target.fresh.token_start, len(ids) - target.fresh.token_start
        fresh = kv.Segment(first, count, target.fresh.kv_uri, target.fresh.kv_start, count * BYTES_PER_TOKEN)
        acks = [
            {"column": at, "epoch": column["epoch"], "incarnation": column["replicas"][0]["incarnation"]}
            for at, column in enumerate(target.layout["columns"])
        ]
        operation = self.journal.begin(
            "commit", file=target.file_id, end=fresh.kv_end, session=self.session, tokens=len(ids)
        )
        try:
            self.client.sessions.commit(target.plan.token, [fresh], kv.digest(ids), acks)
        except errors.Gd2fsError as error:
            self.journal.end(operation, error)
            raise
        self.journal.end(operation)
        self.applied(operation)
        self.stored = len(ids)

    def _try_stale(self, stale: Target, current: Target, end: int) -> None:
        """Writes that must change nothing: beyond the seal with the grant that was taken over, and below the
        seal with the one that was committed."""
        sealed = current.fresh.kv_start + (end - current.fresh.token_start) * BYTES_PER_TOKEN
        attempts = [(stale.file, sealed, "grant"), (current.file, sealed - BYTES_PER_TOKEN, "seal")]
        if stale.file_id != current.file_id:
            return
        for file, start, guard in attempts:
            data = pattern(current.file_id, self.versions(current.file_id), start, BYTES_PER_TOKEN)
            operation = self.journal.begin("stale", file=current.file_id, start=start, guard=guard)
            try:
                file.write(start, data, timeout_s=self.timeout_s)
            except errors.Gd2fsError as error:
                self.journal.end(operation, error)
            else:
                self.journal.end(operation)


def _settle(request: Request) -> None:
    """Its memory is needed until it is over, whatever it brings."""
    try:
        request.wait()
    except errors.Gd2fsError:
        return


def ids_of(session: str, count: int) -> list[int]:
    """The ids of a conversation's first tokens: always the same."""
    seed = int.from_bytes(hashlib.sha256(session.encode()).digest()[:4], "little")
    return [(seed + 7919 * place) % 32_000 for place in range(count)]
