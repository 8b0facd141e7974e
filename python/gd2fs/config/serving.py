"""Serving an ASGI app on a socket that is already bound, until SIGTERM or SIGINT, then draining."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

# Set by a parent that wants its children to end with it, whatever ends it.
PARENT_VARIABLE = "GD2FS_PARENT_PID"
_PR_SET_PDEATHSIG = 1


class Server(uvicorn.Server):
    """uvicorn on bound sockets; a signal means a clean end with exit code 0 instead of being raised again."""

    def __init__(
        self, app: Any, *, drain_s: float, signals: bool = True, connections_max: int | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                # Idle keep-alive connections of pooled clients; longer than their own expiry so that they
                # close first.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(drain_s)),
                limit_concurrency=connections_max,
            )
        )
        self._signals = signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if not self._signals or threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def serve(
    app: Any, listener: socket.socket, *, drain_s: float = 5.0, connections_max: int | None = None
) -> None:
    """Serves `app` on a bound socket until a signal; answers under way get `drain_s` seconds to finish.

    connections_max: beyond it requests are answered 503 at once; None leaves the bound to the app.
    """
    Server(app, drain_s=drain_s, connections_max=connections_max).run(sockets=[listener])


def announce(path: str | Path | None, facts: dict[str, Any]) -> None:
    """Writes `facts` and the process id as JSON to `path`, whole or not at all; None tells a person, on
    stderr.

    Whoever started this process on port 0 learns the real addresses from it, and that it serves.
    """
    if path is None:
        sys.stderr.write(f"gd2fs: serves {facts['url']}; Ctrl-C stops it\n")
        return
    target = Path(path)
    partial = target.with_name(target.name + ".part")
    partial.write_text(json.dumps({"pid": os.getpid(), **facts}))
    partial.replace(target)


@contextlib.contextmanager
def alone_in(directory: Path, command: str) -> Iterator[None]:
    """Holds the lock of a data directory, before anything else is done in its name: a second node over it
    would register anew, which ends the first. The kernel lets go of it with this process.

    Raises OSError (EBUSY; or why the directory cannot be written, with what helps).
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "running.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise OSError(
            error.errno,
            f"data_dir {directory}: {error.strerror}; `{command}` writes there: make it writable, with room, "
            "or choose another --data-dir",
        ) from error
    with os.fdopen(lock, "wb"):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                errno.EBUSY,
                f"another `{command}` runs in {directory}; use that one, or choose another --data-dir",
            ) from None
        yield


def allow_many_files() -> None:
    """Raises this process's limit of open files as far as it may.

    Servers bound their connections themselves, to more than the 1,024 files that shells usually allow; at
    that limit a node could not even report to control any more.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def die_with_parent() -> None:
    """If a parent asked for it, arranges that the kernel kills this process when that parent ends.

    Raises SystemExit if the parent is gone already.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have ended between our start and the call above; then nobody would ever end us.
    if os.getppid() != int(parent):
        raise SystemExit("the process that started this one is gone")
