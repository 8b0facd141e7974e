"""Mooncake Store over TCP: a master, a client whose segment holds the objects, and a client that reads them.

Sources, in kvcache-ai/Mooncake: docs/source/api-reference/python/mooncake-store.md (P2PHANDSHAKE,
register_buffer, batch_get_into); docs/source/deployment/mooncake-store-configuration-reference.md (flags
of the master); mooncake-transfer-engine/src/transport/tcp_transport (the variables that tune TCP).
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from gd2fs.bench.peers.environment import Recipe
from gd2fs.bench.peers.failures import PeerFailed, PeerUnavailable
from gd2fs.bench.peers.pair import Pair

__all__ = ["Peer", "PeerUnavailable"]

VERSION = "0.3.13.post1"
MASTER_READY_S = 15.0
POLL_S = 0.02


@dataclass(frozen=True)
class Tuning:
    """Objects of `value_bytes` each; `lanes` are the TCP connections to one other client."""

    value_bytes: int
    lanes: int


# Each is tried at the start, and the fastest is what Mooncake is measured with: on 2 cores they lay within a
# fifth of each other, and the order changed from run to run. One lane halves the rate of small objects; 8 and
# 16 lanes pay only for large ones.
TUNINGS = (Tuning(1 << 20, 4), Tuning(4 << 20, 4), Tuning(16 << 20, 4), Tuning(64 << 20, 16))
TRIES = 3
# Both ends cut a transfer into such slices. From 64 KiB, its own choice, to 4 MiB the rates lay within the
# noise; this was most often the best.
SLICE_BYTES = 256 << 10
# By default 1,024: of a larger batch a part is refused, and the rest hangs for a minute.
QUEUED_MAX = 65_535


class Peer(Pair):
    """Reads with one `batch_get_into` of all objects into registered memory: what the socket is read into.

    The store clients listen on all network devices, which Mooncake offers no choice about; the master and the
    addresses that they tell each other are on loopback.
    """

    name = "mooncake"
    recipe = Recipe(
        name,
        VERSION,
        packages=(f"mooncake-transfer-engine-non-cuda=={VERSION}", "numpy==2.4.6"),
        probe="import mooncake.store, numpy",
        # Its transfer engine is linked against RDMA's libraries, whatever the protocol.
        debian=("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    )
    driver = "gd2fs.bench.peers.drive_mooncake"
    tuning = TUNINGS[0]

    def _started(self, size_bytes: int) -> Self:
        seconds: dict[Tuning, float] = {}
        for self.tuning in TUNINGS:
            super()._started(size_bytes)
            try:
                seconds[self.tuning] = median(self.read(size_bytes) for _ in range(TRIES))
            except PeerFailed as error:
                raise PeerUnavailable(str(error)) from error
            finally:
                self.close()
        self.tuning = min(seconds, key=lambda tuning: seconds[tuning])
        return super()._started(size_bytes)

    def _settings(self) -> Mapping[str, str]:
        return {
            "MC_TCP_SLICE_SIZE": str(SLICE_BYTES),
            "MC_TCP_LANES_PER_PEER": str(self.tuning.lanes),
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(QUEUED_MAX),
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": str(QUEUED_MAX),
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        }

    def _prepare(self) -> dict[str, Any]:
        """Starts the master."""
        port, metrics = _free_ports(2)
        library = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/mooncake"
        master = self._run(
            "master",
            [
                str(self._environment.directory / library / "mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
                # Objects must not be evicted for the length of a run.
                "--default_kv_lease_ttl=1h",
                "--logtostderr",
            ],
        )
        deadline = time.monotonic() + MASTER_READY_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return {"master": f"127.0.0.1:{port}", "value": self.tuning.value_bytes}
            if not master.running:
                raise PeerFailed(master.ending())
            if time.monotonic() > deadline:
                raise PeerFailed(f"{master.name} did not listen within {MASTER_READY_S:g} s")
            time.sleep(POLL_S)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody had a moment ago: the master can't take one of the kernel's choice and tell it."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
