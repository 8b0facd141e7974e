"""A PostgreSQL server for tests: Debian's package, on a socket in a folder of its own."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from sqlalchemy import create_engine, text

from gd2fs.control.database import Database
from gd2fs.control.migrate import upgrade

_USER = "postgres"
_START_S = 30.0


def wanted() -> bool:
    """Whether the tests of control are to use it."""
    return os.environ.get("GD2FS_TEST_DATABASE") == "postgresql"


class Postgres:
    """One server, ended by ``stop``. Nothing survives it, so it syncs nothing."""

    def __init__(self) -> None:
        self._tools = _tools()
        self.directory = Path(tempfile.mkdtemp(prefix="gd2fs-pg-", dir="/tmp"))
        self._as_user = [] if os.getuid() else ["runuser", "-u", _USER, "--"]
        if self._as_user:
            shutil.chown(self.directory, _USER)
        self.data = self.directory / "data"
        self._run("initdb", "-D", str(self.data), "-U", _USER, "-A", "trust", "--no-sync", "-E", "UTF8")
        self._number = 0
        self.start()

    def start(self) -> None:
        settings = f"-c listen_addresses= -c unix_socket_directories={self.directory} -c fsync=off"
        settings += " -c max_connections=200 -c shared_buffers=32MB"
        log = str(self.directory / "log")
        self._run("pg_ctl", "-D", str(self.data), "-l", log, "-w", "-t", "30", "-o", settings, "start")

    def halt(self) -> None:
        """As a crash of the database does; ``start`` brings it back."""
        self._run("pg_ctl", "-D", str(self.data), "-m", "immediate", "stop")

    def stop(self) -> None:
        self.halt()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://{_USER}@/{name}?host={self.directory}"

    def database(self, template: str = "template1") -> str:
        """The URL of a new database, a copy of ``template``."""
        self._number += 1
        name = f"test{self._number}"
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"))
        engine.dispose()
        return self.url(name)

    @cache  # noqa: B019  one server a process
    def migrated(self) -> str:
        """The name of a database of this version, empty."""
        url = self.database()
        database = Database(url)
        upgrade(database)
        database.close()
        return f"test{self._number}"

    def _command(self, tool: str) -> list[str]:
        return [*self._as_user, str(self._tools / tool)]

    def _run(self, tool: str, *arguments: str) -> None:
        done = subprocess.run(
            [*self._command(tool), *arguments], capture_output=True, text=True, timeout=_START_S, cwd="/"
        )
        if done.returncode:
            log = self.directory / "log"
            raise RuntimeError(f"{tool}: {done.stderr}{log.read_text() if log.exists() else ''}")


@cache
def server() -> Postgres:
    """The server of this process, which ends with it."""
    started = Postgres()
    atexit.register(started.stop)
    return started


def _tools() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found:
        raise RuntimeError("Debian's package postgresql is not installed")
    return found[-1].parent
