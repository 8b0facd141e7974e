"""Runs in Mooncake's environment: the client whose segment holds the objects, or the one that reads them.

API: kvcache-ai/Mooncake, docs/source/api-reference/python/mooncake-store.md, "Zero-Copy API".
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import Any

from gd2fs.bench.peers.driving import Bytes, blank, first_wrong, pattern, serve

# For what the store copies by itself, which zero-copy calls do not use.
_LOCAL_BUFFER_BYTES = 16 << 20
# Allocator overhead, and the share that the master keeps free by evicting (5 % by default).
_SEGMENT_SLACK = 1.25
_SEGMENT_BYTES_MIN = 64 << 20


class Client:
    """A store client in this process. Every failure of a call raises RuntimeError with Mooncake's code."""

    def __init__(self) -> None:
        self._store: Any = import_module("mooncake.store").MooncakeDistributedStore()

    def hold(self, command: dict[str, Any]) -> dict[str, Any]:
        """Stores the pattern as objects in this process's own segment."""
        size = command["size"]
        segment = max(int(size * _SEGMENT_SLACK), _SEGMENT_BYTES_MIN)
        self._set_up(command, segment)
        memory = pattern(size)
        self._register(memory)
        for key, address, length in zip(*_objects(memory, command["value"]), strict=True):
            code = self._store.put_from(key, address, length)
            if code:
                raise RuntimeError(f"put_from of {key} gave {code}")
        self._store.unregister_buffer(memory.ctypes.data)
        return {}

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        self._set_up(command, 0)
        self._memory = blank(command["size"])
        self._register(self._memory)
        self._wanted = _objects(self._memory, command["value"])
        return {}

    def read(self, command: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        got = self._store.batch_get_into(*self._wanted)
        seconds = time.perf_counter() - started
        if got != self._wanted[2]:
            key, length = next(
                (k, g) for k, g, w in zip(self._wanted[0], got, self._wanted[2], strict=True) if g != w
            )
            raise RuntimeError(f"batch_get_into of {key} gave {length}")
        return {"seconds": seconds}

    def check(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"wrong": first_wrong(self._memory)}

    def _set_up(self, command: dict[str, Any], segment: int) -> None:
        code = self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment, _LOCAL_BUFFER_BYTES, "tcp", "", command["master"]
        )
        if code:
            raise RuntimeError(f"setup gave {code}")

    def _register(self, memory: Bytes) -> None:
        code = self._store.register_buffer(memory.ctypes.data, memory.size)
        if code:
            raise RuntimeError(f"register_buffer gave {code}")


def _objects(memory: Bytes, value: int) -> tuple[list[str], list[int], list[int]]:
    """Keys, addresses and lengths of the objects that memory consists of."""
    starts = range(0, memory.size, value)
    addresses = [memory.ctypes.data + start for start in starts]
    return [str(start) for start in starts], addresses, [min(value, memory.size - start) for start in starts]


if __name__ == "__main__":
    client = Client()
    if sys.argv[1] == "holder":
        serve({"hold": client.hold})
    else:
        serve({"prepare": client.prepare, "read": client.read, "check": client.check})
