"""Files with their columns as the rest of control sees them, and the two ways their rows come and go."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Select, delete, insert, literal, select

from gd2fs.control.nodes import free_bytes, is_alive
from gd2fs.control.paths import parent_of
from gd2fs.control.placement import Candidate
from gd2fs.control.schema import file_columns, files, nodes, reclaims, sessions

STRIPE_UNIT = 4 * 2**20
FIRST_EPOCH = 1
Unusable = Literal["lost", "unreachable"]


@dataclass(frozen=True, slots=True)
class ColumnView:
    """One column and its node at the moment of reading."""

    epoch: int
    born: int
    node: str
    incarnation: int
    alive: bool
    addresses: tuple[str, ...]
    free_bytes: int
    valid: int | None
    has_log: bool

    @property
    def proven(self) -> bool:
        """Whether the node's current incarnation took these bytes, or has said that it still has them."""
        return self.born == self.incarnation

    @property
    def lost(self) -> bool:
        """All of it is gone: an earlier incarnation held it, and the current one has not reported it.

        A node with a log is alive only once it has reported everything; until then nobody knows.
        """
        return not self.proven and (self.alive or not self.has_log)


@dataclass(slots=True)
class FileView:
    """A file or directory; directories have no columns."""

    file: str
    tenant: str
    path: str
    is_dir: bool
    file_class: str
    stripe_unit: int
    width: int
    kv_identity: str | None
    session: str | None
    """The session it belongs to: the only one that writes it. Others may refer to it."""
    ids_of: str | None
    """A `.tokens` file: the KV file whose ids it holds."""
    sealed: int
    grant: int
    created_at: float
    priority: int = 0
    """Its session's: what full nodes give up later. Of the files of one session those with later tokens go
    first in any case: a node takes them in the order in which plans pin them."""
    columns: list[ColumnView] = field(default_factory=list)

    @property
    def valid(self) -> int | None:
        """Bytes from the beginning that are there, None: all. Only for a file that is not `unusable`."""
        return min((column.valid for column in self.columns if column.valid is not None), default=None)

    @property
    def whole(self) -> bool:
        """Whether it is reachable and nothing of it is missing: only such a file is written on. What is
        missing never comes back, and control would not see it if the rest grew."""
        return self.unusable is None and self.valid is None

    @property
    def unusable(self) -> Unusable | None:
        """Why nothing should be planned on it now, or None."""
        if any(column.lost for column in self.columns):
            return "lost"
        if not all(column.alive for column in self.columns):
            return "unreachable"
        return None


_NODE = [
    nodes.c[name]
    for name in (
        "node",
        "state",
        "incarnation",
        "addresses",
        "capacity_bytes",
        "used_bytes",
        "evictable_bytes",
        "log_trouble",
        "has_log",
        "heartbeat_at",
    )
]
_COLUMN = [file_columns.c[name] for name in ("ordinal", "epoch", "born", "valid")]


def selected(where: ColumnElement[bool]) -> Select[Any]:
    """The query of the files that `where` selects, with their columns and nodes, in path order: for
    `fetch`."""
    return (
        select(files, *_COLUMN, *_NODE, sessions.c.priority)
        .select_from(files)
        .outerjoin(sessions, sessions.c.session == files.c.session)
        .outerjoin(file_columns, file_columns.c.file == files.c.file)
        .outerjoin(nodes, nodes.c.node == file_columns.c.node)
        .where(where)
        .order_by(files.c.path, files.c.file, file_columns.c.ordinal)
    )


def fetch(
    connection: Connection, now: float, query: Select[Any], values: Mapping[str, Any] | None = None
) -> list[FileView]:
    """Runs what `selected` made."""
    views: list[FileView] = []
    for row in connection.execute(query, values or {}).mappings():
        if not views or views[-1].file != row["file"]:
            views.append(_file_view(row))
        if row["ordinal"] is not None:
            views[-1].columns.append(_column_view(row, now))
    return views


def load(connection: Connection, now: float, where: ColumnElement[bool]) -> list[FileView]:
    """All files that `where` selects, in path order, in one query."""
    return fetch(connection, now, selected(where))


def _file_view(row: Any) -> FileView:
    return FileView(
        file=row["file"],
        tenant=row["tenant"],
        path=row["path"],
        is_dir=row["is_dir"],
        file_class=row["class"],
        stripe_unit=row["stripe_unit"],
        width=row["width"],
        kv_identity=row["kv_identity"],
        session=row["session"],
        ids_of=row["ids_of"],
        sealed=row["sealed"],
        grant=row["write_grant"],
        created_at=row["created_at"],
        priority=row["priority"] or 0,
    )


def _column_view(row: Any, now: float) -> ColumnView:
    return ColumnView(
        epoch=row["epoch"],
        born=row["born"],
        node=row["node"],
        incarnation=row["incarnation"],
        alive=is_alive(row, now),
        addresses=tuple(row["addresses"]),
        free_bytes=free_bytes(row),
        valid=row["valid"],
        has_log=row["has_log"],
    )


def add(
    connection: Connection,
    now: float,
    tenant: str,
    path: str,
    *,
    file_class: str = "cache",
    file: str | None = None,
    stripe_unit: int = STRIPE_UNIT,
    on: Sequence[Candidate] = (),
    kv_identity: str | None = None,
    session: str | None = None,
    ids_of: str | None = None,
    grant: int = 0,
) -> str:
    """Inserts a file with one column on each node of `on`, or a directory where there is none. Returns its
    id."""
    file = file or new_id()
    connection.execute(
        insert(files).values(
            {
                "file": file,
                "tenant": tenant,
                "path": path,
                "parent": parent_of(path),
                "is_dir": not on,
                "class": file_class,
                "stripe_unit": stripe_unit,
                "width": len(on),
                "kv_identity": kv_identity,
                "session": session,
                "ids_of": ids_of,
                "sealed": 0,
                "write_grant": grant,
                "created_at": now,
            }
        )
    )
    if on:
        connection.execute(
            insert(file_columns),
            [
                {
                    "file": file,
                    "ordinal": ordinal,
                    "epoch": FIRST_EPOCH,
                    "born": candidate.incarnation,
                    "node": candidate.node,
                }
                for ordinal, candidate in enumerate(on)
            ],
        )
    return file


def release(connection: Connection, now: float, where: ColumnElement[bool]) -> None:
    """Deletes the files that `where` selects; their columns become reclaims, which free the bytes on the
    nodes.

    A node without a log that has left took its bytes with it and needs none.
    """
    chosen = select(files.c.file).where(where)
    connection.execute(
        insert(reclaims).from_select(
            ["file", "ordinal", "node", "attempts", "next_try_at"],
            select(file_columns.c.file, file_columns.c.ordinal, file_columns.c.node, literal(0), literal(now))
            .join(nodes, nodes.c.node == file_columns.c.node)
            .where(file_columns.c.file.in_(chosen), (nodes.c.state == "joined") | nodes.c.has_log),
        )
    )
    connection.execute(delete(file_columns).where(file_columns.c.file.in_(chosen)))
    connection.execute(delete(files).where(where))


def new_id() -> str:
    """128 random bits in hex: file, session and plan ids, never used twice."""
    return secrets.token_hex(16)
