"""When a node's replies go out, and how long they may wait for their peer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.client_fake_node import PING, READ, WRITE
from tests.client_real_node import RealNode
from tests.contract.data_peer import RawClient
from tests.contract.data_plane import KIB, MIB, TRANSPORTS, Files, noise

pytest_plugins = ["tests.contract.data_fixtures"]

STREAM = next(one for one in TRANSPORTS if one.is_stream)


@pytest.fixture(params=["tcp", "local"])
def raw(request: pytest.FixtureRequest, node: RealNode) -> Iterator[RawClient]:
    """Greeted already. What it does not receive piles up in the node soon."""
    scheme = "tcp" if request.param == "tcp" else "shm"
    address = next(one for one in node.addresses if one.startswith(scheme))
    with RawClient(address, receive_bytes=64 * KIB) as one:
        one.ask(one.hello())
        yield one


@pytest.mark.parametrize("part", ["a piece of a header", "a header without its payload", "half a payload"])
def test_a_reply_is_not_held_back_behind_a_part_of_the_next_request(
    raw: RawClient, files: Files, part: str
) -> None:
    handle = raw.ask(raw.open(files.layout()))["handle"]
    payload = noise(32 * KIB, 1).tobytes()
    second = raw.frame(WRITE, payload=payload, handle=handle, epoch=1)
    upto = {"a piece of a header": 30, "a header without its payload": len(second) - len(payload)}
    cut = upto.get(part, len(second) - len(payload) // 2)
    # In one system call, so that the node receives them together.
    raw.send(raw.frame(PING) + second[:cut])
    header, _, _, _ = raw.receive(timeout_s=2)
    assert (header["opcode"], header["status"]) == (PING, 0)
    raw.send(second[cut:])
    header, ext, _, _ = raw.receive(timeout_s=2)
    assert (header["opcode"], header["status"]) == (WRITE, 0), ext


@pytest.mark.parametrize("short", ["first", "last"])
def test_a_short_deadline_does_not_end_the_replies_beside_it(
    raw: RawClient, files: Files, short: str
) -> None:
    """They go out together, to a peer that takes its time; it is that of the longest deadline."""
    length = 16 * MIB
    layout = files.layout(stripe_unit=length)
    data = noise(length, 2)
    with STREAM.client() as client:
        assert client.open_layout(layout).write(0, data) == length
    handle = raw.ask(raw.open(layout))["handle"]
    allowed_ms = (200, 30_000) if short == "first" else (30_000, 200)
    ping = raw.frame(PING, deadline_ms=allowed_ms[0])
    raw.send(ping + raw.frame(READ, handle=handle, epoch=1, length=length, deadline_ms=allowed_ms[1]))
    # Far beyond 200 ms, and beyond the second that every reply gets.
    time.sleep(1.5)
    header, _, _, _ = raw.receive()
    assert (header["opcode"], header["status"]) == (PING, 0)
    header, ext, _, there = raw.receive()
    assert (header["opcode"], header["status"]) == (READ, 0), ext
    assert there == data.tobytes()
    assert raw.ask(raw.frame(PING))["status"] == 0
