"""Nodes of the same host: they move bytes straight to and from memory that the library has allocated."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gd2fs import _native, errors
from gd2fs.client import Client
from tests.client_real_node import CLUSTER, RealNode, sign
from tests.contract.data_peer import start_peer, stopped
from tests.contract.data_plane import BY_NAME, eventually, noise

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def node() -> Iterator[RealNode]:
    with RealNode("x") as one:
        yield one


@pytest.fixture
def client() -> Iterator[Client]:
    with Client([], cluster=CLUSTER, token="", timeout_s=10) as one:
        yield one


def moved(client: Client) -> tuple[int, int]:
    stats = client._native.stats()
    return stats["bytes_direct"], stats["bytes_staged"]


def wait_for_regions(node: RealNode, count: int) -> None:
    deadline = time.monotonic() + 5
    while node.mapped_regions() != count:
        assert time.monotonic() < deadline, f"the node maps {node.mapped_regions()} regions, not {count}"
        time.sleep(0.01)


def test_shared_memory_is_chosen_by_itself(client: Client, node: RealNode) -> None:
    file = client.open_layout(sign([node]))
    memory = client.alloc(8 * MIB)
    assert (memory.length, memory.kind) == (8 * MIB, "library")
    data = np.frombuffer(memory, np.uint8)
    data[:] = noise(8 * MIB, 0)
    file.write(0, data)
    back = np.frombuffer(client.alloc(8 * MIB), np.uint8)
    assert file.read_into(0, back) == 8 * MIB
    assert np.array_equal(back, data)
    assert moved(client) == (16 * MIB, 0)


def test_foreign_memory_goes_through_the_ring(client: Client, node: RealNode) -> None:
    file = client.open_layout(sign([node]))
    data = noise(8 * MIB + 5, 0)
    file.write(0, data)
    back = np.zeros(8 * MIB + 5, np.uint8)
    assert file.read_into(0, back) == len(data)
    assert np.array_equal(back, data)
    assert moved(client) == (0, 2 * len(data))


def test_what_is_not_whole_pages_is_staged_on_reads_only(client: Client, node: RealNode) -> None:
    file = client.open_layout(sign([node]))
    memory = np.frombuffer(client.alloc(MIB), np.uint8)
    memory[:] = noise(MIB, 0)
    file.write(3, memory[5:70_001])
    assert moved(client) == (69_996, 0)
    back = np.frombuffer(client.alloc(MIB), np.uint8)
    assert file.read_into(3, back[1:69_997]) == 69_996
    assert np.array_equal(back[1:69_997], memory[5:70_001]) and not back[69_997:].any() and back[0] == 0
    assert moved(client) == (69_996, 69_996)


def test_ten_thousand_fragments_in_one_call(client: Client, node: RealNode) -> None:
    count, size = 10_000, 4 * PAGE
    file = client.open_layout(sign([node]))
    source, target = client.alloc(count * size), client.alloc(count * size)
    data = np.frombuffer(source, np.uint64)
    data[:] = np.arange(len(data), dtype=np.uint64)
    order = np.random.default_rng(3).permutation(count).astype(np.uint64) * np.uint64(size)
    lengths = np.full(count, size, np.uint64)
    file.submit_write_at(0, np.uint64(source.address) + order, lengths, iomem=source).wait()
    file.submit_read_at(0, np.uint64(target.address) + order, lengths, iomem=target).wait()
    assert np.array_equal(np.frombuffer(target, np.uint64), data)
    assert moved(client) == (2 * count * size, 0)


def test_fragments_outside_their_iomem_are_refused(client: Client, node: RealNode) -> None:
    file = client.open_layout(sign([node]))
    memory = client.alloc(MIB)
    one = np.array([PAGE], np.uint64)
    for address in (memory.address - 1, memory.address + MIB - PAGE + 1, 1 << 62):
        with pytest.raises(errors.BadRequest, match=r"addresses\[0\].*outside the IOMEM"):
            file.submit_read_at(0, np.array([address], np.uint64), one, iomem=memory)
    memory.close()
    with pytest.raises(errors.BadRequest, match="closed"):
        file.submit_read_at(0, np.array([memory.address], np.uint64), one, iomem=memory)
    with pytest.raises(BufferError, match="closed"):
        memoryview(memory)


def test_registered_memory_is_kept_for_its_requests(client: Client, node: RealNode) -> None:
    file = client.open_layout(sign([node]))
    file.write(0, noise(MIB, 0))
    target = np.zeros(MIB, np.uint8)
    iomem = client.register(target)
    assert (iomem.kind, iomem.length, len(iomem)) == ("foreign", MIB, MIB)
    address = np.array([iomem.address], np.uint64)
    request = file.submit_read_at(0, address, np.array([MIB], np.uint64), iomem=iomem)
    iomem.close()
    assert request.wait() == MIB
    assert np.array_equal(target, noise(MIB, 0))
    with pytest.raises(errors.BadRequest, match="read-only"):
        client.register(b"constant")


def test_memory_goes_with_its_last_user(client: Client, node: RealNode) -> None:
    file = client.open_layout(sign([node]))
    memory = client.alloc(4 * MIB)
    view = np.frombuffer(memory, np.uint8)
    file.write(0, view)
    assert node.mapped_regions() == 1
    memory.close()
    del memory
    file.write(0, view)
    view[:] = 7
    assert node.mapped_regions() == 1, "a view still uses it"
    del view
    gc.collect()
    wait_for_regions(node, 0)


def test_a_dead_clients_memory_is_released(node: RealNode) -> None:
    child = os.fork()
    if child == 0:
        client = Client([], cluster=CLUSTER, token="")
        client.open_layout(sign([node])).write(0, np.frombuffer(client.alloc(4 * MIB), np.uint8))
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    wait_for_regions(node, 0)


@pytest.mark.parametrize("memory", ["shm", "shm-foreign"])
@pytest.mark.parametrize("work", ["read", "write"])
def test_clients_stopped_and_killed_at_random_moments(
    client: Client, node: RealNode, work: str, memory: str
) -> None:
    """While it stands still others go on; once it is dead the node has nothing of it mapped any more."""
    layout, length = sign([node]), 24 * MIB
    file = client.open_layout(layout)
    data = noise(length, 0)
    file.write(0, data)
    back = np.zeros(length, np.uint8)
    own = node.mapped_regions()
    dice = random.Random()
    for turn in range(2):
        peer = start_peer(BY_NAME[memory], work, layout, length)
        if turn == 0:
            eventually(lambda: node.mapped_regions() > own)
        time.sleep(dice.uniform(0, 0.02))
        with stopped(peer):
            started = time.monotonic()
            for _ in range(3):
                assert file.write(0, data) == length
                assert file.read_into(0, back) == length
            assert time.monotonic() - started < 3
            assert np.array_equal(back, data), "a stopped client's late write"
            peer.kill()
        peer.communicate(timeout=10)
        wait_for_regions(node, own)
        assert file.read_into(0, back) == length
        assert np.array_equal(back, data)


def test_a_stopped_node_loses_the_memory_that_it_was_filling(client: Client, node: RealNode) -> None:
    """I5: the caller timed out and uses its buffer for something else; then the node goes on and fills it."""
    file = client.open_layout(sign([node]))
    # Takes a node some 20 ms.
    length = 128 * MIB
    data = noise(length, 0)
    file.write(0, data)
    target = client.alloc(length)
    buffer = np.frombuffer(target, np.uint8)
    file.read_into(0, buffer)
    mark = noise(length, 9)
    timeouts = 0
    for wait_s in (0.0, 0.002, 0.005, 0.01, 0.02):
        request = file.submit_read(0, buffer, timeout_s=0.3)
        time.sleep(wait_s)
        node.pause()
        started = time.monotonic()
        try:
            request.wait()
        except errors.Timeout:
            timeouts += 1
        assert time.monotonic() - started < 3, "a stopped node hangs nobody"
        buffer[:] = mark
        node.resume()
        time.sleep(0.3)
        assert np.array_equal(buffer, mark), f"stopped after {wait_s} s: a late write arrived"
        assert file.read_into(0, buffer, timeout_s=30) == length
        assert np.array_equal(buffer, data)
    assert timeouts > 0, "the node was never stopped while it owed an answer"


def test_very_many_pages_are_lost_to_a_node_that_stops_again_and_again(
    client: Client, node: RealNode
) -> None:
    """Every other page of a region, more than this process could have mappings for: each time the caller gets
    its memory back in time, and bytes arrive."""
    turns, count = 3, 14_000
    file = client.open_layout(sign([node]))
    data = noise(count * PAGE, 3)
    file.write(0, data)
    memory = client.alloc(2 * turns * count * PAGE)
    pages = np.frombuffer(memory, np.uint8).reshape(turns, count, 2, PAGE)
    pages[:] = 7
    starts = (memory.address + np.arange(turns * count, dtype=np.uint64) * np.uint64(2 * PAGE)).reshape(
        turns, count
    )
    lengths = np.full(count, PAGE, np.uint64)
    for turn in range(turns):
        # Its connections are there, and it has mapped the region on each.
        file.submit_read_at(0, starts[turn], lengths, iomem=memory).wait()
        pages[turn, :, 0] = 8
        node.pause()
        started = time.monotonic()
        with pytest.raises(errors.Timeout):
            file.submit_read_at(0, starts[turn], lengths, iomem=memory, timeout_s=0.3).wait(5)
        assert time.monotonic() - started < 4, "a stopped node hangs nobody"
        pages[turn, :, 0] = 9
        node.resume()
        time.sleep(0.3)
        assert (pages[turn, :, 0] == 9).all(), "a late write arrived"
        assert file.submit_read_at(0, starts[turn], lengths, iomem=memory).wait() == len(data)
        assert np.array_equal(pages[turn, :, 0].reshape(-1), data)
    assert (pages[:, :, 1] == 7).all()
    assert mappings(os.getpid()) > 20_000, "nothing was severed"


def mappings(process: int) -> int:
    return Path(f"/proc/{process}/maps").read_text().count("\n")


def test_slots_of_cancelled_reads_come_back_from_a_node_that_stops(client: Client, node: RealNode) -> None:
    """They are in doubt, but not for ever: the connection is given up, and the ring with it."""
    file = client.open_layout(sign([node]))
    data = noise(MIB, 4)
    file.write(0, data)
    back = np.zeros(MIB, np.uint8)
    file.read_into(0, back)
    node.pause()
    crowd = [file.submit_read(0, np.empty(MIB, np.uint8)) for _ in range(40)]
    time.sleep(0.1)
    started = time.monotonic()
    for request in crowd:
        request.give_up()
    assert time.monotonic() - started < 1, "nobody waits for slots"
    request = file.submit_read(0, back, timeout_s=20)
    before = client.stats()["retries"]
    while client.stats()["retries"] == before:
        assert time.monotonic() - started < 8, "the ring is full for ever"
        time.sleep(0.01)
    node.resume()
    assert request.wait() == MIB and np.array_equal(back, data)


_IMPOSTOR = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
os.setuid(65534)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listening", flush=True)
while True:
    peer, _ = listener.accept()
    print(len(peer.recv(1 << 16)), flush=True)
"""


@contextlib.contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_socket_of_another_user_is_not_spoken_to(node: RealNode) -> None:
    """A node is gone, and somebody has taken its name: he gets no token."""
    name = f"gd2fs-impostor-{os.getpid()}"
    command = [sys.executable, "-c", _IMPOSTOR, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as impostor, ending(impostor):
        assert impostor.stdout and impostor.stdout.readline() == "listening\n"
        layout = sign([node])
        replica = layout["columns"][0]["replicas"][0]
        replica["addresses"] = [
            a if a.startswith("tcp://") else a.rpartition("/")[0] + f"/@{name}" for a in replica["addresses"]
        ]
        with (
            Client([], cluster=CLUSTER, token="secret", transport="shm", timeout_s=3) as client,
            pytest.raises(errors.Disconnected, match="runs as user 65534"),
        ):
            client.open_layout(layout).write(0, b"x")
        assert impostor.stdout.readline() == "0\n", "it was told something"
        with Client([], cluster=CLUSTER, token="") as client:
            assert client.open_layout(layout).write(0, b"x" * 100_000) == 100_000
            assert moved(client) == (0, 0)


def test_a_late_take_of_reused_memory_changes_nothing(client: Client, node: RealNode) -> None:
    """I5 for writes: the node goes on after the caller gave up and reused its memory. Bytes that were never
    meant for the file must not be in it."""
    file = client.open_layout(sign([node], stripe_unit=64 * MIB))
    memory = np.frombuffer(client.alloc(64 * MIB), np.uint8)
    memory[:] = 1
    file.write(0, memory)
    for wait_s in (0.0, 0.001, 0.003, 0.006):
        memory[:] = 2
        request = file.submit_write(0, memory, timeout_s=0.2)
        time.sleep(wait_s)
        node.pause()
        with contextlib.suppress(errors.Timeout):
            request.wait()
        memory[:] = 3
        node.resume()
        time.sleep(0.2)
        back = np.zeros(64 * MIB, np.uint8)
        file.read_into(0, back)
        assert set(np.unique(back)) <= {1, 2}
        memory[:] = 1
        file.write(0, memory)


def test_shm_alone_says_why_it_cannot(node: RealNode) -> None:
    layout = sign([node])
    replica = layout["columns"][0]["replicas"][0]
    replica["addresses"] = [a for a in replica["addresses"] if a.startswith("tcp://")]
    with (
        Client([], cluster=CLUSTER, token="", transport="shm", timeout_s=3) as client,
        pytest.raises(errors.Disconnected, match="shares no memory with this host"),
    ):
        client.open_layout(layout).write(0, b"x")
    with pytest.raises(errors.Invalid, match="transport"):
        Client([], cluster=CLUSTER, token="", transport="pigeon")


def test_a_socket_out_of_reach_falls_back_to_tcp(node: RealNode) -> None:
    layout = sign([node])
    replica = layout["columns"][0]["replicas"][0]
    replica["addresses"] = [
        a if a.startswith("tcp://") else a.rpartition("/")[0] + "/@nobody" for a in replica["addresses"]
    ]
    with Client([], cluster=CLUSTER, token="") as client:
        client.open_layout(layout).write(0, b"x" * 100_000)
        assert moved(client) == (0, 0)


def test_spare_threads_copy_the_same_bytes(node: RealNode) -> None:
    with Client([], cluster=CLUSTER, token="", io_threads=1, memory_threads=2) as client:
        file = client.open_layout(sign([node]))
        data = noise(24 * MIB, 0)
        requests = [file.submit_write(0, data), file.submit_write(24 * MIB, data)]
        assert [request.wait() for request in requests] == [len(data)] * 2
        back = [np.zeros(24 * MIB, np.uint8) for _ in range(4)]
        reads = [file.submit_read(24 * MIB * (index % 2), buffer) for index, buffer in enumerate(back)]
        assert [request.wait() for request in reads] == [len(data)] * 4
        assert all(np.array_equal(buffer, data) for buffer in back)
    with pytest.raises(errors.Invalid, match="memory_threads"):
        Client([], cluster=CLUSTER, token="", memory_threads=1000)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short one: the path of a socket has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gd2fs-") as one:
        yield Path(one)


def start_at(socket_path: Path, name: str) -> _native.Node:
    config = {"cluster": CLUSTER, "node": name, "incarnation": 1, "keys": "", "listen": ["tcp://127.0.0.1:0"]}
    config |= {"memory_bytes": 64 * MIB, "shm": str(socket_path), "data_dir": str(socket_path.parent / name)}
    return _native.Node(json.dumps(config))


@pytest.mark.parametrize("kind", ["a file", "a directory", "a link to a file"])
def test_a_node_deletes_nothing_where_its_socket_should_be(directory: Path, kind: str) -> None:
    path, precious = directory / "node.sock", directory / "precious"
    precious.write_text("precious")
    if kind == "a directory":
        path.mkdir()
    elif kind == "a file":
        path.write_text("precious too")
    else:
        path.symlink_to(precious)
    with pytest.raises(errors.Gd2fsError, match=f"{path}.*no socket"):
        start_at(path, "n0")
    assert precious.read_text() == "precious"
    assert path.is_symlink() == (kind == "a link to a file") and path.is_dir() == (kind == "a directory")
    assert kind != "a file" or path.read_text() == "precious too"


def test_a_socket_that_a_dead_node_left_is_used_again_and_a_living_ones_is_not(directory: Path) -> None:
    path = directory / "node.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    node = start_at(path, "n0")
    with pytest.raises(errors.Gd2fsError, match=f"{path}.*another process listens"):
        start_at(path, "n1")
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(str(path))
    node.stop(0)
