"""Child processes of `up` and `demo`: started with a ready signal, stopped in order, never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from gd2fs.cli.output import CommandFailed
from gd2fs.config.serving import PARENT_VARIABLE

# How much of a log is shown when a process ends unexpectedly.
LOG_TAIL_LINES = 15
POLL_S = 0.02
# How long a child may take to stop before it is killed, unless its start says otherwise.
STOP_S = 8.0


class ProcessFailed(CommandFailed):
    """A child ended, or did not get ready in time. Behind the first line of the message stands the end of its
    log, which is shown before it."""


@dataclass
class Child:
    """One process, its own group, with a log and the file in which it announces its addresses."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    announced: Path
    # Where this run begins in the log, which keeps those before it.
    log_start: int = 0
    # How long it may take to stop.
    stop_s: float = STOP_S

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def tail(self) -> str:
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()[self.log_start :].decode(errors="replace")
            return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
        return ""


class Processes:
    """Starts `gd2fs` commands as children. A context manager: leaving it stops all, the first started last.

    Children die with this process, whatever ends it: they ask the kernel for it (see config.serving).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # All but the first at once: on a busy machine one after the other would add up. The first is control,
        # which the others still talk to.
        for group in (self._children[1:], self._children[:1]):
            self._stop_all(group)

    def start(
        self,
        name: str,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        stop_s: float = STOP_S,
        module: str = "gd2fs.cli",
    ) -> Child:
        """Starts `gd2fs ARGUMENTS --announce FILE`; see wait_ready(). `module` runs in its place."""
        announced = self._directory / f"{name}.json"
        announced.unlink(missing_ok=True)
        log = self._directory / f"{name}.log"
        command = [sys.executable, "-m", module, *arguments, "--announce", str(announced)]
        with open(log, "ab") as stream:
            start = stream.tell()
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())},
                # A group of its own: Ctrl-C in the terminal reaches us alone, and we stop the children in
                # order.
                start_new_session=True,
            )
        child = Child(name, popen, log, announced, start, stop_s)
        self._children.append(child)
        return child

    def wait_ready(self, child: Child, timeout_s: float) -> dict[str, Any]:
        """What the child announced. Raises ProcessFailed if it ends before or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        while not child.announced.exists():
            if not child.running:
                raise ProcessFailed(
                    f"{child.name} ended with code {child.popen.returncode} (end of {child.log} above)\n"
                    f"{child.tail()}"
                )
            if time.monotonic() > deadline:
                raise ProcessFailed(
                    f"{child.name} was not ready within {timeout_s:g} s (end of {child.log} above)\n"
                    f"{child.tail()}"
                )
            time.sleep(POLL_S)
        facts: dict[str, Any] = json.loads(child.announced.read_text())
        return facts

    def kill(self, child: Child) -> None:
        """Ends a child at once with SIGKILL, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.popen.pid, signal.SIGKILL)
        child.popen.wait()

    def stop(self, child: Child) -> None:
        """Asks a child to end, waits, and kills what is left of its group."""
        self._stop_all([child])

    def _stop_all(self, children: list[Child]) -> None:
        for child in reversed(children):
            if child.running:
                child.popen.terminate()
        asked = time.monotonic()
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.popen.wait(max(0.0, asked + child.stop_s - time.monotonic()))
            self.kill(child)

    def ended(self) -> Child | None:
        """A child that ended without having been asked to, if there is one."""
        return next((child for child in self._children if not child.running), None)


def forget_configuration(directory: Path) -> None:
    """For a cluster of a command's own: nothing that is configured here for another one may reach it."""
    for key in [key for key in os.environ if key.startswith("GD2FS_")]:
        del os.environ[key]
    empty = directory / "gd2fs.toml"
    empty.touch()
    os.environ["GD2FS_CONFIG"] = str(empty)


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise KeyboardInterrupt like Ctrl-C, so that clean-up runs for them, too.

    Only the first signal does: the clean-up that follows is bounded, and a second one would cut it short.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
