"""Queued requests: a descriptor to poll, and `reap`, for programs with a loop of their own."""

from __future__ import annotations

import asyncio
import select
import threading
import time
from collections.abc import Iterator

import pytest

from gd2fs import errors
from gd2fs.client import Client, File, Request, completions
from tests.client_fake_node import CLUSTER, READ, FakeNode

DATA = bytes(range(250)) * 4000


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode(DATA) as one:
        yield one


@pytest.fixture
def client() -> Iterator[Client]:
    with Client([], cluster=CLUSTER, token="") as one:
        yield one


@pytest.fixture
def file(client: Client, node: FakeNode) -> File:
    return client.open_layout(node.layout())


@pytest.fixture
def held(node: FakeNode) -> Iterator[threading.Event]:
    with node.holding_reads() as gate:
        yield gate


def is_readable(client: Client, patience_s: float = 0.0) -> bool:
    return bool(select.select([client], [], [], patience_s)[0])


def test_a_loop_that_polls(client: Client, file: File) -> None:
    assert not is_readable(client)
    buffers = [bytearray(1000) for _ in range(300)]
    under_way = {
        file.submit_read(1000 * index, buffer, queued=True): index for index, buffer in enumerate(buffers)
    }
    while under_way:
        assert is_readable(client, 5)
        for request in client.reap():
            index = under_way.pop(request)
            assert request.done and request.wait(0) == 1000
            assert buffers[index] == DATA[1000 * index : 1000 * (index + 1)]
    assert client.reap() == [] and not is_readable(client)


def test_what_others_wait_for_does_not_come_and_takes_nothing_away(
    client: Client, file: File, held: threading.Event
) -> None:
    queued = file.submit_read(0, bytearray(10), queued=True)
    plain = file.submit_read(0, bytearray(10))
    assert not is_readable(client)
    held.set()
    # Whoever waits takes all completions, also those of others.
    plain.wait(5)
    queued.wait(5)
    assert is_readable(client)
    assert client.reap() == [queued]
    assert not is_readable(client) and client.reap() == []


def test_a_request_that_fails_is_reaped_too(client: Client, file: File, node: FakeNode) -> None:
    node.twist = lambda header, reply: node.refuse(header, 201) if header["opcode"] == READ else reply
    request = file.submit_read(0, bytearray(10), queued=True)
    assert client.reap(5) == [request]
    with pytest.raises(errors.Hole):
        request.wait(0)


def test_reap_waits_no_longer_than_it_may(client: Client, file: File, held: threading.Event) -> None:
    request = file.submit_read(0, bytearray(10), queued=True)
    begun = time.monotonic()
    assert client.reap(0.2) == []
    assert 0.2 <= time.monotonic() - begun < 2
    held.set()
    assert client.reap(None) == [request]


def test_unreaped_requests_are_bounded(client: Client, file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "QUEUED_MAX", 3)
    requests = {file.submit_read(0, bytearray(10), queued=True) for _ in range(3)}
    with pytest.raises(errors.Overloaded, match="reap before"):
        file.submit_read(0, bytearray(10), queued=True)
    assert file.read_into(0, bytearray(10)) == 10
    reaped: set[Request] = set()
    while reaped != requests:
        reaped |= set(client.reap(5))
    file.submit_read(0, bytearray(10), queued=True)


def test_close_wakes_who_reaps_and_leaves_nothing(client: Client, file: File, held: threading.Event) -> None:
    request = file.submit_read(0, bytearray(10), queued=True)
    reaped: list[Request] = []
    thread = threading.Thread(target=lambda: reaped.extend(client.reap(None)))
    thread.start()
    time.sleep(0.1)
    client.close()
    thread.join(5)
    assert reaped == [request]
    with pytest.raises(errors.Cancelled):
        request.wait(0)
    with pytest.raises(errors.ClosedError):
        client.reap(None)
    with pytest.raises(errors.ClosedError):
        client.fileno()


def test_in_an_event_loop_beside_awaited_ones(client: Client, file: File) -> None:
    reaped: set[Request] = set()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(client, lambda: reaped.update(client.reap()))
        queued = {file.submit_read(0, bytearray(10), queued=True) for _ in range(50)}
        awaited = [file.aread_into(0, bytearray(10)) for _ in range(50)]
        assert await asyncio.gather(*awaited) == [10] * 50
        deadline = time.monotonic() + 5
        while reaped != queued:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        loop.remove_reader(client)

    asyncio.run(main())


def test_closing_wakes_a_loop_that_polls_while_nothing_is_under_way(client: Client) -> None:
    poller = select.epoll()
    poller.register(client.fileno(), select.EPOLLIN)
    closer = threading.Timer(0.05, client.close)
    closer.start()
    for _ in range(2):
        assert poller.poll(5), "the loop sleeps on"
        with pytest.raises(errors.ClosedError):
            while client.reap() == []:
                assert poller.poll(5), "the loop sleeps on"
    closer.join()


def test_a_wait_of_no_number_is_refused(client: Client) -> None:
    with pytest.raises(errors.Invalid, match="timeout_s"):
        client.reap(float("nan"))
