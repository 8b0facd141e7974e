"""Directories and files by path. A tenant has a tree of its own; every function sees that one only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select, update

from gd2fs import errors
from gd2fs.control import files, requests
from gd2fs.control.files import STRIPE_UNIT, FileView
from gd2fs.control.lengths import Length
from gd2fs.control.nodes import candidates
from gd2fs.control.paths import PATH_BYTES_MAX, normal, parent_of, refuse_reserved
from gd2fs.control.placement import Candidate, place
from gd2fs.control.schema import files as table

LIST_MAX = 1000
TREE_MAX = 100_000
"""Entries that one delete or rename may touch: one transaction of bounded length."""
_ROOT_CLASS = "cache"


def mkdir(connection: Connection, now: float, tenant: str, body: requests.Mkdir) -> FileView:
    """Makes a directory; with `parents` also those above it, and one that exists already is fine."""
    path = normal(body.path)
    refuse_reserved(path)
    _refuse_durable(body.file_class)
    if path == "/":
        return _root(tenant)
    existing = find(connection, now, tenant, path)
    if existing is not None:
        if not existing.is_dir:
            raise errors.Exists(f"path: {path} is a file")
        if not body.parents:
            raise errors.Exists(f"path: {path} exists")
        if body.file_class not in (None, existing.file_class):
            raise errors.Exists(f"class: {path} exists with the class {existing.file_class!r}")
        return existing
    parent = parent_of(path)
    if body.parents and parent != "/" and find(connection, now, tenant, parent) is None:
        mkdir(connection, now, tenant, requests.Mkdir(path=parent))
    above = _directory(connection, now, tenant, parent)
    files.add(connection, now, tenant, path, file_class=body.file_class or above.file_class)
    return _found(connection, now, tenant, path)


def create(connection: Connection, now: float, tenant: str, body: requests.Create) -> FileView:
    """A new, empty file with a column on each of `width` nodes. Raises Exists, NotFound (its directory),
    NoNodes."""
    path = normal(body.path)
    refuse_reserved(path)
    if path == "/":
        raise errors.IsADirectory("path: / is the root directory")
    directory = _directory(connection, now, tenant, parent_of(path))
    _refuse_durable(directory.file_class)
    if find(connection, now, tenant, path) is not None:
        raise errors.Exists(f"path: {path} exists")
    stripe_unit = body.stripe_unit or STRIPE_UNIT
    if stripe_unit & (stripe_unit - 1):
        raise errors.Invalid(f"stripe_unit: {stripe_unit} is not a power of two")
    # cache files default to one column: the loss of a node then costs some files and not a piece of every
    # file.
    width = body.width or 1
    file, living = files.new_id(), candidates(connection, now)
    on = place(file, living, width)
    if not on:
        raise errors.NoNodes(_no_nodes(path, width, living))
    files.add(
        connection,
        now,
        tenant,
        path,
        file_class=directory.file_class,
        file=file,
        stripe_unit=stripe_unit,
        on=on,
        kv_identity=body.kv_identity,
    )
    return _found(connection, now, tenant, path)


def _no_nodes(path: str, width: int, living: Sequence[Candidate]) -> str:
    """Why there is no place for a file, and what to do."""
    failing = sum(one.log_trouble for one in living)
    why = (
        f" {failing} of them take no new files, since a log of theirs does not take what is to be flushed:"
        " `gd2fs status` says which, their messages why, and they are used again once it does;"
        if failing
        else ""
    )
    return (
        f"path: {path} needs {width} nodes with room, of {len(living)} that are alive;{why}"
        " start nodes or free space"
    )


def stat(connection: Connection, now: float, tenant: str, path: str) -> FileView:
    """Raises NotFound."""
    path = normal(path)
    return _root(tenant) if path == "/" else _found(connection, now, tenant, path)


def by_id(connection: Connection, now: float, tenant: str, file: str) -> FileView:
    """Raises NotFound, also for another tenant's file."""
    views = files.load(connection, now, (table.c.tenant == tenant) & (table.c.file == file) & ~table.c.is_dir)
    if not views:
        raise errors.NotFound(f"file: {file!r:.80} does not exist")
    return views[0]


def listing(
    connection: Connection, now: float, tenant: str, path: str, limit: int, after: str | None
) -> list[FileView]:
    """At most `limit` entries of a directory, in name order, beyond the name `after`."""
    path = normal(path)
    _directory(connection, now, tenant, path)
    where = (table.c.tenant == tenant) & (table.c.parent == path)
    if after:
        where &= table.c.path > f"{path.rstrip('/')}/{after}"
    page = select(table.c.file).where(where).order_by(table.c.path).limit(limit)
    return files.load(connection, now, table.c.file.in_(page))


def rename(connection: Connection, now: float, tenant: str, source: str, target: str) -> FileView:
    """Moves a file or a whole directory; never over something that exists. Layouts stay valid: they name the
    file's id."""
    source, target = normal(source, "from"), normal(target, "to")
    refuse_reserved(source, "from")
    refuse_reserved(target, "to")
    if source == "/" or target == "/" or target.startswith(source + "/"):
        raise errors.Invalid(f"to: {source} can't be moved to {target}")
    moved = _found(connection, now, tenant, source, lock=True)
    if source == target:
        return moved
    above = _directory(connection, now, tenant, parent_of(target))
    if above.file_class != moved.file_class:
        raise errors.Invalid(
            f"to: {target} lies in class {above.file_class!r}, {source} has {moved.file_class!r}"
        )
    if find(connection, now, tenant, target) is not None:
        raise errors.Exists(f"to: {target} exists")
    if moved.is_dir:
        _move_tree(connection, tenant, source, target)
    connection.execute(
        update(table).where(table.c.file == moved.file).values(path=target, parent=parent_of(target))
    )
    return _found(connection, now, tenant, target)


def remove(connection: Connection, now: float, tenant: str, path: str, recursive: bool) -> list[str]:
    """Deletes a file, or a directory (with what is in it if `recursive`); returns the files whose bytes are
    to be freed."""
    path = normal(path)
    refuse_reserved(path)
    if path == "/":
        raise errors.Invalid("path: the root directory can't be deleted")
    view = _found(connection, now, tenant, path, lock=True)
    where = table.c.file == view.file
    if view.is_dir:
        count = _refuse_large(connection, tenant, path)
        if count and not recursive:
            raise errors.NotEmpty(f"path: {path} has {count} entries; delete with recursive=true")
        where |= _below(tenant, path)
    freed = list(connection.scalars(select(table.c.file).where(where, ~table.c.is_dir)))
    files.release(connection, now, where)
    return freed


def file_info(view: FileView, length: Length | None) -> dict[str, Any]:
    """FileInfo of the REST API; `length` is None for a directory."""
    info = {
        "path": view.path,
        "is_dir": view.is_dir,
        "file": None if view.is_dir else view.file,
        "class": view.file_class,
        "length": length.length if length else None,
        "sealed": length.sealed if length else None,
        "stripe_unit": None if view.is_dir else view.stripe_unit,
        "width": None if view.is_dir else view.width,
        "created_at": view.created_at,
    }
    if length and length.lost:
        info["lost"] = True
    elif length and length.valid is not None:
        info["valid"] = length.valid
    if length and length.end_lost:
        info["end_lost"] = True
    return info


def find(connection: Connection, now: float, tenant: str, path: str) -> FileView | None:
    views = files.load(connection, now, (table.c.tenant == tenant) & (table.c.path == path))
    return views[0] if views else None


def _found(connection: Connection, now: float, tenant: str, path: str, *, lock: bool = False) -> FileView:
    view = find(connection, now, tenant, path)
    if view is None:
        raise errors.NotFound(f"path: {path} does not exist")
    if lock:
        connection.execute(select(table.c.file).where(table.c.file == view.file).with_for_update())
    return view


def _directory(connection: Connection, now: float, tenant: str, path: str) -> FileView:
    """The directory at `path`, locked so that it is not deleted or moved while something is put into it."""
    if path == "/":
        return _root(tenant)
    view = _found(connection, now, tenant, path, lock=True)
    if not view.is_dir:
        raise errors.NotADirectory(f"path: {path} is a file")
    return view


def _root(tenant: str) -> FileView:
    return FileView("", tenant, "/", True, _ROOT_CLASS, 0, 0, None, None, None, 0, 0, 0.0)


def _refuse_durable(file_class: str | None) -> None:
    if file_class == "durable":
        raise errors.Unsupported("class: 'durable' (three replicas) is not built yet; use 'cache'")


def _below(tenant: str, path: str) -> ColumnElement[bool]:
    # '0' follows '/': everything that begins with "path/", by the index.
    return (table.c.tenant == tenant) & (table.c.path > path + "/") & (table.c.path < path + "0")


def _refuse_large(connection: Connection, tenant: str, path: str) -> int:
    below = select(table.c.file).where(_below(tenant, path)).limit(TREE_MAX + 1).subquery()
    count = connection.scalar(select(func.count()).select_from(below)) or 0
    if count > TREE_MAX:
        raise errors.TooLarge(
            f"path: {path} has more than {TREE_MAX} entries; take its subdirectories one by one"
        )
    return count


def _move_tree(connection: Connection, tenant: str, source: str, target: str) -> None:
    _refuse_large(connection, tenant, source)
    below = _below(tenant, source)
    longest = connection.scalar(select(func.max(func.length(table.c.path))).where(below)) or 0
    if longest - len(source) + len(target) > PATH_BYTES_MAX:
        raise errors.Invalid(f"to: paths below {target} would be longer than {PATH_BYTES_MAX} bytes")
    connection.execute(
        update(table)
        .where(below)
        .values(
            path=target + func.substr(table.c.path, len(source) + 1),
            parent=target + func.substr(table.c.parent, len(source) + 1),
        )
    )
