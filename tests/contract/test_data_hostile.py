"""A node that sends anything at all: garbage, frames with wrong fields, frames that end early.

The client returns right bytes or an error, in time, touches nothing beside its buffer, and serves on.
"""

from __future__ import annotations

import struct
import threading
from contextlib import suppress
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gd2fs import _native, errors
from tests.client_fake_node import HELLO, OPEN, READ, WRITE, FakeNode
from tests.contract.data_plane import TRANSPORTS, Room, noise, within

STREAM = next(one for one in TRANSPORTS if one.is_stream)
DATA = noise(150_000, 1).tobytes()
OFFSET, LENGTH = 11, 100_001

HEADER_BYTES = 64
#: Fields of the header by name: where they lie and how they are packed.
FIELDS = {
    "magic": (0, "<I"),
    "version": (4, "<B"),
    "opcode": (5, "<B"),
    "flags": (6, "<H"),
    "request": (8, "<Q"),
    "handle": (16, "<I"),
    "epoch": (20, "<I"),
    "offset": (24, "<Q"),
    "length": (32, "<I"),
    "sums_bytes": (36, "<I"),
    "incarnation": (40, "<I"),
    "status": (44, "<I"),
    "deadline_ms": (48, "<I"),
    "payload_crc": (52, "<I"),
    "ext_bytes": (56, "<H"),
    "priority": (58, "<B"),
    "reserved": (59, "<B"),
}


def sealed(frame: bytes) -> bytes:
    """The frame with the right sum over its header: only what the fields say is wrong."""
    crc = struct.pack("<I", _native.crc32c(frame[: HEADER_BYTES - 4]))
    return frame[: HEADER_BYTES - 4] + crc + frame[HEADER_BYTES:]


def with_field(frame: bytes, name: str, value: int) -> bytes:
    at, form = FIELDS[name]
    size = struct.calcsize(form)
    packed = struct.pack(form, value % (1 << 8 * size))
    return sealed(frame[:at] + packed + frame[at + size :])


def with_flip(frame: bytes, at: int, mask: int) -> bytes:
    at %= len(frame)
    return frame[:at] + bytes([frame[at] ^ mask]) + frame[at + 1 :]


def with_summed_flip(frame: bytes, at: int, mask: int) -> bytes:
    """One byte of ext or sums changed and payload_crc made to fit, as by a node whose memory is bad."""
    header = _native.header_decode(frame[:HEADER_BYTES])
    size = header["ext_bytes"] + header["sums_bytes"]
    if not size:
        return frame
    spoiled = with_flip(frame[HEADER_BYTES : HEADER_BYTES + size], at, mask)
    frame = frame[:HEADER_BYTES] + spoiled + frame[HEADER_BYTES + size :]
    return with_field(frame, "payload_crc", _native.crc32c(spoiled))


numbers = st.one_of(
    st.integers(0, 5),
    st.sampled_from([(1 << bits) - 1 for bits in (8, 16, 31, 32, 63, 64)]),
    st.integers(0, 1 << 64),
)
places = st.integers(0, 1 << 20)
masks = st.integers(1, 255)
#: What becomes of the honest reply.
changes = st.one_of(
    st.tuples(st.just("garbage"), st.binary(max_size=300)),
    st.tuples(st.just("garbage behind it"), st.binary(min_size=1, max_size=300)),
    st.tuples(st.just("flip"), places, masks),
    st.tuples(st.just("summed flip"), places, masks),
    st.tuples(st.just("field"), st.sampled_from(sorted(FIELDS)), numbers),
    st.tuples(st.just("two fields"), st.sampled_from(sorted(FIELDS)), numbers, st.just("length"), numbers),
    st.tuples(st.just("cut"), places),
    st.tuples(st.just("twice")),
    st.tuples(st.just("nothing")),
)


def changed(reply: bytes, change: tuple[Any, ...]) -> bytes:
    kind, *rest = change
    if kind == "garbage":
        return bytes(rest[0])
    if kind == "garbage behind it":
        return reply + bytes(rest[0])
    if kind == "flip":
        return with_flip(reply, *rest)
    if kind == "summed flip":
        return with_summed_flip(reply, *rest)
    if kind in ("field", "two fields"):
        for name, value in zip(rest[::2], rest[1::2], strict=True):
            reply = with_field(reply, name, value)
        return reply
    if kind == "cut":
        return reply[: rest[0] % len(reply)]
    return {"twice": reply + reply, "nothing": b""}[kind]


class Liar:
    """A node that changes its first answer to one operation, then closes; honest from then on."""

    def __init__(self, opcode: int, change: tuple[Any, ...]) -> None:
        self.node = FakeNode(DATA)
        self._opcode, self._change = opcode, change
        self._lock = threading.Lock()
        self._lies_left = 1
        self._closing = False
        self.node.twist = self._twist

    def _twist(self, header: dict[str, int], reply: bytes) -> bytes | None:
        with self._lock:
            if header["opcode"] != self._opcode or not self._lies_left:
                return reply
            self._lies_left -= 1
        one = self.node._sockets[-1]
        with suppress(OSError):  # the client has heard enough
            one.sendall(changed(reply, self._change))
        # Closing spares the client the wait for the rest.
        return None

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self.node.__exit__()


@settings(max_examples=80, deadline=None)
@given(opcode=st.sampled_from([HELLO, OPEN, READ, READ, READ]), change=changes)
def test_reads_from_a_node_that_lies_once(opcode: int, change: tuple[Any, ...]) -> None:
    with Liar(opcode, change) as liar, STREAM.client(streams=1) as client, within(6):
        file = client.open_layout(liar.node.layout())
        room = Room(client, STREAM, LENGTH)
        room.bytes[:] = 0xA5
        try:
            moved = file.read_into(OFFSET, room.bytes, timeout_s=3)
        except errors.Gd2fsError:
            # What the lie was about is over.
            moved = file.read_into(OFFSET, room.bytes, timeout_s=3)
        room.check_guards()
        # A short answer with the right sums is a node's way to say where its column ends.
        assert moved == LENGTH or "length" in change
        assert bytes(room.bytes[:moved]) == DATA[OFFSET : OFFSET + moved]
        again = np.empty(LENGTH, np.uint8)
        assert file.read_into(OFFSET, again, timeout_s=3) == LENGTH
        assert again.tobytes() == DATA[OFFSET : OFFSET + LENGTH]
        assert client.stats()["requests_pending"] == 0


@settings(max_examples=40, deadline=None)
@given(change=changes)
def test_writes_to_a_node_that_lies_once(change: tuple[Any, ...]) -> None:
    with Liar(WRITE, change) as liar, STREAM.client(streams=1) as client, within(6):
        file = client.open_layout(liar.node.layout())
        data = noise(LENGTH, 2)
        with suppress(errors.Gd2fsError):
            assert file.write(OFFSET, data, timeout_s=3) == LENGTH
        assert file.write(OFFSET, data, timeout_s=3) == LENGTH
        assert bytes(liar.node.data[OFFSET : OFFSET + LENGTH]) == data.tobytes()
