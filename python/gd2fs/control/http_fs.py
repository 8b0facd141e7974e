"""Routes of the namespace and of layouts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from gd2fs import errors
from gd2fs.control import namespace, requests
from gd2fs.control.files import FileView
from gd2fs.control.http_edge import Caller, Control
from gd2fs.control.layouts import CAPABILITY_LIFE_S, layout
from gd2fs.control.paths import refuse_reserved
from gd2fs.control.service import Service
from gd2fs.signing import Right

router = APIRouter(prefix="/v1/fs")

PathQuery = Annotated[str, Query(min_length=1, max_length=1024)]
_RIGHTS: dict[str, list[Right]] = {
    "read": ["read"],
    "write": ["write"],
    "read,write": ["read", "write"],
    "write,read": ["read", "write"],
}


@router.post("/mkdir")
def mkdir(control: Control, caller: Caller, body: requests.Mkdir) -> dict[str, Any]:
    caller.require("client")
    view = control.write(lambda connection, now: namespace.mkdir(connection, now, caller.tenant, body))
    return namespace.file_info(view, None)


@router.post("/create")
def create(control: Control, caller: Caller, body: requests.Create) -> dict[str, Any]:
    """A new, empty file, with the layout to read and write it."""
    caller.require("client")

    def work(connection: Any, now: float) -> tuple[FileView, float]:
        return namespace.create(connection, now, caller.tenant, body), now

    view, now = control.write(work)
    info = _infos(control, [view])[0]
    return info | {"layout": _layout(control, view, ["read", "write"], now, info["length"])}


@router.get("/stat")
def stat(control: Control, caller: Caller, path: PathQuery) -> dict[str, Any]:
    caller.require("client")
    view = control.read(lambda connection, now: namespace.stat(connection, now, caller.tenant, path))
    return _infos(control, [view])[0]


@router.get("/list")
def listing(
    control: Control,
    caller: Caller,
    path: PathQuery = "/",
    limit: Annotated[int, Query(ge=1, le=namespace.LIST_MAX)] = 100,
    after: Annotated[str | None, Query(max_length=1024)] = None,
) -> dict[str, Any]:
    """A page of a directory in name order; `next` is the `after` of the following page, null at the end."""
    caller.require("client")
    views = control.read(
        lambda connection, now: namespace.listing(connection, now, caller.tenant, path, limit + 1, after)
    )
    page = views[:limit]
    following = page[-1].path.rpartition("/")[2] if len(views) > limit else None
    return {"entries": _infos(control, page), "next": following}


@router.post("/rename")
def rename(control: Control, caller: Caller, body: requests.Rename) -> dict[str, Any]:
    caller.require("client")
    view = control.write(
        lambda connection, now: namespace.rename(connection, now, caller.tenant, body.source, body.target)
    )
    return _infos(control, [view])[0]


@router.delete("/file")
def delete(control: Control, caller: Caller, path: PathQuery, recursive: bool = False) -> dict[str, Any]:
    """Deletes, and frees the bytes on the nodes at once; where a node is away, as soon as it is back."""
    caller.require("client")
    files = control.write(
        lambda connection, now: namespace.remove(connection, now, caller.tenant, path, recursive)
    )
    return {"deleted_files": len(files), "freed_bytes": control.reclaimer.free_now(files)}


@router.get("/layout")
def get_layout(
    control: Control,
    caller: Caller,
    path: Annotated[str | None, Query(min_length=1, max_length=1024)] = None,
    file: Annotated[str | None, Query(pattern="^[0-9a-f]{32}$")] = None,
    rights: Annotated[str, Query(max_length=16)] = "read",
) -> dict[str, Any]:
    """The layout of a file by its path or its id, with a capability for `rights` (read, write or both)."""
    caller.require("client")
    if (path is None) == (file is None):
        raise errors.Invalid("path, file: give one of them")
    wanted = _RIGHTS.get(rights)
    if wanted is None:
        raise errors.Invalid(f"rights: {rights!r} must be read, write or read,write")

    def work(connection: Any, now: float) -> tuple[FileView, float]:
        if path is not None:
            return namespace.stat(connection, now, caller.tenant, path), now
        return namespace.by_id(connection, now, caller.tenant, file or ""), now

    view, now = control.read(work)
    if view.is_dir:
        raise errors.IsADirectory(f"path: {view.path} is a directory")
    if "write" in wanted:
        # Only a plan gives the right to write a session's file, with the grant that goes with it.
        refuse_reserved(view.path)
    return _layout(control, view, wanted, now, control.lengths.of([view])[view.file].length)


def _infos(control: Service, views: list[FileView]) -> list[dict[str, Any]]:
    lengths = control.lengths.of(views)
    return [namespace.file_info(view, lengths.get(view.file)) for view in views]


def _layout(
    control: Service, view: FileView, rights: list[Right], now: float, length: int | None
) -> dict[str, Any]:
    return layout(control.keys, view, rights=rights, expires_at=int(now) + CAPABILITY_LIFE_S, length=length)
