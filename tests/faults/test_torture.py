"""Loops of random operations and deaths, each followed by a check of every byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from gd2fs.bench.torture import CLUSTERS, Settings, Torture
from tests.faults.conftest import LOOPS, SEED

#: A loop takes a few seconds; a machine with two busy cores several times that.
LOOP_S = 60


@pytest.mark.timeout(120 + LOOP_S * LOOPS)
@pytest.mark.parametrize(("nodes", "logs", "share"), CLUSTERS)
def test_torture(disks: None, tmp_path: Path, nodes: int, logs: int, share: float) -> None:
    loops = max(1, round(share * LOOPS))
    with Torture(Settings(tmp_path, seed=SEED, nodes=nodes, logs=logs)) as torture:
        counters = torture.run(loops, lambda line: print(line, flush=True))
    print(counters)
    assert counters.clean, "\n".join(counters.violations[:20])
    assert counters.loops == loops <= counters.power_cuts
    assert counters.bytes_checked > 0 < counters.stale_attempts


def test_torture_of_nodes_that_have_only_memory(tmp_path: Path) -> None:
    with Torture(Settings(tmp_path, seed=SEED, nodes=1, logs=0)) as torture:
        counters = torture.run(1)
    assert counters.clean, "\n".join(counters.violations[:20])
    # The last kill may have been the end of all that was written.
    assert counters.kills > 0 < counters.bytes_checked + counters.bytes_missing


def test_torture_of_nodes_that_keep_only_their_epochs(disks: None, tmp_path: Path) -> None:
    """Without logs nothing else remembers an epoch through a power cut."""
    with Torture(Settings(tmp_path, seed=SEED, nodes=1, data_disks=True)) as torture:
        counters = torture.run(2)
    assert counters.clean, "\n".join(counters.violations[:20])
    assert counters.power_cuts >= 2 and counters.stale_attempts > 0
