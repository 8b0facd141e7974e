"""Control's parts, wired together once per app."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, func, insert, select

from gd2fs import errors
from gd2fs.control import nodes as node_rows
from gd2fs.control import schema as t
from gd2fs.control.clock import Clock, ClusterTime
from gd2fs.control.commits import Committer
from gd2fs.control.database import Database
from gd2fs.control.files import new_id
from gd2fs.control.fsck import Fsck
from gd2fs.control.lengths import Lengths
from gd2fs.control.metrics import Metrics
from gd2fs.control.migrate import upgrade
from gd2fs.control.node_link import NodeLink
from gd2fs.control.pins import Pins
from gd2fs.control.plans import PLAN_TTL_S, Planner
from gd2fs.control.reclaim import Reclaimer
from gd2fs.signing import Keys

T = TypeVar("T")


class Service:
    """Everything a request needs. Holds no state of its own beyond connections: any control process can
    answer."""

    def __init__(
        self,
        db_url: str,
        keys: Keys,
        link: NodeLink | Callable[[str, Clock], NodeLink],
        cluster: str | None = None,
        *,
        plan_ttl_s: int = PLAN_TTL_S,
        advertise: Sequence[str] = (),
        time: ClusterTime | None = None,
    ) -> None:
        self.database = Database(db_url, time)
        upgrade(self.database)
        self.cluster = self.database.write(
            lambda connection: _claim_cluster(connection, self.database.time.wall(connection), cluster)
        )
        node_rows.watch(self.database)
        self.keys = keys
        self.link = link(self.cluster, self.database.time.now) if callable(link) else link
        self.advertise = list(advertise)
        self.lengths = Lengths(self.link)
        self.pins = Pins(self.link)
        self.planner = Planner(self.database, self.link, self.pins, keys, self.cluster, plan_ttl_s)
        self.committer = Committer(self.database, self.link, self.pins, self.cluster)
        self.reclaimer = Reclaimer(self.database, self.link)
        self.fsck = Fsck(self.database, self.link)
        self.metrics = Metrics()

    def read(self, work: Callable[[Connection, float], T]) -> T:
        """Runs `work(connection, now)` in a read transaction."""
        return self.database.read(lambda connection: work(connection, self.database.time.now()))

    def write(self, work: Callable[[Connection, float], T]) -> T:
        """Runs `work(connection, now)` in a write transaction, again if it collided."""
        return self.database.write(lambda connection: work(connection, self.database.time.now()))

    def metrics_text(self) -> bytes:
        states, rows = self.read(_count)
        for state in ("alive", "dead", "left"):
            self.metrics.nodes.labels(state).set(states.count(state))
        for table, count in rows.items():
            self.metrics.rows.labels(table).set(count)
        return self.metrics.text()

    def close(self) -> None:
        self.reclaimer.close()
        self.lengths.close()
        self.pins.close()
        self.link.close()
        self.database.close()


def _count(connection: Connection, now: float) -> tuple[list[str], dict[str, int]]:
    states: list[Any] = [node["state"] for node in node_rows.describe(connection, now)]
    tables = (t.files, t.sessions, t.segments, t.plans, t.reclaims)
    return states, {
        table.name: connection.scalar(select(func.count()).select_from(table)) or 0 for table in tables
    }


def _claim_cluster(connection: Connection, now: float, wanted: str | None) -> str:
    """The cluster of this database, written down at the first start. Raises WrongCluster for another one."""
    found = connection.scalar(select(t.cluster.c.cluster).where(t.cluster.c.row == 1))
    if found is None:
        found = wanted or new_id()[:12]
        connection.execute(insert(t.cluster).values(row=1, cluster=found, created_at=now, watched_at=now))
    if wanted is not None and wanted != found:
        raise errors.WrongCluster(f"the database belongs to cluster {found!r}, not to {wanted!r}")
    return str(found)
