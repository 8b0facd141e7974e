"""The database: engine, short transactions with bounded retries, and the cluster's time in them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gd2fs import errors
from gd2fs.control.clock import ClusterTime

T = TypeVar("T")

TRIES_MAX = 6
"""Transactions are milliseconds long: six tries with growing pauses outlast any collision that is not a
fault."""
_PAUSE_S = 0.01
_BUSY_TIMEOUT_MS = 5_000
_POOL = {"pool_size": 16, "max_overflow": 32, "pool_timeout": 10.0}
"""More than the 40 threads that serve requests, so that waiting happens there and not here."""
_SERIALIZATION_STATES = frozenset({"40001", "40P01"})


class Database:
    """One SQL database, with the cluster's `time`."""

    def __init__(self, url: str, time: ClusterTime | None = None) -> None:
        self.time = time or ClusterTime()
        self.engine = _create_engine(url)
        self._writer = self.engine.execution_options(gd2fs_write=True)
        # SQLite's readers see one state anyway; elsewhere each statement would see its own.
        self._reader = (
            self.engine
            if self.engine.dialect.name == "sqlite"
            else self.engine.execution_options(isolation_level="REPEATABLE READ")
        )

    def read(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` in one transaction that sees one state of the database."""
        return self._run(self._reader, work)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` in one transaction; it may run several times, so it changes nothing but the database.

        Raises Unavailable when the database stays busy or away.
        """
        return self._run(self._writer, work)

    def _run(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        for tries in range(1, TRIES_MAX + 1):
            try:
                with engine.begin() as connection:
                    return work(connection)
            except (DBAPIError, PoolTimeout) as error:
                if not _can_retry(error) or tries == TRIES_MAX:
                    raise errors.Unavailable(
                        f"the database refused: {_first_line(error)}; try again"
                    ) from error
            # Jittered, so that those who collided do not meet again.
            time.sleep(_PAUSE_S * 2**tries * random.uniform(0.5, 1.0))
        raise AssertionError("the loop returns or raises")

    def close(self) -> None:
        self.engine.dispose()


def _can_retry(error: Exception) -> bool:
    # Two creators of one row meet in a unique constraint: the second try sees the first one's row.
    if isinstance(error, IntegrityError):
        return True
    if isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _SERIALIZATION_STATES:
        return True
    return isinstance(error, OperationalError)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _create_engine(url: str) -> Engine:
    if not url.startswith("sqlite"):
        return create_engine(url, pool_pre_ping=True, **_POOL)
    engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_MS / 1000}, **_POOL)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        # The driver must not begin transactions by itself: `begin` below does.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        # With WAL a crash of the process loses nothing; only a power cut may lose the last commits, and then
        # the nodes of the same machine have lost their memory as well.
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes its lock at once: upgrading a read lock half-way can't be waited for, only refused.
        writes = connection.get_execution_options().get("gd2fs_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
