"""1,000 clients at once, each connected from an address of its own; the one too many is refused early.

Fewer where each has a staging ring of 8 MiB: beyond what other crowds show, many rings are mapped at once.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from gd2fs import errors
from tests.client_real_node import RealNode
from tests.contract.data_peer import end_peer, start_peer
from tests.contract.data_plane import KIB, Files, Transport, descriptors_for, eventually, within

pytest_plugins = ["tests.contract.data_fixtures"]

CLIENTS, CLIENTS_WITH_RINGS, PROCESSES = 1000, 200, 4
UNIT = 32 * KIB


@pytest.mark.timeout(100)
def test_a_crowd_of_clients(transport: Transport) -> None:
    is_staged = transport.memory == "foreign" and not transport.is_stream
    clients = CLIENTS_WITH_RINGS if is_staged else CLIENTS
    each = clients // PROCESSES
    # A client has a queue, a timer, a waker and a connection, all of them descriptors.
    with (
        descriptors_for(16 * each),
        RealNode("busy", connections_max=clients, memory_bytes=256 << 20) as busy,
        transport.client(streams=1) as late,
    ):
        files = Files([busy])
        layout = files.layout(stripe_unit=UNIT)
        idle_bytes = busy.private_bytes()
        peers = [start_peer(transport, "crowd", layout, each * turn, each) for turn in range(PROCESSES)]
        try:
            stats = busy.stats()
            assert stats["connections"] == clients
            assert stats["connections_refused"] == 0
            # About 100 KiB of buffers for each.
            assert busy.private_bytes() - idle_bytes < clients * 200 * KIB

            file = late.open_layout(layout)
            sample = np.empty(100, np.uint8)
            with within(3), pytest.raises(errors.Disconnected):
                file.read_into(0, sample)
            assert busy.stats()["connections_refused"] > 0

            # Those that are connected notice nothing: told to, they write and read again.
            assert end_peer(peers.pop()) == f"{each} clients\n"
            eventually(lambda: busy.stats()["connections"] == clients - each)
            begun = time.monotonic()
            assert file.read_into(0, sample) == 100
            assert (sample == 0).all(), "the first client's bytes"
            assert file.read_into(UNIT, sample) == 100 and (sample == 1).all()
            assert time.monotonic() - begun < 3
            while peers:
                assert end_peer(peers.pop()) == f"{each} clients\n"
            eventually(lambda: busy.stats()["connections"] == 1)
            for number in range(0, clients, 97):
                assert file.read_into(number * UNIT, sample) == 100
                assert (sample == number % 251).all()
        finally:
            for peer in peers:
                peer.kill()
                peer.wait(10)
        files.delete_all()
        files.check_memory_is_back()
