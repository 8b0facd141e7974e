"""gd2fs ls, stat, put, get, cat, rm, where, warm, flush."""

from __future__ import annotations

import base64
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gd2fs.cli.connection import ControlOption, connect
from gd2fs.cli.output import JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from gd2fs.client import FileInfo

# `cat` moves a file through memory in pieces of this size.
CAT_PIECE_BYTES = 8 << 20
# `cat --json` holds the whole answer in memory; beyond it `get` is the right command.
CAT_JSON_BYTES_MAX = 16 << 20
# Names asked for at once.
PAGE = 1000

RemotePath = Annotated[str, typer.Argument(metavar="PATH", help="A path in GD2FS, such as /models/a.bin.")]


def describe(info: FileInfo) -> dict[str, Any]:
    """The JSON of one file or directory."""
    return {
        "path": info.path,
        "is_dir": info.is_dir,
        "file": info.file_id,
        "class": info.file_class,
        "length": info.length,
        "sealed": info.sealed,
        "stripe_unit": info.stripe_unit,
        "width": info.width,
        "created_at": info.created_at,
        "lost": info.lost,
        "end_lost": info.end_lost,
        "valid": info.valid,
        "length_unknown": _why_unknown(info),
    }


def _why_unknown(info: FileInfo) -> str | None:
    """Why nobody knows how long a file is; None for one whose length is known, and for a directory."""
    from gd2fs.errors import Lost, Unavailable

    try:
        if not info.is_dir:
            info.known_length()
    except (Lost, Unavailable) as error:
        return error.message.removeprefix(f"{info.path}: ")
    return None


def _size(info: FileInfo) -> str:
    from gd2fs.config.units import format_bytes

    if info.is_dir:
        return ""
    if info.lost:
        return "lost"
    return "unknown" if info.length is None else format_bytes(info.length)


def ls(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The directory to list.")] = "/",
    limit: Annotated[int, typer.Option(min=1, help="Most entries to list.")] = PAGE,
    control: ControlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List a directory."""
    entries: list[FileInfo] = []
    with connect(control) as client:
        while len(entries) < limit:
            after = entries[-1].path.rsplit("/", 1)[-1] if entries else None
            wanted = min(PAGE, limit - len(entries))
            page = client.list(path, limit=wanted, after=after)
            entries.extend(page)
            if len(page) < wanted:
                break
    if as_json:
        print_json({"path": path, "entries": [describe(entry) for entry in entries]})
        return
    rows = [
        (
            "dir" if entry.is_dir else entry.file_class,
            _size(entry),
            entry.path.rsplit("/", 1)[-1] + ("/" if entry.is_dir else ""),
        )
        for entry in entries
    ]
    print_table("", ["class", ">size", "name"], rows)


def stat(path: RemotePath, control: ControlOption = None, as_json: JsonFlag = False) -> None:
    """Show what is known of one file or directory."""
    with connect(control) as client:
        facts = describe(client.stat(path))
    if as_json:
        print_json(facts)
    else:
        known = facts["length_unknown"] is None
        rows = [(name, value) for name, value in facts.items() if not (known and name == "length_unknown")]
        print_table("", ["field", "value"], rows)


def put(
    local: Annotated[Path, typer.Argument(metavar="LOCAL", help="A file on this machine.")],
    path: RemotePath,
    control: ControlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy a file from this machine into GD2FS; directories on the way are made."""
    if not local.is_file():
        raise FileNotFoundError(f"{local} is not a file on this machine")
    with connect(control) as client:
        parent = path.rpartition("/")[0]
        if parent and not client.exists(parent):
            client.mkdir(parent)
        client.upload(str(local), path, progress=None if as_json else True)
        info = client.stat(path)
    if as_json:
        print_json(describe(info))
    else:
        typer.echo(f"{path}: {info.length} bytes")


def get(
    path: RemotePath,
    local: Annotated[Path, typer.Argument(metavar="LOCAL", help="Where to write it on this machine.")],
    control: ControlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy a file out of GD2FS to this machine."""
    with connect(control) as client:
        client.download(path, str(local), progress=None if as_json else True)
    size = local.stat().st_size
    if as_json:
        print_json({"path": path, "local": str(local), "length": size})
    else:
        typer.echo(f"{local}: {size} bytes")


def cat(
    path: RemotePath,
    offset: Annotated[int, typer.Option(min=0, help="First byte.")] = 0,
    length: Annotated[int | None, typer.Option(min=0, help="Bytes to print. Default: to the end.")] = None,
    control: ControlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Print a file's bytes (with --json: as base64)."""
    with connect(control) as client:
        if as_json:
            wanted = CAT_JSON_BYTES_MAX + 1 if length is None else min(CAT_JSON_BYTES_MAX + 1, length)
            data = client.read(path, offset, wanted)
            if len(data) > CAT_JSON_BYTES_MAX:
                raise ValueError(
                    f"{path} is longer than {CAT_JSON_BYTES_MAX} bytes; use `gd2fs get`, or --length"
                )
            print_json({"path": path, "offset": offset, "data_base64": base64.b64encode(data).decode()})
            return
        end = None if length is None else offset + length
        while end is None or offset < end:
            wanted = CAT_PIECE_BYTES if end is None else min(CAT_PIECE_BYTES, end - offset)
            data = client.read(path, offset, wanted)
            sys.stdout.buffer.write(data)
            offset += len(data)
            if len(data) < wanted:
                break
        sys.stdout.buffer.flush()


def rm(
    path: RemotePath,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Delete a directory with all that is in it.")
    ] = False,
    control: ControlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete a file or directory; its bytes are freed at once."""
    from gd2fs.errors import NotEmpty

    with connect(control) as client:
        try:
            client.delete(path, recursive=recursive)
        except NotEmpty as error:
            raise NotEmpty(error.message.replace("recursive=true", "--recursive")) from None
    if as_json:
        print_json({"path": path, "deleted": True})
    else:
        typer.echo(f"{path}: deleted")


def where(path: RemotePath, control: ControlOption = None, as_json: JsonFlag = False) -> None:
    """Show where the bytes of a file are: in memory (dram), on NVMe, lost, or never written (hole)."""
    with connect(control) as client:
        extents = client.where(path)
    if as_json:
        listed = [{"start": extent.start, "end": extent.end, "tier": extent.tier} for extent in extents]
        print_json({"path": path, "extents": listed})
        return
    rows = [(extent.start, extent.end, extent.length, extent.tier) for extent in extents]
    print_table("", [">start", ">end", ">bytes", "tier"], rows)


def warm(path: RemotePath, control: ControlOption = None, as_json: JsonFlag = False) -> None:
    """Lift a file into the memory of its nodes, in the background; shows how much of it is there."""
    with connect(control) as client:
        warmth = client.warm(path)
    if as_json:
        print_json({"path": path, **dataclasses.asdict(warmth)})
    else:
        typer.echo(f"{path}: {warmth.dram} bytes in memory, {warmth.nvme} on NVMe, {warmth.missing} missing")
        if warmth.unreadable:
            typer.echo(f"{warmth.unreadable} bytes on NVMe could not be read: a disk fails", err=True)


def flush(path: RemotePath, control: ControlOption = None, as_json: JsonFlag = False) -> None:
    """Wait until all that was written to a file is durable. Fails if something of it is lost, or may be."""
    from gd2fs.errors import Lost

    with connect(control) as client:
        client.flush(path)
        # The nodes speak of what they have: somebody else may have written more than that.
        gone = next((extent for extent in client.where(path) if extent.tier == "lost"), None)
    if gone is not None:
        raise Lost(
            f"{path}: the rest is durable, but [{gone.start}, {gone.end}) is lost, if it was written; "
            "write it again, zeros where nothing was"
        )
    if as_json:
        print_json({"path": path, "durable": True})
    else:
        typer.echo(f"{path}: durable")
