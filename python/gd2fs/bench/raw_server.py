"""The other end of the raw socket pair, in a process of its own as a node is.

``python -m gd2fs.bench.raw_server BYTES`` prints its port and serves until its parent ends or kills it.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys

from gd2fs.config.serving import PARENT_VARIABLE, die_with_parent

# It populates as much memory as is moved.
READY_S = 60.0
STOP_S = 5.0


class RawServer:
    """The process. A context manager."""

    def __init__(self, length: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gd2fs.bench.raw_server", str(length)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,  # Ctrl-C reaches the command alone, which ends this one
        )
        assert self._process.stdout is not None
        # Also readable, without a line, when the process has ended.
        ready, _, _ = select.select([self._process.stdout], [], [], READY_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.__exit__()
            raise RuntimeError(f"the raw server did not start within {READY_S:g} s")
        self.port = int(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait(STOP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def main(length: int) -> None:
    from gd2fs import _native
    from gd2fs.bench.buffers import ordinary

    die_with_parent()
    memory = ordinary(length)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    _native.raw_tcp_serve(listener.detach(), memory.at(0, length))


if __name__ == "__main__":
    main(int(sys.argv[1]))
