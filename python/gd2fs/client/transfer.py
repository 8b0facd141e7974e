"""Whole local files to and from GD2FS, a few pieces at a time."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gd2fs import errors

if TYPE_CHECKING:
    from gd2fs.client.client import Client
    from gd2fs.client.completions import Request
    from gd2fs.client.files import File

PIECE_BYTES = 16 << 20
#: Pieces under way: enough to overlap disk and network, and 64 MiB of memory at most.
PIECES_MAX = 4

Progress = Callable[[int, int], Any] | bool | None


def upload(client: Client, local: str | os.PathLike[str], path: str, progress: Progress) -> None:
    """Copies a local file to ``path``. What was there stays until the copy is complete, and is then
    replaced."""
    with suppress(errors.NotFound):
        if client.stat(path).is_dir:
            raise errors.IsADirectory(f"{path} is a directory; upload to a path inside it")
    partial = f"{path}.upload-{secrets.token_hex(4)}"
    with open(local, "rb") as source, _reported(progress, f"put {path}") as report:
        total = os.fstat(source.fileno()).st_size
        client.create(partial)
        try:
            file = client.open_layout(client.namespace.layout(partial, "read,write"))
            _send(file, source.fileno(), total, report)
            with suppress(errors.NotFound):
                client.delete(path)
            client.rename(partial, path)
        except BaseException:
            with suppress(errors.Gd2fsError):
                client.delete(partial)
            raise


def download(client: Client, path: str, local: str | os.PathLike[str], progress: Progress) -> None:
    """Copies ``path`` to a local file, which appears, or is replaced, only when the copy is complete."""
    info = client.stat(path)
    if info.is_dir:
        raise errors.IsADirectory(f"{path} is a directory; download its files one by one")
    length = info.known_length()
    target = Path(local)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory on this machine; name a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is not a directory on this machine; make it first")
    partial = target.with_name(f"{target.name}.download-{secrets.token_hex(4)}")
    try:
        with open(partial, "xb") as sink, _reported(progress, f"get {path}") as report:
            file = client.open_layout(client.namespace.layout(path, "read"))
            _receive(file, sink.fileno(), length, report)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _send(file: File, source: int, total: int, report: Callable[[int, int], Any]) -> None:
    under_way: deque[tuple[Request, memoryview]] = deque()
    spare: list[memoryview] = []
    done = 0
    try:
        for offset, length in _pieces(total):
            if len(under_way) == PIECES_MAX:
                done += _landed(under_way, spare)
                report(done, total)
            buffer = (spare.pop() if spare else memoryview(bytearray(PIECE_BYTES)))[:length]
            if os.preadv(source, [buffer], offset) != length:
                raise OSError(f"{file.path}: the local file became shorter while it was read")
            under_way.append((file.submit_write(offset, buffer), buffer))
        while under_way:
            done += _landed(under_way, spare)
            report(done, total)
    finally:
        _give_up(under_way)


def _receive(file: File, sink: int, total: int, report: Callable[[int, int], Any]) -> None:
    under_way: deque[tuple[Request, memoryview]] = deque()
    done = 0

    def land() -> None:
        nonlocal done
        request, buffer = under_way[0]
        if request.wait() != len(buffer):
            raise errors.Hole(f"{file.path}: became shorter while it was read, at byte {done}")
        _store(sink, buffer, done)
        under_way.popleft()
        done += len(buffer)
        report(done, total)

    try:
        for offset, length in _pieces(total):
            if len(under_way) == PIECES_MAX:
                land()
            buffer = memoryview(bytearray(length))
            under_way.append((file.submit_read(offset, buffer), buffer))
        while under_way:
            land()
    finally:
        _give_up(under_way)


def _store(sink: int, buffer: memoryview, offset: int) -> None:
    """Writes all of it: a disk that becomes full takes a part without an error, and refuses only the next
    one."""
    while len(buffer):
        stored = os.pwrite(sink, buffer, offset)
        buffer, offset = buffer[stored:], offset + stored


def _pieces(total: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, total, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, total - offset)


def _landed(under_way: deque[tuple[Request, memoryview]], spare: list[memoryview]) -> int:
    request, buffer = under_way[0]
    moved = request.wait()
    under_way.popleft()
    if len(buffer) == PIECE_BYTES:
        spare.append(buffer)
    return moved


def _give_up(under_way: deque[tuple[Request, memoryview]]) -> None:
    for request, _ in under_way:
        request.give_up()


@contextmanager
def _reported(progress: Progress, title: str) -> Iterator[Callable[[int, int], Any]]:
    if callable(progress):
        yield progress
    elif progress:
        # Only whoever wants a bar pays for the import.
        from rich.filesize import decimal
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        # Of all since the begin: pieces land several at a time, and between two that do there is no time.
        rate = TextColumn("{task.fields[rate]}")
        begun = time.monotonic()
        with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), rate) as bar:
            task = bar.add_task(title, total=None, rate="")

            def show(done: int, total: int) -> None:
                seconds = max(time.monotonic() - begun, 1e-9)
                bar.update(task, completed=done, total=total, rate=f"{decimal(int(done / seconds))}/s")

            yield show
    else:
        yield lambda done, total: None
