"""Runs in NIXL's environment: the agent whose memory is read, or the one that reads it.

API: docs.nvidia.com/nixl/getting-started/quick-start, "Memory Registration" to "Transfer".
"""

from __future__ import annotations

import base64
import sys
import time
from importlib import import_module
from typing import Any

from gd2fs.bench.peers.driving import Bytes, blank, first_wrong, pattern, serve

# Without a progress thread an agent connects only when it is called.
_PROGRESS_S = 0.002
_TRANSFER_S = 100.0


class Agent:
    """One agent with its default backend, UCX."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._agent: Any = None

    def hold(self, command: dict[str, Any]) -> dict[str, Any]:
        """Registers the pattern; answers with what the reader must know."""
        self._memory = pattern(command["size"])
        self._create(command)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._memory.ctypes.data}

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        self._memory = blank(command["size"])
        self._create(command)
        other = self._agent.add_remote_agent(base64.b64decode(command["metadata"]))
        near = _pieces(self._memory.ctypes.data, command["size"], command["piece"])
        far = _pieces(command["address"], command["size"], command["piece"])
        self._transfer = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(near, "DRAM"),
            self._agent.get_xfer_descs(far, "DRAM"),
            other,
        )
        return {}

    def read(self, command: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        state = self._agent.transfer(self._transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._transfer)
            if time.perf_counter() - started > _TRANSFER_S:
                raise TimeoutError(f"the transfer was not done within {_TRANSFER_S:g} s")
        seconds = time.perf_counter() - started
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
        return {"seconds": seconds}

    def check(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"wrong": first_wrong(self._memory)}

    def progress(self) -> None:
        if self._agent is not None:
            self._agent.get_new_notifs()

    def _create(self, command: dict[str, Any]) -> None:
        api = import_module("nixl_cu12._api")
        settings = api.nixl_agent_config(enable_prog_thread=command["progress_threads"])
        self._agent = api.nixl_agent(self._role, settings)
        self._agent.register_memory([_described(self._memory)], "DRAM")


def _described(memory: Bytes) -> tuple[int, int, int, str]:
    return memory.ctypes.data, memory.size, 0, ""


def _pieces(address: int, size: int, piece: int) -> list[tuple[int, int, int]]:
    return [(address + start, min(piece, size - start), 0) for start in range(0, size, piece)]


if __name__ == "__main__":
    agent = Agent(sys.argv[1])
    if sys.argv[1] == "holder":
        serve({"hold": agent.hold}, agent.progress, _PROGRESS_S)
    else:
        serve({"prepare": agent.prepare, "read": agent.read, "check": agent.check})
