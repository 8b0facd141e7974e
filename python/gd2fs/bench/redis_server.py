"""Debian's redis-server on a loopback port, without persistence, in a process that ends with this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from gd2fs.bench import debian
from gd2fs.config.serving import PARENT_VARIABLE, die_with_parent

READY_S = 15.0
STOP_S = 5.0
POLL_S = 0.02


class RedisUnavailable(Exception):
    """There is no Redis to compare with; the message says why and what helps."""


def ensure_installed() -> None:
    """Installs Debian's package if there is none and we may. Raises RedisUnavailable."""
    try:
        debian.ensure_installed("redis-server", "redis-server")
    except debian.PackageUnavailable as error:
        raise RedisUnavailable(str(error)) from error


def version() -> str:
    """As the server says it, such as "7.0.15"."""
    text = subprocess.run(
        ["redis-server", "--version"], capture_output=True, text=True, timeout=READY_S, check=True
    ).stdout
    return next((word[2:] for word in text.split() if word.startswith("v=")), text.strip())


class RedisServer:
    """The running server. A context manager. Raises RedisUnavailable."""

    def __init__(self, directory: Path) -> None:
        ensure_installed()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        options = f"--port {self.port} --bind 127.0.0.1 --appendonly no --daemonize no".split()
        log = directory / "redis.log"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gd2fs.bench.redis_server", *options, "--save", "", "--logfile", str(log)],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,  # Ctrl-C reaches the command alone, which ends this one
        )
        try:
            self._wait_ready(log)
        except BaseException:
            self.__exit__()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait(STOP_S)

    def _wait_ready(self, log: Path) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                    probe.sendall(b"PING\r\n")
                    if probe.recv(7) == b"+PONG\r\n":
                        return
            except OSError:
                pass  # not listening yet
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-500:] if log.exists() else ""
                raise RedisUnavailable(f"redis-server did not start within {READY_S:g} s: {tail}")
            time.sleep(POLL_S)


if __name__ == "__main__":
    # The wish to die with the parent survives the exec.
    die_with_parent()
    os.execvp("redis-server", ["redis-server", *sys.argv[1:]])
