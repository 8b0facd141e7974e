"""Control's line to the nodes: what it asks of columns and of nodes, and the ids of a `.tokens` file."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from gd2fs import errors
from gd2fs.control.clock import Clock
from gd2fs.kv import ID_BYTES, Ids, ids_from_bytes
from gd2fs.signing import Keys, Token

if TYPE_CHECKING:
    from gd2fs import _native

ITEMS_MAX = 4096
"""Items of one SEAL, DELETE, STAT, PIN or UNPIN, and columns of one LIST."""
_SEAL, _DELETE, _STAT, _PIN, _UNPIN, _LIST, _SCRUB = range(16, 23)
_TIMEOUT_MS = 3_000
"""A column operation is microseconds of work; a node that takes longer counts as away and is asked again
later."""
_PIN_TIMEOUT_MS = 1_000
"""A request waits for its plan, and would rather recompute than wait for a node that hangs."""
_READERS_MAX = 4
"""Readers of ids at the same time: only edited conversations need one, for a few hundred KiB."""
_TOKEN_LIFE_S = 24 * 3600

Item = dict[str, Any]
# Named here, since the classes below have a method `list`.
Items = list[Item]
FoundItems = list[Item | None]
Answers = list[Any]
T = TypeVar("T")


class NodeLink(Protocol):
    """What control asks of nodes. `addresses` are those of one node, tried in turn.

    Methods block, are called from several threads, and raise gd2fs.errors (Disconnected, Timeout, Lost…).
    """

    def seal(self, addresses: Sequence[str], items: Items) -> tuple[int, Items]:
        """Seals columns in order. Returns the node's incarnation and {"status", "sealed", "message"} of each
        item."""

    def delete(self, addresses: Sequence[str], items: Items) -> tuple[int, Items]:
        """Frees columns, leaving tombstones. Returns the incarnation and {"freed": bytes} of each item."""

    def stat(self, addresses: Sequence[str], items: Items) -> tuple[int, FoundItems]:
        """Returns the incarnation and {"length", "sealed", "grant", "epoch", "bytes"} of each item, None: not
        known. With {"deleted": true} in it the node remembers that control had it deleted."""

    def pin(self, addresses: Sequence[str], items: Items) -> tuple[int, Items]:
        """Keeps ranges {"pin", "file", "column", "epoch", "start", "end", "ttl_ms"} from being evicted.
        Returns the incarnation and {"status", "valid", "message"} of each item; "valid": the first byte of
        the range in this column that is not there, None: all are."""

    def unpin(self, addresses: Sequence[str], items: Items) -> tuple[int, Items]:
        """Lets go all ranges of each {"pin"}. Returns the incarnation and {"ranges": number} of each item."""

    def list(self, addresses: Sequence[str], after: Item | None, limit: int) -> tuple[int, Item]:
        """A page of the columns that a node keeps, behind the column `after` ({"file", "column"}), at most
        ITEMS_MAX.

        Returns the incarnation and {"items": [{"file", "column", "epoch", "sealed", "grant", "length",
        "valid", "dram_bytes", "nvme_bytes"}], "next": `after` of the next page, None: there is none}."""

    def scrub(self, addresses: Sequence[str], start: bool) -> tuple[int, Item]:
        """Has a node read again all that it keeps, if `start` and none runs. Returns the incarnation and
        {"running", "bytes", "bytes_total", "corrupt_chunks", "unreadable_chunks", "seconds", "rounds"}."""

    def read_ids(self, layout: dict[str, Any], first: int, count: int) -> Ids:
        """`count` token ids of a `.tokens` file from id `first` on."""

    def close(self) -> None: ...


class NativeNodeLink:
    """The real line, through gd2fs._native."""

    def __init__(self, cluster: str, keys: Keys, clock: Clock) -> None:
        self._cluster = cluster
        self._keys = keys
        # Nodes go by the cluster's time.
        self._clock = clock
        self._line = _Renewed(partial(self._connect, _TIMEOUT_MS))
        # Of its own: a plan does not wait behind other calls either.
        self._pin_line = _Renewed(partial(self._connect, _PIN_TIMEOUT_MS))
        # Slots of clients that are not in use; a slot is filled with its first use.
        self._readers: queue.SimpleQueue[_Renewed[_native.Client]] = queue.SimpleQueue()
        for _ in range(_READERS_MAX):
            self._readers.put(_Renewed(self._connect_reader))

    def seal(self, addresses: Sequence[str], items: Items) -> tuple[int, Items]:
        return self._call(addresses, _SEAL, items)

    def delete(self, addresses: Sequence[str], items: Items) -> tuple[int, Items]:
        return self._call(addresses, _DELETE, items)

    def stat(self, addresses: Sequence[str], items: Items) -> tuple[int, FoundItems]:
        return self._call(addresses, _STAT, items)

    def pin(self, addresses: Sequence[str], items: Items) -> tuple[int, Items]:
        incarnation, reply = self._ask(addresses, _PIN, {"items": items}, self._pin_line)
        return incarnation, reply["items"]

    def unpin(self, addresses: Sequence[str], items: Items) -> tuple[int, Items]:
        return self._call(addresses, _UNPIN, items)

    def list(self, addresses: Sequence[str], after: Item | None, limit: int) -> tuple[int, Item]:
        return self._ask(addresses, _LIST, {"after": after, "limit": limit})

    def scrub(self, addresses: Sequence[str], start: bool) -> tuple[int, Item]:
        return self._ask(addresses, _SCRUB, {"start": start})

    def read_ids(self, layout: dict[str, Any], first: int, count: int) -> Ids:
        buffer = np.empty(count * ID_BYTES, dtype=np.uint8)
        try:
            reader = self._readers.get(timeout=_TIMEOUT_MS / 1000)
        except queue.Empty:
            raise errors.Overloaded("all readers of token ids are busy; try again") from None
        try:
            client = reader.get()
            request = client.submit_read(
                client.file(json.dumps(layout)), first * ID_BYTES, [buffer], _TIMEOUT_MS
            )
            # A client's requests complete when nothing can touch their memory any more, also after the
            # timeout.
            done = [item for item in client.reap(1, -1) if item[0] == request]
        finally:
            self._readers.put(reader)
        if not done:
            raise errors.Internal(f"{layout['path']}: the read of its ids did not complete")
        _, code, moved, message = done[0]
        if code != 0:
            raise errors.from_code(code, f"{layout['path']}: {message}")
        if moved != len(buffer):
            raise errors.Hole(
                f"{layout['path']}: ends {len(buffer) - moved} bytes before the ids {first} + {count}"
            )
        return ids_from_bytes(buffer.data)

    def close(self) -> None:
        for _ in range(_READERS_MAX):
            self._readers.get().drop()
        self._line.drop()
        self._pin_line.drop()

    def _call(self, addresses: Sequence[str], opcode: int, items: Items) -> tuple[int, Answers]:
        incarnation, reply = self._ask(addresses, opcode, {"items": items})
        return incarnation, reply["items"]

    def _ask(
        self,
        addresses: Sequence[str],
        opcode: int,
        message: Item,
        line: _Renewed[_native.NodeLink] | None = None,
    ) -> tuple[int, Item]:
        payload = json.dumps(message).encode()
        failure: errors.Gd2fsError = errors.Disconnected("the node has no address yet")
        for address in addresses:
            try:
                code, incarnation, reply = (line or self._line).get().call(address, opcode, payload)
            except errors.Gd2fsError as error:
                failure = error
                continue
            if code == 0:
                return incarnation, json.loads(reply)
            failure = errors.from_code(code, f"{address}: {_message(reply)}")
            if not failure.retryable:
                break
        raise failure

    def _token(self) -> str:
        return self._keys.sign(Token("default", "control", int(self._clock()) + _TOKEN_LIFE_S))

    def _connect(self, timeout_ms: int) -> _native.NodeLink:
        from gd2fs import _native

        return _native.NodeLink(self._cluster, self._token(), timeout_ms)

    def _connect_reader(self) -> _native.Client:
        from gd2fs import _native

        # No control addresses: the layouts it is given travel with a capability signed here.
        return _native.Client([], self._cluster, self._token(), io_threads=1, streams=1)


class _Renewed(Generic[T]):
    """Something that is made with a token at its first use, and made anew when half of the token's life is
    over."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: T | None = None
        self._renew_at = 0.0

    def get(self) -> T:
        with self._lock:
            if self._made is None or time.monotonic() >= self._renew_at:
                # The former one closes when the last call that uses it has returned.
                self._made = self._make()
                self._renew_at = time.monotonic() + _TOKEN_LIFE_S / 2
            return self._made

    def drop(self) -> None:
        with self._lock:
            self._made = None


def _message(reply: bytes) -> str:
    try:
        return str(json.loads(reply)["message"])
    except (ValueError, KeyError, TypeError):
        return reply.decode(errors="replace")[:500]
