"""How long files are: only their nodes know, so they are asked in one batched STAT a node, all at the same
time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gd2fs import errors
from gd2fs.control.files import FileView
from gd2fs.control.node_link import ITEMS_MAX, NodeLink

_NODES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Length:
    """`length` and `sealed` in bytes, None where a node could not be asked; `lost`: a node lost its share;
    `end_lost`: a node lost what was written last, so that nobody knows the length; `valid`: the first byte
    that is missing, None: none is known to be."""

    length: int | None
    sealed: int | None
    lost: bool = False
    end_lost: bool = False
    valid: int | None = None


class Lengths:
    """Asks nodes for the lengths of files; never raises for a node that is away."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._threads = ThreadPoolExecutor(_NODES_AT_ONCE, thread_name_prefix="gd2fs-stat")

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def of(self, views: Sequence[FileView]) -> dict[str, Length]:
        """The length of each file by its id; directories have none."""
        asked: dict[str, tuple[tuple[str, ...], list[dict[str, Any]]]] = {}
        for view in views:
            for ordinal, column in enumerate(view.columns):
                if column.alive and not column.lost:
                    _, items = asked.setdefault(column.node, (column.addresses, []))
                    items.append({"file": view.file, "column": ordinal})
        answers: dict[tuple[str, int], dict[str, Any]] = {}
        for found in self._threads.map(lambda work: self._stat(*work), asked.values()):
            answers.update(found)
        return {view.file: _length(view, answers) for view in views if not view.is_dir}

    def _stat(
        self, addresses: Sequence[str], items: list[dict[str, Any]]
    ) -> dict[tuple[str, int], dict[str, Any]]:
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for start in range(0, len(items), ITEMS_MAX):
            batch = items[start : start + ITEMS_MAX]
            try:
                incarnation, replies = self._link.stat(addresses, batch)
            except errors.Gd2fsError:
                return found
            for item, reply in zip(batch, replies, strict=True):
                found[item["file"], item["column"]] = reply or {"unknown_to": incarnation}
        return found


def _length(view: FileView, answers: dict[tuple[str, int], dict[str, Any]]) -> Length:
    columns = []
    for ordinal, column in enumerate(view.columns):
        answer = answers.get((view.file, ordinal))
        if column.lost or (answer and answer.get("unknown_to", column.born) != column.born):
            # Also where the node was started anew without it a moment ago, and control has not heard of it.
            return Length(None, None, lost=True)
        if answer and "unknown_to" in answer:
            # Placed there, and never written.
            answer = {"length": 0, "sealed": 0, "end_lost": False}
        columns.append(answer)
    known = [column for column in columns if column is not None]
    if len(known) < len(columns):
        return Length(None, None)
    sealed = min(column["sealed"] for column in known)
    if any(column["end_lost"] for column in known):
        return Length(None, sealed, end_lost=True, valid=view.valid)
    # Lengths are file offsets: the longest column ends where the file ends.
    return Length(max(column["length"] for column in known), sealed, valid=view.valid)
