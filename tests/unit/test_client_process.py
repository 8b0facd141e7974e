"""Whole processes: forks, Ctrl-C, and exits with requests in flight."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gd2fs import errors
from tests.client_fake_node import CLUSTER, READ, UNMAP, FakeLocalNode, FakeNode

PRELUDE = """
import asyncio, json, os, signal, sys, threading, time
from gd2fs import errors
from gd2fs.client import Client
layout = json.loads(sys.argv[1])
client = Client([], cluster=sys.argv[2], token="")
file = client.open_layout(layout)
"""


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode(bytes(range(250)) * 1000) as one:
        yield one


@pytest.fixture
def mute(node: FakeNode) -> Iterator[FakeNode]:
    """A node that never answers a READ."""
    gate = threading.Event()
    node.twist = lambda header, reply: reply if header["opcode"] != READ or gate.wait(30) else None
    yield node
    gate.set()


def start(node: FakeNode, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRELUDE + script, json.dumps(node.layout()), CLUSTER]
    environment = os.environ | {"PYTHONPATH": str(Path(errors.__file__).parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes)  # type: ignore[call-overload, no-any-return]


def run(node: FakeNode, script: str) -> str:
    process = start(node, script)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert not err
    return out


@pytest.mark.parametrize(
    "waiting",
    [
        "file.read_into(0, bytearray(100))",
        "file.submit_read(0, bytearray(100)).wait()",
        "client._native.reap(1, -1)",
        "asyncio.run(file.aread_into(0, bytearray(100)))",
    ],
)
def test_ctrl_c_ends_a_blocking_call(mute: FakeNode, waiting: str) -> None:
    script = (
        f"print('waiting', flush=True)\ntry:\n    {waiting}\nexcept KeyboardInterrupt:\n    print('caught')\n"
    )
    process = start(mute, script)
    assert process.stdout and process.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "caught\n", "")
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "sys.exit(0)",
        "os._exit(0)",
        "del client, file",
        "threading.Thread(target=lambda: file.submit_read(0, bytearray(9))).start()",
        "client.keep = client",  # a cycle: found by the collector at the very end
    ],
)
def test_an_exit_with_requests_in_flight_is_clean(mute: FakeNode, ending: str) -> None:
    script = "requests = [file.submit_read(0, bytearray(100_000)) for _ in range(50)]\ntime.sleep(0.1)\n"
    begun = time.monotonic()
    assert run(mute, script + ending) == ""
    assert time.monotonic() - begun < 5


def test_an_exit_while_threads_wait_is_clean(mute: FakeNode) -> None:
    script = """
def wait():
    try:
        file.read_into(0, bytearray(100_000))
    except errors.Gd2fsError:
        pass
for _ in range(4):
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
"""
    assert run(mute, script) == ""


@pytest.mark.parametrize("attempt", range(4))
def test_an_exit_while_threads_call_all_the_time_is_clean(node: FakeNode, attempt: int) -> None:
    """Such a thread is nearly always inside a native call, or about to enter or leave one."""
    script = """
asking = Client(["http://127.0.0.1:9"], cluster="c", token="")  # where nobody listens
def call(one):
    while True:
        try:
            one()
        except errors.Gd2fsError:
            pass
for one in [lambda: asking.stat("/x"), lambda: file.read_into(0, bytearray(1000))] * 4:
    threading.Thread(target=call, args=(one,), daemon=True).start()
time.sleep(0.2)
"""
    assert run(node, script) == ""


def test_submitting_what_is_refused_does_not_block_other_threads(node: FakeNode) -> None:
    script = """
sys.setswitchinterval(1e-6)
until = time.monotonic() + 1
def submit():
    while time.monotonic() < until:
        try:
            client._native.submit_read(file._native_file, (1 << 63) - 1, [bytearray(4)], 1000)
        except errors.BadRequest:
            pass
threads = [threading.Thread(target=submit) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    assert run(node, script) == ""


def test_every_call_in_a_forked_child_says_so(node: FakeNode) -> None:
    script = """
assert file.read_into(0, bytearray(100)) == 100
request = file.submit_read(0, bytearray(100))
child = os.fork()
if child == 0:
    calls = [
        lambda: file.read_into(0, bytearray(9)), lambda: file.write(0, b"x"), lambda: client.stats(),
        lambda: client.control("GET", "/"), lambda: client.close(), lambda: request.wait(),
        lambda: file.length(),
        lambda: asyncio.run(file.aread_into(0, bytearray(9))), lambda: client._native.reap(1, 0),
        lambda: client._native.cancel(1), lambda: client._native.fileno(),
        lambda: client.fileno(), lambda: client.reap(),
    ]
    for call in calls:
        try:
            call()
        except errors.ForkedError:
            continue
        os._exit(1)
    fresh = Client([], cluster=sys.argv[2], token="")
    assert fresh.open_layout(layout).read_into(0, bytearray(100)) == 100
    del client, file, request  # frees nothing that is the parent's
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert request.wait() == 100
for _ in range(20):
    assert file.read_into(0, bytearray(100)) == 100
client.close()
print("parent unharmed")
"""
    assert run(node, script) == "parent unharmed\n"


def test_library_memory_stays_with_the_process_that_made_it(node: FakeNode) -> None:
    script = """
import ctypes, mmap, numpy
memory = client.alloc(1 << 20)
view = numpy.frombuffer(memory, numpy.uint8)
view[:] = 7
def ending(of):
    child = os.fork()
    if child == 0:
        of()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
def write():
    view[0] = 9
def look():
    try:
        memoryview(memory)
    except BufferError as error:
        assert "fork" in str(error)
        os._exit(5)
def name():
    fresh = Client([], cluster=sys.argv[2], token="").open_layout(layout)
    try:
        where, sizes = (numpy.array([n], numpy.uint64) for n in (memory.address, 4096))
        fresh.submit_read_at(0, where, sizes, iomem=memory)
    except errors.BadRequest as error:
        assert "allocate anew" in str(error)
        os._exit(6)
def drop():
    # What the child has put in the place of the memory stays there when the child's copy of its owner goes.
    global memory, view
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    number, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_long]
    address, fixed_no_replace = memory.address, 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_no_replace
    assert libc.mmap(address, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
    del memory, view
    ctypes.memset(address, 1, 1 << 20)
    os._exit(8)
assert ending(write) == signal.SIGSEGV
assert [ending(look), ending(name), ending(drop)] == [5, 6, 8]
assert (view == 7).all()
assert file.read_into(0, view[:100]) == 100
print("unharmed")
"""
    assert run(node, script) == "unharmed\n"


@pytest.mark.parametrize(
    "ending",
    [
        "del view, memory, file, client\ngc.collect()\nos._exit(3)",
        "memory.close()\ndel view, memory\ngc.collect()\nsys.exit(3)",
        "sys.exit(3)",
    ],
)
def test_shared_memory_of_the_parent_survives_its_child(ending: str) -> None:
    """The child drops memory that a node has mapped for its parent, soon or at its end: nobody tells it."""
    script = """
import gc
memory = client.alloc(1 << 20)
view = memoryview(memory)
assert file.read_into(0, view[:8192]) == 8192
child = os.fork()
if child == 0:
    {ending}
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
view[:8192] = bytes(8192)
for _ in range(20):
    assert file.read_into(0, view[:8192]) == 8192
assert bytes(view[:8192]) == bytes(range(256)) * 32
client.close()
print("parent unharmed")
"""
    with FakeLocalNode(bytes(range(256)) * 32) as node:
        assert run(node, script.replace("{ending}", ending.replace("\n", "\n    "))) == "parent unharmed\n"
        assert node.count(UNMAP) == 0, "the child spoke for its parent"
        assert node.count(READ) == 21 and len(node.hellos) == 1


def test_a_child_may_leave_the_block_of_its_parents_client(node: FakeNode) -> None:
    script = """
with client:
    child = os.fork()
    if child == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert file.read_into(0, bytearray(100)) == 100
"""
    assert run(node, script) == ""
