"""Storage nodes of few lines for tests of the client: true to the wire, and able to break any rule, or to
stand still between any two steps."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from gd2fs import _native

HELLO, OPEN, CLOSE, READ, WRITE, PING, MAP, UNMAP = range(1, 9)
#: Flags of a header.
RESPONSE, ONE_SIDED = 1, 4
HEADER_BYTES = 64
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
        self._listener = self._listen()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _listen(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    @contextmanager
    def holding_reads(self) -> Iterator[threading.Event]:
        """It answers no READ before the event is set."""
        gate = threading.Event()
        self.twist = lambda header, reply: reply if header["opcode"] != READ or gate.wait(20) else None
        yield gate
        gate.set()

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
            self._sockets.append(one)
            self._threads.append(threading.Thread(target=self._serve, args=(one,), daemon=True))
            self._threads[-1].start()

    def _serve(self, one: socket.socket) -> None:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with one, one.makefile("rb") as stream:
            try:
                while head := stream.read(HEADER_BYTES):
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
            "flags": RESPONSE,
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


#: Where a `FakeLocalNode` can stand still: what it has seen or done last. A frame that is only "seen" is
#: still in the socket, with its descriptor. "halfway" is in the middle of the answer's frame.
STEPS_TO_READ = (
    *("accepted", "HELLO seen", "HELLO taken", "HELLO answered", "OPEN seen", "OPEN taken", "OPEN answered"),
    *("MAP seen", "MAP taken", "MAP done", "MAP answered"),
    *("READ seen", "READ taken", "READ moved half", "READ moved", "READ halfway"),
)
STEPS_TO_WRITE = (
    *STEPS_TO_READ[:11],
    "WRITE seen",
    "WRITE taken",
    "WRITE moved",
    "WRITE done",
    "WRITE halfway",
)
_NAMES = {
    HELLO: "HELLO",
    OPEN: "OPEN",
    CLOSE: "CLOSE",
    READ: "READ",
    WRITE: "WRITE",
    MAP: "MAP",
    UNMAP: "UNMAP",
}

#: Offset and length of a piece of a mapped region.
Piece = tuple[mmap.mmap, int, int]


class Died(OSError):
    """The node's process is gone, as far as its client can see."""


class FakeLocalNode(FakeNode):
    """On a local socket: maps the memory that clients offer, and moves bytes there itself.

    Its first connection, or every one, stands still at the step ``stops_at`` until `go_on`, and then first
    writes `LATE` into all memory that the request under way names; or ends at the step ``dies_at``.
    """

    LATE = 0xEE
    #: Nobody stands still for longer, so that a test that failed does not hang the suite.
    HOLD_S_MAX = 30.0

    def __init__(
        self,
        data: bytes = b"",
        *,
        stops_at: str = "",
        dies_at: str = "",
        always: bool = False,
        **options: Any,
    ) -> None:
        self._name = "gd2fs-test-" + secrets.token_hex(16)
        self._stops_at, self._dies_at, self._always = stops_at, dies_at, always
        #: Connections that stand still.
        self.stopped = threading.Semaphore(0)
        #: Those of them that have gone on, and written what they had to write.
        self.went_on = threading.Semaphore(0)
        self._going_on = threading.Event()
        #: What was applied, in order.
        self.written: list[bytes] = []
        super().__init__(data, **options)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + self._name)
        listener.listen()
        return listener

    @property
    def address(self) -> str:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"shm://{host}/@{self._name}"

    def go_on(self) -> None:
        self._going_on.set()

    def __exit__(self, *_: object) -> None:
        self.go_on()
        super().__exit__()

    def _serve(self, one: socket.socket) -> None:
        first = self._sockets[0] is one
        maps: dict[int, mmap.mmap] = {}
        try:
            with one, suppress(OSError):
                self._step("accepted", first)
                while self._exchange(one, maps, first):
                    pass
        finally:
            for mapped in maps.values():
                mapped.close()

    def _step(self, step: str, first: bool, pieces: list[Piece] | None = None) -> None:
        if not first and not self._always:
            return
        if step == self._dies_at:
            raise Died(step)
        if step == self._stops_at and not self._going_on.is_set():
            self.stopped.release()
            self._going_on.wait(self.HOLD_S_MAX)
            if step.startswith("READ"):
                _put(pieces or [], bytes([self.LATE]) * sum(length for _, _, length in pieces or []))
            self.went_on.release()

    def _exchange(self, one: socket.socket, maps: dict[int, mmap.mmap], first: bool) -> bool:
        """Serves one request. False: the client has ended the connection."""
        head = one.recv(HEADER_BYTES, socket.MSG_PEEK | socket.MSG_WAITALL)
        if not head:
            return False
        header = _native.header_decode(head)
        name = _NAMES[header["opcode"]]
        self._step(f"{name} seen", first)
        ext, descriptors = self._take(one, header)
        self.seen.append(header)
        try:
            pieces = _pieces(ext, maps) if header["flags"] & ONE_SIDED else []
            self._step(f"{name} taken", first, pieces)
            if header["opcode"] == MAP:
                said = json.loads(ext)
                maps[said["region"]] = mmap.mmap(descriptors[0], said["length"])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if header["opcode"] == UNMAP:
            maps.pop(json.loads(ext)["region"]).close()
        reply = self._moved(one, header, pieces, first) if pieces else self._answer(header, ext, b"")
        if reply is None:
            return False
        self._step(f"{name} done", first, pieces)
        one.sendall(reply[: len(reply) // 2])
        self._step(f"{name} halfway", first, pieces)
        one.sendall(reply[len(reply) // 2 :])
        self._step(f"{name} answered", first, pieces)
        return True

    @staticmethod
    def _take(one: socket.socket, header: dict[str, int]) -> tuple[bytes, list[int]]:
        """The ext of the frame whose header has been seen, and the descriptors that come with it."""
        wanted = HEADER_BYTES + header["ext_bytes"] + header["sums_bytes"]
        frame, descriptors = b"", []
        while len(frame) < wanted:
            part, some, _, _ = socket.recv_fds(one, wanted - len(frame), 1)
            descriptors += some
            if not part:
                raise Died("the client ended in the middle of a frame")
            frame += part
        return frame[HEADER_BYTES : HEADER_BYTES + header["ext_bytes"]], descriptors

    def _moved(
        self, one: socket.socket, header: dict[str, int], pieces: list[Piece], first: bool
    ) -> bytes | None:
        """Moves the bytes of a one-sided request; its reply, None for a write whose client has gone."""
        start, end = header["offset"], header["offset"] + header["length"]
        flags = RESPONSE | ONE_SIDED
        if header["opcode"] == READ:
            data = bytes(self.data[start:end])
            _put(pieces, data[: len(data) // 2])
            self._step("READ moved half", first, pieces)
            _put(pieces, data)
            self._step("READ moved", first, pieces)
            framed = self.reply(header, data=data, flags=flags)
            return framed[: len(framed) - len(data)]
        data = b"".join(mapped[at : at + length] for mapped, at, length in pieces)
        self._step("WRITE moved", first, pieces)
        if _is_ended(one):
            # As every node must: what was taken after this end may not be what the client meant.
            return None
        self.written.append(data)
        self._answer(header, b"", data)
        return self.reply(header, length=header["length"], flags=flags)


def _pieces(ext: bytes, maps: dict[int, mmap.mmap]) -> list[Piece]:
    """The segments of a one-sided request: region, length, offset of each."""
    return [(maps[region], offset, length) for region, length, offset in struct.iter_unpack("<IIQ", ext)]


def _put(pieces: list[Piece], data: bytes) -> None:
    at = 0
    for mapped, offset, length in pieces:
        part = data[at : at + length]
        mapped[offset : offset + len(part)] = part
        at += length


def _is_ended(one: socket.socket) -> bool:
    """Whether the peer has ended its direction of the connection."""
    poll = select.poll()
    poll.register(one, select.POLLRDHUP)
    return bool(poll.poll(0))
