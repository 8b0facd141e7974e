"""Pins: what a plan will read is not evicted before the plan ends.

The node's answer is also the last word on what is there: what went since its last report shortens the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gd2fs import errors
from gd2fs.control.files import FileView, Unusable
from gd2fs.control.node_link import Item, NodeLink
from gd2fs.control.sessions import SessionView, tokens_below
from gd2fs.kv import ID_BYTES, Segment

_NODES_AT_ONCE = 16
_RELEASES_MAX = 1024
"""UNPINs that may wait for their turn; beyond it pins end with their time."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One PIN item, and the planned segment it belongs to."""

    item: Item
    segment: Segment
    kv: FileView
    of_ids: bool


@dataclass(slots=True)
class _Node:
    node: str
    addresses: Sequence[str]
    incarnation: int
    asked: list[_Asked] = field(default_factory=list)


@dataclass(slots=True)
class Pinned:
    """What of a plan's stored segments is there: `end` tokens from the session's beginning, and what kept it
    from being all."""

    end: int
    miss: Unusable | None = None
    shrunken: set[str] = field(default_factory=set)
    """KV files that have lost something, or whose ids have: nothing more is written to them."""
    silent: set[str] = field(default_factory=set)
    """Nodes that did not answer: nothing is placed there, whatever control still believes of them."""
    best_effort: bool = False
    """Whether something that is there could not be pinned, and may be evicted before it is read."""

    def cut(self, end: int, miss: Unusable) -> None:
        if end < self.end:
            self.end, self.miss = end, miss


class Pins:
    """Pins and unpins at the nodes. Holds nothing itself: the nodes count, under the plan's id."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._threads = ThreadPoolExecutor(_NODES_AT_ONCE, thread_name_prefix="gd2fs-pin")
        self._room = threading.BoundedSemaphore(_RELEASES_MAX)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def hold(self, plan: str, view: SessionView, cached: Sequence[Segment], ttl_s: int) -> Pinned:
        """Pins the planned segments with their ids for `ttl_s` seconds, in one call a node, all at the same
        time. A node that does not answer is a miss from its first segment on. Never raises for a node."""
        found = Pinned(cached[-1].token_end if cached else 0)
        nodes = list(_by_node(plan, view, cached, ttl_s).values())
        # One node is the rule (a session lies on one), and needs no thread.
        answers = self._threads.map(self._pin, nodes) if len(nodes) > 1 else map(self._pin, nodes)
        for node, replies in zip(nodes, answers, strict=True):
            if replies == "unreachable":
                found.silent.add(node.node)
            for position, asked in enumerate(node.asked):
                _judge(found, view, asked, replies[position] if isinstance(replies, list) else replies)
        found.end = view.kv_format.round_down(found.end)
        return found

    def drop(self, plans: Collection[str], views: Iterable[FileView]) -> None:
        """Ends the pins of these plans on the living nodes of `views`, in the background."""
        if not plans:
            return
        items = [{"pin": plan} for plan in plans]
        nodes = {column.node: column.addresses for view in views for column in view.columns if column.alive}
        for addresses in nodes.values():
            if self._room.acquire(blocking=False):
                self._threads.submit(self._unpin, addresses, items)

    def _pin(self, node: _Node) -> list[Item] | Unusable | None:
        """The replies of a node, why it serves nothing, or None for a node that knows no pins."""
        try:
            incarnation, replies = self._link.pin(node.addresses, [asked.item for asked in node.asked])
        except errors.UnknownOpcode:
            return None  # of the version before
        except errors.Gd2fsError:
            return "unreachable"
        # Registered anew since: the layouts of this plan would name an incarnation that is over.
        return replies if incarnation == node.incarnation else "unreachable"

    def _unpin(self, addresses: Sequence[str], items: list[Item]) -> None:
        try:
            self._link.unpin(addresses, items)
        except errors.Gd2fsError:
            return  # they end with their time
        finally:
            self._room.release()


def _by_node(plan: str, view: SessionView, cached: Sequence[Segment], ttl_s: int) -> dict[str, _Node]:
    """Each node with its items in the order of their tokens: it evicts what was pinned last first."""
    nodes: dict[str, _Node] = {}
    for segment, stored in zip(cached, view.segments, strict=False):
        kv = view.files[stored.file]
        first = segment.token_index(view.kv_format, segment.token_start) * ID_BYTES
        ids = first, first + segment.token_length * ID_BYTES
        ranges = ((kv, (segment.kv_start, segment.kv_end)), (view.tokens_file(stored.file), ids))
        for file, (start, end) in ranges:
            for ordinal, column in enumerate(file.columns):
                item: dict[str, Any] = {
                    "pin": plan,
                    "file": file.file,
                    "column": ordinal,
                    "epoch": column.epoch,
                    "start": start,
                    "end": end,
                    "ttl_ms": ttl_s * 1000,
                }
                node = nodes.setdefault(column.node, _Node(column.node, column.addresses, column.incarnation))
                node.asked.append(_Asked(item, segment, kv, file is not kv))
    return nodes


def _judge(found: Pinned, view: SessionView, asked: _Asked, reply: Item | Unusable | None) -> None:
    """What one reply means for the plan. Ids shorten nothing: control's digests say what they were."""
    if reply is None:
        found.best_effort = True
    elif reply == "unreachable":
        found.cut(asked.segment.token_start, "unreachable")
    elif isinstance(reply, dict):
        missing = reply["status"] not in (0, errors.Overloaded.code)
        found.best_effort |= reply["status"] == errors.Overloaded.code
        valid = 0 if missing else reply["valid"]
        if valid is not None and valid < asked.item["end"]:
            found.shrunken.add(asked.kv.file)
            if not asked.of_ids:
                found.cut(tokens_below(asked.segment, valid, view.kv_format), "lost")
