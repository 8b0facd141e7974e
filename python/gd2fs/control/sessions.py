"""Sessions: what is stored for one conversation, and who may see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, bindparam, delete, func, insert, select, update

from gd2fs import errors
from gd2fs.control import files, requests
from gd2fs.control import schema as t
from gd2fs.control.files import FileView, Unusable
from gd2fs.control.paths import SESSIONS_ROOT, session_directory
from gd2fs.kv import KvFormat, Segment, cut, segment_to_json, tokens_of

NO_DIGEST = ""
"""Of a fork's last segment, where it ends inside one of its parent's: the ids themselves are compared, until
the fork's first commit, which knows the digest."""


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
        return tokens_of_file(self.files, kv_file)


def tokens_of_file(by_id: Mapping[str, FileView], kv_file: str) -> FileView:
    """The `.tokens` file beside a KV file."""
    return next(view for view in by_id.values() if view.ids_of == kv_file)


def format_of(row: RowMapping) -> KvFormat:
    return KvFormat(row["format_name"], row["bytes_per_token"], row["granule"])


def tokens_below(segment: Segment, valid: int, kv_format: KvFormat) -> int:
    """Where the session ends (in tokens) if only the bytes below `valid` of the segment's file are there."""
    if valid >= segment.kv_end:
        return segment.token_end
    if not kv_format.merges:
        return segment.token_start  # its bytes are not in token order: all or nothing
    return segment.token_start + max(0, valid - segment.kv_start) // kv_format.bytes_per_token


def insert_segments(
    connection: Connection, session: str, segments: Sequence[StoredSegment], position: int
) -> None:
    """Adds rows, the first of them at `position`."""
    if segments:
        connection.execute(
            insert(t.segments),
            [
                {
                    "session": session,
                    "position": position,
                    "token_start": item.segment.token_start,
                    "token_length": item.segment.token_length,
                    "file": item.file,
                    "kv_start": item.segment.kv_start,
                    "kv_length": item.segment.kv_length,
                    "digest": item.digest,
                }
                for position, item in enumerate(segments, start=position)
            ],
        )


def uri_of(cluster: str, path: str) -> str:
    return f"gd2fs://{cluster}{path}"


# Built once: on the way of every plan and commit, building a statement costs more than running it.
_GET = select(t.sessions).where(
    t.sessions.c.session == bindparam("session"), t.sessions.c.tenant == bindparam("tenant")
)
_LOCK = _GET.with_for_update()
_NAMED = select(t.segments.c.file).where(t.segments.c.session == bindparam("session"))
_OWN = select(t.files.c.file, t.files.c.ids_of).where(
    t.files.c.session == bindparam("session"), ~t.files.c.is_dir
)
_child = t.files.alias("child")
_SHARED_DIRECTORIES = (
    select(t.files.c.file, func.min(_child.c.session))
    .join(_child, (_child.c.tenant == t.files.c.tenant) & (_child.c.parent == t.files.c.path))
    .where(
        t.files.c.session == bindparam("session"), t.files.c.is_dir, _child.c.session != bindparam("session")
    )
    .group_by(t.files.c.file)
)
# By ids, each part by an index: an OR over these conditions makes PostgreSQL read all files there are.
_FILES = files.selected(
    t.files.c.file.in_(
        _OWN.with_only_columns(t.files.c.file).union(
            _NAMED, select(t.files.c.file).where(t.files.c.ids_of.in_(_NAMED))
        )
    )
)
_SEGMENTS = (
    select(t.segments).where(t.segments.c.session == bindparam("session")).order_by(t.segments.c.position)
)


def create(
    connection: Connection, now: float, tenant: str, body: requests.CreateSession, cluster: str
) -> str:
    """A new session, empty or with what another one begins with; returns its id. Raises NotFound, Invalid."""
    parent = None
    if body.fork is not None:
        lock(connection, tenant, body.fork.session)
        parent = load(connection, now, tenant, body.fork.session, cluster)
    values = _begin(body, parent)
    segments = _forked(parent, body.fork) if parent and body.fork else []
    session = files.new_id()
    connection.execute(
        insert(t.sessions).values(
            session=session,
            tenant=tenant,
            **values,
            version=0,
            tokens=tokens_of([stored.segment for stored in segments]),
            bytes=sum(stored.segment.kv_length or 0 for stored in segments),
            next_number=1,
            last_plan=None,
            created_at=now,
            updated_at=now,
            expires_at=None if values["ttl_s"] is None else now + values["ttl_s"],
        )
    )
    root = select(t.files.c.file).where(t.files.c.tenant == tenant, t.files.c.path == SESSIONS_ROOT)
    if connection.scalar(root) is None:
        files.add(connection, now, tenant, SESSIONS_ROOT)
    files.add(connection, now, tenant, session_directory(session), session=session)
    insert_segments(connection, session, segments, 0)
    return session


def _begin(body: requests.CreateSession, parent: SessionView | None) -> dict[str, Any]:
    """What a session is for: what the body says, else what its parent is for. Raises Invalid."""
    if parent is None:
        if body.kv_identity is None or body.kv_format is None:
            raise errors.Invalid("kv_identity, kv_format: a session that is no fork needs both")
        kv_identity, kv_format = body.kv_identity, body.kv_format.value()
    else:
        kv_identity, kv_format = parent.row["kv_identity"], parent.kv_format
        if body.kv_identity not in (None, kv_identity):
            raise errors.Invalid(
                f"kv_identity: {body.kv_identity!r:.80}, but session {parent.session} has {kv_identity!r};"
                " a fork has its parent's"
            )
        if body.kv_format is not None and body.kv_format.value() != kv_format:
            raise errors.Invalid(
                f"kv_format: session {parent.session} has {kv_format}; a fork has its parent's"
            )
    inherited = parent.row if parent else {"model": None, "priority": 0, "ttl_s": None}
    return {
        "kv_identity": kv_identity,
        "format_name": kv_format.name,
        "bytes_per_token": kv_format.bytes_per_token,
        "granule": kv_format.granule,
    } | {
        name: getattr(body, name) if name in body.model_fields_set else inherited[name]
        for name in ("model", "priority", "ttl_s")
    }


def _forked(parent: SessionView, fork: requests.Fork) -> list[StoredSegment]:
    """The parent's segments up to the fork, in whole granules. Raises Invalid."""
    tokens = parent.tokens if fork.tokens is None else fork.tokens
    if tokens > parent.tokens:
        raise errors.Invalid(
            f"fork.tokens: {tokens}, but session {parent.session} has {parent.tokens} tokens stored"
        )
    kept = cut(parent.stored, parent.kv_format.round_down(tokens), parent.kv_format)
    return [
        StoredSegment(segment, stored.file, stored.digest if segment == stored.segment else NO_DIGEST)
        for segment, stored in zip(kept, parent.segments, strict=False)
    ]


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
    """By their ids, the files that belong to the session and those of others that its segments name, each
    with its `.tokens` file."""
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
    own = [file for file in view.files.values() if file.session == view.session]
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
            "files": len(own),
            # Rows that carry epochs and grants: one a column.
            "chain": sum(len(file.columns) for file in own),
        },
        "created_at": row["created_at"],
        "updated_at": row["updated_at"],
        "expires_at": row["expires_at"],
    }


def list_ids(connection: Connection, tenant: str, limit: int, after: str, **wanted: str | None) -> list[str]:
    """Ids of the tenant's sessions, in id order, beyond `after`. `wanted`: values of columns, None: any."""
    query = select(t.sessions.c.session).where(t.sessions.c.tenant == tenant, t.sessions.c.session > after)
    for name, value in wanted.items():
        if value is not None:
            query = query.where(t.sessions.c[name] == value)
    return list(connection.scalars(query.order_by(t.sessions.c.session).limit(limit)))


def extend(connection: Connection, now: float, row: RowMapping, body: requests.Extend) -> None:
    """Changes the (locked) session's retention, and lets its time to live begin anew."""
    changes: dict[str, Any] = {name: getattr(body, name) for name in body.model_fields_set}
    if changes.get("priority", 0) is None:
        raise errors.Invalid("priority: null; leave it out to keep it")
    ttl_s = changes.get("ttl_s", row["ttl_s"])
    changes["expires_at"] = renewed(connection, now, row["session"], ttl_s)
    connection.execute(update(t.sessions).where(t.sessions.c.session == row["session"]).values(**changes))


def renewed(
    connection: Connection, now: float, session: str, ttl_s: int | None, but: str | None = None
) -> float | None:
    """When the session ends if it is used now: never under one of its plans, `but` that one."""
    if ttl_s is None:
        return None
    plans = select(func.max(t.plans.c.expires_at)).where(
        t.plans.c.session == session, t.plans.c.plan != (but or "")
    )
    return max(now + ttl_s, connection.scalar(plans) or 0.0)


def remove(connection: Connection, now: float, session: str) -> list[str]:
    """Deletes the (locked) session with everything that hangs on it; returns the files whose bytes are to be
    freed. What other sessions refer to becomes theirs."""
    connection.execute(delete(t.plans).where(t.plans.c.session == session))
    connection.execute(delete(t.segments).where(t.segments.c.session == session))
    own = connection.execute(_OWN, {"session": session}).all()
    kept = _bequeath(connection, {row.file for row in own if row.ids_of is None})
    freed = [row.file for row in own if (row.ids_of or row.file) not in kept]
    for directory, heir in connection.execute(_SHARED_DIRECTORIES, {"session": session}).all():
        connection.execute(update(t.files).where(t.files.c.file == directory).values(session=heir))
    files.release(connection, now, t.files.c.session == session)
    connection.execute(delete(t.sessions).where(t.sessions.c.session == session))
    return freed


def release_unused(connection: Connection, now: float, session: str) -> bool:
    """Deletes the (locked) session's files that no segment and no plan refers to; whether there were any.
    What only other sessions still refer to becomes theirs."""
    used = set(
        connection.scalars(
            select(t.segments.c.file)
            .where(t.segments.c.session == session)
            .union(select(t.plans.c.file).where(t.plans.c.session == session, t.plans.c.file.is_not(None)))
        )
    )
    own = connection.execute(_OWN, {"session": session}).all()
    used |= _bequeath(connection, {row.file for row in own if row.ids_of is None} - used)
    unused = [row.file for row in own if (row.ids_of or row.file) not in used]
    if unused:
        files.release(connection, now, t.files.c.file.in_(unused))
    return bool(unused)


def _bequeath(connection: Connection, kv_files: Collection[str]) -> set[str]:
    """Gives each of the KV files that some session's segments name, with its `.tokens` file, to one of those
    sessions. Returns them.

    A session that is deleted by somebody else meanwhile cannot become the owner (the foreign key waits for it
    and then refuses): the transaction runs again. One whose commit has dropped the file meanwhile can, so the
    segments are asked again: from then on the foreign key holds it until this transaction ends.
    """
    kept: set[str] = set()
    while left := set(kv_files) - kept:
        named = select(t.segments.c.file, t.segments.c.session).where(t.segments.c.file.in_(left))
        heirs = {file: heir for file, heir in sorted(map(tuple, connection.execute(named)), reverse=True)}
        if not heirs:
            break
        for file, heir in heirs.items():
            both = (t.files.c.file == file) | (t.files.c.ids_of == file)
            connection.execute(update(t.files).where(both).values(session=heir))
        still = set(map(tuple, connection.execute(named)))
        kept |= {file for file, heir in heirs.items() if (file, heir) in still}
        kv_files = set(heirs)
    return kept


def _one(connection: Connection, query: Select[Any], tenant: str, session: str) -> RowMapping:
    row = connection.execute(query, {"session": session, "tenant": tenant}).mappings().one_or_none()
    if row is None:
        raise errors.NotFound(f"session {session!r:.80} does not exist; create one with POST /v1/kv/sessions")
    return row
