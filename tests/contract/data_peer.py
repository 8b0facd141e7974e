"""Clients that are treated badly: one written by hand, which stands still between any two bytes, and others
in processes of their own, to be stopped, killed or counted in hundreds.

``python -m tests.contract.data_peer TRANSPORT WORK …`` prints a line when it has begun, and ends with its
standard input.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gd2fs import _native, errors
from tests.client_fake_node import HEADER_BYTES, HELLO, MAP, ONE_SIDED, OPEN, PIECE, READ
from tests.client_real_node import CLUSTER
from tests.contract.data_plane import BY_NAME, Transport, eventually

Peer = subprocess.Popen[str]

ROOT = Path(__file__).parents[2]
#: What each client of a crowd writes and reads: a page, which a node of the same host fills by itself.
SAMPLE_BYTES = 4096

#: Header fields, ext, sums and payload of a reply.
Reply = tuple[dict[str, int], bytes, bytes, bytes]


class RawClient:
    """A connection to a node, by tcp or on its host, whose frames a test sends itself. A context manager."""

    def __init__(self, address: str, *, receive_bytes: int | None = None) -> None:
        """``receive_bytes`` of replies fit into the socket."""
        scheme, _, rest = address.partition("://")
        host, _, name = rest.rpartition("/" if scheme == "shm" else ":")
        self._socket = socket.socket(socket.AF_UNIX if scheme == "shm" else socket.AF_INET)
        self._socket.settimeout(10)
        if receive_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.connect(name.replace("@", "\0", 1) if scheme == "shm" else (host, int(name)))
        self._client = secrets.token_hex(16)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def frame(self, opcode: int, ext: bytes = b"", payload: bytes = b"", **fields: int) -> bytes:
        sums = b""
        for at in range(0, len(payload), PIECE):  # the payload begins where a piece does
            sums += struct.pack("<I", _native.crc32c(payload[at : at + PIECE]))
        shape = {"ext_bytes": len(ext), "sums_bytes": len(sums), "payload_crc": _native.crc32c(ext + sums)}
        if payload:
            shape["length"] = len(payload)
        return _native.header_encode(opcode=opcode, request=1, **shape, **fields) + ext + sums + payload

    def hello(self) -> bytes:
        said = {"versions": (_native.WIRE_VERSION,) * 2, "features": 0, "cluster": CLUSTER, "token": ""}
        said |= {"client": self._client, "slot": 0, "generation": 1}
        return self.frame(HELLO, json.dumps(said).encode())

    def open(self, layout: dict[str, Any]) -> bytes:
        return self.frame(OPEN, json.dumps({"column": 0, "capability": layout["capability"]}).encode())

    def map(self, region: int, length: int) -> bytes:
        """To be sent with a descriptor."""
        return self.frame(MAP, json.dumps({"region": region, "length": length}).encode())

    def one_sided(self, opcode: int, handle: int, region: int, length: int) -> bytes:
        """A READ or WRITE of the file's first bytes, to or from the first ones of the region."""
        ext = struct.pack("<IIQ", region, length, 0)
        return self.frame(opcode, ext, handle=handle, epoch=1, length=length, flags=ONE_SIDED)

    def send(self, data: bytes, descriptor: int | None = None) -> None:
        if descriptor is None:
            self._socket.sendall(data)
        else:
            assert socket.send_fds(self._socket, [data], [descriptor]) == len(data)

    def receive(self, timeout_s: float = 10) -> Reply:
        self._socket.settimeout(timeout_s)
        header = _native.header_decode(self._exactly(HEADER_BYTES))
        ext, sums = self._exactly(header["ext_bytes"]), self._exactly(header["sums_bytes"])
        carries = header["opcode"] == READ and not header["flags"] & ONE_SIDED
        return header, ext, sums, self._exactly(header["length"] if carries else 0)

    def ask(self, frame: bytes, descriptor: int | None = None) -> dict[str, int]:
        """Sends it; the header of the answer, which must be a success."""
        self.send(frame, descriptor)
        header, ext, _, _ = self.receive()
        assert header["status"] == 0, ext
        return header

    def _exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            parts.append(self._socket.recv(min(count, 1 << 20)))
            assert parts[-1], "the node has closed the connection"
            count -= len(parts[-1])
        return b"".join(parts)


@contextmanager
def region_to_offer(content: bytes) -> Iterator[int]:
    """The descriptor of memory that a node maps, as the library makes it."""
    descriptor = os.memfd_create("gd2fs-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        assert os.write(descriptor, content) == len(content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def stopped(peer: Peer) -> Iterator[None]:
    """The process stands still, wherever it was."""
    peer.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{peer.pid}/stat")
    eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
    try:
        yield
    finally:
        peer.send_signal(signal.SIGCONT)


def start_peer(transport: Transport, work: str, layout: dict[str, Any], *numbers: int) -> Peer:
    """Starts a process that does ``work`` over and over; returns when the first transfer has begun."""
    command = [sys.executable, "-m", "tests.contract.data_peer", transport.name, work]
    command += [str(number) for number in numbers]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)])}
    pipe = subprocess.PIPE
    peer = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert peer.stdin and peer.stdout
    peer.stdin.write(json.dumps(layout) + "\n")
    peer.stdin.flush()
    line = peer.stdout.readline()
    assert line == "begun\n", f"the peer says {line!r}"
    return peer


def end_peer(peer: Peer, patience_s: float = 20) -> str:
    """Ends its standard input; what it printed since. Raises AssertionError if it fails."""
    said, _ = peer.communicate(timeout=patience_s)
    assert peer.returncode == 0, f"the peer ended with {peer.returncode}: {said}"
    return said


def _is_wanted() -> bool:
    """Whether standard input is still open."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return not ready


def _transfer(transport: Transport, work: str, layout: dict[str, Any], length: int) -> None:
    """Reads or writes the range over and over; each write puts one byte value everywhere."""
    with transport.client(timeout_s=60) as client:
        file = client.open_layout(layout)
        memory = transport.allocate(client, length)
        turns = 0
        while turns == 0 or _is_wanted():
            memory[:] = turns % 256
            submit = file.submit_read if work == "read" else file.submit_write
            request = submit(0, memory)
            if turns == 0:
                print("begun", flush=True)
            assert request.wait() == length
            turns += 1
    print(f"{turns} turns", flush=True)


def _crowd(transport: Transport, layout: dict[str, Any], first: int, count: int) -> None:
    """``count`` clients at once, each from an address of its own and with a stripe unit of its own."""
    clients, files = [], []
    try:
        for number in range(first, first + count):
            address = f"127.0.{1 + number // 250}.{1 + number % 250}"
            client = transport.client(io_threads=1, streams=1, nics=[address])
            clients.append(client)
            files.append(client.open_layout(layout))
        _write_and_read(transport, clients, files, first, layout["stripe_unit"])
        print("begun", flush=True)
        sys.stdin.readline()
        # All of them are still connected, and read again.
        _write_and_read(transport, clients, files, first, layout["stripe_unit"])
    finally:
        for client in clients:
            client.close()
    print(f"{count} clients", flush=True)


def _write_and_read(
    transport: Transport, clients: list[Any], files: list[Any], first: int, unit: int
) -> None:
    memory = [transport.allocate(client, SAMPLE_BYTES) for client in clients]
    for number, one in enumerate(memory):
        one[:] = (first + number) % 251
    writes = [file.submit_write((first + i) * unit, memory[i]) for i, file in enumerate(files)]
    assert all(request.wait() == SAMPLE_BYTES for request in writes)
    for one in memory:
        one[:] = 255
    reads = [file.submit_read((first + i) * unit, memory[i]) for i, file in enumerate(files)]
    assert all(request.wait() == SAMPLE_BYTES for request in reads)
    assert all((one == (first + number) % 251).all() for number, one in enumerate(memory))


def main() -> None:
    transport, work, *numbers = sys.argv[1:]
    layout = json.loads(sys.stdin.readline())
    try:
        if work == "crowd":
            _crowd(BY_NAME[transport], layout, *map(int, numbers))
        else:
            _transfer(BY_NAME[transport], work, layout, *map(int, numbers))
    except errors.Gd2fsError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
