"""Two ends that speak different versions tell each other so, and name both."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gd2fs import _native, errors
from tests.client_fake_node import CLUSTER, HELLO, READ, FakeNode
from tests.client_real_node import RealNode
from tests.contract.data_plane import Files, Transport, within

pytest_plugins = ["tests.contract.data_fixtures"]

MINE = _native.WIRE_VERSION
HEADER_BYTES, VERSION_AT, SUM_AT = 64, 4, 60


def in_version(frame: bytes, version: int) -> bytes:
    """The frame with another version in its header, which is intact otherwise."""
    head = bytearray(frame[:HEADER_BYTES])
    head[VERSION_AT] = version
    head[SUM_AT:] = struct.pack("<I", _native.crc32c(bytes(head[:SUM_AT])))
    return bytes(head) + frame[HEADER_BYTES:]


def hello(versions: tuple[int, int]) -> bytes:
    """The first frame of a client that speaks ``versions``."""
    said = {
        "versions": versions,
        "features": 0,
        "cluster": CLUSTER,
        "token": "",
        "client": "c" * 32,
        "slot": 0,
        "generation": 1,
    }
    ext = json.dumps(said).encode()
    header = _native.header_encode(
        opcode=HELLO, request=1, ext_bytes=len(ext), payload_crc=_native.crc32c(ext)
    )
    return header + ext


@contextmanager
def connected(node: RealNode) -> Iterator[socket.socket]:
    host, _, port = node.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as one:
        yield one


def answer(one: socket.socket) -> tuple[dict[str, int], dict[str, Any]]:
    with one.makefile("rb") as stream:
        header = _native.header_decode(stream.read(HEADER_BYTES))
        said: dict[str, Any] = json.loads(stream.read(header["ext_bytes"]))
        return header, said


def test_a_client_of_the_future_is_told_what_the_node_speaks(node: RealNode) -> None:
    with connected(node) as one:
        one.sendall(hello((MINE + 1, MINE + 1)))
        header, said = answer(one)
        assert header["status"] == errors.Version.code
        assert str(MINE + 1) in said["message"] and str(MINE) in said["message"], said
        assert one.recv(1) == b"", "the node ends the connection"


def test_a_client_that_speaks_both_gets_the_nodes_version(node: RealNode) -> None:
    with connected(node) as one:
        one.sendall(hello((MINE, MINE + 8)))
        header, said = answer(one)
        assert (header["status"], said["version"]) == (0, MINE)


def test_a_header_of_another_version_is_answered(node: RealNode) -> None:
    with connected(node) as one:
        one.sendall(in_version(hello((MINE + 1, MINE + 1)), MINE + 1))
        header, said = answer(one)
        assert (header["status"], header["request"]) == (errors.Version.code, 1)
        assert str(MINE + 1) in said["message"] and str(MINE) in said["message"], said
        assert one.recv(1) == b""


@pytest.mark.parametrize(
    "spoken",
    [
        pytest.param(
            "in the answer",
            marks=pytest.mark.xfail(
                strict=True,
                raises=AssertionError,
                reason="the client's message names the node's version only, not its own",
            ),
        ),
        "in the header",
        "by refusing",
    ],
)
def test_a_node_of_another_version_is_an_error_that_names_both(stream: Transport, spoken: str) -> None:
    def twist(header: dict[str, int], reply: bytes) -> bytes:
        if header["opcode"] != HELLO:
            return reply
        if spoken == "in the answer":
            said = {"version": 9, "features": 0, "node": "n0", "cluster": CLUSTER, "incarnation": 1}
            return fake.reply(header, ext=said | {"payload_bytes_max": 1 << 20})
        if spoken == "in the header":
            return in_version(reply, 9)
        return fake.refuse(
            header, errors.Version.code, f"versions {MINE} to {MINE} are not spoken here, only 9"
        )

    with FakeNode(b"data") as fake, stream.client() as client:
        fake.twist = twist
        with within(4), pytest.raises(errors.Version) as caught:
            client.open_layout(fake.layout()).read_into(0, bytearray(4))
        message = str(caught.value).replace(fake.address.removeprefix("tcp://"), "")
        assert "9" in message and f" {MINE}" in message, caught.value
        assert fake.count(READ) == 0, "nothing is asked of it"


def test_a_version_that_changes_on_the_way_ends_the_connection(stream: Transport) -> None:
    """A reply that is suddenly of another version: never taken for data."""
    with FakeNode(b"data") as fake, stream.client() as client:
        fake.twist = lambda header, reply: in_version(reply, 9) if header["opcode"] == READ else reply
        buffer = bytearray(4)
        with within(4), pytest.raises((errors.Version, errors.Disconnected), match="9"):
            client.open_layout(fake.layout()).read_into(0, buffer)
        assert buffer == bytes(4)


def test_a_refused_client_does_not_disturb_others(node: RealNode, files: Files, transport: Transport) -> None:
    with transport.client() as client:
        file = client.open_layout(files.layout())
        file.write(0, b"data")
        for version in (0, 2, 9, 255):
            with connected(node) as one:
                one.sendall(in_version(hello((version, version)), version))
                assert answer(one)[0]["status"] == errors.Version.code
        back = bytearray(4)
        assert file.read_into(0, back) == 4 and back == b"data"
