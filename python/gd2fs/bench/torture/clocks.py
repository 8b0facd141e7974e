"""Clocks that are set while a process runs: files that say how far they are off, and control that obeys.

    GD2FS_CLOCK_FILE=FILE python -m gd2fs.bench.torture.clocks control --listen HOST:PORT …

`gd2fs control` has no such hook. A node has it in the build that the mutants make (`fault-hooks`).
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

VARIABLE = "GD2FS_CLOCK_FILE"
HOUR_S, DAY_S = 3600, 86_400


@dataclass(frozen=True, slots=True)
class SetClock:
    """The machine's clock as one process sees it. ``path`` holds the seconds that it is off, in decimal."""

    path: Path

    def set(self, off_s: int) -> None:
        # Replaced as a whole: who reads it sees the old number or the new one.
        new = self.path.with_suffix(".new")
        new.write_text(str(off_s))
        new.replace(self.path)

    def jump(self, random: Random) -> int:
        """Sets it to anything up to a day off, as often back as forwards; returns how far it is off now."""
        off_s = random.choice((-1, 1)) * random.choice((random.randint(1, HOUR_S), HOUR_S, DAY_S))
        self.set(off_s)
        return off_s

    def time(self) -> float:
        return time.time() + int(self.path.read_text())

    @property
    def environment(self) -> dict[str, str]:
        """For the process whose clock this is."""
        return {VARIABLE: str(self.path)}


def main() -> None:
    from gd2fs.cli.servers import run_control
    from gd2fs.config import load
    from gd2fs.config.serving import allow_many_files, die_with_parent

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["control"])
    for name in ("--listen", "--data-dir", "--announce"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    die_with_parent()
    allow_many_files()
    clock = SetClock(Path(os.environ[VARIABLE]))
    loaded = load({"control.listen": options.listen, "control.data_dir": options.data_dir})
    run_control(loaded, Path(options.announce), clock.time)


if __name__ == "__main__":
    main()
