"""GD2FS itself: control and a node in processes of their own, and requests to them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gd2fs import _native
from gd2fs.bench.buffers import SHIFT_BYTES, Buffer, slots
from gd2fs.bench.cases import FRAGMENT_BYTES, MIB, Case, Memory, Transport, outstanding, requests
from gd2fs.bench.samples import Contender, Sample, timed
from gd2fs.cli.processes import Processes
from gd2fs.cli.up import READY_S, start_control, start_node
from gd2fs.client.connect import connect

if TYPE_CHECKING:
    from gd2fs.client import Client

#: A request of a gigabyte takes a second at most; this is a machine that does something else, too.
TIMEOUT_S = 60.0
READ_PATH, WRITE_PATH = "/read", "/written"


class Cluster:
    """One control, one node with all the memory, and the clients of all cases. A context manager.

    ``source`` holds what the files hold; reads go to ``target``, both ordinary memory. The file that is read
    is written once and never again; writes go to another one.
    """

    def __init__(self, directory: Path, span_bytes: int, source: Buffer, target: Buffer) -> None:
        self.span, self.source, self.target = span_bytes, source, target
        self._stack = ExitStack()
        # Both files, one that is written anew, and room for the frames of units that are being rewritten.
        memory = f"{(3 * span_bytes + span_bytes // 2) // MIB + 256}MiB"
        try:
            processes = self._stack.enter_context(Processes(directory))
            _, self.control = start_control(processes, directory, 0)
            node = start_node(processes, directory, 1, memory, self.control)
            self.node_pid = int(processes.wait_ready(node, READY_S)["pid"])
            self._users: dict[tuple[Transport, int, bool], User] = {}
            writer = self.user("tcp", 1, True)
            for path in (READ_PATH, WRITE_PATH):
                writer.fill(path)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def user(self, transport: Transport, streams: int, verify: bool) -> User:
        """The client with these options; see `User.probe`."""
        key = (transport, streams, verify)
        if key not in self._users:
            client = connect(
                self.control, transport=transport, streams=streams, verify=verify, timeout_s=TIMEOUT_S
            )
            self._users[key] = User(self, self._stack.enter_context(client))
        return self._users[key]

    def contender(self, case: Case) -> Contender:
        """A measurement of this case, run once and checked byte by byte: what is read is what was written."""
        user = self.user(case.transport, case.streams, case.verify)
        if case.first:
            return user.first_write(case)
        return user.write(case) if case.op == "write" else user.read(case)


class User:
    """One client and the requests that are made with it."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self._cluster, self._client = cluster, client
        self._layouts: dict[str, str] = {}
        self._library: Buffer | None = None

    def probe(self) -> None:
        """Reads a little. Raises an error of GD2FS where the transport can't be used."""
        self._client.read(READ_PATH, 0, 1)

    def fill(self, path: str) -> None:
        """Makes a file as long as the span, with the bytes of the source."""
        self._client.create(path)
        self._client.write(path, 0, self._cluster.source.array[: self._cluster.span])

    def read(self, case: Case) -> Contender:
        span, count = self._cluster.span, requests(case.size, self._cluster.span)
        memory = self._library_memory() if case.memory == "library" else self._cluster.target
        places, lengths, gather = self._places(case, count)
        run = self._requests(case, READ_PATH, count, memory.address + places, lengths)
        memory.array[:span] = 0
        run()
        for position, place in gather:
            length = int(lengths[0])
            if not np.array_equal(
                memory.array[place : place + length],
                self._cluster.source.array[position : position + length],
            ):
                raise RuntimeError(f"{case}: other bytes than were written, at byte {position}")
        return run

    def write(self, case: Case) -> Contender:
        """Overwrites what is there with, by turns, the bytes of two places of the source."""
        memory, count = self._written_from(case.memory), requests(case.size, self._cluster.span)
        places, lengths, gather = self._places(case, count)
        runs = [
            self._requests(case, WRITE_PATH, count, memory.address + places + shift, lengths)
            for shift in (0, SHIFT_BYTES)
        ]
        turn = 0

        def by_turns() -> Sample:
            nonlocal turn
            turn += 1
            return runs[turn % 2]()

        by_turns()
        self._check_written(case, gather, int(lengths[0]), SHIFT_BYTES)
        return by_turns

    def first_write(self, case: Case) -> Contender:
        """Writes a new file every time, so that the node needs new memory for it."""
        memory = self._written_from(case.memory)
        place, length = np.array([memory.address], np.uint64), np.array([case.size], np.uint64)

        def run() -> Sample:
            path = "/first"
            self._client.create(path)
            try:
                return self._requests(case, path, 1, place, length)()
            finally:
                self._layouts.pop(path, None)
                self._client.delete(path)

        return run

    def _requests(self, case: Case, path: str, count: int, addresses: Any, lengths: Any) -> Contender:
        offsets = [index * case.size for index in range(count)]
        layout = self._layout(path)
        # The loop runs below this object: nobody else has requests under way on it meanwhile.
        native = self._client._native

        def work() -> tuple[float, list[float]]:
            return _native.bench_requests(
                native,
                case.op == "write",
                layout,
                offsets,
                addresses,
                lengths,
                outstanding(case.size),
                int(TIMEOUT_S * 1000),
            )

        return lambda: timed(count * case.size, (self._cluster.node_pid,), work)

    def _places(self, case: Case, count: int) -> tuple[Any, Any, list[tuple[int, int]]]:
        """Offsets in memory and lengths of all fragments; their offsets in (file, memory)."""
        length = FRAGMENT_BYTES if case.scattered else case.size
        number = count * case.size // length
        places = slots(self._cluster.span, number) if case.scattered else np.arange(number, dtype=np.uint64)
        places = places * np.uint64(length)
        pairs = [(index * length, int(place)) for index, place in enumerate(places)]
        return places, np.full(number, length, np.uint64), pairs

    def _check_written(self, case: Case, gather: list[tuple[int, int]], length: int, shift: int) -> None:
        source, back = self._cluster.source.array, self._cluster.target.array
        total = len(gather) * length
        back[:total] = 0
        self._client.read_into(WRITE_PATH, 0, back[:total])
        for position, place in gather:
            expected = source[place + shift : place + shift + length]
            if not np.array_equal(back[position : position + length], expected):
                raise RuntimeError(f"{case}: was not stored as written, at byte {position}")

    def _written_from(self, kind: Memory) -> Buffer:
        """Memory that holds what the source holds."""
        if kind == "foreign":
            return self._cluster.source
        memory = self._library_memory()
        memory.array[:] = self._cluster.source.array
        return memory

    def _library_memory(self) -> Buffer:
        if self._library is None:
            region = self._client.alloc(len(self._cluster.source.array))
            self._library = Buffer(np.frombuffer(memoryview(region), np.uint8), region)
        return self._library

    def _layout(self, path: str) -> str:
        if path not in self._layouts:
            self._layouts[path] = json.dumps(self._client.namespace.layout(path, "read,write"))
        return self._layouts[path]
