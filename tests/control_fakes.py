"""Storage nodes in memory, behind control's NodeLink: the rules of the real node, without sockets.

Writers use `FakeNodes.write` with a layout as an engine would: capability, grant, seal and incarnation are
checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gd2fs import errors
from gd2fs.kv import ID_BYTES, Ids, ids_from_bytes
from gd2fs.signing import Capability, Keys


@dataclass
class FakeColumn:
    epoch: int
    born: int
    grant: int = 0
    sealed: int = 0
    written: list[tuple[int, int]] = field(default_factory=list)
    wanted: int = 0  # the end before something was lost
    end_lost: bool = False
    data: bytearray = field(default_factory=bytearray)  # of `.tokens` files; nobody looks at KV cache here

    @property
    def length(self) -> int:
        return max([self.wanted, *(end for _, end in self.written)])

    def has(self, start: int, end: int) -> bool:
        """Whether [start, end) was written without a hole."""
        for low, high in sorted(self.written):
            if low > start:
                return False
            start = max(start, high)
            if start >= end:
                return True
        return start >= end

    def drop_beyond(self, end: int) -> None:
        self.written = [(low, min(high, end)) for low, high in self.written if low < end]
        del self.data[end:]
        self.wanted = min(self.wanted, end)

    @property
    def valid(self) -> int | None:
        """The first byte that is missing below what was written."""
        return self.missing(0, max(self.length, self.sealed))

    def missing(self, start: int, end: int) -> int | None:
        """The first byte of [start, end) that is not there."""
        for low, high in sorted(self.written):
            if low > start:
                break
            start = max(start, high)
        return start if start < end else None

    def lose(self, start: int, end: int) -> None:
        """Evicts, loses or corrupts [start, end)."""
        self.wanted = self.length
        pieces = [
            piece for low, high in self.written for piece in ((low, min(high, start)), (max(low, end), high))
        ]
        self.written = [(low, high) for low, high in pieces if low < high]


@dataclass
class FakeNode:
    name: str
    incarnation: int = 0
    away: bool = False
    columns: dict[tuple[str, int], FakeColumn] = field(default_factory=dict)
    deleted: set[tuple[str, int]] = field(default_factory=set)
    pins: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    pins_max: int = 1000
    knows_pins: bool = True
    scrub: dict[str, Any] = field(
        default_factory=lambda: {"running": False, "rounds": 0, "corrupt_chunks": 0}
    )

    @property
    def address(self) -> str:
        return f"tcp://{self.name}:7528"

    def restart(self, incarnation: int) -> None:
        """Everything was memory."""
        self.incarnation = incarnation
        self.columns.clear()
        self.deleted.clear()
        self.pins.clear()

    def recover(self, incarnation: int) -> list[dict[str, Any]]:
        """Everything was on a log; returns what the agent reports."""
        self.incarnation = incarnation
        self.pins.clear()
        return [self.item(key) for key in sorted(self.columns)]

    def item(self, key: tuple[str, int]) -> dict[str, Any]:
        column = self.columns[key]
        return {
            "file": key[0],
            "column": key[1],
            "epoch": column.epoch,
            "sealed": column.sealed,
            "length": column.length,
            "valid": column.valid,
        }

    def used_bytes(self) -> int:
        return sum(high - low for column in self.columns.values() for low, high in column.written)


class FakeNodes:
    """NodeLink over FakeNode objects; `calls` counts what was asked."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.nodes: dict[str, FakeNode] = {}
        names = ("seal", "delete", "stat", "pin", "unpin", "list", "scrub", "read_ids")
        self.calls: dict[str, int] = dict.fromkeys(names, 0)
        self.after_list: Any = None
        self.after_stat: Any = None
        self.before_seal: Any = None
        self.before_read_ids: Any = None

    def node(self, name: str) -> FakeNode:
        return self.nodes.setdefault(name, FakeNode(name))

    # What control asks.

    def seal(self, addresses: Sequence[str], items: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
        self.calls["seal"] += 1
        if self.before_seal:
            self.before_seal()
        node = self._reach(addresses)
        return node.incarnation, [self._seal_one(node, item) for item in items]

    def delete(
        self, addresses: Sequence[str], items: list[dict[str, Any]]
    ) -> tuple[int, list[dict[str, Any]]]:
        self.calls["delete"] += 1
        node = self._reach(addresses)
        replies = []
        for item in items:
            key = item["file"], item["column"]
            column = node.columns.pop(key, None)
            node.deleted.add(key)
            freed = sum(high - low for low, high in column.written) if column else 0
            replies.append({"freed": freed})
        return node.incarnation, replies

    def stat(
        self, addresses: Sequence[str], items: list[dict[str, Any]]
    ) -> tuple[int, list[dict[str, Any] | None]]:
        self.calls["stat"] += 1
        node = self._reach(addresses)
        replies: list[dict[str, Any] | None] = []
        for item in items:
            column = node.columns.get((item["file"], item["column"]))
            if (item["file"], item["column"]) in node.deleted:
                replies.append(
                    {"length": 0, "sealed": 0, "grant": 0, "epoch": 0, "bytes": 0, "deleted": True}
                )
                continue
            replies.append(
                {
                    "length": column.length,
                    "sealed": column.sealed,
                    "grant": column.grant,
                    "epoch": column.epoch,
                    "bytes": column.length,
                    "end_lost": column.end_lost,
                }
                if column
                else None
            )
        if self.after_stat:
            self.after_stat()
        return node.incarnation, replies

    def pin(self, addresses: Sequence[str], items: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
        self.calls["pin"] += 1
        node = self._reach(addresses)
        if not node.knows_pins:
            raise errors.UnknownOpcode("opcode 19 is not known")
        return node.incarnation, [self._pin_one(node, item) for item in items]

    def unpin(
        self, addresses: Sequence[str], items: list[dict[str, Any]]
    ) -> tuple[int, list[dict[str, Any]]]:
        self.calls["unpin"] += 1
        node = self._reach(addresses)
        return node.incarnation, [{"ranges": len(node.pins.pop(item["pin"], []))} for item in items]

    def list(
        self, addresses: Sequence[str], after: dict[str, Any] | None, limit: int
    ) -> tuple[int, dict[str, Any]]:
        self.calls["list"] += 1
        node = self._reach(addresses)
        first = (after["file"], after["column"]) if after else ("", -1)
        keys = sorted(key for key in node.columns if key > first)
        page = [
            node.item(key) | {"grant": node.columns[key].grant, "dram_bytes": 0, "nvme_bytes": 0}
            for key in keys[:limit]
        ]
        last = {"file": page[-1]["file"], "column": page[-1]["column"]} if len(keys) > limit else None
        if self.after_list:
            self.after_list()
        return node.incarnation, {"items": page, "next": last}

    def scrub(self, addresses: Sequence[str], start: bool) -> tuple[int, dict[str, Any]]:
        self.calls["scrub"] += 1
        node = self._reach(addresses)
        node.scrub["running"] = start or node.scrub["running"]
        return node.incarnation, dict(node.scrub)

    def read_ids(self, layout: dict[str, Any], first: int, count: int) -> Ids:
        self.calls["read_ids"] += 1
        if self.before_read_ids:
            self.before_read_ids()
        return ids_from_bytes(bytes(self.read(layout, first * ID_BYTES, count * ID_BYTES)))

    def close(self) -> None:
        pass

    # What an engine does with a layout.

    def write(
        self, layout: dict[str, Any], offset: int, length: int, data: bytes | None = None
    ) -> dict[str, int]:
        """Writes `length` bytes (of `data`, or of nothing in particular); returns the acknowledgement."""
        capability = self._allowed(layout, "write", offset, length)
        node, column, key = self._open(layout, capability)
        if capability.grant < column.grant:
            raise errors.StaleWriter("a higher grant was seen")
        if capability.grant > column.grant:
            column.grant = capability.grant
            column.drop_beyond(column.sealed)
        if offset < column.sealed:
            raise errors.Sealed(f"[{offset}, {offset + length}) begins below the seal {column.sealed}")
        column.written.append((offset, offset + length))
        if data is not None:
            column.data.extend(bytes(max(0, offset + length - len(column.data))))
            column.data[offset : offset + length] = data
        return {"column": key[1], "epoch": column.epoch, "incarnation": node.incarnation}

    def read(self, layout: dict[str, Any], offset: int, length: int) -> bytes:
        capability = self._allowed(layout, "read", offset, length)
        node, column, _ = self._open(layout, capability)
        if not column.has(offset, offset + length):
            raise (errors.Lost if column.born < node.incarnation else errors.Hole)(f"[{offset}, +{length})")
        return bytes(column.data[offset : offset + length])

    def _open(
        self, layout: dict[str, Any], capability: Capability
    ) -> tuple[FakeNode, FakeColumn, tuple[str, int]]:
        replica = layout["columns"][0]["replicas"][0]
        node = self._reach(replica["addresses"])
        key = capability.file, 0
        if key in node.deleted:
            raise errors.Deleted(capability.file)
        epoch, born = capability.columns[0]
        return node, node.columns.setdefault(key, FakeColumn(epoch, born)), key

    def _allowed(self, layout: dict[str, Any], right: Any, offset: int, length: int) -> Capability:
        capability = self.keys.verify_ever(layout["capability"], Capability)
        inside = any(
            start <= offset and (end < 0 or offset + length <= end) for start, end in capability.ranges
        )
        if right not in capability.rights or (capability.ranges and not inside):
            raise errors.Forbidden(f"{right} [{offset}, +{length}) of {capability.ranges}")
        return capability

    def _reach(self, addresses: Sequence[str]) -> FakeNode:
        for node in self.nodes.values():
            if node.address in addresses and not node.away:
                return node
        raise errors.Disconnected(f"nobody listens on {list(addresses)}")

    def _pin_one(self, node: FakeNode, item: dict[str, Any]) -> dict[str, Any]:
        column = node.columns.get((item["file"], item["column"]))
        code: type[errors.Gd2fsError] | None = None
        valid = None
        if column is None:
            code = errors.NotFound
        elif item["epoch"] != column.epoch:
            code = errors.StaleLayout
        else:
            valid = column.missing(item["start"], item["end"])
            if sum(map(len, node.pins.values())) >= node.pins_max:
                code = errors.Overloaded
            else:
                assert 0 < item["ttl_ms"] <= 3_600_000
                node.pins.setdefault(item["pin"], []).append(item)
        return {"status": code.code if code else 0, "valid": valid, "message": ""}

    def _seal_one(self, node: FakeNode, item: dict[str, Any]) -> dict[str, Any]:
        column = node.columns.get((item["file"], item["column"]))
        code: type[errors.Gd2fsError] | None = None
        if column is None:
            code = errors.Lost if item["born"] < node.incarnation else errors.Hole
        elif item["grant"] != column.grant:
            code = errors.StaleWriter
        elif item["epoch"] != column.epoch:
            code = errors.StaleLayout
        elif not column.has(column.sealed, item["length"]):
            code = errors.Lost if item["born"] < node.incarnation else errors.Hole
        elif column:
            column.sealed = max(column.sealed, item["length"])
        sealed = column.sealed if column else 0
        return {
            "status": code.code if code else 0,
            "sealed": sealed,
            "message": code.__name__ if code else "",
        }


@dataclass
class FakeClock:
    """The database's time, moved by the test."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now
