"""NIXL between two processes of one host: memory to memory with its default backend, UCX.

Between processes of one host UCX reads with cross-memory attach (process_vm_readv): one copy by the reading
process, none by the other.

Source: docs.nvidia.com/nixl (getting-started/quick-start; user-guide/backend-selection/ucx).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gd2fs.bench.peers.environment import Environment, Recipe, prepare
from gd2fs.bench.peers.failures import PeerUnavailable
from gd2fs.bench.peers.pair import GIB, Pair

__all__ = ["Peer", "PeerUnavailable"]

VERSION = "1.5.1"
# From 1 MiB to the whole gigabyte made no difference; 256 KiB was 7 % slower, 64 KiB 25 %.
PIECE_BYTES = 16 << 20


class Peer(Pair):
    """Reads with one READ transfer of prepared descriptors.

    1 GiB on 2 quiet cores: 9.2 GB/s. With `progress_threads`, which agents have as they are created by
    default: 4.6 GB/s, and 3 when anything else runs, since the threads spin on both sides. `num_threads` of 1
    to 3 were no faster. Over TCP (UCX_TLS=tcp): 0.85 GB/s.
    """

    name = "nixl"
    recipe = Recipe(
        name,
        VERSION,
        # What its own metadata asks for beside numpy is torch, which only tensors need.
        packages=(f"nixl-cu12=={VERSION}", "numpy==2.4.6"),
        probe="import nixl_cu12._api",
    )
    driver = "gd2fs.bench.peers.drive_nixl"
    # Progress threads spin.
    pausable = True

    def __init__(self, directory: Path, environment: Environment, progress_threads: bool = False) -> None:
        super().__init__(directory, environment)
        self._progress_threads = progress_threads
        if progress_threads:
            self.name = "nixl as created"

    @classmethod
    def start(cls, directory: Path, size_bytes: int = GIB, progress_threads: bool = False) -> Self:
        return cls(directory, prepare(cls.recipe), progress_threads)._started(size_bytes)

    def _settings(self) -> Mapping[str, str]:
        # UCX also opens a port on each network device; memory of one host is not read through them.
        return {"UCX_NET_DEVICES": "lo"}

    def _prepare(self) -> dict[str, Any]:
        return {"progress_threads": self._progress_threads, "piece": PIECE_BYTES}
