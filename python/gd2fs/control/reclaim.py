"""Freeing bytes on nodes: `reclaims` rows become DELETEs, tried again until the node has answered.

The same worker watches the leases, and ends what nobody else ends: plans over their time, sessions over their
ttl.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import ColumnElement, Connection, case, delete, select, tuple_, update

from gd2fs import errors
from gd2fs.control import overdue
from gd2fs.control.database import Database
from gd2fs.control.node_link import NodeLink
from gd2fs.control.nodes import LEASE_S, is_alive, watch
from gd2fs.control.schema import nodes, reclaims

_log = logging.getLogger(__name__)

BATCH = 512
"""Rows of one round: a transaction and a request of bounded size, however much there is to free."""
_INTERVAL_S = 2.0
_PAUSE_S, _PAUSE_MAX_S = 2.0, 60.0
"""After a failed attempt: 2 s longer each time, so that a node in trouble is not pressed."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What one node is to free: (file, ordinal) of each column."""

    node: str
    addresses: Sequence[str]
    columns: list[tuple[str, int]] = field(default_factory=list)

    @property
    def rows(self) -> ColumnElement[bool]:
        return tuple_(reclaims.c.file, reclaims.c.ordinal).in_(self.columns)


class Reclaimer:
    """Frees in the background (`start`), and at once after a delete (`free_now`)."""

    def __init__(self, database: Database, link: NodeLink) -> None:
        self._database = database
        self._link = link
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gd2fs-reclaim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Says that there is something to free, without waiting for it."""
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def free_now(self, files: Sequence[str]) -> int:
        """One attempt for deleted `files`, whatever their turn; returns bytes freed. What fails stays for the
        worker."""
        freed = 0
        for start in range(0, len(files), BATCH):
            freed += self._free(reclaims.c.file.in_(files[start : start + BATCH]))[1]
        return freed

    def sweep(self) -> int:
        """One bounded round of everything; returns how many rows it ended. Raises Unavailable without a
        database."""
        ended = self._database.write(lambda connection: overdue.end(connection, self._database.time.now()))
        return ended + self._free(None)[0]

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                watch(self._database)
                more = self.sweep() >= overdue.BATCH
            except Exception as error:
                # Nothing may end this worker: without it no byte is freed and no lease watched.
                _log.warning(
                    "the worker goes on: %s", error, exc_info=not isinstance(error, errors.Gd2fsError)
                )
                more = False
            if not more:
                self._wake.wait(_INTERVAL_S)

    def _free(self, chosen: ColumnElement[bool] | None) -> tuple[int, int]:
        """Frees the chosen rows, or those that are due. Returns (rows, bytes)."""
        rows = freed = 0
        for work in self._database.read(lambda connection: self._due(connection, chosen)):
            try:
                _, replies = self._link.delete(
                    work.addresses, [{"file": file, "column": ordinal} for file, ordinal in work.columns]
                )
            except errors.Gd2fsError as error:
                _log.info("node %s did not free %d columns yet: %s", work.node, len(work.columns), error)
                self._database.write(partial(self._postpone, work))
                continue
            self._database.write(partial(_forget, work))
            rows += len(work.columns)
            freed += sum(reply["freed"] for reply in replies)
        return rows, freed

    def _due(self, connection: Connection, chosen: ColumnElement[bool] | None) -> list[_Work]:
        now = self._database.time.now()
        if chosen is None:
            # Rows of a dead node wait for its return without being looked at again and again.
            chosen = (reclaims.c.next_try_at <= now) & (nodes.c.heartbeat_at >= now - LEASE_S)
        rows = connection.execute(
            select(reclaims.c.file, reclaims.c.ordinal, nodes)
            .join(nodes, nodes.c.node == reclaims.c.node)
            .where(chosen)
            .order_by(reclaims.c.next_try_at)
            .limit(BATCH)
        ).mappings()
        by_node: dict[str, _Work] = {}
        for row in rows:
            if is_alive(row, now):
                work = by_node.setdefault(row["node"], _Work(row["node"], row["addresses"]))
                work.columns.append((row["file"], row["ordinal"]))
        return list(by_node.values())

    def _postpone(self, work: _Work, connection: Connection) -> None:
        pause = _PAUSE_S * (reclaims.c.attempts + 1)
        connection.execute(
            update(reclaims)
            .where(work.rows)
            .values(
                attempts=reclaims.c.attempts + 1,
                next_try_at=self._database.time.now()
                + case((pause > _PAUSE_MAX_S, _PAUSE_MAX_S), else_=pause),
            )
        )


def _forget(work: _Work, connection: Connection) -> None:
    connection.execute(delete(reclaims).where(work.rows))
