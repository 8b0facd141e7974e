"""Control's line to real nodes, over a stand-in for the native module: addresses, refusals, tokens, short
reads."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gd2fs
from gd2fs import errors
from gd2fs.control import node_link
from gd2fs.control.node_link import NativeNodeLink
from gd2fs.signing import Keys, Token

KEYS = Keys.parse("7:00112233445566778899aabbccddeeff")
NOW = 1_000_000_000.0
"""Years before what any machine's clock says: tokens are good by the cluster's time."""
IDS = np.arange(100, dtype="<u4")


class Line:
    """Stands in for _native.NodeLink."""

    made: list[str] = []  # noqa: RUF012

    def __init__(self, cluster: str, token: str, timeout_ms: int) -> None:
        assert cluster == "c" and 0 < timeout_ms <= 10_000
        Line.made.append(token)

    def call(self, address: str, opcode: int, payload: bytes) -> tuple[int, int, bytes]:
        if address == "tcp://away":
            raise errors.Disconnected("nobody is there")
        if address == "tcp://busy":
            return errors.Overloaded.code, 0, b'{"message": "too many connections"}'
        if address == "tcp://stranger":
            return errors.WrongCluster.code, 0, b'{"message": "cluster d"}'
        message = json.loads(payload)
        answer = {"items": [opcode, message["items"]]} if "items" in message else {"asked": [opcode, message]}
        return 0, 5, json.dumps(answer).encode()


class Reader:
    """Stands in for _native.Client: a file of the ids 0..99."""

    def __init__(self, addresses: list[str], cluster: str, token: str, **options: Any) -> None:
        assert KEYS.verify(token, Token, now=NOW).role == "control"
        self.done: list[tuple[int, int, int, str]] = []

    def file(self, layout: str) -> str:
        return layout

    def submit_read(self, layout: str, offset: int, buffers: list[Any], timeout_ms: int) -> int:
        if json.loads(layout)["path"] == "/lost":
            self.done.append((1, errors.Lost.code, 0, "gone"))
        else:
            part = IDS.tobytes()[offset : offset + len(buffers[0])]
            buffers[0][: len(part)] = np.frombuffer(part, np.uint8)
            self.done.append((1, 0, len(part), ""))
        return 1

    def reap(self, most: int, timeout_ms: int) -> list[tuple[int, int, int, str]]:
        done, self.done = self.done, []
        return done


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeNodeLink]:
    native = types.ModuleType("gd2fs._native")
    native.NodeLink, native.Client = Line, Reader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gd2fs._native", native)
    monkeypatch.setattr(gd2fs, "_native", native, raising=False)
    Line.made.clear()
    link = NativeNodeLink("c", KEYS, lambda: NOW)
    yield link
    link.close()


def test_operations_and_items_reach_the_node(link: NativeNodeLink) -> None:
    items = [{"file": "f", "column": 0}]
    assert link.seal(["tcp://here"], items) == (5, [16, items])
    assert link.delete(["tcp://here"], items) == (5, [17, items])
    assert link.stat(["tcp://here"], items) == (5, [18, items])
    assert link.pin(["tcp://here"], items) == (5, [19, items])
    assert link.unpin(["tcp://here"], items) == (5, [20, items])
    page = {"after": items[0], "limit": 7}
    assert link.list(["tcp://away", "tcp://here"], items[0], 7) == (5, {"asked": [21, page]})
    assert link.scrub(["tcp://here"], True) == (5, {"asked": [22, {"start": True}]})
    assert len(Line.made) == 2, "one line for all but pins, which wait less"
    token = KEYS.verify(Line.made[0], Token, now=NOW)
    assert token.role == "control" and token.expiry <= NOW + 86_400


def test_the_next_address_is_tried_where_that_can_help(link: NativeNodeLink) -> None:
    assert link.stat(["tcp://away", "tcp://busy", "tcp://here"], [])[0] == 5
    with pytest.raises(errors.Disconnected):
        link.stat(["tcp://away"], [])
    with pytest.raises(errors.Overloaded, match="too many"):
        link.stat(["tcp://busy"], [])
    with pytest.raises(errors.WrongCluster, match="cluster d"):
        link.stat(["tcp://stranger", "tcp://here"], [])
    with pytest.raises(errors.Disconnected, match="no address"):
        link.stat([], [])


def test_the_token_is_renewed_before_it_is_over(
    link: NativeNodeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(node_link.time, "monotonic", lambda: now[0])
    link.stat(["tcp://here"], [])
    now[0] += 11 * 3600
    link.stat(["tcp://here"], [])
    assert len(Line.made) == 1
    now[0] += 2 * 3600
    link.stat(["tcp://here"], [])
    assert len(Line.made) == 2


def test_ids_are_read_whole_or_not_at_all(link: NativeNodeLink) -> None:
    assert link.read_ids({"path": "/f"}, 10, 5).tolist() == [10, 11, 12, 13, 14]
    assert link.read_ids({"path": "/f"}, 0, 0).size == 0
    with pytest.raises(errors.Hole, match="8 bytes"):
        link.read_ids({"path": "/f"}, 95, 7)
    with pytest.raises(errors.Lost, match="/lost"):
        link.read_ids({"path": "/lost"}, 0, 1)
    for _ in range(10):  # more often than there are readers: each comes back
        link.read_ids({"path": "/f"}, 0, 1)
