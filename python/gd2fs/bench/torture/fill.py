"""What lies on the nodes before a loop begins: so much that memory, or the logs, can't hold it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gd2fs import errors
from gd2fs.bench.torture.pattern import pattern

if TYPE_CHECKING:
    from gd2fs.bench.torture.journal import Journal
    from gd2fs.client import Client

UNIT = 1 << 20
FILE_BYTES = 4 << 20
TIMEOUT_S = 5.0
FILL_S_MAX = 10.0
"""A loop is about what happens afterwards."""
_FIRST = 1


def fill(client: Client, journal: Journal, directory: str, size_bytes: int) -> None:
    """Writes and flushes files of `FILE_BYTES`, ``size_bytes`` in all; all of it is journaled. A node that is
    full may refuse the rest."""
    until = time.monotonic() + FILL_S_MAX
    for number in range(size_bytes // FILE_BYTES):
        if time.monotonic() > until:
            return
        path = f"{directory}/fill-{number}"
        operation = journal.begin("create", path=path, unit=UNIT)
        info, layout = client.namespace.create(path, UNIT, 1)
        nodes = [column["replicas"][0]["node"] for column in layout["columns"]]
        journal.end(operation, file=info.file_id, nodes=nodes)
        file = str(info.file_id)
        data = pattern(file, _FIRST, 0, FILE_BYTES)
        operation = journal.begin("write", file=file, start=0, end=FILE_BYTES, version=_FIRST)
        try:
            client.write(path, 0, data, timeout_s=TIMEOUT_S)
            journal.end(operation)
            operation = journal.begin("flush", file=file)
            client.flush(path, timeout_s=TIMEOUT_S)
            journal.end(operation)
        except (errors.NoSpace, errors.Overloaded, errors.Timeout) as error:
            # It is full; what is there by now is enough.
            journal.end(operation, error)
            return
