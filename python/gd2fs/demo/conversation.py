"""Holding the conversation, and measuring each turn three ways: GD2FS, recomputed, kept locally."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gd2fs.demo.script import Piece
from gd2fs.demo.stage import Stage
from gd2fs.demo.talk import Answer, Talker

if TYPE_CHECKING:
    from gd2fs.client import Client

KILL_AFTER_TURN = 4
# Comparisons are repeated against noise where it is cheap: the local engine computes only the new tokens, so
# always; recomputing everything takes seconds, so only for the last turn, whose ratio is checked.
REPEATS = 3


@dataclass
class Turn:
    """One turn: what the user got, and the same prompt on the two engines to compare with."""

    number: int
    engine: str
    pid: int
    stored_tokens: int
    reusable_tokens: int
    prompt_ids: list[int]
    answer: Answer
    node_bytes_read: int
    recomputed: Answer
    local: Answer
    identical: bool = False

    @property
    def report(self) -> dict[str, Any]:
        return self.answer.report

    @property
    def cached_tokens(self) -> int:
        return int(self.report["cached_tokens"])

    def to_json(self) -> dict[str, Any]:
        return {
            "turn": self.number,
            "engine": self.engine,
            "prompt_tokens": len(self.prompt_ids),
            "stored_tokens": self.stored_tokens,
            "reusable_tokens": self.reusable_tokens,
            "cached_tokens": self.cached_tokens,
            "loaded_bytes": self.report["loaded_bytes"],
            "ttft_ms": round(self.answer.ttft_ms, 1),
            "recompute_ttft_ms": round(self.recomputed.ttft_ms, 1),
            "local_ttft_ms": round(self.local.ttft_ms, 1),
            "identical": self.identical,
        }


@dataclass
class Conversation:
    """The conversation so far. `session` is control's description of the session after the last turn."""

    stage: Stage
    talker: Talker
    client: Client
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    session_id: str = ""
    session: dict[str, Any] = field(default_factory=dict)

    def hold(
        self, pieces: list[Piece], on_turn: Callable[[Turn], None], on_event: Callable[[str], None]
    ) -> None:
        """Holds all turns. An engine is killed on the way; the next turn is answered without waiting for
        anything, then a new engine takes the place.
        """
        for number, piece in enumerate(pieces, start=1):
            turn = self._turn(number, piece, last=number == len(pieces))
            self.turns.append(turn)
            on_turn(turn)
            if number == KILL_AFTER_TURN:
                self.stage.kill(turn.engine)
                on_event(f"{turn.engine} killed with SIGKILL; the conversation goes on")
            elif number == KILL_AFTER_TURN + 1:
                self.stage.replace_killed("engine-c")
                self.stage.wait_healthy(self.talker)
                on_event("engine-c started in its place")

    @property
    def all_ids(self) -> list[int]:
        """Every token id of the conversation, the last sampled one included."""
        last = self.turns[-1]
        return last.prompt_ids + last.answer.token_ids

    def _turn(self, number: int, piece: Piece, last: bool) -> Turn:
        stage, talker = self.stage, self.talker
        stored = int(self.session["tokens"]) if self.session else 0
        self.messages.append(piece.message)
        before = stage.bytes_read(talker)
        answer = talker.chat(stage.gateway, self.messages, self.session_id or None)
        read = stage.bytes_read(talker) - before
        if not answer.session or not answer.report:
            raise RuntimeError(
                f"turn {number}: the answer has no session or no report; see the gateway's log"
            )
        self.messages.append({"role": "assistant", "content": answer.text})
        self.session_id = answer.session
        path = f"/v1/kv/sessions/{quote(answer.session, safe='')}"
        self.session = self.client.control("GET", path)
        ids = self.client.control("GET", f"{path}/tokens")["token_ids"]
        prompt_ids = ids[: answer.report["prompt_tokens"]]
        if len(prompt_ids) < answer.report["prompt_tokens"]:
            reason = answer.report.get("commit_error") or answer.report.get("miss")
            raise RuntimeError(f"turn {number}: its KV cache was not stored ({reason})")
        engine = stage.serving_at(answer.headers["x-gd2fs-engine"])
        return Turn(
            number=number,
            engine=engine.name,
            pid=engine.child.popen.pid,
            stored_tokens=stored,
            reusable_tokens=int(answer.headers.get("x-gd2fs-reusable-tokens", 0)),
            prompt_ids=prompt_ids,
            answer=answer,
            node_bytes_read=read,
            recomputed=self._recompute(prompt_ids, REPEATS if last else 1),
            local=self._keep_locally(prompt_ids, stored),
        )

    def _recompute(self, ids: list[int], repeats: int) -> Answer:
        """The same prompt on an engine that is given no KV cache."""
        assert self.stage.plain
        url = self.stage.plain.url
        times = [self.talker.complete(url, ids, max_tokens=1).ttft_ms for _ in range(repeats - 1)]
        answer = self.talker.complete(url, ids)
        answer.ttft_ms = statistics.median([*times, answer.ttft_ms])
        return answer

    def _keep_locally(self, ids: list[int], kept: int) -> Answer:
        """The same prompt on an engine that has the same prefix in its own memory.

        Once it has seen the prompt it has all of it, so the repeats that come before differ in the first new
        token: what matches, and what is computed, is as long as in the real turn.
        """
        assert self.stage.local
        url = self.stage.local.url
        times = []
        for repeat in range(1, REPEATS):
            other = [*ids[:kept], ids[kept] + repeat, *ids[kept + 1 :]]
            times.append(self.talker.complete(url, other, max_tokens=1).ttft_ms)
        answer = self.talker.complete(url, ids)
        answer.ttft_ms = statistics.median([*times, answer.ttft_ms])
        return answer
