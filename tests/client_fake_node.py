"""A storage node of few lines for tests of the client: true to the wire, and able to break any rule."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from typing import Any

from gd2fs import _native

HELLO, OPEN, CLOSE, READ, WRITE = 1, 2, 3, 4, 5
PIECE = 32 << 10
CLUSTER = "cluster-of-tests"

#: Gets a request's header and the honest reply; returns the bytes to send, or None to close the connection.
Twist = Callable[[dict[str, int], bytes], bytes | None]


class FakeNode:
    """Serves one column of every file from `data`. A context manager."""

    def __init__(self, data: bytes = b"", *, node: str = "n0", incarnation: int = 1) -> None:
        self.node = node
        self.incarnation = incarnation
        self.data = bytearray(data)
        self.twist: Twist = lambda _header, reply: reply
        self.hellos: list[dict[str, Any]] = []
        self.seen: list[dict[str, int]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def layout(self, **changes: Any) -> dict[str, Any]:
        replica = {"node": self.node, "incarnation": self.incarnation, "addresses": [self.address]}
        layout = {
            "file": "0" * 31 + "1",
            "path": "/file",
            "stripe_unit": 4 << 20,
            "width": 1,
            "columns": [{"epoch": 1, "replicas": [replica]}],
            "capability": "a capability",
            "refresh": False,
        }
        return layout | changes

    def count(self, opcode: int) -> int:
        return sum(header["opcode"] == opcode for header in self.seen)

    def __enter__(self) -> FakeNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()
        for thread in self._threads:
            thread.join(5)

    def drop_connections(self) -> None:
        for one in self._sockets:
            with suppress(OSError):  # the client was faster
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(one)
            self._threads.append(threading.Thread(target=self._serve, args=(one,), daemon=True))
            self._threads[-1].start()

    def _serve(self, one: socket.socket) -> None:
        with one, one.makefile("rb") as stream:
            try:
                while head := stream.read(64):
                    header = _native.header_decode(head)
                    ext = stream.read(header["ext_bytes"])
                    stream.read(header["sums_bytes"])
                    payload = self.receive(one, stream, header) if header["opcode"] == WRITE else b""
                    self.seen.append(header)
                    reply = self.twist(header, self._answer(header, ext, payload))
                    if reply is None:
                        return
                    one.sendall(reply)
            except OSError:
                return

    def receive(self, one: socket.socket, stream: BufferedReader, header: dict[str, int]) -> bytes:
        """The payload of a WRITE; subclasses answer before they have it."""
        return stream.read(header["length"])

    def _answer(self, header: dict[str, int], ext: bytes, payload: bytes) -> bytes:
        if header["opcode"] == HELLO:
            self.hellos.append(json.loads(ext))
            said = {
                "version": 1,
                "features": 0,
                "node": self.node,
                "cluster": CLUSTER,
                "incarnation": self.incarnation,
                "payload_bytes_max": 64 << 20,
            }
            return self.reply(header, ext=said)
        if header["opcode"] == OPEN:
            opened = {"handle": 1, "length": len(self.data), "sealed": 0, "grant": 0, "lost": False}
            return self.reply(header, ext=opened)
        start, end = header["offset"], header["offset"] + header["length"]
        if header["opcode"] == READ:
            return self.reply(header, data=bytes(self.data[start:end]))
        if header["opcode"] == WRITE:
            self.data.extend(bytes(max(0, end - len(self.data))))
            self.data[start:end] = payload
            return self.reply(header, length=header["length"])
        return self.reply(header)

    def reply(
        self,
        header: dict[str, int],
        *,
        ext: dict[str, Any] | None = None,
        data: bytes = b"",
        status: int = 0,
        **changes: int,
    ) -> bytes:
        """A well-formed reply, with any header field changed."""
        sums, at = b"", header["offset"]
        end = at + len(data)
        while at < end:
            upto = min((at // PIECE + 1) * PIECE, end)
            sums += struct.pack("<I", _native.crc32c(data[at - header["offset"] : upto - header["offset"]]))
            at = upto
        extension = json.dumps(ext).encode() if ext is not None else b""
        fields = {
            "opcode": header["opcode"],
            "flags": 1,
            "request": header["request"],
            "handle": header["handle"],
            "epoch": header["epoch"],
            "offset": header["offset"],
            "length": len(data),
            "sums_bytes": len(sums),
            "incarnation": self.incarnation,
            "status": status,
            "payload_crc": _native.crc32c(extension + sums),
            "ext_bytes": len(extension),
        }
        return _native.header_encode(**(fields | changes)) + extension + sums + data

    def refuse(self, header: dict[str, int], code: int, message: str = "no") -> bytes:
        return self.reply(header, ext={"message": message}, status=code)
