"""The writers as processes of the loop: started, paused, killed, started again, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gd2fs.bench.torture.writer import TIMEOUT_S
from gd2fs.config.serving import PARENT_VARIABLE

#: What is under way may have to look its file up again, twice, and each call may take its whole time.
STOP_S = 6 * TIMEOUT_S


@dataclass(slots=True)
class ClientProcess:
    """One writer (`gd2fs.bench.torture.writer`) and its journal, over all its lives."""

    name: str
    control: str
    journal: Path
    seed: int
    budget: int
    width: int
    _popen: subprocess.Popen[bytes] | None = None
    failures: list[str] = field(default_factory=list)
    """How it ended without having been told to."""

    @property
    def log(self) -> Path:
        return self.journal.with_suffix(".log")

    def start(self) -> None:
        facts = {"--control": self.control, "--journal": self.journal, "--name": self.name}
        facts |= {"--seed": self.seed, "--budget": self.budget, "--width": self.width}
        words = [str(word) for pair in facts.items() for word in pair]
        with open(self.log, "ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "gd2fs.bench.torture.writer", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            )

    def signal(self, number: signal.Signals) -> None:
        if self._running():
            assert self._popen is not None
            self._popen.send_signal(number)

    def kill(self) -> None:
        """In the middle of whatever it does."""
        if self._running():
            assert self._popen is not None
            self._popen.kill()
            self._popen.wait()

    def stop(self) -> None:
        """Ends it once what it does is done."""
        if not self._running():
            return
        assert self._popen is not None
        self._popen.send_signal(signal.SIGCONT)
        self._popen.terminate()
        try:
            code = self._popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.failures.append(f"{self.name}: an operation did not end within {STOP_S:g} s")
            self.kill()
            return
        # Before its handler is in place the signal ends it at once: it had not begun.
        if code not in (0, -signal.SIGTERM):
            self._failed(code)

    def _running(self) -> bool:
        if self._popen is None or self._popen.returncode is not None:
            return False
        code = self._popen.poll()
        if code is not None:
            self._failed(code)
        return code is None

    def _failed(self, code: int) -> None:
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        self.failures.append(f"{self.name} ended with {code}:\n" + "\n".join(tail))
