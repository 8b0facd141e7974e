"""Runs a command that prints one JSON object and keeps it with its machine, commit and command.

python benchmarks/record.py NAME COMMAND...    writes benchmarks/results/DATE-NAME.json
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def machine() -> dict[str, Any]:
    """What a reader needs to compare: processor, cores, memory, kernel, Python."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def commit() -> str:
    """The commit that was measured, marked if the tree had changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")


def main(name: str, command: list[str]) -> int:
    """Records the result of `command`; its exit code is the command's."""
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "command": " ".join(command),
    }
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    record["result"] = json.loads(done.stdout)
    target = ROOT / "benchmarks" / "results" / f"{record['date'][:10]}-{name}.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(target.relative_to(ROOT))
    return done.returncode


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
