"""Where bytes are, and what a client may be told about their durability, with nodes that have memory only."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gd2fs import _native, errors
from gd2fs.client import Client, Extent, Warmth
from gd2fs.signing import Keys, Token
from tests.client_fake_node import CLUSTER as FAKE_CLUSTER
from tests.client_fake_node import FakeNode
from tests.client_real_node import CLUSTER, RealNode, sign

UNIT = 64 << 10


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RealNode]]:
    with RealNode("a") as a, RealNode("b") as b, RealNode("c") as c:
        yield [a, b, c]


@pytest.fixture
def client() -> Iterator[Client]:
    with Client([], cluster=CLUSTER, token="") as one:
        yield one


def control(node: RealNode, opcode: int, payload: dict[str, Any]) -> dict[str, Any]:
    token = Keys.development().sign(Token("default", "control", int(time.time()) + 600))
    code, incarnation, answer = _native.NodeLink(CLUSTER, token, 5_000).call(
        node.address, opcode, json.dumps(payload).encode()
    )
    assert (code, incarnation) == (0, node.incarnation), answer
    parsed: dict[str, Any] = json.loads(answer)
    return parsed


def test_the_columns_of_a_file_are_one_answer(client: Client, nodes: list[RealNode]) -> None:
    file = client.open_layout(sign(nodes, stripe_unit=UNIT))
    file.write(0, b"x" * (5 * UNIT + 100))
    file.write(7 * UNIT, b"y" * 10)
    end = 7 * UNIT + 10
    whole = [
        Extent(0, 5 * UNIT + 100, "dram"),
        Extent(5 * UNIT + 100, 7 * UNIT, "hole"),
        Extent(7 * UNIT, end, "dram"),
    ]
    assert file.where([(0, end)]) == whole
    assert file.where([(10, 20), (30, 30), (5 * UNIT, 6 * UNIT)]) == [
        Extent(10, 20, "dram"),
        Extent(5 * UNIT, 5 * UNIT + 100, "dram"),
        Extent(5 * UNIT + 100, 6 * UNIT, "hole"),
    ]
    there = 5 * UNIT + 110
    assert file.warm([(0, end)]) == Warmth(there, 0, end - there)
    assert file.warm([(0, 1), (end, end + 9)]) == Warmth(1, 0, 9)
    assert file.where([]) == [] and file.warm([]) == Warmth()


def test_many_extents_come_in_several_answers(client: Client, nodes: list[RealNode]) -> None:
    file = client.open_layout(sign(nodes[:2], stripe_unit=UNIT))
    done = [file.submit_write(index * 100, b"z" * 50) for index in range(4000)]
    assert sum(request.wait() for request in done) == 200_000
    found = file.where([(0, 400_000)])
    assert len(found) == 8000
    assert found[::2] == [Extent(index * 100, index * 100 + 50, "dram") for index in range(4000)]
    assert {extent.tier for extent in found[1::2]} == {"hole"}


def test_rights_ranges_and_lives_count(client: Client, nodes: list[RealNode]) -> None:
    layout = sign(nodes[:1], rights=("write",))
    writer = client.open_layout(layout)
    for ask in (writer.where, writer.warm):
        with pytest.raises(errors.Forbidden, match="reading"):
            ask([(0, 10)])
        for bad in ((-1, 5), (6, 5), (0, 1 << 63)):
            with pytest.raises(errors.Invalid, match="ranges"):
                ask([bad])
    old = client.open_layout(sign(nodes[:1], file=layout["file"], life_s=-1))
    with pytest.raises(errors.Expired):
        old.flush()
    with pytest.raises(errors.Invalid, match="timeout_s"):
        writer.flush(timeout_s=0)


def test_a_node_without_a_log_promises_nothing(client: Client, nodes: list[RealNode]) -> None:
    file = client.open_layout(sign(nodes[:2]))
    file.write(0, b"data")
    with pytest.raises(errors.Unsupported, match=r"node\.logs"):
        file.flush()


def test_what_went_with_a_node_is_lost(client: Client) -> None:
    with RealNode("x") as node:
        layout = sign([node])
        client.open_layout(layout).write(0, b"data")
        node.kill()
        node.start()
        # As control would say it: the column was born in the first incarnation and lives in the second.
        columns = layout["columns"]
        replica = columns[0]["replicas"][0] | {"incarnation": 2, "addresses": node.addresses}
        again = client.open_layout(layout | {"columns": [columns[0] | {"replicas": [replica]}]})
        assert again.where([(0, 4)]) == [Extent(0, 4, "lost")]
        assert again.warm([(0, 4)]) == Warmth(0, 0, 4)


def test_a_flush_by_another_incarnation_than_the_writes_is_an_error_once() -> None:
    with FakeNode() as node, Client([], cluster=FAKE_CLUSTER, token="") as client:
        file = client.open_layout(node.layout())
        file.write(0, b"first")
        file.flush()
        node.incarnation = 2
        node.drop_connections()
        file.flush()  # the first write was durable before the node went
        file.write(0, b"second")
        node.incarnation = 3
        node.drop_connections()
        # Also through another layout of the same file, such as one that control gave later.
        with pytest.raises(errors.Lost, match="started anew"):
            client.open_layout(node.layout(path="/again")).flush()
        file.flush()
        file.write(0, b"third")
        node.incarnation = 4
        node.drop_connections()
        file.write(0, b"fourth")
        with pytest.raises(errors.Lost):
            file.flush()


def test_answers_that_make_no_sense_are_refused() -> None:
    with FakeNode(bytes(100)) as node, Client([], cluster=FAKE_CLUSTER, token="") as client:
        file = client.open_layout(node.layout())
        for said in (
            {"extents": [[0, 101, "dram"]], "next": None},
            {"extents": [[50, 60, "dram"], [0, 10, "dram"]], "next": None},
            {"extents": [], "next": 0},
            {"extents": [[0, 100, "tape"]], "next": None},
            {"extents": [[0, 100]]},
        ):
            node.twist = lambda header, reply, said=said: (
                node.reply(header, ext=said) if header["opcode"] == 11 else reply
            )
            with pytest.raises((errors.BadFrame, errors.BadRequest)):
                file.where([(0, 100)])
        node.twist = lambda header, reply: (
            node.refuse(header, errors.Overloaded.code) if header["opcode"] == 9 else reply
        )
        with pytest.raises(errors.Overloaded):
            file.flush()
        assert node.count(9) > 1, "tried again"


def test_control_lists_pins_and_scrubs(client: Client, nodes: list[RealNode]) -> None:
    layout = sign(nodes[:1])
    client.open_layout(layout).write(0, bytes(1000))
    listed = control(nodes[0], 21, {"after": None, "limit": 4096})
    (item,) = [item for item in listed["items"] if item["file"] == layout["file"]]
    assert (item["length"], item["valid"], item["epoch"], listed["next"]) == (1000, None, 1, None)
    pin = {"pin": "1" * 32, "file": layout["file"], "column": 0, "epoch": 1, "start": 0, "end": 2000}
    answer = control(nodes[0], 19, {"items": [pin | {"ttl_ms": 1000}]})
    assert answer == {"items": [{"status": 0, "valid": 1000, "message": ""}]}
    assert control(nodes[0], 20, {"items": [{"pin": "1" * 32}]}) == {"items": [{"ranges": 1}]}
    control(nodes[0], 22, {"start": True})
    deadline = time.monotonic() + 10
    while (state := control(nodes[0], 22, {"start": False}))["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (state["rounds"], state["corrupt_chunks"]) == (1, 0) and state["bytes"] == state["bytes_total"]
