"""fsck: what a node keeps beside what control believes of it, a page of columns at a time, and repairs.

The order of looking makes it sound while the cluster works. A column is unknown to control (an orphan) if
the database does not have it *after* the node listed it: rows are written before the first layout is signed,
and ids are never used twice, so it was deleted, not just being made; and if the node has it still when asked
*after* that, and nothing waits to be freed: else it was deleted in order meanwhile. It is missing on its node
if the node does not know it when asked *after* the database was read, and the database has it still. It was
deleted if the node has a tombstone of it: only control orders deletions, and forgets one only with its
database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from sqlalchemy import Connection, RowMapping, Select, and_, func, or_, select, tuple_, update

from gd2fs import errors
from gd2fs.control import files as file_rows
from gd2fs.control import nodes, ranges, requests
from gd2fs.control.database import Database
from gd2fs.control.node_link import Item, NodeLink
from gd2fs.control.ranges import lesser
from gd2fs.control.schema import file_columns, files, reclaims, segments, sessions
from gd2fs.kv import ID_BYTES

Kind = Literal["orphan", "deleted", "missing", "unreported", "shrunken", "seal", "grant", "epoch"]
Key = tuple[str, int]

_PAGE = (
    select(
        file_columns.c.file,
        file_columns.c.ordinal,
        file_columns.c.epoch,
        file_columns.c.born,
        file_columns.c.valid,
        files.c.path,
        files.c.session,
        files.c.ids_of,
        files.c.stripe_unit,
        files.c.width,
        files.c.sealed,
        files.c.write_grant,
    )
    .join(files, files.c.file == file_columns.c.file)
    .order_by(file_columns.c.file, file_columns.c.ordinal)
)


@dataclass(slots=True)
class Finding:
    """One thing that is not as it should be; `repaired` only if it is now."""

    kind: Kind
    file: str
    column: int
    path: str | None
    detail: str
    repaired: bool = False


@dataclass(slots=True)
class _Page:
    """One stretch of keys, as the node and as control have it. `stored`: bytes of each file that segments
    name, and that its node must therefore have sealed."""

    node: RowMapping
    listed: dict[Key, Item]
    known: dict[Key, RowMapping]
    stored: dict[str, int]
    following: Item | None

    def believed(self, key: Key) -> bool:
        """Whether control counts on anything of this column."""
        row = self.known[key]
        return row["born"] == self.node["incarnation"] and row["valid"] != 0


class Fsck:
    """Compares and repairs; every call is one page of one node."""

    def __init__(self, database: Database, link: NodeLink) -> None:
        self._database = database
        self._link = link

    def page(self, body: requests.Fsck) -> dict[str, Any]:
        """Findings of the next page of a node: {"columns", "findings", "reclaims", "next"}; `next` is the
        `after` of the following page, None at the end.

        Raises NotFound, Unavailable (the node is not alive), StaleIncarnation (it was registered anew
        meanwhile: begin again), and what the node's link raises.
        """
        found = self._read(body)
        findings = self._compare(found, body.repair)
        return {
            "columns": len(found.listed),
            "findings": [asdict(finding) for finding in findings],
            "reclaims": self._reclaims(found, body.repair) if body.after is None else 0,
            "next": found.following,
        }

    def _read(self, body: requests.Fsck) -> _Page:
        node = self._database.read(lambda c: nodes.living(c, self._database.time.now(), body.node))
        after = body.after.model_dump() if body.after else None
        incarnation, reply = self._link.list(node["addresses"], after, body.limit)
        if incarnation != node["incarnation"]:
            raise _started_anew(body.node)
        first = (after["file"], after["column"]) if after else ("", -1)
        listed = {(item["file"], item["column"]): item for item in reply["items"]}
        last = _key(reply["next"]) if reply["next"] else None
        known, stored, full = self._database.read(partial(_control_page, node, first, last, body.limit))
        if full is not None and (last is None or full < last):
            # Control has more here than fits on the page: the rest of the node's waits for the next one.
            last = full
            listed = {key: item for key, item in listed.items() if key <= full}
        following = {"file": last[0], "column": last[1]} if last else None
        return _Page(node, listed, known, stored, following)

    def _compare(self, page: _Page, repair: bool) -> list[Finding]:
        orphans = [key for key in page.listed if key not in page.known]
        findings = self._orphans(page, orphans, repair)
        both = [key for key in page.listed if key in page.known]
        differing = {key for key in both if page.listed[key]["epoch"] != page.known[key]["epoch"]}
        for key in differing:
            detail = f"the node has epoch {page.listed[key]['epoch']}, control {page.known[key]['epoch']}"
            findings.append(Finding("epoch", *key, page.known[key]["path"], detail))
        same = [key for key in both if key not in differing]
        for key in same:
            findings += self._valid(page, key, repair)
            findings += self._grant(page, key, repair)
        findings += self._absent(page, [key for key in page.known if key not in page.listed], same, repair)
        return findings

    def _orphans(self, page: _Page, keys: Sequence[Key], repair: bool) -> list[Finding]:
        waiting = self._database.read(partial(_reclaimed, keys)) if keys else set()
        # One that was deleted and freed since the node listed it is in neither: the node knows.
        still = self._ask(page, [key for key in keys if key not in waiting])
        orphans = [
            Finding("orphan", *key, None, f"{page.listed[key]['length']} bytes that control has no file for")
            for key, reply in still
            if reply is not None and not reply.get("deleted", False)
        ]
        if orphans and repair:
            items = [{"file": one.file, "column": one.column} for one in orphans]
            self._link.delete(page.node["addresses"], items)
            for one in orphans:
                one.repaired = True
        return orphans

    def _valid(self, page: _Page, key: Key, repair: bool) -> list[Finding]:
        item, row = page.listed[key], page.known[key]
        reported = row["born"] == page.node["incarnation"]
        if not reported and not item["length"] and not item["sealed"]:
            # Somebody has opened a file that is lost: an empty column brings nothing back.
            return []
        if reported and lesser(row["valid"], item["valid"]) == row["valid"]:
            return []
        believed = _end(row["valid"]) if reported else "that it is lost"
        detail = f"valid up to {_end(item['valid'])}; control believes: {believed}"
        finding = Finding("shrunken" if reported else "unreported", *key, row["path"], detail)
        if repair:
            self._sink(page, [(key, item["valid"])])
            finding.repaired = True
        return [finding]

    def _grant(self, page: _Page, key: Key, repair: bool) -> list[Finding]:
        grant, row = page.listed[key]["grant"], page.known[key]
        if grant <= row["write_grant"]:
            return []
        detail = f"the node has seen grant {grant}, control gave out {row['write_grant']}"
        finding = Finding("grant", *key, row["path"], detail)
        if repair:
            self._database.write(partial(_raise_grant, key[0], grant))
            finding.repaired = True
        return [finding]

    def _absent(
        self, page: _Page, unlisted: Sequence[Key], listed: Sequence[Key], repair: bool
    ) -> list[Finding]:
        """Columns that their node was told to delete, that it does not have sealed as segments name them, or
        that it does not know at all.

        Never written is not missing: only what is stored is, and only what control still believes in. Of a
        plain file that its node does not list only a tombstone says that there was more to it.
        """
        short = {
            key
            for key in (*unlisted, *listed)
            if page.stored.get(key[0], 0) > (page.listed[key]["sealed"] if key in page.listed else 0)
            and page.believed(key)
        }
        plain = {key for key in unlisted if page.known[key]["session"] is None}
        findings = []
        for key, reply in self._asked(page, sorted(short | plain)):
            deleted = reply is not None and reply.get("deleted", False)
            if deleted and key in plain:
                findings.append(self._deleted(page, key, repair))
            elif key in short:
                findings += self._short(page, key, None if deleted else reply, repair)
        return findings

    def _asked(self, page: _Page, keys: Sequence[Key]) -> list[tuple[Key, Item | None]]:
        """What the node says of these now, if control still has them.

        They were listed before the database was read: a commit may have come in between. So may a delete,
        whose rows go before the node is told.
        """
        replies = self._ask(page, keys)
        placed = self._database.read(partial(_placed, keys)) if keys else set()
        return [(key, reply) for key, reply in replies if key in placed]

    def _ask(self, page: _Page, keys: Sequence[Key]) -> list[tuple[Key, Item | None]]:
        """What the node says of these now."""
        if not keys:
            return []
        items = [{"file": file, "column": column} for file, column in keys]
        incarnation, replies = self._link.stat(page.node["addresses"], items)
        if incarnation != page.node["incarnation"]:
            raise _started_anew(page.node["node"])
        return list(zip(keys, replies, strict=True))

    def _short(self, page: _Page, key: Key, reply: Item | None, repair: bool) -> list[Finding]:
        stored, path = page.stored[key[0]], page.known[key]["path"]
        if reply is None:
            finding = Finding("missing", *key, path, f"the node knows nothing of {stored} stored bytes")
        elif reply["sealed"] < stored:
            detail = f"sealed up to {reply['sealed']} on the node, {stored} bytes are stored"
            finding = Finding("seal", *key, path, detail)
        else:
            return []
        if repair:
            finding.repaired = self._settle(page, key, reply, stored)
        return [finding]

    def _deleted(self, page: _Page, key: Key, repair: bool) -> Finding:
        """A plain file that was deleted while control used a later database than this one."""
        detail = "the node was told to delete it; control's database is older than that"
        finding = Finding("deleted", *key, page.known[key]["path"], detail)
        if repair:
            self._database.write(
                lambda c: file_rows.release(c, self._database.time.now(), files.c.file == key[0])
            )
            finding.repaired = True
        return finding

    def _settle(self, page: _Page, key: Key, reply: Item | None, stored: int) -> bool:
        """Seals again what is stored, where all bytes are there; otherwise control believes the node."""
        if reply is None:
            self._sink(page, [(key, 0)])
            return True
        row = page.known[key]
        wanted = {
            "file": key[0],
            "column": key[1],
            "epoch": row["epoch"],
            "born": row["born"],
            "grant": reply["grant"],
            "stripe_unit": row["stripe_unit"],
            "width": row["width"],
            "length": stored,
        }
        _, [answer] = self._link.seal(page.node["addresses"], [wanted])
        if answer["status"] in (errors.Lost.code, errors.Hole.code):
            self._sink(page, [(key, min(reply["sealed"], stored))])
            return True
        return bool(answer["status"] == 0)

    def _sink(self, page: _Page, ends: Sequence[tuple[Key, int | None]]) -> None:
        """Notes how far columns are valid, unless they were reported or deleted meanwhile."""
        node, incarnation = page.node["node"], page.node["incarnation"]
        self._database.write(partial(ranges.sink, node=node, incarnation=incarnation, ends=dict(ends)))

    def _reclaims(self, page: _Page, repair: bool) -> int:
        """Columns that this node has still to free; with `repair` they are due now."""

        def work(connection: Connection) -> int:
            mine = reclaims.c.node == page.node["node"]
            if repair:
                connection.execute(update(reclaims).where(mine).values(next_try_at=self._database.time.now()))
            return connection.scalar(select(func.count()).select_from(reclaims).where(mine)) or 0

        return self._database.write(work) if repair else self._database.read(work)


def _control_page(
    node: RowMapping, first: Key, last: Key | None, limit: int, connection: Connection
) -> tuple[dict[Key, RowMapping], dict[str, int], Key | None]:
    """Control's columns on the node between two keys, what segments name of their files, and the last key if
    there may be more."""
    query = _PAGE.where(file_columns.c.node == node["node"], _beyond(first))
    if last is not None:
        query = query.where(~_beyond(last))
    rows = connection.execute(query.limit(limit)).mappings().all()
    known = {(row["file"], row["ordinal"]): row for row in rows}
    full = (rows[-1]["file"], rows[-1]["ordinal"]) if len(rows) == limit else None
    return known, _stored(connection, rows), full


def _stored(connection: Connection, rows: Sequence[RowMapping]) -> dict[str, int]:
    """Bytes that segments of any session name of each KV file, and of the `.tokens` file beside it."""
    wanted = {row["ids_of"] or row["file"] for row in rows if row["session"]}
    ends = {row.file: row for row in connection.execute(_stored_ends(sorted(wanted)))}
    stored = {}
    for row in rows:
        found = ends.get(row["ids_of"] or row["file"])
        if found is not None:
            of_ids = row["ids_of"] is not None
            stored[row["file"]] = found.end // found.bytes_per_token * ID_BYTES if of_ids else found.end
    return stored


def _stored_ends(wanted: Sequence[str]) -> Select[Any]:
    end = func.max(segments.c.kv_start + segments.c.kv_length).label("end")
    return (
        select(segments.c.file, sessions.c.bytes_per_token, end)
        .join(sessions, sessions.c.session == segments.c.session)
        .where(segments.c.file.in_(wanted))
        .group_by(segments.c.file, sessions.c.bytes_per_token)
    )


def _beyond(key: Key) -> Any:
    file, column = key
    return or_(file_columns.c.file > file, and_(file_columns.c.file == file, file_columns.c.ordinal > column))


def _reclaimed(keys: Sequence[Key], connection: Connection) -> set[Key]:
    """Those that are to be freed already: deleted while their node was away."""
    query = select(reclaims.c.file, reclaims.c.ordinal).where(
        tuple_(reclaims.c.file, reclaims.c.ordinal).in_(keys)
    )
    return {(row.file, row.ordinal) for row in connection.execute(query)}


def _placed(keys: Sequence[Key], connection: Connection) -> set[Key]:
    """Those that control still has."""
    query = select(file_columns.c.file, file_columns.c.ordinal).where(
        tuple_(file_columns.c.file, file_columns.c.ordinal).in_(keys)
    )
    return {(row.file, row.ordinal) for row in connection.execute(query)}


def _raise_grant(file: str, grant: int, connection: Connection) -> None:
    """Control's count came from a backup: plans must give out higher grants than the node has seen."""
    connection.execute(
        update(files).where(files.c.file == file, files.c.write_grant < grant).values(write_grant=grant)
    )


def _key(place: Item) -> Key:
    return place["file"], place["column"]


def _end(valid: int | None) -> str:
    return "its end" if valid is None else str(valid)


def _started_anew(node: str) -> errors.Gd2fsError:
    return errors.StaleIncarnation(f"node {node} was started anew; run fsck again")
