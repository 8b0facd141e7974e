"""A peer of the same host stands still or dies at every step of a read and of a write over shared memory.

A node that does is written by hand; it maps what the client offers, and goes on when the caller has long gone
on too: what it then writes reaches nobody, and what it then takes is never in the file. A client that does is
written by hand too, and a real node keeps nothing of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Literal

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.client import Client, File
from tests.client_fake_node import READ, STEPS_TO_READ, STEPS_TO_WRITE, WRITE, FakeLocalNode
from tests.client_real_node import RealNode
from tests.contract.data_peer import RawClient, region_to_offer
from tests.contract.data_plane import (
    KIB,
    TRANSPORTS,
    Files,
    Room,
    Transport,
    at_every_step,
    eventually,
    noise,
    within,
)

pytest_plugins = ["tests.contract.data_fixtures"]

Work = Literal["read", "write"]
Ending = Literal["timeout", "cancel", "close"]
STEPS = {"read": STEPS_TO_READ, "write": STEPS_TO_WRITE}

#: Whole pages at a page's offset, so that library memory is filled by the node itself; touches two pieces.
OFFSET, LENGTH = 12 * KIB, 28 * KIB
OLD, NEW, NEWEST = noise(LENGTH, 1), noise(LENGTH, 2), noise(LENGTH, 3)
FILE = bytes(OFFSET) + OLD.tobytes()
TIMEOUT_S = 0.3
#: A request whose memory the node may be writing to ends when the node has answered, or so much later: then
#: the memory is taken from it.
TAKEN_AFTER_S = 0.75
#: How long a call may take beyond that, on a machine whose cores are busy with something else.
SLACK_S = 1.5
#: Steps are independent of each other; nearly all of their time is waiting.
AT_ONCE = 16

ENDED: dict[Ending, type[errors.Gd2fsError]] = {
    "timeout": errors.Timeout,
    "cancel": errors.Cancelled,
    "close": errors.Cancelled,
}


@pytest.fixture(
    scope="module",
    params=[one for one in TRANSPORTS if not one.is_stream],
    ids=lambda transport: transport.name,
)
def local(request: pytest.FixtureRequest) -> Transport:
    one: Transport = request.param
    return one


def named(work: Work) -> list[tuple[str, str]]:
    return [(step, step) for step in STEPS[work]]


def check_file(node: FakeLocalNode, *allowed: np.ndarray) -> None:
    there = bytes(node.data[OFFSET : OFFSET + LENGTH])
    assert any(there == one.tobytes() for one in allowed), "the file holds other bytes"
    meant = {NEW.tobytes(), NEWEST.tobytes()}
    assert set(node.written) <= meant, "the file held bytes that nobody wrote there"


class Attempt:
    """One transfer with a node that stands still at ``step``, and its end."""

    def __init__(self, local: Transport, client: Client, node: FakeLocalNode, work: Work) -> None:
        self.file: File = client.open_layout(node.layout())
        self.room = Room(client, local, LENGTH)
        self.room.bytes[:] = 0 if work == "read" else NEW
        self._client, self._node, self._work = client, node, work

    def run_to(self, ending: Ending) -> None:
        """Begins it, ends it as told, and checks that it ends as that, and in time."""
        submit = self.file.submit_read if self._work == "read" else self.file.submit_write
        request = submit(OFFSET, self.room.bytes, timeout_s=TIMEOUT_S if ending == "timeout" else 30)
        assert self._node.stopped.acquire(timeout=5), "the node never came to this step"
        begun = time.monotonic()
        if ending == "cancel":
            request.cancel()
        if ending == "close":
            self._client.close()
        with pytest.raises(ENDED[ending]):
            request.wait()
        allowed_s = TIMEOUT_S * (ending == "timeout") + TAKEN_AFTER_S + SLACK_S
        assert time.monotonic() - begun < allowed_s, "it ended late"

    def check_nothing_comes_late(self) -> None:
        """The caller uses its memory for something else; the node goes on."""
        self.room.bytes[:] = 0xA5
        self._node.go_on()
        assert self._node.went_on.acquire(timeout=5)
        threading.Event().wait(0.05)
        assert (self.room.bytes == 0xA5).all(), "memory was written after its request had ended"
        self.room.check_guards()


@contextmanager
def standing_still(local: Transport, step: str) -> Iterator[tuple[FakeLocalNode, Client]]:
    with FakeLocalNode(FILE, stops_at=step) as one, local.client(streams=2, io_threads=1) as client:
        yield one, client


@pytest.mark.parametrize("ending", ["timeout", "cancel"])
@pytest.mark.parametrize("work", ["read", "write"])
def test_a_node_that_stands_still_and_goes_on_late(local: Transport, work: Work, ending: Ending) -> None:
    def check(step: str) -> None:
        with standing_still(local, step) as (node, client):
            attempt = Attempt(local, client, node, work)
            attempt.run_to(ending)
            # A write that may still be applied is overtaken on a new connection; whatever else was given up
            # may hold its connection, and with it this one.
            attempt.room.bytes[:] = 0xA5
            request = attempt.file.submit_write(OFFSET, NEWEST, timeout_s=10)
            with suppress(errors.Timeout):
                request.wait(0.2)
            attempt.check_nothing_comes_late()
            assert request.wait() == LENGTH
            back = Room(client, local, LENGTH)
            assert attempt.file.read_into(OFFSET, back.bytes, timeout_s=10) == LENGTH
            assert np.array_equal(back.bytes, NEWEST), "a late write came after a newer one"
            check_file(node, NEWEST)
            assert (attempt.room.bytes == 0xA5).all()

    at_every_step(named(work), check, AT_ONCE)


@pytest.mark.parametrize("work", ["read", "write"])
def test_a_client_that_is_closed_meanwhile(local: Transport, work: Work) -> None:
    """The caller still holds the memory of a client that is gone."""

    def check(step: str) -> None:
        with standing_still(local, step) as (node, client):
            attempt = Attempt(local, client, node, work)
            attempt.run_to("close")
            attempt.check_nothing_comes_late()
            check_file(node, OLD, *([NEW] if work == "write" else []))

    at_every_step(named(work), check, AT_ONCE)


@pytest.mark.parametrize("work", ["read", "write"])
def test_a_node_that_dies_once(local: Transport, work: Work) -> None:
    """The transfer is healed on a new connection."""

    def check(step: str) -> None:
        with FakeLocalNode(FILE, dies_at=step) as node, local.client(io_threads=1) as client, within(5):
            file = client.open_layout(node.layout())
            room = Room(client, local, LENGTH)
            room.bytes[:] = NEW
            if work == "write":
                assert file.write(OFFSET, room.bytes) == LENGTH
            assert file.read_into(OFFSET, room.bytes) == LENGTH
            assert np.array_equal(room.bytes, NEW if work == "write" else OLD)
            room.check_guards()
            assert client.stats()["retries"] == 1

    at_every_step(named(work), check, AT_ONCE)


@pytest.mark.parametrize("work", ["read", "write"])
def test_a_node_that_always_dies(local: Transport, files: Files, work: Work) -> None:
    """An error soon; the same client goes on with another node."""
    layouts = {step: files.layout() for step in STEPS[work]}

    def check(step: str) -> None:
        with FakeLocalNode(FILE, dies_at=step, always=True) as dying, local.client(io_threads=1) as client:
            file = client.open_layout(dying.layout())
            room = Room(client, local, LENGTH)
            transfer = file.read_into if work == "read" else file.write
            with within(5), pytest.raises(errors.Disconnected):
                transfer(OFFSET, room.bytes, timeout_s=10)
            room.bytes[:] = NEW
            good = client.open_layout(layouts[step])
            assert good.write(OFFSET, room.bytes) == LENGTH
            room.bytes[:] = 0
            assert good.read_into(OFFSET, room.bytes) == LENGTH
            assert np.array_equal(room.bytes, NEW)
            room.check_guards()

    at_every_step(named(work), check, AT_ONCE)


@pytest.mark.parametrize("step", ["accepted", "OPEN seen", "MAP seen"])
def test_what_calls_share_costs_each_its_own_time_only(local: Transport, step: str) -> None:
    """One call connects, opens or maps for all; none waits longer than its own time, or ends by another's."""
    for first_s, second_s in ((10.0, TIMEOUT_S), (TIMEOUT_S, 10.0)):
        with FakeLocalNode(FILE, stops_at=step) as node, local.client(streams=1) as client:
            file = client.open_layout(node.layout())
            # Of one allocation: what is mapped is shared too.
            whole = Room(client, local, 2 * LENGTH)
            halves = (whole.bytes[:LENGTH], whole.bytes[LENGTH:])
            first = file.submit_read(OFFSET, halves[0], timeout_s=first_s)
            assert node.stopped.acquire(timeout=5)
            second = file.submit_read(OFFSET, halves[1], timeout_s=second_s)
            short, long = (second, first) if second_s < first_s else (first, second)
            with within(TIMEOUT_S + SLACK_S), pytest.raises(errors.Timeout):
                short.wait()
            assert not long.done, "it was ended by the other's time"
            node.go_on()
            with within(SLACK_S):
                assert long.wait() == LENGTH
            assert np.array_equal(halves[0 if long is first else 1], OLD)
            whole.check_guards()


#: Where a client can stand still: in the middle of a frame, behind it, and behind its answer.
CLIENT_STEPS = [
    f"{frame} {where}"
    for frame in ("HELLO", "OPEN", "MAP", "READ", "WRITE")
    for where in ("half sent", "sent", "answered")
]


def go_to(step: str, raw: RawClient, layout: dict[str, object], content: np.ndarray) -> None:
    """Reads and writes over shared memory that holds ``content``, up to ``step``."""
    handle = 0
    frames: list[tuple[str, Callable[[], bytes]]] = [
        ("HELLO", raw.hello),
        ("OPEN", lambda: raw.open(layout)),
        ("MAP", lambda: raw.map(1, LENGTH)),
        ("READ", lambda: raw.one_sided(READ, handle, 1, LENGTH)),
        ("WRITE", lambda: raw.one_sided(WRITE, handle, 1, LENGTH)),
    ]
    with region_to_offer(content.tobytes()) as memory:
        for name, make in frames:
            frame, descriptor = make(), memory if name == "MAP" else None
            if step == f"{name} half sent":
                return raw.send(frame[: len(frame) // 2], descriptor)
            if step == f"{name} sent":
                return raw.send(frame, descriptor)
            handle = raw.ask(frame, descriptor)["handle"] or handle
            if step == f"{name} answered":
                return None
    raise AssertionError(f"there is no step {step!r}")


def test_clients_that_stand_still_and_die(local: Transport, node: RealNode, files: Files) -> None:
    """One at every step, all at once: the node serves others meanwhile, and then holds nothing of them."""
    address = next(one for one in node.addresses if one.startswith("shm"))
    layout = files.layout()
    with local.client() as client:
        file, room = client.open_layout(layout), Room(client, local, LENGTH)

        def check(*allowed: np.ndarray) -> None:
            with within(2):
                assert file.read_into(0, room.bytes) == LENGTH
            assert any(np.array_equal(room.bytes, one) for one in allowed), "the file holds a mixture"
            room.check_guards()

        file.write(0, OLD)
        check(OLD)
        connections, regions = node.stats()["connections"], node.mapped_regions()
        with ExitStack() as standing:
            for step in CLIENT_STEPS:
                raw = standing.enter_context(RawClient(address))
                # What it reads first is what it writes then.
                go_to(step, raw, layout, NEW)
                check(OLD)
            assert node.stats()["connections"] == connections + len(CLIENT_STEPS)
            mapping = [step for step in CLIENT_STEPS if step.startswith(("READ", "WRITE"))]
            eventually(lambda: node.mapped_regions() == regions + len(mapping) + 2)
            with within(2):
                assert file.write(0, NEWEST) == LENGTH
            check(NEWEST)
        eventually(lambda: node.stats()["connections"] == connections)
        eventually(lambda: node.mapped_regions() == regions)
        check(NEWEST)
