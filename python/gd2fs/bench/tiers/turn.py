"""The last turn of the demo's conversation: its KV cache in the log only, and lifted beforehand."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from gd2fs.bench.cases import GIB, MIB
from gd2fs.bench.tiers.plan import Sizes
from gd2fs.bench.tiers.stage import Stage
from gd2fs.bench.tiers.traffic import Memory, Traffic
from gd2fs.client import Client
from gd2fs.demo.run import ANSWER_S
from gd2fs.demo.script import SHIPPED, read_script
from gd2fs.demo.stage import ENGINE_READY_S
from gd2fs.demo.talk import Talker
from gd2fs.kv import KvFormat

LIFT_S = 30.0
#: The whole conversation is about 130 MB, and what is read beside it pushes it out of memory.
MEMORY, LOG = 256 * MIB, 4 * GIB
OTHERS = "/others"


def measure(directory: Path, sizes: Sizes, memory: Memory) -> dict[str, Any]:
    """Time to the first token through a plan, cold and warm in turns.

    Raises RuntimeError if the KV cache was not where it should be, or not used.
    """
    with ExitStack() as stack:
        stage = stack.enter_context(Stage(directory / "turn", MEMORY, LOG))
        arguments = ["engine", "--listen", "127.0.0.1:0", "--control", stage.control]
        url = stage.processes.wait_ready(stage.processes.start("engine", arguments), ENGINE_READY_S)["url"]
        client = stack.enter_context(stage.connect())
        talker = stack.enter_context(closing(Talker(max_tokens=1, timeout_s=ANSWER_S)))
        turn = _Turn(client, talker, url)
        others = Traffic(client, memory, 16)
        others.fill(OTHERS, 2 * MEMORY)
        client.flush(OTHERS)
        found: dict[str, list[float]] = {"cold": [], "warm": []}
        for _ in range(sizes.rounds):
            for name, times in found.items():
                # Everything that was used longer ago goes.
                others.read(OTHERS, range(0, 2 * MEMORY, 4 * MIB), 4 * MIB)
                turn.require("nvme")
                if name == "warm":
                    turn.lift()
                times.append(turn.ttft_ms())
    medians = {f"{name}_ttft_ms": round(statistics.median(times), 1) for name, times in found.items()}
    return medians | {
        "cold_vs_warm": round(medians["cold_ttft_ms"] / medians["warm_ttft_ms"], 3),
        "stored_tokens": turn.stored,
        "prompt_tokens": len(turn.ids),
        "loaded_bytes": turn.bytes,
        "rounds": {name: [round(one, 1) for one in times] for name, times in found.items()},
    }


class _Turn:
    """A session that has stored all turns but the last, and the last one's prompt."""

    def __init__(self, client: Client, talker: Talker, url: str) -> None:
        self._client, self._talker, self._url = client, talker, url
        health = talker.get(f"{url}/health")
        talker.model, self._identity = health["model"], health["kv_identity"]
        texts = [piece.message["content"] for piece in read_script(SHIPPED)]
        stored, self.ids = self._tokens(texts[:-1]), self._tokens(texts)
        self.stored = next(n for n, (a, b) in enumerate(zip([*stored, -1], self.ids, strict=False)) if a != b)
        shape = health["kv_format"]
        self.bytes = self.stored * int(shape["bytes_per_token"])
        form = KvFormat(**{name: shape[name] for name in ("name", "bytes_per_token", "granule")})
        self._session = client.sessions.create(self._identity, form).session
        self._number = 0
        # One token more than what every later turn shares with it: the last one is always computed.
        self._complete(self.ids[: self.stored + 1])
        self._paths = [
            "/" + segment.kv_uri.removeprefix("gd2fs://").partition("/")[2]
            for segment in client.sessions.get(self._session).stored
        ]
        for path in self._paths:
            client.flush(path)

    def ttft_ms(self) -> float:
        """Another prompt from the first new token on, each time: what is stored is as long as in the turn."""
        other = [*self.ids[: self.stored], self.ids[self.stored] + self._number, *self.ids[self.stored + 1 :]]
        answer = self._complete(other)
        cached = int(answer.report["cached_tokens"])
        if cached != self.stored:
            raise RuntimeError(
                f"{cached} of {self.stored} tokens were loaded ({answer.report.get('miss')}): no turn to time"
            )
        return float(answer.ttft_ms)

    def _complete(self, ids: list[int]) -> Any:
        self._number += 1
        plan = self._client.sessions.plan(
            self._session, ids, max_tokens=1, request_id=f"turn-{self._number}", kv_identity=self._identity
        )
        kv = {"kvcache_params": plan.kv_transfer}
        return self._talker.complete(self._url, ids, kv_transfer_params=kv, max_tokens=1)

    def require(self, tier: str) -> None:
        """Raises RuntimeError if the stored KV cache is anywhere else."""
        found = self._tiers()
        if found != {tier}:
            raise RuntimeError(f"the KV cache lies in {sorted(found)} and not in {tier} alone")

    def lift(self) -> None:
        """Lifts it, and returns when it is in memory."""
        deadline = time.monotonic() + LIFT_S
        while self._tiers() != {"dram"}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the KV cache was not lifted within {LIFT_S:g} s")
            for path in self._paths:
                self._client.warm(path)
            time.sleep(0.05)

    def _tiers(self) -> set[str]:
        return {extent.tier for path in self._paths for extent in self._client.where(path)}

    def _tokens(self, texts: list[str]) -> list[int]:
        body = {"prompt": "\n\n".join(texts), "add_special_tokens": False}
        return list(self._talker.post(f"{self._url}/tokenize", body)["tokens"])
