"""How far each column is there, as its node says: all of it after a restart, later what changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from gd2fs.control import nodes, requests
from gd2fs.control.schema import file_columns, files

Key = tuple[str, int]
"""File and ordinal of a column."""

_KNOWN = (
    select(
        file_columns.c.file,
        file_columns.c.ordinal,
        file_columns.c.epoch,
        file_columns.c.born,
        file_columns.c.valid,
        files.c.sealed,
    )
    .join(files, files.c.file == file_columns.c.file)
    .where(
        file_columns.c.node == bindparam("node"), file_columns.c.file.in_(bindparam("files", expanding=True))
    )
)
_PROVE = (
    update(file_columns)
    .where(file_columns.c.file == bindparam("id"), file_columns.c.ordinal == bindparam("column"))
    .values(born=bindparam("incarnation"), valid=bindparam("to"))
)


def take(connection: Connection, node: str, body: requests.Ranges) -> dict[str, Any]:
    """Writes down what the current incarnation of `node` says of its columns. Idempotent.

    `unknown` in the answer: columns that control does not place there (deleted meanwhile, or orphans for
    fsck); `stale`: those of another epoch, which prove nothing. Raises StaleIncarnation, NotFound.
    """
    nodes.lock_current(connection, node, body.incarnation)
    known = _known(connection, node, {item.file for item in body.items})
    said: dict[Key, int | None] = {}
    unknown: list[dict[str, Any]] = []
    stale: list[dict[str, Any]] = []
    for item in body.items:
        key = item.file, item.column
        row = known.get(key)
        if row is None:
            unknown.append({"file": item.file, "column": item.column})
        elif row.epoch != item.epoch:
            stale.append({"file": item.file, "column": item.column, "epoch": row.epoch})
        else:
            end = item.valid_below(row.sealed)
            said[key] = lesser(said[key], end) if key in said else end
    _prove(connection, body.incarnation, known, said)
    return {"taken": len(body.items) - len(unknown) - len(stale), "unknown": unknown, "stale": stale}


def sink(connection: Connection, node: str, incarnation: int, ends: Mapping[Key, int | None]) -> None:
    """Notes valid prefixes of columns of `node` that somebody else has found out. Raises StaleIncarnation."""
    nodes.lock_current(connection, node, incarnation)
    known = _known(connection, node, {file for file, _ in ends})
    _prove(connection, incarnation, known, {key: end for key, end in ends.items() if key in known})


def _known(connection: Connection, node: str, wanted: Collection[str]) -> dict[Key, Any]:
    rows = connection.execute(_KNOWN, {"node": node, "files": sorted(wanted)})
    return {(row.file, row.ordinal): row for row in rows}


def _prove(
    connection: Connection, incarnation: int, known: Mapping[Key, Any], said: Mapping[Key, int | None]
) -> None:
    changed = []
    # In the order of the key, so that two transactions that meet here wait for each other and no more.
    for key, end in sorted(said.items(), key=lambda entry: entry[0]):
        row = known[key]
        # Within one incarnation a column only loses bytes: a report that comes late brings none back.
        valid = lesser(row.valid, end) if row.born == incarnation else end
        if (row.born, row.valid) != (incarnation, valid):
            changed.append({"id": key[0], "column": key[1], "incarnation": incarnation, "to": valid})
    if changed:
        connection.execute(_PROVE, changed)


def lesser(one: int | None, other: int | None) -> int | None:
    """The smaller of two valid prefixes, None being everything."""
    return min((end for end in (one, other) if end is not None), default=None)
