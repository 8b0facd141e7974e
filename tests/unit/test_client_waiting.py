"""Many waiters at once: event loops, threads, both; cancelled ones; a client that closes under them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Client, File
from tests.client_fake_node import CLUSTER, READ, FakeNode
from tests.contract.data_plane import eventually

DATA = np.random.default_rng(7).bytes(1_000_000)


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode(DATA) as one:
        yield one


@pytest.fixture
def client() -> Iterator[Client]:
    with Client([], cluster=CLUSTER, token="", io_threads=2) as one:
        yield one


@pytest.fixture
def file(client: Client, node: FakeNode) -> File:
    return client.open_layout(node.layout())


@pytest.fixture
def held(node: FakeNode) -> Iterator[threading.Event]:
    with node.holding_reads() as gate:
        yield gate


async def read(file: File, offset: int, length: int = 1000) -> None:
    buffer = bytearray(length)
    assert await file.aread_into(offset, buffer) == length
    assert buffer == DATA[offset : offset + length]


def test_gather_of_many(file: File) -> None:
    async def main() -> None:
        await asyncio.gather(*(read(file, offset) for offset in range(0, 900_000, 1000)))
        assert await file.awrite(0, DATA[:10]) == 10

    asyncio.run(main())


def test_errors_reach_their_own_task(file: File, node: FakeNode) -> None:
    node.twist = lambda header, reply: (
        node.refuse(header, 201) if header["opcode"] == READ and header["offset"] % 2 else reply
    )

    async def main() -> list[BaseException | None]:
        tasks = (read(file, offset) for offset in range(40))
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(main())
    assert [type(outcome) for outcome in outcomes] == [type(None), errors.Hole] * 20


def test_loops_and_threads_share_one_client(file: File) -> None:
    def blocking(start: int) -> None:
        for offset in range(start, start + 100_000, 1000):
            buffer = bytearray(1000)
            assert file.read_into(offset, buffer) == 1000
            assert buffer == DATA[offset : offset + 1000]

    def looping(start: int) -> None:
        async def main() -> None:
            for _ in range(10):
                await asyncio.gather(*(read(file, start + 1000 * turn) for turn in range(10)))

        asyncio.run(main())

    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(blocking, 100_000 * index) for index in range(4)]
        work += [pool.submit(looping, 100_000 * index) for index in range(4)]
        for one in work:
            one.result(60)


def test_waiting_does_not_poll_for_long(file: File) -> None:
    """With several waiters, each hears of its result at once, and not at the next look around."""

    def many(_: int) -> float:
        start = time.monotonic()
        for _ in range(50):
            file.read_into(0, bytearray(10))
        return time.monotonic() - start

    with ThreadPoolExecutor(3) as pool:
        # 50 reads that each waited for a look around would take 5 s.
        assert max(pool.map(many, range(3))) < 2


def test_a_cancelled_task_returns_when_its_memory_is_free(file: File, held: threading.Event) -> None:
    buffer = bytearray(1000)

    async def main() -> None:
        task = asyncio.create_task(file.aread_into(0, buffer))
        await asyncio.sleep(0.1)
        task.cancel()
        start = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - start < 1
        buffer[:] = b"m" * 1000
        held.set()
        await asyncio.sleep(0.2)
        assert buffer == b"m" * 1000
        await read(file, 5)

    asyncio.run(main())


def test_one_request_may_be_awaited_by_several(file: File, held: threading.Event) -> None:
    async def main() -> None:
        request = file.submit_read(0, bytearray(10))

        async def wait() -> int:
            return await request

        tasks = [asyncio.create_task(wait()) for _ in range(3)]
        blocked = asyncio.create_task(asyncio.to_thread(request.wait))
        await asyncio.sleep(0.1)
        held.set()
        assert await asyncio.gather(*tasks, blocked) == [10] * 4
        assert await request == 10

    asyncio.run(main())


def test_a_task_group_that_fails_gives_all_transfers_up(file: File, held: threading.Event) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.05)
        raise KeyError("why")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for offset in range(20):
                group.create_task(read(file, offset))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert [type(error) for error in caught.value.exceptions] == [KeyError]


def test_close_completes_everything_with_cancelled_within_a_second(
    client: Client, file: File, held: threading.Event
) -> None:
    # A thread names itself when it has begun.
    eventually(lambda: _io_threads() >= 2)
    before = _io_threads()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(file.read_into, 0, bytearray(100)) for _ in range(3)]

        async def main() -> None:
            task = asyncio.create_task(file.aread_into(0, bytearray(100)))
            await asyncio.sleep(0.2)
            start = time.monotonic()
            await asyncio.to_thread(client.close)
            assert time.monotonic() - start < 1.2
            with pytest.raises(errors.Cancelled):
                await task

        asyncio.run(main())
        for one in waiting:
            with pytest.raises(errors.Cancelled):
                one.result(2)
    # Its two threads are gone; clients of other tests keep theirs.
    assert _io_threads() == before - 2


def _io_threads() -> int:
    return sum(name.startswith("gd2fs-io") for name in _thread_names())


def _thread_names() -> Iterator[str]:
    from pathlib import Path

    for task in Path("/proc/self/task").iterdir():
        yield (task / "comm").read_text()


def test_a_loop_that_closes_meanwhile_is_no_concern_of_others(file: File, held: threading.Event) -> None:
    request = file.submit_read(0, bytearray(10))
    loop = asyncio.new_event_loop()
    request._futures.append((loop, loop.create_future()))
    loop.close()
    # As seen by a thread that looked just before it closed.
    loop.is_closed = lambda: False  # type: ignore[method-assign]
    held.set()
    assert request.wait(5) == 10
    del loop.is_closed


def test_a_closed_client_says_so(client: Client, file: File) -> None:
    request = file.submit_read(0, bytearray(10))
    client.close()
    client.close()
    assert request.done
    for call in (
        lambda: file.submit_read(0, bytearray(10)),
        lambda: file.write(0, b"x"),
        lambda: client.stats(),
        lambda: client.control("GET", "/x"),
        lambda: file.length(),
    ):
        with pytest.raises(errors.ClosedError):
            call()


def test_many_clients_come_and_go(node: FakeNode) -> None:
    before = len(list(_thread_names()))
    for _ in range(20):
        with Client([], cluster=CLUSTER, token="") as one:
            assert one.open_layout(node.layout()).read_into(0, bytearray(10)) == 10
    Client([], cluster=CLUSTER, token="")  # dropped without close
    deadline = time.monotonic() + 5
    # The fake node has a thread for each connection; they end with them.
    while len(list(_thread_names())) > before + 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(list(_thread_names())) <= before + 1
