"""What a connector needs of the GD2FS client, as protocols; `gd2fs.Client` fits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Transfer(Protocol):
    """One read or write under way.

    `wait` returns the bytes moved or raises what `gd2fs.errors` has for the failure; a wait that runs out of
    time raises too, and the transfer goes on. Until it is `done`, something may still touch its memory.
    """

    def wait(self, timeout_s: float | None = None) -> int: ...

    def cancel(self) -> None: ...

    @property
    def done(self) -> bool: ...


class File(Protocol):
    """A file addressed by a layout."""

    def submit_read(self, offset: int, buffers: Any, *, timeout_s: float | None = None) -> Transfer: ...

    def submit_write(self, offset: int, buffers: Any, *, timeout_s: float | None = None) -> Transfer: ...


class Client(Protocol):
    """Opens layouts and calls control (JSON); errors of both are exceptions of `gd2fs.errors`."""

    def open_layout(self, layout: dict[str, Any]) -> File: ...

    def control(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]: ...


class Miss(Exception):
    """KV that is not used. `reason` is a short stable word, counted in metrics; the text says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


def miss_reason(error: BaseException) -> str:
    """The stable word for a failure: the error's own name on the wire where it has one."""
    if isinstance(error, Miss):
        return error.reason
    name = getattr(error, "name", "")
    if isinstance(name, str) and name.isidentifier():
        return name.lower()
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionError):
        return "disconnected"
    return "internal"


def described(error: BaseException) -> str:
    """One line for a report or a log."""
    return f"{type(error).__name__}: {error}"[:500]


def give_up(transfers: Iterable[Transfer], grace_s: float) -> bool:
    """Cancel, and wait for the end of each. False when one is not done within `grace_s`: its memory is in
    doubt.
    """
    transfers = list(transfers)
    for transfer in transfers:
        transfer.cancel()
    deadline = time.monotonic() + grace_s
    for transfer in transfers:
        with contextlib.suppress(Exception):  # how it ended does not matter any more
            transfer.wait(max(0.001, deadline - time.monotonic()))
    return all(transfer.done for transfer in transfers)


def path_of(kv_uri: str) -> str:
    """The path of `gd2fs://CLUSTER/path`. Raises Miss for anything else."""
    scheme, _, rest = kv_uri.partition("://")
    _, slash, path = rest.partition("/")
    if scheme != "gd2fs" or not slash or not path:
        raise Miss("bad_params", f"kv_uri {kv_uri!r} is not of the form gd2fs://CLUSTER/path")
    return "/" + path.partition("?")[0]


def layout_of(layouts: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """The layout of `uri` among those that came with the plan. Raises Miss when there is none."""
    layout = layouts.get(uri)
    if not isinstance(layout, dict):
        raise Miss("bad_params", f"plan.layouts has no layout for {uri}")
    return layout
