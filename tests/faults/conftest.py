"""Processes that die, disks that fail: everything here runs with `make test-faults`, or by naming this
directory; a plain `pytest` leaves it out.

`SEED=17 LOOPS=1 pytest tests/faults -k torture` repeats one loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest

import gd2fs
from gd2fs.bench.torture.cluster import Cluster
from gd2fs.bench.torture.disk import NoDisk, program
from gd2fs.client import Client

SEED = int(os.environ.get("SEED", "0"))
LOOPS = int(os.environ.get("LOOPS", "5"))


#: Set by `make test-faults`, whose whole point they are.
DISKS_REQUIRED = bool(os.environ.get("GD2FS_FAULTS_REQUIRED"))


def not_tested(why: object) -> NoReturn:
    """Skips, or fails where nothing may be skipped."""
    (pytest.fail if DISKS_REQUIRED else pytest.skip)(f"NOT TESTED: {why}")


@pytest.fixture(scope="session")
def disks() -> None:
    """For tests that need disks whose power can be cut."""
    try:
        program()
    except NoDisk as error:
        not_tested(error)


Connect = Callable[[], Client]
Start = Callable[..., tuple[Cluster, Connect]]


@pytest.fixture
def start(disks: None, tmp_path: Path) -> Iterator[Start]:
    """Starts a cluster of one node with one log (or as its options say), and makes clients of it. After a
    restart a new client is what knows at once where the node is now."""
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[Cluster, Connect]:
            cluster = stack.enter_context(Cluster(tmp_path, **({"logs": 1, "seed": SEED} | options)))
            return cluster, lambda: stack.enter_context(gd2fs.connect(cluster.control, timeout_s=10))

        yield make
