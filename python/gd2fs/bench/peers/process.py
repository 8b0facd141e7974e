"""A process of a peer: ends with ours, logs to a file, and may answer one JSON line to each of ours."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gd2fs.bench.peers.failures import PeerFailed
from gd2fs.config.serving import PARENT_VARIABLE, die_with_parent

# The longest answer is the metadata of a NIXL agent, some kilobytes.
ANSWER_BYTES_MAX = 1 << 20
READ_BYTES = 1 << 16
LOG_TAIL_CHARS = 1_000
# After SIGKILL: only a process that hangs in the kernel takes longer, and nothing helps against that.
REAP_S = 10.0


class Process:
    """`command` run in a session of its own, with `variables` as its whole environment."""

    def __init__(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], directory: Path
    ) -> None:
        self.name = name
        self._log = directory / f"peer-{name}.log"
        self._received = b""
        with open(self._log, "wb") as log:
            self._popen = subprocess.Popen(
                # Through this module in our interpreter, whose wish to end with us survives the exec.
                [sys.executable, "-m", "gd2fs.bench.peers.process", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
                env={**variables, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,  # Ctrl-C reaches the command alone, which ends this one
            )

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Sends one command and waits for its answer.

        Raises PeerFailed if the process ends, takes longer than `timeout_s`, or answers with an error.
        """
        assert self._popen.stdin is not None
        if not self.running:
            raise PeerFailed(self.ending())
        try:
            self._popen.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._popen.stdin.flush()
        except OSError as error:
            raise PeerFailed(self.ending()) from error
        line = self._line(do, time.monotonic() + timeout_s, timeout_s)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerFailed(f"{self.name} answered {do!r} with something else than JSON: {line[:200]!r}")
        if "error" in answer:
            raise PeerFailed(f"{self.name} could not {do}: {answer['error']}")
        return answer

    def ending(self) -> str:
        """How the process ended, with the last it logged."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        tail = self._log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
        return f"{self.name} ended with code {self._popen.returncode}; end of its log: {tail or 'empty'}"

    def pause(self) -> None:
        """Stops it where it is, so that it takes no processor time from what is measured beside it."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kills it and all that it started. May be called again."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(REAP_S)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _signal(self, number: int) -> None:
        # Its group has the number of the process; before that is reaped no other can have it.
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    def _line(self, do: str, deadline: float, timeout_s: float) -> bytes:
        assert self._popen.stdout is not None
        answers = self._popen.stdout.fileno()
        while b"\n" not in self._received:
            if not select.select([answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.close()  # or its late answer would be taken for that of the next command
                raise PeerFailed(f"{self.name} did not answer {do!r} within {timeout_s:g} s")
            received = os.read(answers, READ_BYTES)
            if not received:
                raise PeerFailed(self.ending())
            self._received += received
            if len(self._received) > ANSWER_BYTES_MAX:
                raise PeerFailed(f"{self.name} answered {do!r} with more than {ANSWER_BYTES_MAX} bytes")
        line, self._received = self._received.split(b"\n", 1)
        return line


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
