"""The cluster's time: unix seconds that never jump, whatever happens to the clocks of the machines.

Everything in the database that expires, and what control signs, expires by it; nodes hear it with every
heartbeat. A lease, a plan or a session must not end because somebody set a clock, and what has ended must not
come to life again: so a process goes by what has really passed (CLOCK_BOOTTIME) from one look at the
database's clock to the next, and a clock that was set only changes how far the time is `ahead` of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Double, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from gd2fs.control.schema import cluster

Clock = Callable[[], float]

JUMP_S = 1.0
"""Beyond this much in one look a clock was set. Below, clocks only go a little wrong, and the database's
counts, which all control processes see."""
SLEW = 0.05
"""How much faster or slower the time may go until it is what the clock says again, once that was set: a wrong
clock that was set right is reached after 20 times its error, and no duration is off by more than this."""


class unix_time(FunctionElement[float]):
    """The database's clock in unix seconds: one clock, however many control processes there are."""

    inherit_cache = True
    type = Double()


@compiles(unix_time)
def _unix_time(element: unix_time, compiler: Any, **options: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


@compiles(unix_time, "sqlite")
def _unix_time_sqlite(element: unix_time, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


_NOW = select(unix_time())


def since_boot() -> float:
    """Seconds that nobody can set; those in which the machine was suspended count."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the database's clock: the time `now`, at `steady` on this process's steady clock, and the
    time `before` at which a control process looked last."""

    now: float
    steady: float
    before: float


class ClusterTime:
    """The time as one control process knows it. `wall` replaces the database's clock, `steady` that of this
    process, in tests."""

    def __init__(self, wall: Clock | None = None, steady: Clock = since_boot) -> None:
        self._wall = wall
        self._steady = steady
        self._last: Look | None = None

    def now(self) -> float:
        """Goes back by a second at most. Before the first `keep` there is no time."""
        last = self._last
        if last is None:
            raise RuntimeError("nobody has looked at the database's clock yet")
        return last.now + self._steady() - last.steady

    def wall(self, connection: Connection) -> float:
        """What the database's clock says."""
        return float(connection.scalar(_NOW) or 0.0) if self._wall is None else self._wall()

    def look(self, connection: Connection) -> Look:
        """Compares the time with the database's clock and writes down how far it is ahead: in a transaction,
        after which `keep` takes it over."""
        row = connection.execute(
            select(cluster.c.watched_at, cluster.c.clock_ahead_s).with_for_update()
        ).one()
        steady, wall, ahead = self._steady(), self.wall(connection), row.clock_ahead_s
        now = wall + ahead
        if self._last is not None:
            expected = self._last.now + steady - self._last.steady
            # Since anybody's last look, so that many processes are not faster at it than one.
            most = SLEW * max(0.0, expected - row.watched_at)
            slewed = max(-most, min(most, ahead))
            now = now - slewed if abs(now - expected) <= JUMP_S else expected - slewed
        # Another process may be a little further. After a stop of all of them this is all that is known of a
        # clock that was set back meanwhile.
        now = max(now, row.watched_at)
        connection.execute(update(cluster).values(watched_at=now, clock_ahead_s=now - wall))
        return Look(now, steady, row.watched_at)

    def keep(self, look: Look) -> None:
        """From now on the time goes on from this look, whose transaction was committed."""
        self._last = look
