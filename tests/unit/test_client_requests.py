"""Requests against a node that misbehaves: what is retried, what is an error, and how long it takes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from gd2fs import _native, errors
from gd2fs.client import Client
from tests.client_fake_control import FakeControl
from tests.client_fake_node import CLUSTER, HELLO, OPEN, READ, WRITE, FakeNode

DATA = np.random.default_rng(6).bytes(300_000)


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode(DATA) as one:
        yield one


@pytest.fixture
def client() -> Iterator[Client]:
    with Client([], cluster=CLUSTER, token="") as one:
        yield one


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def read(client: Client, node: FakeNode, length: int = 100_000, **options: float) -> bytes:
    buffer = bytearray(length)
    moved = client.open_layout(node.layout()).read_into(11, buffer, **options)
    return bytes(buffer[:moved])


def test_bytes_arrive_and_the_end_is_short(client: Client, node: FakeNode) -> None:
    assert read(client, node) == DATA[11:100_011]
    assert read(client, node, 400_000) == DATA[11:]
    file = client.open_layout(node.layout())
    assert file.read_into(len(DATA) + 5, bytearray(10)) == 0
    assert file.length() == len(DATA)
    assert node.count(OPEN) == 2, "one for all reads, one to ask for the length"


def test_damaged_bytes_are_never_returned(client: Client, node: FakeNode) -> None:
    node.twist = lambda header, reply: (
        reply[:-1] + bytes([reply[-1] ^ 1]) if header["opcode"] == READ else reply
    )
    before = node.count(READ)
    with pytest.raises(errors.Checksum, match=r"/file \[11, 100011\)"):
        read(client, node)
    assert node.count(READ) - before == 2, "tried once more"
    stats = client.stats()
    assert [stats[name] for name in ("checksum_failures", "retries", "failures")] == [2, 1, 1]


def test_damage_on_a_way_that_is_open_is_tried_and_counted_alike(client: Client, node: FakeNode) -> None:
    """Such a small request takes a way of its own."""
    assert read(client, node) == DATA[11:100_011]
    test_damaged_bytes_are_never_returned(client, node)


def test_what_fails_on_a_way_that_is_open_is_a_failure(client: Client, node: FakeNode) -> None:
    assert read(client, node) == DATA[11:100_011]
    node.twist = lambda header, reply: node.refuse(header, 201) if header["opcode"] == READ else reply
    with pytest.raises(errors.Hole, match=r"/file \[11, 100011\)"):
        read(client, node)
    node.twist = lambda header, reply: b"" if header["opcode"] == READ else reply
    with pytest.raises(errors.Timeout):
        read(client, node, timeout_s=0.1)
    assert client.stats()["failures"] == 2


def test_damage_that_does_not_repeat_is_healed(client: Client, node: FakeNode) -> None:
    damaged = iter([True])

    def once(header: dict[str, int], reply: bytes) -> bytes:
        if header["opcode"] == READ and next(damaged, False):
            return reply[:-1] + bytes([reply[-1] ^ 1])
        return reply

    node.twist = once
    assert read(client, node) == DATA[11:100_011]


@pytest.mark.parametrize("case", range(9))
def test_a_reply_that_makes_no_sense_ends_the_connection(client: Client, node: FakeNode, case: int) -> None:
    def nonsense(header: dict[str, int], reply: bytes) -> bytes | None:
        if header["opcode"] != READ:
            return reply
        body = DATA[11:100_011]
        return [
            lambda: b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100),
            lambda: reply[:-100],  # and nothing more
            lambda: node.reply(header, data=body, request=header["request"] + 1000),
            lambda: node.reply(header, data=body, incarnation=99),
            lambda: node.reply(header, data=body, opcode=WRITE, sums_bytes=0, payload_crc=0),
            # Bytes of another place, and bytes without sums, must not pass for the wanted ones.
            lambda: node.reply(header | {"offset": 32_768 + 11}, data=body),
            lambda: node.reply(header, data=body, flags=3, sums_bytes=0, payload_crc=0),
            lambda: node.reply(header, data=body + b"too much"),
            lambda: reply[:70] + bytes(4) + reply[74:],  # sums damaged on the way
        ][case]()

    node.twist = nonsense
    with within(5), pytest.raises((errors.Disconnected, errors.Timeout)) as caught:
        read(client, node, timeout_s=1.5)
    if case != 1:
        assert isinstance(caught.value, errors.Disconnected)
        assert node.count(READ) == 5, "a first try and four more"


def test_a_node_that_closes_is_tried_again(client: Client, node: FakeNode) -> None:
    closes = iter([True, True])
    node.twist = lambda header, reply: (
        None if header["opcode"] in (READ, WRITE) and next(closes, False) else reply
    )
    assert read(client, node) == DATA[11:100_011]
    assert client.stats()["retries"] == 2


class TwoSlots:
    """A node whose slot 0 is busy with a read until the first WRITE came, which so goes to slot 1.

    What is sent next then goes to slot 0, whose connection is fine: only the rule makes the client say
    HELLO on slot 1 before.
    """

    def __init__(self, node: FakeNode, client: Client) -> None:
        self.order: list[int] = []
        self.write_gate = threading.Event()
        self._read_gate = threading.Event()
        self._writes = 0
        node.twist = self._twist
        self.file = client.open_layout(node.layout())
        self._read = self.file.submit_read(0, bytearray(300_000))
        deadline = time.monotonic() + 5
        while node.count(READ) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def _twist(self, header: dict[str, int], reply: bytes) -> bytes | None:
        self.order.append(header["opcode"])
        if header["opcode"] == READ:
            self._read_gate.wait(5)
        elif header["opcode"] == WRITE:
            self._writes += 1
            if self._writes == 1:
                self._read_gate.set()
                self._read.wait()
                self.write_gate.wait(5)
                return None
        return reply


@pytest.fixture
def two_slots(node: FakeNode) -> Iterator[TwoSlots]:
    with Client([], cluster=CLUSTER, token="", streams=2) as client:
        yield TwoSlots(node, client)


def check_fence(node: FakeNode, two_slots: TwoSlots) -> None:
    opcodes = two_slots.order
    first, second = (index for index, opcode in enumerate(opcodes) if opcode == WRITE)
    assert opcodes[first:second].count(HELLO) == 1, "the second WRITE waited for a HELLO"
    slot_0, slot_1, fence = node.hellos
    assert (slot_0["slot"], slot_1["slot"], fence["slot"]) == (0, 1, 1)
    assert fence["generation"] > slot_1["generation"] and fence["client"] == slot_1["client"]


def test_a_write_is_repeated_only_behind_a_fence(node: FakeNode, two_slots: TwoSlots) -> None:
    two_slots.write_gate.set()
    assert two_slots.file.write(0, b"x" * 100) == 100
    check_fence(node, two_slots)


def test_a_write_after_one_that_timed_out_waits_for_the_fence(node: FakeNode, two_slots: TwoSlots) -> None:
    with pytest.raises(errors.Timeout):
        two_slots.file.write(0, b"old", timeout_s=0.3)
    two_slots.file.write(0, b"new")
    check_fence(node, two_slots)
    two_slots.write_gate.set()


def test_time_is_bounded_when_the_node_is_slow_and_late_replies_are_dropped(
    client: Client, node: FakeNode
) -> None:
    delay = iter([0.6])

    def slow(header: dict[str, int], reply: bytes) -> bytes:
        if header["opcode"] == READ:
            time.sleep(next(delay, 0))
        return reply

    node.twist = slow
    buffer = bytearray(1000)
    file = client.open_layout(node.layout())
    with within(0.5), pytest.raises(errors.Timeout):
        file.read_into(0, buffer, timeout_s=0.1)
    buffer[:] = b"m" * 1000
    other = bytearray(1000)
    assert file.read_into(5, other) == 1000
    assert other == DATA[5:1005]
    assert buffer == b"m" * 1000
    assert len(node.hellos) == 1, "the connection is as good as before"


def test_a_read_given_up_while_its_bytes_arrive_ends_the_connection(client: Client, node: FakeNode) -> None:
    gate = threading.Event()

    def half(header: dict[str, int], reply: bytes) -> bytes | None:
        if header["opcode"] != READ:
            return reply
        sockets = node._sockets[-1]
        sockets.sendall(reply[: len(reply) // 2])
        gate.wait(5)
        with suppress(OSError):  # the client has shut the connection
            sockets.sendall(reply[len(reply) // 2 :])
        return None

    node.twist = half
    buffer = bytearray(200_000)
    with within(1), pytest.raises(errors.Timeout):
        client.open_layout(node.layout()).read_into(0, buffer, timeout_s=0.3)
    assert buffer[:1000] == DATA[:1000], "half of it had arrived"
    buffer[:] = b"m" * 200_000
    gate.set()
    time.sleep(0.2)
    assert buffer == b"m" * 200_000


def test_cancel_completes_with_cancelled(client: Client, node: FakeNode) -> None:
    gate = threading.Event()
    node.twist = lambda header, reply: reply if header["opcode"] != READ or gate.wait(5) else None
    request = client.open_layout(node.layout()).submit_read(0, bytearray(10))
    with pytest.raises(errors.Timeout, match="still under way"):
        request.wait(0.05)
    assert not request.done
    request.cancel()
    with within(0.5), pytest.raises(errors.Cancelled):
        request.wait()
    gate.set()


@pytest.mark.parametrize(
    ("code", "kind", "tries"),
    [
        (108, errors.Overloaded, 5),
        (109, errors.ShuttingDown, 5),
        (201, errors.Hole, 1),
        (202, errors.Lost, 1),
        (205, errors.Corrupt, 1),
        (301, errors.StaleLayout, 1),  # the layout can't be refreshed
        (402, errors.Forbidden, 1),
        (9999, errors.Internal, 1),
    ],
)
def test_refusals_keep_their_code(
    client: Client, node: FakeNode, code: int, kind: type[errors.Gd2fsError], tries: int
) -> None:
    node.twist = lambda header, reply: (
        node.refuse(header, code, "because") if header["opcode"] == READ else reply
    )
    with pytest.raises(kind, match=r"/file \[11, 100011\): because"):
        read(client, node)
    assert node.count(READ) == tries


def test_an_absent_node_is_an_error_at_once(client: Client, node: FakeNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"tcp://127.0.0.1:{gone.getsockname()[1]}"
    layout = node.layout()
    layout["columns"][0]["replicas"][0] |= {"node": "gone", "addresses": [address]}
    with within(1), pytest.raises(errors.Disconnected, match="node gone can't be reached"):
        client.open_layout(layout).read_into(0, bytearray(10))


def test_a_node_that_accepts_and_says_nothing_is_an_error_in_time(client: Client, node: FakeNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        layout = node.layout()
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        layout["columns"][0]["replicas"][0] |= {"node": "mute", "addresses": [address]}
        file = client.open_layout(layout)
        with within(1.5), pytest.raises(errors.Timeout):
            file.read_into(0, bytearray(10), timeout_s=1)
        # Many at once share one attempt instead of waiting for each other's.
        requests = [file.submit_read(0, bytearray(10)) for _ in range(50)]
        with within(8):
            for request in requests:
                with pytest.raises(errors.Disconnected, match="HELLO"):
                    request.wait()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"cluster": "another"}, errors.WrongCluster), ({"node": "n9"}, errors.WrongNode)],
)
def test_another_cluster_or_node_is_not_talked_to(
    client: Client, node: FakeNode, changes: dict[str, str], kind: type[errors.Gd2fsError]
) -> None:
    said = {"version": 1, "features": 0, "node": "n0", "cluster": CLUSTER, "incarnation": 1}
    said |= {"payload_bytes_max": 1} | changes
    node.twist = lambda header, reply: node.reply(header, ext=said) if header["opcode"] == HELLO else reply
    with pytest.raises(kind):
        read(client, node)
    assert node.count(OPEN) == 0


def test_a_hole_between_columns_is_not_the_end() -> None:
    unit = 32 << 10
    with (
        FakeNode(DATA[:unit], node="a") as a,
        FakeNode(DATA[: 2 * unit], node="b") as b,
        Client([], cluster=CLUSTER, token="") as client,
    ):
        columns = [a.layout()["columns"][0], b.layout()["columns"][0]]
        file = client.open_layout(a.layout(stripe_unit=unit, width=2, columns=columns))
        buffer = bytearray(4 * unit)
        assert file.read_into(0, buffer) == 2 * unit
        assert buffer[: 2 * unit] == DATA[: 2 * unit]
        # Column b now ends beyond the third chunk, which would be column a's.
        b.data.extend(DATA[2 * unit : 4 * unit])
        with pytest.raises(errors.Hole, match=rf"\[{2 * unit}, "):
            file.read_into(0, buffer)
        # Seen also by a read that touches column a alone.
        with pytest.raises(errors.Hole):
            file.read_into(2 * unit, buffer[:100])
        assert file.length() == 4 * unit


def test_a_file_that_grows_under_a_read_has_no_hole() -> None:
    unit = 32 << 10
    with (
        FakeNode(DATA[:unit], node="a") as a,
        FakeNode(DATA[:unit], node="b") as b,
        Client([], cluster=CLUSTER, token="") as client,
    ):

        def grow(header: dict[str, int], reply: bytes) -> bytes:
            # Whenever its end is asked for, the file has just become longer.
            if header["opcode"] != OPEN or not a.count(READ) or len(a.data) == 4 * unit:
                return reply
            for one in (a, b):
                one.data.extend(DATA[len(one.data) : len(one.data) + unit // 2])
            opened = {"handle": 1, "length": len(a.data), "sealed": 0, "grant": 0, "lost": False}
            return a.reply(header, ext=opened)

        a.twist = grow
        columns = [a.layout()["columns"][0], b.layout()["columns"][0]]
        file = client.open_layout(a.layout(stripe_unit=unit, width=2, columns=columns))
        buffer = bytearray(6 * unit)
        assert file.read_into(0, buffer) == 4 * unit
        assert buffer[: 4 * unit] == DATA[: 4 * unit]


@pytest.mark.parametrize("offset", [-1, 1 << 63, 1 << 70])
def test_an_offset_that_no_file_has_is_refused_by_name(client: Client, node: FakeNode, offset: int) -> None:
    file = client.open_layout(node.layout())
    for call in (
        lambda: file.read_into(offset, bytearray(1)),
        lambda: file.write(offset, b"x"),
        lambda: client.read("/file", offset),
    ):
        with pytest.raises(errors.Invalid, match="offset"):
            call()


def test_a_stale_layout_is_fetched_anew_once(node: FakeNode) -> None:
    fresh = node.layout(refresh=True)
    fresh["columns"] = [fresh["columns"][0] | {"epoch": 2}]
    node.twist = lambda header, reply: (
        node.refuse(header, 301, "epoch 2 is current") if header["epoch"] == 1 else reply
    )
    control = FakeControl()
    control.answers["/v1/fs/layout"] = (200, fresh)
    try:
        with Client([control.url], cluster=CLUSTER, token="") as client:
            file = client.open_layout(node.layout(refresh=True))
            requests = [file.submit_read(0, bytearray(1000)) for _ in range(20)]
            assert [request.wait() for request in requests] == [1000] * 20
            assert [seen[1] for seen in control.seen] == [f"/v1/fs/layout?file={fresh['file']}&rights=read"]
            # A writer asks for its own rights; if control does not know the file any more, the first
            # failure stays.
            control.answers["/v1/fs/layout"] = (404, {"error": {"code": 501, "message": "no such file"}})
            with pytest.raises(
                errors.StaleLayout, match=r"epoch 2 is current; no newer layout: no such file"
            ):
                file.write(0, b"x")
            assert control.seen[-1][1].endswith("rights=read,write")
    finally:
        control.stop()


def test_bytes_under_way_are_bounded(node: FakeNode) -> None:
    gate = threading.Event()
    node.twist = lambda header, reply: reply if header["opcode"] != READ or gate.wait(5) else None
    budget = {"outstanding_bytes_max": 256 << 10, "streams": 4}
    native = _native.Client([], CLUSTER, "", **budget)
    file = native.file(json.dumps(node.layout()))
    buffers = [bytearray(64 << 10) for _ in range(20)]
    for buffer in buffers:
        native.submit_read(file, 0, [buffer], 10_000)
    time.sleep(0.3)
    assert node.count(READ) <= 4, "256 KiB of 64 KiB each"
    gate.set()
    done: list[tuple[int, int, int, str]] = []
    while len(done) < 20:
        assert native.reap(100, 5_000, done)
    assert all(code == 0 for _, code, _, _ in done)
    assert all(buffer == DATA[: 64 << 10] for buffer in buffers)
    native.close()


def test_streams_share_the_work(node: FakeNode) -> None:
    node.twist = lambda _header, reply: (time.sleep(0.02), reply)[1]
    with Client([], cluster=CLUSTER, token="", streams=3) as client:
        file = client.open_layout(node.layout())
        requests = [file.submit_read(0, bytearray(300_000)) for _ in range(30)]
        assert sum(request.wait() for request in requests) == 9_000_000
    assert {hello["slot"] for hello in node.hellos} == {0, 1, 2}


def test_too_many_requests_are_refused_early_and_it_recovers(client: Client, node: FakeNode) -> None:
    native = client._native
    file, buffer = native.file(json.dumps(node.layout())), bytearray(1)
    gate = threading.Event()
    node.twist = lambda header, reply: reply if header["opcode"] != READ or gate.wait(20) else None
    with pytest.raises(errors.Overloaded, match="65536"):
        for _ in range(70_000):
            native.submit_read(file, 0, [buffer], 60_000)
    for request in range(1, 65_537):
        native.cancel(request)
    gate.set()
    reaped: list[tuple[int, int, int, str]] = []
    while len(reaped) < 65_536:
        assert native.reap(100_000, 10_000, reaped)
    assert read(client, node) == DATA[11:100_011]
