"""Brings a database to this version's schema: `upgrade` at every start, or `python -m gd2fs.control.migrate
URL`."""

from __future__ import annotations

import sys
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, text

from gd2fs import errors
from gd2fs.control.database import Database

_LOCK = 0x6764_3266_73
"""PostgreSQL advisory lock ("gd2fs"): several control processes may start at once. SQLite locks the file by
itself."""


def upgrade(database: Database) -> None:
    """Runs the missing migrations in one transaction. Raises Unsupported for a newer version's database."""
    database.write(_upgrade)


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    try:
        command.upgrade(config(connection), "head")
    except CommandError as error:
        raise errors.Unsupported(f"the database is of a newer GD2FS than this one: {error}") from error


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration of the scripts inside this package, so that an installed wheel migrates by
    itself."""
    settings = Config()
    settings.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    settings.set_main_option("path_separator", "os")
    settings.attributes["connection"] = connection
    return settings


if __name__ == "__main__":
    upgrade(Database(sys.argv[1]))
