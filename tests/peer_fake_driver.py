"""A peer's driver without a peer: FAKE_PEER says what it does wrong, and when."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from gd2fs.bench.peers.driving import first_wrong, pattern, serve

FAULT = os.environ.get("FAKE_PEER", "")
ROLE = sys.argv[1]


class Fake:
    reads = 0

    def hold(self, command: dict[str, Any]) -> dict[str, Any]:
        print("noise of a native library", flush=True)
        if FAULT == "refuses":
            raise RuntimeError("no more memory")
        return {"size_held": command["size"]}

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        if FAULT == "dies early":
            print("cannot open the device", file=sys.stderr, flush=True)
            os._exit(3)
        assert command["size_held"] == command["size"]
        self.memory = pattern(command["size"])
        if FAULT == "wrong byte":
            self.memory[command["size"] // 2] ^= 1
        return {}

    def read(self, command: dict[str, Any]) -> dict[str, Any]:
        self.reads += 1
        if self.reads == 2 and FAULT == "dies late":
            os._exit(4)
        if self.reads == 2 and FAULT == "hangs":
            time.sleep(60)
        return {"seconds": 0.25 * self.reads}

    def check(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"wrong": first_wrong(self.memory)}


if __name__ == "__main__":
    fake = Fake()
    serve({"hold": fake.hold, "prepare": fake.prepare, "read": fake.read, "check": fake.check})
