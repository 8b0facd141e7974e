"""How far each column is there, as its node says: all of it after a restart, later what changed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from gd2fs.control import nodes, requests
from gd2fs.control.schema import file_columns, files

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
    wanted = {"node": node, "files": sorted({item.file for item in body.items})}
    known = {(row.file, row.ordinal): row for row in connection.execute(_KNOWN, wanted)}
    now: dict[tuple[str, int], tuple[int, int | None]] = {
        key: (row.born, row.valid) for key, row in known.items()
    }
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
            born, valid = now[key]
            said = item.valid_below(row.sealed)
            # Within one incarnation a column only loses bytes: a report that comes late brings none back.
            now[key] = body.incarnation, lesser(valid, said) if born == body.incarnation else said
    # In the order of the key, so that two transactions that meet here wait for each other and no more.
    changed = [
        {"id": file, "column": ordinal, "incarnation": born, "to": valid}
        for (file, ordinal), (born, valid) in sorted(now.items(), key=lambda entry: entry[0])
        if (born, valid) != (known[file, ordinal].born, known[file, ordinal].valid)
    ]
    if changed:
        connection.execute(_PROVE, changed)
    return {"taken": len(body.items) - len(unknown) - len(stale), "unknown": unknown, "stale": stale}


def lesser(one: int | None, other: int | None) -> int | None:
    """The smaller of two valid prefixes, None being everything."""
    return min((end for end in (one, other) if end is not None), default=None)
