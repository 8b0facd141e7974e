"""A client that stops in mid-transfer costs the node bounded memory and the other clients nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Client
from tests.client_real_node import RealNode
from tests.contract.data_peer import end_peer, start_peer, stopped
from tests.contract.data_plane import MIB, UNIT, Files, Room, Transport, noise, through, within
from tests.contract.proxy import Proxy, Way, Ways

pytest_plugins = ["tests.contract.data_fixtures"]

LENGTH = 64 * MIB
#: What the node may use besides its arena for four connections whose peers do not read.
NODE_GROWTH_MAX = 32 * MIB


def work_goes_on(client: Client, transport: Transport, files: Files) -> None:
    """Another client's transfers take their usual time."""
    file = client.open_layout(files.layout())
    data = noise(4 * MIB, 9)
    room = Room(client, transport, len(data))
    for _ in range(10):
        with within(2):
            assert file.write(0, data) == len(data)
            assert file.read_into(0, room.bytes) == len(data)
        assert np.array_equal(room.bytes, data)


@pytest.mark.parametrize("work", ["read", "write"])
def test_a_stopped_client(
    client: Client, transport: Transport, files: Files, node: RealNode, work: str
) -> None:
    layout = files.layout()
    data = noise(LENGTH, 1)
    file = client.open_layout(layout)
    file.write(0, data)
    work_goes_on(client, transport, files)
    peer = start_peer(transport, work, layout, LENGTH)
    try:
        before = node.private_bytes()
        time.sleep(0.05)
        with stopped(peer):
            arena = node.stats()["arena_used"]
            work_goes_on(client, transport, files)
            # The very range that the stopped client is at can be read and written.
            unit = Room(client, transport, UNIT)
            for start in range(0, LENGTH, 16 * MIB):
                with within(2):
                    assert file.read_into(start, unit.bytes) == UNIT
                original = np.array_equal(unit.bytes, data[start : start + UNIT])
                assert original or (work == "write" and (unit.bytes == unit.bytes[0]).all())
                with within(2):
                    assert file.write(start, data[start : start + UNIT]) == UNIT
            assert node.private_bytes() - before < NODE_GROWTH_MAX
            # Frames that the stopped client still refers to, and those that were published meanwhile.
            assert node.stats()["arena_used"] - arena < 2 * LENGTH
        said = end_peer(peer)
        assert said.endswith("turns\n"), said
    finally:
        peer.kill()
        peer.wait(10)


def test_connections_that_do_not_read_hold_a_bounded_amount(
    stream: Transport, node: RealNode, files: Files
) -> None:
    """32 connections whose replies pile up on the way: the node waits without a copy of their bytes."""
    layout = files.layout()
    with stream.client() as direct:
        direct.open_layout(layout).write(0, noise(LENGTH, 2))

        def ways(_number: int) -> Ways:
            # Past HELLO and OPEN, in the middle of the first data.
            return Ways(to_client=Way(stall_at=100_000))

        before, arena = node.private_bytes(), node.stats()["arena_used"]
        with Proxy(node.address, ways) as proxy, stream.client(streams=32) as client:
            file = client.open_layout(through(layout, proxy.address))
            rooms = [Room(client, stream, LENGTH) for _ in range(4)]
            requests = [file.submit_read(0, room.bytes, timeout_s=20) for room in rooms]
            for _ in range(32):
                assert proxy.stalled.acquire(timeout=10)
            assert node.stats()["connections"] >= 32
            assert node.private_bytes() - before < NODE_GROWTH_MAX
            assert node.stats()["arena_used"] == arena
            work_goes_on(direct, stream, files)
            proxy.release()
            for request, room in zip(requests, rooms, strict=True):
                assert request.wait() == LENGTH
                room.check_guards()


def test_a_write_that_is_never_finished_holds_no_lock(
    stream: Transport, node: RealNode, files: Files
) -> None:
    """Its payload stops in the middle; others write and read the same unit; then it ends all the same."""
    layout = files.layout()
    old, slow, fast = noise(MIB, 3), noise(MIB, 4), noise(MIB, 5)
    with stream.client() as direct:
        file = direct.open_layout(layout)
        file.write(0, old)

        def ways(_number: int) -> Ways:
            return Ways(to_node=Way(stall_at=500_000))

        with Proxy(node.address, ways) as proxy, stream.client(streams=1) as client:
            request = client.open_layout(through(layout, proxy.address)).submit_write(0, slow, timeout_s=20)
            assert proxy.stalled.acquire(timeout=10)
            back = Room(direct, stream, MIB)
            with within(2):
                assert file.read_into(0, back.bytes) == MIB
            assert np.array_equal(back.bytes, old)
            with within(2):
                assert file.write(0, fast) == MIB
            proxy.release()
            expected = slow
            try:
                assert request.wait() == MIB
            except errors.StaleWriter:
                expected = fast
            assert file.read_into(0, back.bytes) == MIB
            assert np.array_equal(back.bytes, expected)
