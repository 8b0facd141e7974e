"""Paths: what exists, and under which name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from gd2fs import errors
from gd2fs.client.control import Control


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file or directory.

    ``length`` and ``sealed`` count bytes; ``length`` is None for a directory, and for a file whose length
    nobody knows: a node can't be reached, or has lost its share of the file (``lost``), or has lost what was
    written last (``end_lost``). ``created_at`` is in unix seconds. ``valid``: the first byte that is missing,
    None where none is known to be.
    """

    path: str
    is_dir: bool
    file_id: str | None
    file_class: str
    length: int | None
    sealed: int | None
    stripe_unit: int | None
    width: int | None
    created_at: float
    lost: bool = False
    end_lost: bool = False
    valid: int | None = None

    def known_length(self) -> int:
        """The length of a file in bytes. Raises IsADirectory; Lost or Unavailable where nobody knows it."""
        if self.is_dir:
            raise errors.IsADirectory(f"{self.path} is a directory")
        if self.lost:
            raise errors.Lost(
                f"{self.path}: nobody knows where it ended, since a node was started anew without its share "
                "of it; read the ranges that you need, or delete it and write it again"
            )
        if self.end_lost:
            there = "" if self.valid is None else f"; below {self.valid} all is there"
            raise errors.Lost(
                f"{self.path}: nobody knows where it ended, since a node was started anew that had not kept "
                f"what was written last{there}; read the ranges that you need, or delete it and write it "
                "again"
            )
        if self.length is None:
            raise errors.Unavailable(
                f"{self.path}: its length is not known, since its node can't be reached; try again"
            )
        return self.length

    @classmethod
    def from_json(cls, info: dict[str, Any]) -> FileInfo:
        return cls(
            path=info["path"],
            is_dir=info["is_dir"],
            file_id=info.get("file"),
            file_class=info["class"],
            length=info.get("length"),
            sealed=info.get("sealed"),
            stripe_unit=info.get("stripe_unit"),
            width=info.get("width"),
            created_at=info["created_at"],
            lost=bool(info.get("lost", False)),
            end_lost=bool(info.get("end_lost", False)),
            valid=info.get("valid"),
        )


class Namespace:
    """The calls of control's namespace. Every method raises what control
    answers."""

    def __init__(self, call: Control) -> None:
        self._call = call

    def mkdir(self, path: str, file_class: str, parents: bool) -> None:
        self._call("POST", "/v1/fs/mkdir", {"path": path, "class": file_class, "parents": parents})

    def create(
        self, path: str, stripe_unit: int | None, width: int | None
    ) -> tuple[FileInfo, dict[str, Any]]:
        """The new file and its layout, for reading and writing."""
        wanted = {"stripe_unit": stripe_unit, "width": width}
        body = {"path": path} | {name: value for name, value in wanted.items() if value is not None}
        answer = self._call("POST", "/v1/fs/create", body)
        return FileInfo.from_json(answer), answer["layout"]

    def stat(self, path: str) -> FileInfo:
        return FileInfo.from_json(self._call("GET", _query("/v1/fs/stat", path=path)))

    def exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except (errors.NotFound, errors.NotADirectory):
            return False
        return True

    def list(self, path: str, limit: int, after: str | None) -> list[FileInfo]:
        options: dict[str, Any] = {"path": path, "limit": limit}
        if after:
            options["after"] = after
        return [FileInfo.from_json(e) for e in self._call("GET", _query("/v1/fs/list", **options))["entries"]]

    def rename(self, source: str, target: str) -> None:
        self._call("POST", "/v1/fs/rename", {"from": source, "to": target})

    def delete(self, path: str, recursive: bool) -> None:
        self._call("DELETE", _query("/v1/fs/file", path=path, recursive=str(recursive).lower()))

    def layout(self, path: str, rights: str, timeout_s: float | None = None) -> dict[str, Any]:
        """The layout of a file with a capability for ``rights``: ``read`` or ``read,write``."""
        return self._call("GET", _query("/v1/fs/layout", path=path, rights=rights), None, timeout_s)


def _query(route: str, **options: Any) -> str:
    return f"{route}?{urlencode(options)}"
