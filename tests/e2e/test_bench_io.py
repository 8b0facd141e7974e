"""`gd2fs bench io` on tiny sizes: everything is started, measured, checked and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench_shape import assert_shape

# Sizes without a counterpart in Redis: no test installs a package.
ARGUMENTS = ["bench", "io", "--json", "--sizes", "16KiB,64KiB", "--rounds", "1", "--output"]


def run(*arguments: str, directory: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GD2FS_")}
    return subprocess.run(
        [sys.executable, "-m", "gd2fs.cli", *arguments],
        cwd=directory,
        env={**environment, **environ},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_tiny_run_measures_checks_and_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run(*ARGUMENTS, str(tmp_path), directory=tmp_path, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert_shape(result)
    sizes = {(row["op"], row["size"]) for row in result["results"] if row["transport"] == "tcp"}
    assert {(op, size) for op in ("read", "write") for size in (16 << 10, 64 << 10)} <= sizes
    assert result["ratios"]["scattered_read"]["tcp"] and result["ratios"]["load_vs_local_dram"]["tcp"]
    assert result["ratios"]["read_1gib_vs_redis"] == {"tcp": None, "shm": None}
    kept = sorted(path.suffix for path in tmp_path.iterdir() if path.is_file())
    assert kept == [".json", ".svg"] and not list(temporary.iterdir())


def test_sizes_that_cannot_be_measured_are_named(tmp_path: Path) -> None:
    done = run("bench", "io", "--sizes", "3KiB", directory=tmp_path)
    assert done.returncode == 2 and "3072" in done.stderr
    done = run("bench", "io", "--sizes", "lots", directory=tmp_path)
    assert done.returncode != 0 and "lots" in done.stderr and "Traceback" not in done.stderr
