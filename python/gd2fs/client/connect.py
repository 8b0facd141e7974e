"""From a URI to a client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gd2fs import errors
from gd2fs.client import uri as uris
from gd2fs.client.client import Client

DEFAULT_URI = "gd2fs://127.0.0.1:7527"


def connect(
    uri: str | None = None,
    *,
    token: str | None = None,
    nics: Sequence[str] | None = None,
    io_threads: int = 0,
    memory_threads: int = 0,
    streams: int = 4,
    transport: str = "auto",
    timeout_s: float = 30.0,
    verify: bool = True,
) -> Client:
    """A client of the cluster whose control is at ``uri``; a context manager.

    Args:
        uri: ``gd2fs://HOST:PORT[,HOST:PORT…]``; default ``$GD2FS_CONTROL``, or this machine. With
            ``?cluster=ID`` nothing is asked of control until it is needed, so that the call succeeds while
            control is away.
        token: who the caller is; default ``$GD2FS_TOKEN``, or what the file ``$GD2FS_TOKEN_FILE`` holds.
        nics: IP addresses of the local NICs to use; default: whatever the routes say.
        io_threads: native threads that move bytes; 0: one for each two processors, at most 4.
        memory_threads: native threads that take over from one of those while it copies much between memory
            and memory (shared memory with ordinary buffers); 0: what else it serves waits.
        streams: connections per storage node and NIC.
        transport: "tcp", "shm" (nodes of this host only), or "auto": shared memory where a node is on this
            host, else TCP.
        timeout_s: seconds that a request may take, retries included, unless the call says otherwise.
        verify: check CRC-32C sums end to end; off only to measure what that costs.

    Raises Invalid for a bad argument, Unavailable when control can't be reached, and the auth errors.
    """
    parsed = uris.parse(uri or os.environ.get("GD2FS_CONTROL") or DEFAULT_URI)
    if parsed.path != "/":
        raise errors.Invalid(f"uri: {uri!r} has a path; connect to the cluster, then name paths in calls")
    return Client(
        parsed.addresses,
        cluster=parsed.cluster,
        token=_token() if token is None else token,
        nics=nics or (),
        io_threads=io_threads,
        memory_threads=memory_threads,
        streams=streams,
        transport=transport,
        timeout_s=timeout_s,
        verify=verify,
    )


def _token() -> str:
    token = os.environ.get("GD2FS_TOKEN", "")
    if token:
        return token.strip()
    file = os.environ.get("GD2FS_TOKEN_FILE", "")
    if not file:
        return ""
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.Unauthenticated(f"GD2FS_TOKEN_FILE: {file!r} can't be read: {error}") from error
