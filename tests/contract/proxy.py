"""A proxy between a client and a node that delays, throttles, cuts, stalls or damages what passes.

It runs in threads of the test's process, one for each direction of each connection.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from gd2fs import _native

Direction = Literal["to_node", "to_client"]
DIRECTIONS: tuple[Direction, Direction] = ("to_node", "to_client")

#: Nothing is held back for longer, so that a test that failed does not hang the suite.
HOLD_S_MAX = 60.0
_HEADER_BYTES = 64
_READ, _WRITE = 4, 5


@dataclass
class Way:
    """What happens to one direction of one connection. Positions count its bytes from 0."""

    #: Each piece waits this long before it is passed on: what loss looks like on a connection.
    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    #: Pieces are of 1 to this many bytes, at random; None: as they come.
    chop_bytes_max: int | None = None
    #: So many bytes pass, then the connection ends, in both directions.
    cut_at: int | None = None
    #: So many bytes pass, the others only after `Proxy.release`.
    stall_at: int | None = None
    #: So many bytes pass, then `act` runs in the proxy's thread, then the others pass.
    act_at: int | None = None
    act: Callable[[], None] | None = None
    #: The byte at this position is changed.
    flip_at: int | None = None
    #: Everything that passed, if wanted.
    record: bytearray | None = None

    def stops(self) -> list[int]:
        return [at for at in (self.cut_at, self.stall_at, self.act_at) if at is not None]


@dataclass
class Ways:
    to_node: Way = field(default_factory=Way)
    to_client: Way = field(default_factory=Way)


class Proxy:
    """Passes connections on to ``address``; ``ways`` says how, by the number of the connection. A context
    manager.
    """

    def __init__(
        self, address: str, ways: Callable[[int], Ways] = lambda _number: Ways(), *, seed: int = 0
    ) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._ways = ways
        self._seed = seed
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.connections = 0
        #: Directions that have reached their `stall_at`.
        self.stalled = threading.Semaphore(0)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def release(self) -> None:
        """Lets everything go that is stalled, now and later."""
        self._released.set()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for one in self._sockets:
                with suppress(OSError):  # cut already
                    one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive(), "a thread of the proxy does not end"
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                node = socket.create_connection(self._target, timeout=5)
            except OSError:  # a node that is gone refuses; so does the proxy in its place
                client.close()
                continue
            node.settimeout(None)
            number = self.connections
            self.connections += 1
            ways = self._ways(number)
            pumps = [(client, node, ways.to_node), (node, client, ways.to_client)]
            with self._lock:
                self._sockets += [client, node]
            for one in (client, node):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for index, (source, sink, way) in enumerate(pumps):
                dice = random.Random(self._seed * 1000 + number * 2 + index)
                thread = threading.Thread(target=self._pump, args=(source, sink, way, dice), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way, dice: random.Random) -> None:
        passed = 0
        with suppress(OSError), _ending(sink):  # either end went away, or the other direction was cut
            while self._pause(source, sink, way, passed) and (piece := source.recv(_size(way, passed, dice))):
                if way.flip_at is not None and passed <= way.flip_at < passed + len(piece):
                    at = way.flip_at - passed
                    piece = piece[:at] + bytes([piece[at] ^ dice.randint(1, 255)]) + piece[at + 1 :]
                if way.delay_s:
                    self._released.wait(way.delay_s)
                if way.bytes_per_s < float("inf"):
                    self._released.wait(len(piece) / way.bytes_per_s)
                sink.sendall(piece)
                passed += len(piece)
                if way.record is not None:
                    way.record += piece

    def _pause(self, source: socket.socket, sink: socket.socket, way: Way, passed: int) -> bool:
        """What is to happen at this position; False if nothing passes any more."""
        if passed == way.act_at and way.act:
            way.act()
        if passed == way.stall_at:
            self.stalled.release()
            self._released.wait(HOLD_S_MAX)
        if passed == way.cut_at:
            # Both directions at once, also under a thread that waits; closing would not wake it.
            for one in (source, sink):
                one.shutdown(socket.SHUT_RDWR)
            return False
        return True


@contextmanager
def _ending(sink: socket.socket) -> Iterator[None]:
    """Passes the end of a direction on, however it ended."""
    try:
        yield
    finally:
        sink.shutdown(socket.SHUT_WR)


def _size(way: Way, passed: int, dice: random.Random) -> int:
    """How much to take at once: no piece reaches over a position where something happens."""
    limit = 256 << 10 if way.chop_bytes_max is None else dice.randint(1, way.chop_bytes_max)
    return min([limit, *(stop - passed for stop in way.stops() if stop > passed)])


@dataclass(frozen=True)
class FrameAt:
    """Where one frame and its parts lie in a recorded direction; each part ends where the next begins."""

    opcode: int
    start: int
    ext: int
    sums: int
    payload: int
    end: int

    def parts(self) -> dict[str, tuple[int, int]]:
        """The parts that hold bytes."""
        spans = {
            "header": (self.start, self.ext),
            "ext": (self.ext, self.sums),
            "sums": (self.sums, self.payload),
            "payload": (self.payload, self.end),
        }
        return {name: span for name, span in spans.items() if span[0] < span[1]}


def frames_of(recorded: bytes | bytearray) -> list[FrameAt]:
    """The frames of a recorded direction. Raises what `header_decode` raises for what is not one."""
    frames, at = [], 0
    while at < len(recorded):
        head = _native.header_decode(bytes(recorded[at : at + _HEADER_BYTES]))
        is_reply = bool(head["flags"] & 1)
        bare = head["opcode"] == (_WRITE if is_reply else _READ)
        ext = at + _HEADER_BYTES
        sums = ext + head["ext_bytes"]
        payload = sums + head["sums_bytes"]
        end = payload + (0 if bare else head["length"])
        frames.append(FrameAt(head["opcode"], at, ext, sums, payload, end))
        at = end
    assert at == len(recorded), "the last frame was not finished"
    return frames


def points(frames: list[FrameAt]) -> list[tuple[str, int]]:
    """Named positions that hit every part of every frame: its first byte, its middle and its last byte."""
    found: dict[int, str] = {}
    for number, frame in enumerate(frames):
        for part, (start, end) in frame.parts().items():
            for at in (start, (start + end) // 2, end - 1):
                found.setdefault(at, f"frame {number} (opcode {frame.opcode}), {part}, byte {at}")
    return [(name, at) for at, name in sorted(found.items())]
