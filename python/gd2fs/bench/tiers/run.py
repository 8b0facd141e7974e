"""`gd2fs bench tiers`: one part after the other."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from gd2fs import errors
from gd2fs.bench.result import machine
from gd2fs.bench.tiers import cold, full, recovery, resident, torture, turn, writes
from gd2fs.bench.tiers.figures import to_json
from gd2fs.bench.tiers.fio import FioUnavailable
from gd2fs.bench.tiers.plan import Options, Tell
from gd2fs.bench.tiers.traffic import Memory
from gd2fs.cli.output import CommandFailed
from gd2fs.cli.processes import forget_configuration, terminate_as_interrupt

#: File systems that are memory.
NO_DISK = ("tmpfs", "ramfs")


def run_tiers(options: Options, tell: Tell) -> dict[str, Any]:
    """Measures; returns the JSON object. A part that fails is null in it, and told: the others go on.

    Raises CommandFailed for a directory that is not on a disk. Leaves nothing behind.
    """
    kind = _file_system(options.directory)
    if kind in NO_DISK:
        raise CommandFailed(
            f"--directory: {options.directory} is on {kind}, which is memory; name one on a disk"
        )
    facts = machine() | {"file_system": kind}
    begun, details, failed = time.monotonic(), dict[str, dict[str, Any]](), dict[str, str]()
    with (
        terminate_as_interrupt(),
        tempfile.TemporaryDirectory(prefix=".gd2fs-bench-", dir=options.directory) as name,
    ):
        directory = Path(name)
        forget_configuration(directory)
        parts = _Parts(Options(directory, options.parts, options.sizes, options.loops, options.seed), tell)
        for part in options.parts:
            tell(f"{part} …")
            started = time.monotonic()
            try:
                details[part] = parts.run(part)
            except (errors.Gd2fsError, CommandFailed, FioUnavailable, RuntimeError, OSError) as error:
                failed[part] = f"{type(error).__name__}: {error}"
                tell(f"{part} has FAILED and stays null: {failed[part]}")
            finally:
                parts.clean()
            tell(f"{part}: {time.monotonic() - started:.1f} s")
    facts["seconds"] = round(time.monotonic() - begun, 1)
    return to_json(facts, details, failed)


class _Parts:
    """Each part by its name, and what they share."""

    def __init__(self, options: Options, tell: Tell) -> None:
        self._options, self._tell = options, tell

    def run(self, part: str) -> dict[str, Any]:
        options, tell = self._options, self._tell
        place, sizes = options.directory, options.sizes
        calls: dict[str, Callable[[], dict[str, Any]]] = {
            "cold": lambda: cold.sequential(place, sizes, self._memory),
            "random": lambda: cold.random(place, sizes, self._memory),
            "write": lambda: writes.sustained(place, sizes, self._memory),
            "ingest": lambda: writes.ingest(place, sizes, self._memory),
            "full": lambda: full.measure(place, sizes, self._memory),
            "turn": lambda: turn.measure(place, sizes, self._memory),
            "recovery": lambda: recovery.measure(place, sizes, self._memory, tell),
            "memory": lambda: resident.measure(place, sizes, self._memory),
            "torture": lambda: torture.measure(options, tell),
            "mutants": lambda: torture.mutants(options, tell),
        }
        return calls[part]()

    @cached_property
    def _memory(self) -> Memory:
        return Memory()

    def clean(self) -> None:
        """The next part wants the space."""
        for entry in self._options.directory.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)


def _file_system(directory: Path) -> str:
    """As the system calls it, such as "ext4"."""
    done = subprocess.run(
        ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    # Of mounts over each other the last one counts.
    return (done.stdout.split() or ["unknown"])[-1]
