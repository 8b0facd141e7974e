"""1,000 clients at once, each connected from an address of its own; the one too many is refused early."""

from __future__ import annotations

import time

import numpy as np
import pytest

from gd2fs import errors
from tests.client_real_node import RealNode
from tests.contract.data_peer import end_peer, start_peer
from tests.contract.data_plane import KIB, Files, Transport, descriptors_for, eventually, within

pytest_plugins = ["tests.contract.data_fixtures"]

CLIENTS, PROCESSES = 1000, 4
EACH = CLIENTS // PROCESSES
UNIT = 32 * KIB


@pytest.mark.timeout(100)
def test_a_thousand_clients(transport: Transport) -> None:
    # A client has a queue, a timer, a waker and a connection, all of them descriptors.
    with (
        descriptors_for(16 * EACH),
        RealNode("busy", connections_max=CLIENTS, memory_bytes=256 << 20) as busy,
        transport.client(streams=1) as late,
    ):
        files = Files([busy])
        layout = files.layout(stripe_unit=UNIT)
        idle_bytes = busy.private_bytes()
        peers = [start_peer(transport, "crowd", layout, EACH * turn, EACH) for turn in range(PROCESSES)]
        try:
            stats = busy.stats()
            assert stats["connections"] == CLIENTS
            assert stats["connections_refused"] == 0
            # About 100 KiB of buffers for each.
            assert busy.private_bytes() - idle_bytes < CLIENTS * 200 * KIB

            file = late.open_layout(layout)
            sample = np.empty(100, np.uint8)
            with within(3), pytest.raises(errors.Disconnected):
                file.read_into(0, sample)
            assert busy.stats()["connections_refused"] > 0

            # Those that are connected notice nothing: told to, they write and read again.
            assert end_peer(peers.pop()) == f"{EACH} clients\n"
            eventually(lambda: busy.stats()["connections"] == CLIENTS - EACH)
            begun = time.monotonic()
            assert file.read_into(0, sample) == 100
            assert (sample == 0).all(), "the first client's bytes"
            assert file.read_into(UNIT, sample) == 100 and (sample == 1).all()
            assert time.monotonic() - begun < 3
            while peers:
                assert end_peer(peers.pop()) == f"{EACH} clients\n"
            eventually(lambda: busy.stats()["connections"] == 1)
            for number in range(0, CLIENTS, 97):
                assert file.read_into(number * UNIT, sample) == 100
                assert (sample == number % 251).all()
        finally:
            for peer in peers:
                peer.kill()
                peer.wait(10)
        files.delete_all()
        files.check_memory_is_back()
