"""A peer is a pair of processes: one holds the bytes, the other reads them into its own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import gd2fs
from gd2fs.bench.peers.environment import Environment, Recipe, prepare
from gd2fs.bench.peers.failures import PeerFailed, PeerUnavailable, WrongBytes
from gd2fs.bench.peers.process import Process

GIB = 1 << 30
# Loading the peer's libraries, a gigabyte of pattern, and its way into the store.
HOLD_S = 120.0
READ_S = 120.0
# The drivers are modules of gd2fs, which the peer's environment does not have. Its folder goes last: whatever
# else lies beside it, the peer's own packages are found first.
_BOOT = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)


class Pair:
    """What the peers have in common. `driver` is a module that runs in the peer's environment."""

    name: str
    recipe: ClassVar[Recipe]
    driver: ClassVar[str]
    # Whether its processes may be stopped between reads, so that they take no processor time from what is
    # measured in between.
    pausable: ClassVar[bool] = False

    def __init__(self, directory: Path, environment: Environment) -> None:
        self._directory = directory
        self._environment = environment
        self._processes: list[Process] = []
        self._size_bytes = 0

    @classmethod
    def start(cls, directory: Path, size_bytes: int = GIB) -> Self:
        """A peer that holds `size_bytes` and has read them once, verified; logs go to `directory`.

        The first time it is downloaded. Raises PeerUnavailable, and nothing of it runs then any more;
        WrongBytes if what was read is not what was stored.
        """
        return cls(directory, prepare(cls.recipe))._started(size_bytes)

    def read(self, size_bytes: int) -> float:
        """Seconds for one read of `size_bytes`, from the call until all is in the reader's memory.

        Another size than before is prepared and verified first, outside the clock. Raises PeerFailed.
        """
        if size_bytes != self._size_bytes:
            self.close()
            self._open(size_bytes)
        self._each(Process.resume)
        try:
            return float(self._reader.ask("read", READ_S)["seconds"])
        finally:
            self._each(Process.pause)

    def close(self) -> None:
        """Kills every process of the peer. May be called again."""
        while self._processes:
            self._processes.pop().close()
        self._size_bytes = 0

    def _started(self, size_bytes: int) -> Self:
        try:
            self._open(size_bytes)
        except WrongBytes:
            raise
        except PeerFailed as error:
            raise PeerUnavailable(str(error)) from error
        return self

    def _open(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise ValueError(f"size_bytes is {size_bytes}: a read has at least one byte")
        try:
            arguments = self._prepare()
            holder = self._drive("holder")
            held = holder.ask("hold", HOLD_S, size=size_bytes, **arguments)
            self._reader = self._drive("reader")
            self._reader.ask("prepare", HOLD_S, size=size_bytes, **arguments, **held)
            # The first read also connects. The memory was zero before it, and of the pattern only the first
            # word is: bytes that never came are seen.
            self._reader.ask("read", READ_S)
            wrong = self._reader.ask("check", READ_S)["wrong"]
            if wrong is not None:
                raise WrongBytes(f"{self.name} read a wrong byte at {wrong} of {size_bytes}")
        except BaseException:
            self.close()
            raise
        self._size_bytes = size_bytes
        self._each(Process.pause)

    def _each(self, act: Callable[[Process], None]) -> None:
        if self.pausable:
            for process in self._processes:
                act(process)

    def _prepare(self) -> dict[str, Any]:
        """Starts what the two need, and says what both are told."""
        return {}

    def _settings(self) -> Mapping[str, str]:
        """Environment variables that tune the peer."""
        return {}

    def _run(self, role: str, command: list[str]) -> Process:
        variables = {**self._environment.variables(), **self._settings()}
        process = Process(f"{self.name}-{role}", command, variables, self._directory)
        self._processes.append(process)
        return process

    def _drive(self, role: str) -> Process:
        root = str(Path(gd2fs.__file__).resolve().parents[1])
        return self._run(role, [str(self._environment.python), "-c", _BOOT, root, self.driver, role])
