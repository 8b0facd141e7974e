"""What may stand for memory, and what is refused by name."""

from __future__ import annotations

import array
import gc
import mmap
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Client, File
from tests.client_fake_node import CLUSTER, READ, FakeNode

DATA = np.random.default_rng(5).bytes(100_000)


@pytest.fixture
def file() -> Iterator[File]:
    with FakeNode(DATA) as node, Client([], cluster=CLUSTER, token="") as client:
        yield client.open_layout(node.layout())


class Tensor:
    """What the client uses of a torch tensor."""

    def __init__(self, values: np.ndarray[Any, Any], device: str = "cpu") -> None:
        self.values = values
        self.device = type("device", (), {"type": device})

    def data_ptr(self) -> int:
        return int(self.values.ctypes.data)

    def element_size(self) -> int:
        return self.values.itemsize

    def numel(self) -> int:
        return self.values.size

    def is_contiguous(self) -> bool:
        return bool(self.values.flags.c_contiguous)


class Interface:
    """Only `__array_interface__`."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values
        self.__array_interface__ = values.__array_interface__


class DLPack:
    """Only DLPack."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


def test_reads_fill_every_kind_of_writable_memory(file: File) -> None:
    block = bytearray(64)
    numbers = array.array("Q", bytes(64))
    mapped = mmap.mmap(-1, 64)
    floats = np.zeros((4, 4), np.float32)
    tensor, interface = Tensor(np.zeros(32, np.uint16)), Interface(np.zeros(64, np.uint8))
    view = memoryview(bytearray(80))[8:72]
    wanted = [block, numbers, mapped, floats, tensor, interface, view]
    assert file.read_into(7, wanted) == 7 * 64
    got = b"".join(
        [
            bytes(block),
            numbers.tobytes(),
            mapped[:],
            floats.tobytes(),
            tensor.values.tobytes(),
            interface.values.tobytes(),
            bytes(view),
        ]
    )
    assert got == DATA[7 : 7 + 7 * 64]


def test_writes_take_read_only_memory_too(file: File) -> None:
    assert file.write(10, [b"abc", memoryview(b"defg"), DLPack(np.arange(4, dtype=np.uint8)), b""]) == 11
    out = bytearray(11)
    assert file.read_into(10, out) == 11
    assert out == b"abcdefg\x00\x01\x02\x03"


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        pytest.param(b"bytes", "read-only", id="bytes"),
        pytest.param(memoryview(bytes(8)), "read-only", id="view of bytes"),
        pytest.param(np.zeros((4, 4))[:, 1], "not contiguous", id="column"),
        pytest.param(np.asfortranarray(np.zeros((4, 4))), "not contiguous", id="Fortran order"),
        pytest.param(memoryview(bytearray(8))[::2], "not contiguous", id="view with steps"),
        pytest.param(Tensor(np.zeros((4, 4))[:, 1]), "not contiguous", id="column of a tensor"),
        pytest.param(Tensor(np.zeros(4), device="cuda"), "cuda", id="tensor on a GPU"),
        pytest.param(object(), "buffer protocol", id="object"),
        pytest.param("text", "buffer protocol", id="text"),
        pytest.param(None, "buffer protocol", id="None"),
        pytest.param(17, "buffer protocol", id="number"),
    ],
)
def test_what_will_not_do_is_refused_with_its_place(file: File, bad: Any, word: str) -> None:
    good = bytearray(4)
    with pytest.raises(errors.BadRequest, match=rf"buffers\[1\].*{word}"):
        file.submit_read(0, [good, bad])
    assert good == bytes(4)


def test_fragments_by_address(file: File) -> None:
    memory = np.zeros((1000, 64), np.uint8)
    addresses = memory.ctypes.data + np.arange(0, 64_000, 128, dtype=np.uint64)
    lengths = np.full(500, 64, np.uint64)
    assert file.submit_read_at(3, addresses, lengths).wait() == 32_000
    assert memory[::2].tobytes() == DATA[3:32_003]
    assert not memory[1::2].any()
    assert file.submit_write_at(50_000, addresses, lengths).wait() == 32_000
    again = bytearray(32_000)
    file.read_into(50_000, again)
    assert again == DATA[3:32_003]
    for wrong in (lengths[:3], lengths.astype(np.uint32), lengths[::2], [64] * 500):
        with pytest.raises(errors.BadRequest, match="lengths"):
            file.submit_read_at(0, addresses, wrong)
    with pytest.raises(errors.BadRequest, match=r"addresses.*can't be memory"):
        file.submit_read_at(0, np.zeros(1, np.uint64), np.ones(1, np.uint64))


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, np.uint32, np.complex128, object])
@pytest.mark.parametrize("name", ["addresses", "lengths"])
def test_numbers_of_another_kind_are_never_taken_for_addresses(file: File, name: str, kind: type) -> None:
    """A float's bits are an address too, of other memory; and one rounded to 53 bits is near it."""
    memory = np.zeros(4, np.uint64)
    fragments = {"addresses": np.array([memory.ctypes.data], np.uint64), "lengths": np.array([8], np.uint64)}
    fragments[name] = fragments[name].astype(kind)
    for submit in (file.submit_read_at, file.submit_write_at):
        with pytest.raises(errors.BadRequest, match=rf"^BAD_REQUEST: {name} \(ndarray\)"):
            submit(0, **fragments)
    assert not memory.any()


def test_ten_thousand_fragments_in_one_call(file: File) -> None:
    buffers = [np.empty(7 + index % 5, np.uint8) for index in range(10_000)]
    total = sum(map(len, buffers))
    assert file.read_into(1, buffers) == total
    assert b"".join(buffer.tobytes() for buffer in buffers) == DATA[1 : 1 + total]
    assert file.write(0, buffers) == total
    back = bytearray(total)
    file.read_into(0, back)
    assert back == DATA[1 : 1 + total]


def test_a_buffer_lives_as_long_as_its_transfer() -> None:
    class Block(bytearray):  # can be referred to weakly
        pass

    gate = threading.Event()
    with FakeNode(DATA) as node, Client([], cluster=CLUSTER, token="") as client:
        node.twist = lambda header, reply: reply if header["opcode"] != READ or gate.wait(5) else None
        block = Block(1000)
        seen = weakref.ref(block)
        request = client.open_layout(node.layout()).submit_read(0, [block])
        del block
        gc.collect()
        assert seen() is not None
        gate.set()
        assert request.wait() == 1000
        gc.collect()
        assert seen() is None


def test_an_empty_transfer_is_done_at_once(file: File) -> None:
    assert file.read_into(0, []) == file.read_into(5, bytearray()) == file.write(5, b"") == 0
