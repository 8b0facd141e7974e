"""A node that answers a WRITE before it has received it: the call returns only when its memory is free."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Request
from tests.client_fake_node import FakeNode
from tests.contract.data_plane import MIB, TRANSPORTS, eventually, noise

STREAM = next(one for one in TRANSPORTS if one.is_stream)
#: More than the buffers of both ends of a connection hold together.
LENGTH = 48 * MIB
RECEIVE_BUFFER_BYTES = 1 * MIB


class EarlyNode(FakeNode):
    """Answers each WRITE at once with ``status``, and receives it once ``go_on`` is set; ``received`` is
    what came."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.go_on = threading.Event()
        self.answered = threading.Event()
        self.received: list[bytes] = []
        super().__init__()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)

    def receive(self, one: socket.socket, stream: BufferedReader, header: dict[str, int]) -> bytes:
        if self.status:
            one.sendall(self.refuse(header, self.status))
        else:
            one.sendall(self.reply(header, length=header["length"]))
        self.answered.set()
        assert self.go_on.wait(20)
        came = bytearray()
        with suppress(OSError):
            while part := stream.read1(header["length"] - len(came)):
                came += part
        self.received.append(bytes(came))
        raise ConnectionAbortedError("one answer is enough")


@contextmanager
def writing(node: EarlyNode, source: np.ndarray) -> Iterator[tuple[Request, threading.Thread]]:
    """A write under way, and a thread that reuses its memory as soon as it may."""
    with STREAM.client(streams=1) as client:
        file = client.open_layout(node.layout(stripe_unit=64 * MIB))
        request = file.submit_write(0, source, timeout_s=10)

        def reuse() -> None:
            with suppress(errors.Gd2fsError):
                request.wait()
            source[:] = 0
            node.go_on.set()

        thread = threading.Thread(target=reuse)
        thread.start()
        assert node.answered.wait(5)
        yield request, thread
        # The node sees the end of what it was sent, whether the connection is still open or not.
        thread.join(10)
        node.drop_connections()


def check_nothing_but(data: np.ndarray, received: list[bytes]) -> None:
    for part in received:
        assert part == data[: len(part)].tobytes(), "the node got bytes that the caller had put there later"


def test_an_early_refusal_waits_until_the_memory_is_free() -> None:
    data = noise(LENGTH, 1)
    source = data.copy()
    with EarlyNode(errors.Forbidden.code) as node, writing(node, source) as (request, thread):
        thread.join(0.5)
        assert not request.done, "its memory is still being sent"
        node.go_on.set()
        thread.join(10)
        with pytest.raises(errors.Forbidden):
            request.wait()
        eventually(lambda: bool(node.received))
    check_nothing_but(data, node.received)
    assert len(node.received[0]) == LENGTH


def test_an_early_success_is_a_lie() -> None:
    data = noise(LENGTH, 2)
    source = data.copy()
    with EarlyNode(0) as node, writing(node, source) as (request, thread):
        thread.join(15)
        with pytest.raises(errors.Disconnected):
            request.wait()
    check_nothing_but(data, node.received)


def test_an_early_refusal_ends_with_its_connection() -> None:
    """As by a node that runs out of time for the write, says so and closes."""
    source = noise(LENGTH, 3)
    with EarlyNode(errors.Forbidden.code) as node, writing(node, source) as (request, thread):
        # It goes on receiving: a reset could overtake the answer.
        node._sockets[-1].shutdown(socket.SHUT_WR)
        thread.join(15)
        with pytest.raises(errors.Forbidden):
            request.wait()


def test_an_early_refusal_does_not_outlive_its_time() -> None:
    data = noise(LENGTH, 4)
    source = data.copy()
    with EarlyNode(errors.Forbidden.code) as node, STREAM.client(streams=1) as client:
        file = client.open_layout(node.layout(stripe_unit=64 * MIB))
        with pytest.raises(errors.Timeout):
            file.write(0, source, timeout_s=1)
        source[:] = 0
        node.go_on.set()
    check_nothing_but(data, node.received)
