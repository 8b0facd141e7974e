"""Real storage nodes as processes, and layouts for them signed by hand: what control would do."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gd2fs import errors
from gd2fs.signing import Capability, Keys, Right

CLUSTER = "cluster-of-tests"

_SCRIPT = """
import sys
from gd2fs import _native
node = _native.Node(sys.argv[1])
print(*node.addresses(), flush=True)
# Every line asks for the counters; the end of input, also that of a parent that died, ends the node.
for _ in sys.stdin:
    print(node.stats(), flush=True)
"""


class RealNode:
    """A node in a process of its own, on a free loopback port. A context manager."""

    def __init__(self, name: str = "n0", *, memory_bytes: int = 1 << 30, connections_max: int = 4096) -> None:
        self.name = name
        self.incarnation = 0
        self._memory_bytes = memory_bytes
        self._connections_max = connections_max
        self._directory = tempfile.TemporaryDirectory(prefix="gd2fs-node-")
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        self.addresses: list[str] = []
        self.start()

    def start(self) -> None:
        """Starts it, or starts it anew with the next incarnation."""
        self.incarnation += 1
        config = {
            "cluster": CLUSTER,
            "node": self.name,
            "incarnation": self.incarnation,
            "keys": "",
            "listen": [self.address or "tcp://127.0.0.1:0"],
            "memory_bytes": self._memory_bytes,
            "connections_max": self._connections_max,
            "data_dir": self._directory.name,
        }
        environment = os.environ | {"PYTHONPATH": str(Path(errors.__file__).parents[1])}
        command = [sys.executable, "-c", _SCRIPT, json.dumps(config)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self._process.stdout
        self.addresses = self._process.stdout.readline().split()
        assert self.addresses, "the node did not start"
        self.address = self.addresses[0]
        assert self.address.startswith("tcp://"), "the node did not start"

    def stats(self) -> dict[str, Any]:
        """The node's counters now; it must not be paused."""
        assert self._process and self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        counters: dict[str, Any] = json.loads(self._process.stdout.readline())
        return counters

    def private_bytes(self) -> int:
        """Memory of its process that is not the arena: what connections and requests cost."""
        assert self._process
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) << 10

    def mapped_regions(self) -> int:
        """Regions of clients' memory that its process has mapped."""
        assert self._process
        return Path(f"/proc/{self._process.pid}/maps").read_text().count("memfd:gd2fs-region")

    def pause(self) -> None:
        """Stops it in mid-step, as a machine that hangs; returns when it stands still."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self._process.pid}/stat")
        deadline = time.monotonic() + 5
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def resume(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process and self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait(10)
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> RealNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._directory.cleanup()


def sign(
    nodes: list[RealNode],
    *,
    file: str | None = None,
    stripe_unit: int = 4 << 20,
    rights: tuple[Right, ...] = ("read", "write"),
    epoch: int = 1,
    grant: int = 0,
    life_s: int = 3600,
) -> dict[str, Any]:
    """A layout of one column per node, with its capability signed by the development key."""
    file = file or secrets.token_hex(16)
    columns = [(epoch, node.incarnation) for node in nodes]
    expiry = int(time.time()) + life_s
    capability = Capability(
        "default",
        file,
        "cache",
        stripe_unit,
        len(nodes),
        rights,
        [],
        grant,
        columns,
        [[node.name] for node in nodes],
        expiry,
    )
    replicas = [
        {"node": node.name, "incarnation": node.incarnation, "addresses": node.addresses} for node in nodes
    ]
    return {
        "file": file,
        "path": f"/{file[:6]}",
        "class": "cache",
        "stripe_unit": stripe_unit,
        "width": len(nodes),
        "grant": grant,
        "columns": [
            {"epoch": epoch, "born": node.incarnation, "replicas": [replica]}
            for node, replica in zip(nodes, replicas, strict=True)
        ],
        "capability": Keys.development().sign(capability),
        "expires_at": expiry,
        "kv_identity": None,
        "length": None,
        "refresh": False,
    }
