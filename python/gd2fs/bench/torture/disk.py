"""A disk in a process of its own (crates/gd2fs-disk), whose power can be cut: its one file is a node's log,
or its directory what a node keeps beside its logs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

READY_S = 10.0
STOP_S = 5.0
ANSWER_S = 30.0
PROGRAM_VARIABLE = "GD2FS_DISK"
_ANSWER_BYTES_MAX = 1 << 16


class NoDisk(RuntimeError):
    """Why no disk can be had here, and what to do about it."""


def program() -> Path:
    """Where the disk's program is. Raises NoDisk if it was not built, or /dev/fuse can't be used."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise NoDisk("/dev/fuse can't be used; power cuts need it, and root or fusermount3")
    target = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[4] / "target"))
    built = target / "release" / "gd2fs-disk"
    named = os.environ.get(PROGRAM_VARIABLE) or (str(built) if built.exists() else shutil.which("gd2fs-disk"))
    if not named:
        raise NoDisk(
            f"gd2fs-disk was not built: cargo build --release -p gd2fs-disk, or name it in {PROGRAM_VARIABLE}"
        )
    return Path(named)


class Disk:
    """One disk. A context manager; afterwards nothing is mounted any more."""

    def __init__(self, directory: Path, size_bytes: int, seed: int) -> None:
        """Starts it in ``directory``, which is made. Raises NoDisk."""
        self._directory = directory
        self._mount = directory / "mount"
        self._mount.mkdir(parents=True, exist_ok=True)
        self._socket = directory / "socket"
        arguments = {
            "--backing": self.backing,
            "--bytes": size_bytes,
            "--mount": self._mount,
            "--socket": self._socket,
            "--seed": seed,
            "--parent": os.getpid(),
        }
        words = [str(word) for pair in arguments.items() for word in pair]
        self._log = open(directory / "log", "ab")  # noqa: SIM115 (closed in close)
        self._popen = subprocess.Popen(
            [str(program()), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log
        )
        assert self._popen.stdout is not None
        if not self._popen.stdout.readline():
            self.close()
            raise NoDisk(f"the disk did not start: {(directory / 'log').read_text().strip()}")

    @property
    def path(self) -> Path:
        """What a node takes as its log."""
        return self._mount / "disk"

    @property
    def data(self) -> Path:
        """A directory that a node takes as its data directory. It is gone when the disk is closed."""
        return self._mount / "data"

    @property
    def backing(self) -> Path:
        """Where the bytes are once they are durable."""
        return self._directory / "backing"

    def cut(self) -> dict[str, int]:
        """Cuts the power: {"writes", "sectors", "sectors_lost"}, and of the directory {"changes_lost",
        "files_lost"}. Every call fails until `restore`."""
        return self._ask({"cut": True})

    def restore(self) -> None:
        self._ask({"restore": True})

    def rule(self, effect: str, **options: Any) -> int:
        """Orders a fault; see `gd2fs-disk` without arguments."""
        return int(self._ask({"rule": {"effect": effect} | options})["rule"])

    def clear(self) -> None:
        """Takes all rules away."""
        self._ask({"clear": True})

    def flip(self, offset: int, bit: int) -> None:
        """Turns one stored bit."""
        self._ask({"flip": {"offset": offset, "bit": bit}})

    def stats(self) -> dict[str, Any]:
        return self._ask({"stats": True})

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ANSWER_S)
            line.connect(str(self._socket))
            line.sendall(json.dumps(command).encode() + b"\n")
            text = line.makefile("rb").readline(_ANSWER_BYTES_MAX)
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise ValueError(f"the disk refuses {command}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process, which unmounts; whoever has the file open gets errors. Idempotent."""
        self._popen.terminate()
        try:
            self._popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        self._log.close()
        # After a kill; nothing happens where it is unmounted already.
        subprocess.run(["umount", "-l", str(self._mount)], capture_output=True, check=False)

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
