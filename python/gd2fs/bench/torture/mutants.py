"""Proof that the torture notices: the same with one guard of the node switched off at a time.

    python -m gd2fs.bench.torture.mutants

The nodes run a build of their own (`cargo build --features fault-hooks`), in which an environment variable
names the guard that does nothing (crates/gd2fs-wire/src/guard.rs), and a file says how far their clocks are
off (clock.rs beside it). With all guards on this build must pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from gd2fs.bench.torture.loop import Settings, Torture

ROOT = Path(__file__).parents[4]
TARGET = ROOT / "target" / "fault-hooks"
BUILD_S = 1800.0
LOOPS_MAX = 8
"""A guard that is off and was not missed by then was not missed."""
CONTROL_LOOPS = 4
"""With all guards on, and in each the clocks of control and of a node set: nothing may be found."""
VARIABLE = "GD2FS_GUARD_OFF"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A guard, and the counters of which at least one must rise without it."""

    guard: str
    noticed: tuple[str, ...]
    needs_logs: bool = False


MUTANTS = (
    Mutant("checksum", ("wrong_bytes",), needs_logs=True),
    Mutant("epoch", ("stale_writes",)),
    Mutant("grant", ("stale_writes", "wrong_bytes")),
    Mutant("seal", ("stale_writes",)),
    Mutant("sync", ("lost_after_flush", "wrong_bytes", "phantoms"), needs_logs=True),
    Mutant("clock", ("unreadable",)),
)


def build() -> Path:
    """The native module with guards that can be switched off. Raises RuntimeError with cargo's last words."""
    command = ["cargo", "build", "--release", "--locked", "-p", "gd2fs-py", "--features", "fault-hooks"]
    command += ["--target-dir", str(TARGET)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise RuntimeError(
            f"cargo could not build the guards that can be switched off:\n{done.stderr[-2000:]}"
        )
    return TARGET / "release" / "lib_native.so"


def overlay(module: Path, directory: Path) -> Path:
    """A directory for PYTHONPATH in which `gd2fs` is this one, but for its native module."""
    package = directory / "gd2fs"
    package.mkdir(parents=True)
    for entry in Path(__file__).parents[2].iterdir():
        if not entry.name.startswith(("_native.abi3", "__pycache__")):
            (package / entry.name).symlink_to(entry)
    shutil.copy(module, package / "_native.abi3.so")
    return directory


def run_mutants(settings: Settings, module: Path) -> dict[str, dict[str, object]]:
    """What became of each guard: {"caught", "by": counters, "loops", "seconds"}; "" is none switched off.

    Of ``settings``, the directory and the environment are replaced.
    """
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="gd2fs-mutants-") as scratch:
        place = overlay(module, Path(scratch) / "python")
        path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
        for mutant in (Mutant("", ()), *MUTANTS):
            if mutant.needs_logs and not settings.logs:
                continue
            directory = Path(scratch) / (mutant.guard or "none")
            directory.mkdir()
            begun = time.monotonic()
            changed = replace(
                settings,
                directory=directory,
                environment={"PYTHONPATH": path, VARIABLE: mutant.guard},
                # A lost checksum shows where bits were flipped.
                damage=1.0 if mutant.guard == "checksum" else 0.0,
                pressure=0.0,
                stop_at_first=True,
                hooks=mutant.guard in ("", "clock"),
            )
            with Torture(changed) as torture:
                counters = torture.run(LOOPS_MAX if mutant.guard else CONTROL_LOOPS)
            found = {name: getattr(counters, name) for name in mutant.noticed if getattr(counters, name)}
            caught = bool(found) if mutant.guard else not counters.clean
            results[mutant.guard] = {
                "caught": caught,
                "by": found or counters.violations[:3],
                "loops": counters.loops,
                "seconds": round(time.monotonic() - begun, 1),
            }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--logs", type=int, default=1, help="Disks of the node; without any, some guards guard nothing."
    )
    options = parser.parse_args()
    if not options.logs:
        left_out = ", ".join(mutant.guard for mutant in MUTANTS if mutant.needs_logs)
        print(f"NOT TESTED without logs: {left_out}", file=sys.stderr)
    results = run_mutants(Settings(Path(), seed=options.seed, logs=options.logs), build())
    plain = results.pop("")
    print(json.dumps(results | {"none": plain}, indent=2))
    missed = [guard for guard, result in results.items() if not result["caught"]]
    if plain["caught"]:
        print("with all guards on, the torture found faults: nothing is proven", file=sys.stderr)
    if missed:
        print(f"nobody missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed or plain["caught"] else 0


if __name__ == "__main__":
    sys.exit(main())
