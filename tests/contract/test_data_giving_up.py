"""Requests that end early, by the caller or by their time: then their memory is the caller's alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Client, File
from tests.client_real_node import RealNode
from tests.contract.data_peer import start_peer
from tests.contract.data_plane import MIB, Files, Fragments, Room, Transport, eventually, noise, within

pytest_plugins = ["tests.contract.data_fixtures"]

LENGTH = 24 * MIB
#: How long a call may take beyond its timeout, on a machine whose cores are busy with something else.
SLACK_S = 2.0


@pytest.fixture(scope="module")
def patient() -> Iterator[RealNode]:
    """A node that is stopped and goes on again."""
    with RealNode("patient") as one:
        yield one


@pytest.fixture
def patient_files(patient: RealNode) -> Iterator[Files]:
    made = Files([patient])
    yield made
    made.delete_all()
    made.check_memory_is_back()


def mark(rooms: list[Room]) -> None:
    """The caller uses its memory for something else."""
    for room in rooms:
        room.bytes[:] = 0xA5


def check_marks(rooms: list[Room]) -> None:
    for room in rooms:
        assert (room.bytes == 0xA5).all(), "memory was written after its request had ended"
        room.check_guards()


def check_reads(file: File, client: Client, transport: Transport, data: np.ndarray) -> None:
    room = Room(client, transport, len(data))
    assert file.read_into(0, room.bytes) == len(data)
    assert np.array_equal(room.bytes, data)


def test_reads_cancelled_at_random_moments(
    client: Client, transport: Transport, files: Files, rng: np.random.Generator
) -> None:
    file = client.open_layout(files.layout())
    data = noise(LENGTH, 1)
    file.write(0, data)
    outcomes: set[str] = set()
    for _ in range(12):
        rooms = [Room(client, transport, length) for length in (LENGTH, MIB, 10_000, 1)]
        requests = []
        for room in rooms:
            pieces = Fragments.at_random(room.bytes, rng, min(len(room.bytes), 500))
            requests.append(file.submit_read_at(0, pieces.addresses, pieces.lengths))
        time.sleep(float(rng.choice([0, rng.uniform(0, 0.03)])))
        for request in rng.permutation(np.array(requests, object)):
            request.cancel()
        with within(SLACK_S):
            for request, room in zip(requests, rooms, strict=True):
                try:
                    assert request.wait() == len(room.bytes)
                    outcomes.add("done")
                except errors.Cancelled:
                    outcomes.add("cancelled")
        mark(rooms)
        time.sleep(0.02)
        check_marks(rooms)
    # A node that shares memory has moved its bytes before anybody can change his mind.
    assert "cancelled" in outcomes or not transport.is_stream
    check_reads(file, client, transport, data)


def test_writes_cancelled_at_random_moments(
    client: Client, transport: Transport, files: Files, rng: np.random.Generator
) -> None:
    """Each unit is the old or the new one; what is written afterwards stays."""
    file = client.open_layout(files.layout())
    old = noise(LENGTH, 2)
    back = Room(client, transport, LENGTH)
    for turn in range(8):
        file.write(0, old)
        new = noise(LENGTH, 10 + turn)
        source = Room(client, transport, LENGTH)
        source.bytes[:] = new
        request = file.submit_write(0, source.bytes)
        time.sleep(float(rng.uniform(0, 0.02)))
        request.cancel()
        with within(SLACK_S):
            try:
                assert request.wait() == LENGTH
            except errors.Cancelled as error:
                assert error.code == errors.Cancelled.code
        # The memory is free: what stands there now must never reach the file.
        mark([source])
        if turn % 2:
            file.write(0, old)
        assert file.read_into(0, back.bytes) == LENGTH
        for start in range(0, LENGTH, 4 * MIB):
            unit = back.bytes[start : start + 4 * MIB]
            is_old = np.array_equal(unit, old[start : start + 4 * MIB])
            assert is_old or (turn % 2 == 0 and np.array_equal(unit, new[start : start + 4 * MIB])), start


def test_cancelled_tasks_get_their_memory_back(
    client: Client, transport: Transport, files: Files, rng: np.random.Generator
) -> None:
    file = client.open_layout(files.layout())
    data = noise(4 * MIB, 3)
    file.write(0, data)
    rooms = [Room(client, transport, 4 * MIB) for _ in range(10)]

    async def main() -> None:
        for _ in range(5):
            tasks = [asyncio.create_task(file.aread_into(0, room.bytes)) for room in rooms]
            await asyncio.sleep(float(rng.uniform(0, 0.02)))
            for task in tasks:
                task.cancel()
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
            mark(rooms)
            await asyncio.sleep(0.02)
            check_marks(rooms)

    asyncio.run(main())
    check_reads(file, client, transport, data)


def test_a_node_stopped_at_random_moments(
    transport: Transport, patient: RealNode, patient_files: Files, rng: np.random.Generator
) -> None:
    """The call ends in its time; when the node goes on, nothing reaches the buffer; the client reads on."""
    with transport.client() as client:
        file = client.open_layout(patient_files.layout())
        data = noise(LENGTH, 4)
        file.write(0, data)
        timed_out = 0
        for turn in range(8):
            rooms = [Room(client, transport, LENGTH), Room(client, transport, 10_000)]
            pieces = Fragments.at_random(rooms[0].bytes, rng, 300)
            if turn == 0:
                patient.pause()  # before anything was sent
            requests = [
                file.submit_read_at(0, pieces.addresses, pieces.lengths, timeout_s=0.3),
                file.submit_read(5, rooms[1].bytes, timeout_s=0.3),
            ]
            if turn:
                time.sleep(float(rng.uniform(0, 0.02)))
                patient.pause()
            with within(0.3 + SLACK_S):
                for request in requests:
                    try:
                        request.wait()
                    except errors.Timeout:
                        timed_out += 1
            assert all(request.done for request in requests)
            mark(rooms)
            patient.resume()
            time.sleep(0.1)
            check_marks(rooms)
            check_reads(file, client, transport, data)
        assert timed_out >= 2, "it was stopped before it could answer the first two"


def test_writes_to_a_stopped_node(
    transport: Transport, patient: RealNode, patient_files: Files, rng: np.random.Generator
) -> None:
    """What timed out may still be applied, whole or not at all, but never over what was written since."""
    with transport.client() as client:
        file = client.open_layout(patient_files.layout())
        source, back = Room(client, transport, 4 * MIB), Room(client, transport, 4 * MIB)
        before = noise(4 * MIB, 5)
        for turn in range(6):
            file.write(0, before)
            source.bytes[:] = late = noise(4 * MIB, 20 + turn)
            if turn < 2:
                patient.pause()
                request = file.submit_write(0, source.bytes, timeout_s=0.3)
            else:
                request = file.submit_write(0, source.bytes, timeout_s=0.3)
                time.sleep(float(rng.uniform(0, 0.004)))
                patient.pause()
            with within(0.3 + SLACK_S):
                try:
                    request.wait()
                except errors.Timeout as error:
                    assert error.may_have_changed
            mark([source])
            patient.resume()
            assert file.read_into(0, back.bytes) == 4 * MIB
            assert np.array_equal(back.bytes, before) or np.array_equal(back.bytes, late)
            now = noise(4 * MIB, 40 + turn)
            file.write(0, now)
            time.sleep(0.05)
            assert file.read_into(0, back.bytes) == 4 * MIB
            assert np.array_equal(back.bytes, now), "a late write came after a newer one"


def test_a_client_that_is_closed_gives_its_memory_back(transport: Transport, files: Files) -> None:
    client = transport.client()
    file = client.open_layout(files.layout())
    file.write(0, noise(LENGTH, 6))
    rooms = [Room(client, transport, LENGTH) for _ in range(3)]
    requests = [file.submit_read(0, room.bytes) for room in rooms]
    with within(1 + SLACK_S):
        client.close()
    assert all(request.done for request in requests)
    mark(rooms)
    time.sleep(0.05)
    check_marks(rooms)


def test_a_client_closed_while_its_node_stands_still(
    transport: Transport, patient: RealNode, patient_files: Files, rng: np.random.Generator
) -> None:
    """The memory outlives the client that filled it, and so does a node that is in the middle of doing so."""
    layout = patient_files.layout()
    cancelled = 0
    for turn in range(2):
        client = transport.client()
        file = client.open_layout(layout)
        if turn == 0:
            file.write(0, noise(LENGTH, 8))
        rooms = [Room(client, transport, LENGTH) for _ in range(3)]
        for room in rooms:
            assert file.read_into(0, room.bytes) == LENGTH
        requests = [file.submit_read(0, room.bytes) for room in rooms]
        time.sleep(float(rng.uniform(0, 0.004)))
        patient.pause()
        with within(1 + SLACK_S):
            client.close()
        for request in requests:
            try:
                assert request.wait() == LENGTH
            except errors.Cancelled:
                cancelled += 1
        mark(rooms)
        patient.resume()
        time.sleep(0.1)
        check_marks(rooms)
    assert cancelled > 0, "the node had always answered before it was stopped"


@pytest.mark.parametrize("work", ["read", "write"])
def test_a_client_killed_in_mid_transfer_leaves_no_trace(
    transport: Transport, files: Files, node: RealNode, work: str
) -> None:
    """Its connections and what it had mapped go; the file is whole; others go on."""
    layout = files.layout()
    data = noise(LENGTH, 7)
    with transport.client() as client:
        file = client.open_layout(layout)
        file.write(0, data)
        others = node.stats()["connections"]
        for moment_s in (0.0, 0.003, 0.01):
            peer = start_peer(transport, work, layout, LENGTH)
            time.sleep(moment_s)
            peer.kill()
            peer.wait(10)
            eventually(lambda: node.stats()["connections"] == others)
            back = Room(client, transport, LENGTH)
            assert file.read_into(0, back.bytes) == LENGTH
            for start in range(0, LENGTH, 4 * MIB):
                unit = back.bytes[start : start + 4 * MIB]
                whole = np.array_equal(unit, data[start : start + 4 * MIB])
                # The peer writes units of one byte value each.
                assert whole or (work == "write" and (unit == unit[0]).all()), start
