"""Sessions: what is stored for one conversation, and who may see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, bindparam, delete, func, insert, select

from gd2fs import errors
from gd2fs.control import files, requests
from gd2fs.control import schema as t
from gd2fs.control.files import FileView, Unusable
from gd2fs.control.paths import SESSIONS_ROOT, session_directory, tokens_path
from gd2fs.kv import KvFormat, Segment, segment_to_json, tokens_of


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment with its file's id and the digest of all the session's token ids from 0 to its end."""

    segment: Segment
    file: str
    digest: str


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session with its segments and files at one moment (`now`, unix seconds of the database)."""

    now: float
    row: RowMapping
    segments: list[StoredSegment]
    files: dict[str, FileView]

    @property
    def session(self) -> str:
        return self.row["session"]

    @property
    def kv_format(self) -> KvFormat:
        return format_of(self.row)

    @property
    def stored(self) -> list[Segment]:
        return [stored.segment for stored in self.segments]

    @property
    def tokens(self) -> int:
        return tokens_of(self.stored)

    def reachable(self) -> tuple[int, Unusable | None]:
        """How many tokens from the beginning nodes can serve, whole granules, and why not more."""
        for stored in self.segments:
            kv = self.files[stored.file]
            end, reason = stored.segment.token_start, kv.unusable
            if reason is None and kv.valid is not None and kv.valid < stored.segment.kv_end:
                end, reason = tokens_below(stored.segment, kv.valid, self.kv_format), "lost"
            if reason:
                return self.kv_format.round_down(end), reason
        return self.tokens, None

    def tokens_file(self, kv_file: str) -> FileView:
        """The `.tokens` file beside a KV file."""
        wanted = tokens_path(self.files[kv_file].path)
        return next(view for view in self.files.values() if view.path == wanted)


def format_of(row: RowMapping) -> KvFormat:
    return KvFormat(row["format_name"], row["bytes_per_token"], row["granule"])


def tokens_below(segment: Segment, valid: int, kv_format: KvFormat) -> int:
    """Where the session ends (in tokens) if only the bytes below `valid` of the segment's file are there."""
    if valid >= segment.kv_end:
        return segment.token_end
    if not kv_format.merges:
        return segment.token_start  # its bytes are not in token order: all or nothing
    return segment.token_start + max(0, valid - segment.kv_start) // kv_format.bytes_per_token


def uri_of(cluster: str, path: str) -> str:
    return f"gd2fs://{cluster}{path}"


# Built once: on the way of every plan and commit, building a statement costs more than running it.
_GET = select(t.sessions).where(
    t.sessions.c.session == bindparam("session"), t.sessions.c.tenant == bindparam("tenant")
)
_LOCK = _GET.with_for_update()
_FILES = files.selected((t.files.c.session == bindparam("session")) & ~t.files.c.is_dir)
_SEGMENTS = (
    select(t.segments).where(t.segments.c.session == bindparam("session")).order_by(t.segments.c.position)
)


def create(connection: Connection, now: float, tenant: str, body: requests.CreateSession) -> str:
    """A new, empty session; returns its id."""
    kv_format = KvFormat(body.kv_format.name, body.kv_format.bytes_per_token, body.kv_format.granule)
    session = files.new_id()
    connection.execute(
        insert(t.sessions).values(
            session=session,
            tenant=tenant,
            kv_identity=body.kv_identity,
            format_name=kv_format.name,
            bytes_per_token=kv_format.bytes_per_token,
            granule=kv_format.granule,
            model=body.model,
            priority=body.priority,
            ttl_s=body.ttl_s,
            version=0,
            tokens=0,
            bytes=0,
            next_number=1,
            last_plan=None,
            created_at=now,
            updated_at=now,
            expires_at=None if body.ttl_s is None else now + body.ttl_s,
        )
    )
    root = select(t.files.c.file).where(t.files.c.tenant == tenant, t.files.c.path == SESSIONS_ROOT)
    if connection.scalar(root) is None:
        files.add(connection, now, tenant, SESSIONS_ROOT)
    files.add(connection, now, tenant, session_directory(session), session=session)
    return session


def lock(connection: Connection, tenant: str, session: str) -> RowMapping:
    """The session's row, held until the transaction ends: what changes a session begins here. Raises
    NotFound."""
    return _one(connection, _LOCK, tenant, session)


def load(connection: Connection, now: float, tenant: str, session: str, cluster: str) -> SessionView:
    """The session as it is now, in three queries whatever its length. Raises NotFound, also for another
    tenant's."""
    row = _one(connection, _GET, tenant, session)
    by_id = files_of(connection, now, session)
    return SessionView(now, row, load_segments(connection, session, cluster, by_id), by_id)


def files_of(connection: Connection, now: float, session: str) -> dict[str, FileView]:
    """The session's files by their ids."""
    return {view.file: view for view in files.fetch(connection, now, _FILES, {"session": session})}


def read_files(connection: Connection, now: float, session: str) -> list[FileView]:
    """The files that the session's segments lie in: where its plans may have pinned something."""
    by_id = files_of(connection, now, session)
    used = connection.scalars(select(t.segments.c.file).where(t.segments.c.session == session).distinct())
    return [by_id[file] for file in used]


def load_segments(
    connection: Connection, session: str, cluster: str, by_id: dict[str, FileView]
) -> list[StoredSegment]:
    rows = connection.execute(_SEGMENTS, {"session": session})
    return [
        StoredSegment(
            Segment(
                row.token_start,
                row.token_length,
                uri_of(cluster, by_id[row.file].path),
                row.kv_start,
                row.kv_length,
            ),
            row.file,
            row.digest,
        )
        for row in rows
    ]


def describe(connection: Connection, view: SessionView) -> dict[str, Any]:
    """The session as the REST API shows it. `control_rows` counts what control keeps for it."""
    row = view.row
    plans = connection.scalar(
        select(func.count()).select_from(t.plans).where(t.plans.c.session == view.session)
    )
    return {
        "session": view.session,
        "kv_identity": row["kv_identity"],
        "kv_format": {
            "name": row["format_name"],
            "bytes_per_token": row["bytes_per_token"],
            "granule": row["granule"],
        },
        "model": row["model"],
        "priority": row["priority"],
        "ttl_s": row["ttl_s"],
        "version": row["version"],
        "tokens": row["tokens"],
        "valid_tokens": view.reachable()[0],
        "bytes": row["bytes"],
        "stored_kv_cache": [segment_to_json(segment) for segment in view.stored],
        "control_rows": {
            "segments": len(view.segments),
            "plans": plans or 0,
            "files": len(view.files),
            # Rows that carry epochs and grants: one a column.
            "chain": sum(len(file.columns) for file in view.files.values()),
        },
        "created_at": row["created_at"],
        "updated_at": row["updated_at"],
    }


def list_ids(connection: Connection, tenant: str, limit: int, after: str) -> list[str]:
    """Ids of the tenant's sessions, in id order, beyond `after`."""
    return list(
        connection.scalars(
            select(t.sessions.c.session)
            .where(t.sessions.c.tenant == tenant, t.sessions.c.session > after)
            .order_by(t.sessions.c.session)
            .limit(limit)
        )
    )


def remove(connection: Connection, now: float, session: str) -> list[str]:
    """Deletes the (locked) session with everything that hangs on it; returns the files whose bytes are to be
    freed."""
    freed = list(
        connection.scalars(select(t.files.c.file).where(t.files.c.session == session, ~t.files.c.is_dir))
    )
    connection.execute(delete(t.plans).where(t.plans.c.session == session))
    connection.execute(delete(t.segments).where(t.segments.c.session == session))
    files.release(connection, now, t.files.c.session == session)
    connection.execute(delete(t.sessions).where(t.sessions.c.session == session))
    return freed


def release_unused(connection: Connection, now: float, session: str) -> bool:
    """Deletes the (locked) session's files that no segment and no plan refers to; whether there were any."""
    used = set(
        connection.scalars(
            select(t.segments.c.file)
            .where(t.segments.c.session == session)
            .union(select(t.plans.c.file).where(t.plans.c.session == session, t.plans.c.file.is_not(None)))
        )
    )
    rows = connection.execute(
        select(t.files.c.file, t.files.c.path).where(t.files.c.session == session, ~t.files.c.is_dir)
    ).all()
    kept = set(_with_tokens(row.path for row in rows if row.file in used))
    unused = [row.file for row in rows if row.path not in kept]
    if unused:
        files.release(connection, now, t.files.c.file.in_(unused))
    return bool(unused)


def _with_tokens(paths: Iterable[str]) -> list[str]:
    return [name for path in paths for name in (path, tokens_path(path))]


def _one(connection: Connection, query: Select[Any], tenant: str, session: str) -> RowMapping:
    row = connection.execute(query, {"session": session, "tenant": tenant}).mappings().one_or_none()
    if row is None:
        raise errors.NotFound(f"session {session!r:.80} does not exist; create one with POST /v1/kv/sessions")
    return row
