"""The client and real nodes, in processes that are stopped, killed and started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Client
from tests.client_real_node import CLUSTER, RealNode, sign

MIB = 1 << 20


def noise(length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


@pytest.fixture(scope="module")
def shared_nodes() -> Iterator[list[RealNode]]:
    """Three nodes for tests that leave them running."""
    with RealNode("a") as a, RealNode("b") as b, RealNode("c") as c:
        yield [a, b, c]


@pytest.fixture
def node() -> Iterator[RealNode]:
    """A node that the test may treat badly."""
    with RealNode("x") as one:
        yield one


@pytest.fixture(params=["tcp", "shm"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client([], cluster=CLUSTER, token="", transport=request.param) as one:
        yield one


@pytest.mark.parametrize(("width", "stripe_unit"), [(1, 4 * MIB), (1, 64 * MIB), (2, 64 << 10), (3, MIB)])
def test_what_was_written_is_read_back(
    client: Client, shared_nodes: list[RealNode], width: int, stripe_unit: int
) -> None:
    layout = sign(shared_nodes[:width], stripe_unit=stripe_unit)
    file = client.open_layout(layout)
    data = noise(20 * MIB + 12_345)
    # Out of order, of odd sizes, many at once.
    cuts = [0, 1, 32 << 10, (32 << 10) + 7, 3 * MIB, 9 * MIB + 5, len(data)]
    writes = [
        file.submit_write(start, data[start:end])
        for start, end in zip(cuts[::-1][1:], cuts[::-1], strict=False)
    ]
    assert sum(request.wait() for request in writes) == len(data)
    assert file.length() == len(data)
    back = np.zeros(len(data) + 100, np.uint8)
    assert file.read_into(0, back) == len(data)
    assert np.array_equal(back[: len(data)], data)
    for offset, length in [(0, 1), (32_767, 2), (5 * MIB - 3, 70_000), (len(data) - 9, 50)]:
        part = bytearray(length)
        moved = file.read_into(offset, part)
        assert part[:moved] == data[offset : offset + length].tobytes()
        assert moved == min(length, len(data) - offset)
    # Another client sees the same bytes.
    with Client([], cluster=CLUSTER, token="", streams=1, verify=False) as other:
        again = np.zeros(len(data), np.uint8)
        assert other.open_layout(layout).read_into(0, again) == len(data)
        assert np.array_equal(again, data)


def test_a_model_of_random_writes_and_reads(client: Client, shared_nodes: list[RealNode]) -> None:
    file = client.open_layout(sign(shared_nodes[:2], stripe_unit=64 << 10))
    size = 2 * MIB
    model = noise(size, 2)
    assert file.write(0, model) == size
    rng = np.random.default_rng(3)
    for turn in range(200):
        offset = int(rng.integers(0, size - 1))
        length = int(rng.integers(1, min(150_000, size - offset) + 1))
        if turn % 2:
            model[offset : offset + length] = noise(length, turn)
            file.write(offset, model[offset : offset + length])
        else:
            got = np.empty(length, np.uint8)
            assert file.read_into(offset, got) == length
            assert np.array_equal(got, model[offset : offset + length]), (turn, offset, length)


def test_never_written_is_a_hole_and_beyond_the_end_is_short(
    client: Client, shared_nodes: list[RealNode]
) -> None:
    for width in (1, 3):
        file = client.open_layout(sign(shared_nodes[:width], stripe_unit=64 << 10))
        assert file.read_into(0, bytearray(10)) == 0
        file.write(200_000, b"x" * 1000)
        with pytest.raises(errors.Hole):
            file.read_into(0, bytearray(201_000))
        with pytest.raises(errors.Hole):
            file.read_into(199_999, bytearray(10))
        assert file.read_into(200_500, bytearray(10_000)) == 500
        assert file.read_into(300_000, bytearray(10)) == 0


def test_rights_and_expiry_are_kept(client: Client, shared_nodes: list[RealNode]) -> None:
    layout = sign(shared_nodes[:1])
    client.open_layout(layout).write(0, b"data")
    reader = client.open_layout(sign(shared_nodes[:1], file=layout["file"], rights=("read",)))
    assert reader.read_into(0, bytearray(4)) == 4
    with pytest.raises(errors.Forbidden):
        reader.write(0, b"no")
    with pytest.raises(errors.Expired):
        client.open_layout(sign(shared_nodes[:1], file=layout["file"], life_s=-1)).read_into(0, bytearray(4))
    with pytest.raises(errors.BadSignature):
        client.open_layout(layout | {"capability": layout["capability"][:-2] + "AA"}).read_into(
            0, bytearray(4)
        )


def test_a_superseded_writer_changes_nothing(client: Client, shared_nodes: list[RealNode]) -> None:
    layout = sign(shared_nodes[:1], grant=1)
    old = client.open_layout(layout)
    old.write(0, b"old")
    new = client.open_layout(sign(shared_nodes[:1], file=layout["file"], grant=2))
    new.write(0, b"new")
    with pytest.raises(errors.StaleWriter):
        old.write(0, b"old")
    back = bytearray(3)
    new.read_into(0, back)
    assert back == b"new"


def test_threads_and_loops_write_and_read_at_once(client: Client, shared_nodes: list[RealNode]) -> None:
    file = client.open_layout(sign(shared_nodes))

    def blocking(index: int) -> None:
        data = noise(3 * MIB, index)
        file.write(index * 3 * MIB, data)
        back = np.zeros(len(data), np.uint8)
        assert file.read_into(index * 3 * MIB, back) == len(data)
        assert np.array_equal(back, data)

    async def asynchronous() -> None:
        async def one(index: int) -> None:
            data = noise(100_000, index)
            assert await file.awrite(100 * MIB + index * 100_000, data) == 100_000
            back = np.zeros(100_000, np.uint8)
            assert await file.aread_into(100 * MIB + index * 100_000, back) == 100_000
            assert np.array_equal(back, data)

        await asyncio.gather(*(one(index) for index in range(50)))

    with ThreadPoolExecutor(5) as pool:
        work = [pool.submit(blocking, index) for index in range(4)]
        work.append(pool.submit(lambda: asyncio.run(asynchronous())))
        for one in work:
            one.result(60)


def test_a_node_stopped_in_mid_read_touches_nothing_later(client: Client, node: RealNode) -> None:
    """I5: the caller timed out and uses its buffer for something else; then the node goes on."""
    file = client.open_layout(sign([node]))
    data = noise(64 * MIB)
    file.write(0, data)
    mark = noise(64 * MIB, 9)
    for wait_s in (0.0, 0.002, 0.005, 0.01, 0.02):
        buffer = np.zeros(64 * MIB, np.uint8)
        if wait_s == 0.0:
            node.pause()
        request = file.submit_read(0, buffer, timeout_s=0.5)
        time.sleep(wait_s)
        node.pause()
        outcome: type[BaseException] | None = None
        try:
            assert request.wait() == len(data)
        except errors.Timeout as error:
            outcome = type(error)
        assert request.done
        buffer[:] = mark
        node.resume()
        time.sleep(0.2)
        assert np.array_equal(buffer, mark), f"stopped after {wait_s} s"
        # The same client reads on as if nothing had been.
        assert file.read_into(0, buffer) == len(data)
        assert np.array_equal(buffer, data)
        if wait_s == 0.0:
            assert outcome is errors.Timeout, "it was stopped before it could answer"


def test_a_late_write_never_overwrites_its_repetition(client: Client, node: RealNode) -> None:
    """I5 for writes: the first copy lies in a stopped node's socket while the caller writes something
    newer."""
    layout = sign([node])
    file = client.open_layout(layout)
    old, new = noise(4 * MIB, 1), noise(4 * MIB, 2)
    file.write(0, new)
    for turn in range(5):
        node.pause()
        with pytest.raises(errors.Timeout) as caught:
            file.write(0, old[: 50_000 + turn], timeout_s=0.2)
        assert caught.value.may_have_changed
        request = file.submit_write(0, new, timeout_s=20)
        time.sleep(0.05)
        node.resume()
        assert request.wait() == len(new)
        time.sleep(0.1)
        back = np.zeros(len(new), np.uint8)
        file.read_into(0, back)
        assert np.array_equal(back, new)


def test_memory_of_a_write_that_timed_out_may_be_reused(client: Client, node: RealNode) -> None:
    """What the node may still apply are the bytes as they were, or nothing: never what the memory holds
    later."""
    layout = sign([node])
    file = client.open_layout(layout)
    data = noise(48 * MIB)
    node.pause()
    with pytest.raises(errors.Timeout):
        file.write(0, data, timeout_s=0.3)
    before = data.copy()
    data[:] = 0
    node.resume()
    time.sleep(0.3)
    for offset in range(0, len(data), 4 * MIB):
        back = np.ones(4 * MIB, np.uint8)
        try:
            moved = file.read_into(offset, back)
        except errors.Hole:
            continue
        assert np.array_equal(back[:moved], before[offset : offset + moved])


def test_a_node_killed_in_mid_transfer_is_an_error_soon(client: Client, node: RealNode) -> None:
    layout = sign([node])
    file = client.open_layout(layout)
    data = noise(64 * MIB)
    file.write(0, data)
    buffers = [np.zeros(64 * MIB, np.uint8) for _ in range(4)]
    requests = [file.submit_read(0, buffer) for buffer in buffers]
    requests.append(file.submit_write(0, data))
    time.sleep(0.01)
    node.kill()
    start = time.monotonic()
    for request in requests:
        try:
            request.wait()
        except errors.Disconnected:
            continue
    assert time.monotonic() - start < 4
    with pytest.raises(errors.Disconnected, match="node x can't be reached"):
        file.read_into(0, buffers[0])
    # Back with a new incarnation: what it held is lost, and the client says so instead of reading on.
    node.start()
    layout["columns"][0]["replicas"][0]["addresses"] = node.addresses
    with pytest.raises(errors.StaleIncarnation):
        client.open_layout(layout).read_into(0, buffers[0])


def test_a_node_that_returns_in_time_is_not_an_error(client: Client, node: RealNode) -> None:
    layout = sign([node])
    file = client.open_layout(layout)
    file.write(0, b"before")
    node.pause()
    request = file.submit_read(0, bytearray(6), timeout_s=20)
    time.sleep(0.3)
    node.resume()
    assert request.wait() == 6


def test_a_node_that_hangs_does_not_stop_transfers_with_others(
    client: Client, node: RealNode, shared_nodes: list[RealNode]
) -> None:
    hanging, other = client.open_layout(sign([node])), client.open_layout(sign(shared_nodes[:1]))
    other.write(0, b"there")
    node.pause()
    # More than the whole client may have under way.
    data = np.zeros(64 * MIB, np.uint8)
    writes = [hanging.submit_write(0, data, timeout_s=4) for _ in range(17)]
    time.sleep(0.2)
    buffer = bytearray(5)
    assert other.read_into(0, buffer, timeout_s=2) == 5 and buffer == b"there"
    for request in writes:
        request.give_up()
    node.resume()


def test_no_space_is_an_error_and_not_a_hang(client: Client) -> None:
    with RealNode("small", memory_bytes=64 * MIB) as small:
        file = client.open_layout(sign([small]))
        with pytest.raises(errors.NoSpace):
            file.write(0, np.ones(100 * MIB, np.uint8))
        assert client.open_layout(sign([small])).length() == 0
