"""What the contract suite of the data plane stands on: transports, guarded memory, files on real nodes.

A new transport is a line in `TRANSPORTS`; every test then runs over it.
"""

from __future__ import annotations

import json
import resource
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from gd2fs import _native
from gd2fs.client import Client
from gd2fs.signing import Keys, Token
from tests.client_real_node import CLUSTER, RealNode, sign

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: The default stripe unit, which is also the largest part of a request then: atomicity is promised per unit.
UNIT = 4 * MIB

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Transport:
    """A way of moving bytes: the options that make a client use it, and whose memory the bytes are in."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    #: ``library``: from the client's ``alloc``; ``foreign``: any memory of the process.
    memory: Literal["foreign", "library"] = "foreign"
    #: Whether it is a byte stream that a proxy can stand in.
    is_stream: bool = False

    def client(self, **options: Any) -> Client:
        return Client([], cluster=CLUSTER, token="", **{**self.options, **options})

    def allocate(self, client: Client, length: int) -> Bytes:
        """Memory for transfers of ``client``; its content is arbitrary."""
        if self.memory == "foreign":
            return np.empty(length, np.uint8)
        buffer: Any = client.alloc(length)
        return np.frombuffer(buffer, np.uint8)


TRANSPORTS = (
    Transport("tcp", {"transport": "tcp"}, is_stream=True),
    Transport("shm", {"transport": "shm"}, memory="library"),
    Transport("shm-foreign", {"transport": "shm"}),
)
BY_NAME = {transport.name: transport for transport in TRANSPORTS}


class Room:
    """A buffer for transfers between two guards: whatever is written beside it is noticed."""

    GUARD_BYTES = 4 * KIB
    GUARD = np.random.default_rng(0).integers(0, 256, GUARD_BYTES, dtype=np.uint8)

    def __init__(self, client: Client, transport: Transport, length: int, skew: int = 0) -> None:
        """``skew`` moves the buffer by so many bytes off its alignment."""
        start = self.GUARD_BYTES + skew
        whole = transport.allocate(client, start + length + self.GUARD_BYTES)
        self._guards = (whole[skew:start], whole[start + length :])
        for guard in self._guards:
            guard[:] = self.GUARD
        self.bytes = whole[start : start + length]

    def check_guards(self) -> None:
        for guard in self._guards:
            assert np.array_equal(guard, self.GUARD), "bytes beside the buffer were changed"


class Fragments:
    """A list of pieces of one array, as the two arrays that a scattered request takes."""

    def __init__(self, memory: Bytes, starts: Any, lengths: Any) -> None:
        self._memory = memory
        self.starts = np.asarray(starts, np.uint64)
        self.lengths = np.asarray(lengths, np.uint64)
        self.addresses = self.starts + np.uint64(memory.ctypes.data)

    @classmethod
    def cut(cls, memory: Bytes, cuts: Any, order: Any) -> Fragments:
        """``memory`` cut at the positions ``cuts``, its pieces in ``order``."""
        starts = np.concatenate([[0], np.asarray(cuts, np.int64)])
        lengths = np.diff(np.append(starts, len(memory)))
        return cls(memory, starts[order], lengths[order])

    @classmethod
    def at_random(cls, memory: Bytes, rng: np.random.Generator, count: int) -> Fragments:
        """About ``count`` pieces of any length down to none at all, some of one byte, in any order."""
        cuts = rng.integers(0, len(memory) + 1, count)
        beside = np.minimum(cuts[: count // 4] + 1, len(memory))
        cuts = np.sort(np.concatenate([cuts, beside]))
        return cls.cut(memory, cuts, rng.permutation(len(cuts) + 1))

    def gathered(self) -> Bytes:
        """A copy of the bytes in the order of the list."""
        pieces = zip(self.starts.astype(np.int64), self.lengths.astype(np.int64), strict=True)
        return np.concatenate([self._memory[start : start + length] for start, length in pieces])


def noise(length: int, seed: int) -> Bytes:
    """Random bytes, at about 1 GB/s."""
    words = np.random.default_rng(seed).integers(0, 1 << 64, length // 8 + 1, dtype=np.uint64)
    return words.view(np.uint8)[:length]


class Files:
    """New files on nodes. Closing deletes them and checks that the nodes then hold no memory."""

    PATIENCE_S = 10.0

    def __init__(self, nodes: list[RealNode]) -> None:
        self.nodes = nodes
        self._made: list[str] = []

    def layout(self, **options: Any) -> dict[str, Any]:
        """A layout of a new file; options as of `sign`."""
        layout = sign(self.nodes, file=secrets.token_hex(16), **options)
        self._made.append(layout["file"])
        return layout

    def delete_all(self) -> None:
        token = Keys.development().sign(Token("default", "control", int(time.time()) + 600))
        delete = 17
        for column, node in enumerate(self.nodes):
            body = {"items": [{"file": file, "column": column} for file in self._made]}
            link = _native.NodeLink(CLUSTER, token, 10_000)
            code, _, answer = link.call(node.address, delete, json.dumps(body).encode())
            assert code == 0, answer
        self._made.clear()

    def check_memory_is_back(self) -> None:
        """Whatever was cancelled, cut or killed: no frame is held for it any more."""
        for node in self.nodes:
            eventually(lambda node=node: node.stats()["arena_used"] == 0, self.PATIENCE_S)


def through(layout: dict[str, Any], address: str) -> dict[str, Any]:
    """The layout with ``address`` in the place of its node's: of a proxy, or of a node that moved."""
    columns = [
        column | {"replicas": [replica | {"addresses": [address]} for replica in column["replicas"]]}
        for column in layout["columns"]
    ]
    return layout | {"columns": columns}


Step = TypeVar("Step")


def at_every_step(steps: Iterable[tuple[str, Step]], check: Callable[[Step], None], at_once: int) -> None:
    """Runs ``check`` at all steps, ``at_once`` of them side by side; fails with the name of the step."""

    def named(name: str, step: Step) -> None:
        try:
            check(step)
        except BaseException as error:
            error.add_note(f"at the step {name}: {step}")
            raise

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(named, name, step) for name, step in steps]:
            done.result(60)


def eventually(check: Callable[[], bool], patience_s: float = 5.0) -> None:
    deadline = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < deadline, f"not within {patience_s} s"
        time.sleep(0.01)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    taken = time.monotonic() - begun
    assert taken < seconds, f"took {taken:.2f} s of at most {seconds} s"


@contextmanager
def descriptors_for(count: int) -> Iterator[None]:
    """Raises the limit of open files for this process and those it starts meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= count, f"the hard limit of open files (ulimit -Hn) is {hard}; this test needs {count}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
