"""`gd2fs bench tiers` on small sizes: nodes are started, measured, checked and ended. Only what needs no fio:
no test installs a package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_bench_io import run
from tests.unit.test_bench_tiers import RATIOS

pytestmark = pytest.mark.timeout(120)


def test_a_small_run_measures_and_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    arguments = ["--quick", "--only", "ingest", "--json", "--directory", str(place)]
    done = run("bench", "tiers", *arguments, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["failed"] == {}, done.stderr
    assert set(result["ratios"]) == RATIOS
    assert result["ratios"]["writeback_ingest_vs_dram"] > 0
    assert {name for name, value in result["ratios"].items() if value is None} == RATIOS - {
        "writeback_ingest_vs_dram"
    }
    for way in ("with_log", "memory_only"):
        measured = result["details"]["ingest"][way]
        assert measured["gb_per_s"] > 0 < measured["longest_ms"] and len(measured["rounds"]) == 3
    assert {"cpu", "kernel", "file_system", "load_before"} <= set(result["machine"])
    assert not list(place.iterdir())


def test_what_cannot_be_measured_is_named(tmp_path: Path) -> None:
    done = run("bench", "tiers", "--only", "warm", directory=tmp_path)
    assert done.returncode == 2 and "'warm'" in done.stderr
    done = run("bench", "tiers", "--directory", "/dev/shm", "--only", "cold", directory=tmp_path)
    assert done.returncode == 1 and "tmpfs" in done.stderr and "Traceback" not in done.stderr
