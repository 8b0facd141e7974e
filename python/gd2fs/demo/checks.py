"""What the demo claims, checked on what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gd2fs._native import crc32c_combine
from gd2fs.demo.conversation import KILL_AFTER_TURN, Conversation, Turn
from gd2fs.demo.talk import Score

# FP32 against recomputation; a greedy token may differ only where the first two lie closer than this.
LOGPROB_TOLERANCE = 1e-3
CONTEXT_TOKENS_MIN, CONTEXT_TOKENS_MAX = 2000, 8192
SPEEDUP_MIN = 5.0
LOCAL_FACTOR_MAX, LOCAL_SLACK_MS = 1.3, 20.0
ENGINE_RSS_MIB_MAX = 4096
# Beside the KV the engine, the gateway and control read token ids, 4 bytes each; nobody needs them more than
# once each in a turn.
ID_BYTES_PER_TOKEN_MAX = 12
SEGMENTS_MAX, CHAIN_ROWS_PER_TURN_MAX = 2, 2


@dataclass(frozen=True)
class Check:
    """One claim. `detail` has the figures, whether it holds or not."""

    name: str
    ok: bool
    detail: str

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "detail": self.detail}


def hits(turns: list[Turn]) -> Check:
    later = turns[1:]
    good = [
        t
        for t in later
        if t.cached_tokens == t.reusable_tokens == t.stored_tokens > 0 and not t.report["miss"]
    ]
    bad = "; ".join(
        f"turn {t.number}: stored {t.stored_tokens}, reusable {t.reusable_tokens}, cached {t.cached_tokens}, "
        f"miss {t.report['miss']}"
        for t in later
        if t not in good
    )
    return Check(
        "every turn hits 100 %", len(good) == len(later), bad or f"{len(good)} of {len(later)} later turns"
    )


def bytes_moved(turns: list[Turn], bytes_per_token: int) -> Check:
    problems = []
    for turn in turns[1:]:
        loaded = turn.report["loaded_bytes"]
        ids = turn.node_bytes_read - loaded
        if loaded != turn.cached_tokens * bytes_per_token:
            problems.append(f"turn {turn.number}: {loaded} bytes for {turn.cached_tokens} tokens")
        elif not 0 <= ids <= ID_BYTES_PER_TOKEN_MAX * turn.stored_tokens:
            problems.append(f"turn {turn.number}: loaded {loaded}, the nodes counted {turn.node_bytes_read}")
    total = sum(turn.report["loaded_bytes"] for turn in turns)
    detail = "; ".join(problems) or f"{total / 1e6:.1f} MB from the nodes, {bytes_per_token} bytes a token"
    return Check("loaded bytes = cached tokens x bytes per token, as the nodes count", not problems, detail)


def alternation(turns: list[Turn]) -> Check:
    repeated = [b.number for a, b in pairwise(turns) if a.pid == b.pid]
    order = " ".join(turn.engine.removeprefix("engine-") for turn in turns)
    return Check("never twice in a row on the same engine", not repeated, f"order: {order}")


def survived_the_kill(turns: list[Turn], killed: str) -> Check:
    after = [turn for turn in turns if turn.number > KILL_AFTER_TURN]
    engines = {turn.engine for turn in after}
    ok = turns[KILL_AFTER_TURN - 1].engine == killed and killed not in engines and len(engines) == 2
    return Check(
        "the conversation goes on after the kill", ok, f"{killed} died; then {', '.join(sorted(engines))}"
    )


def loaded_is_saved(turns: list[Turn]) -> Check:
    """I7 (a): the sum of what turn n + 1 loads is the sum of what turns 1 to n saved."""
    saved: int | None = None
    problems = []
    for turn in turns:
        report = turn.report
        if turn.number > 1 and report["loaded_crc32c"] != saved:
            problems.append(f"turn {turn.number} loaded {report['loaded_crc32c']}, saved was {saved}")
        fresh = report["saved_crc32c"]
        saved = fresh if saved is None else crc32c_combine(saved, fresh, report["saved_bytes"])
    return Check(
        "what is loaded is bit-equal to what was saved", not problems, "; ".join(problems) or "CRC-32C equal"
    )


def equals_local(turns: list[Turn]) -> Check:
    """I7 (b): the engine that kept the same KV in its own memory says the same, to the last bit."""
    odd = [
        turn.number
        for turn in turns
        if turn.local.token_ids != turn.answer.token_ids or turn.local.logprobs != turn.answer.logprobs
    ]
    kept = [t.number for t in turns[1:] if t.local.report["local_cached_tokens"] != t.stored_tokens]
    detail = f"ids and log-probabilities of {len(turns)} turns"
    if odd or kept:
        detail = f"turns that differ: {odd}; turns whose prefix was not kept: {kept}"
    return Check("output is bit-equal to KV cache kept locally", not odd and not kept, detail)


def equals_recomputed(conversation: Conversation, scores: list[Score | None]) -> tuple[Check, float]:
    """I7 (c): one teacher-forced pass over all ids without GD2FS. Also decides each turn's `identical`.

    scores: of all ids. Returns the largest difference, too.
    """
    ids = conversation.all_ids
    largest, compared, wrong = 0.0, 0, []
    for turn in conversation.turns:
        start = len(turn.prompt_ids)
        for offset, (token, logprob) in enumerate(
            zip(turn.answer.token_ids, turn.answer.logprobs, strict=True)
        ):
            if ids[start + offset] != token:
                break  # a turn's last sampled token is not stored; the template may tokenize it otherwise
            score = scores[start + offset]
            assert score is not None
            largest = max(largest, abs(score.own - logprob))
            compared += 1
            if score.best - score.own >= LOGPROB_TOLERANCE:
                wrong.append(f"turn {turn.number} token {offset}")
        turn.identical = turn.recomputed.token_ids == turn.answer.token_ids or _near_tie(turn)
    sampled = sum(len(turn.answer.token_ids) for turn in conversation.turns)
    ok = largest <= LOGPROB_TOLERANCE and not wrong and compared >= sampled - len(conversation.turns)
    ok = ok and all(turn.identical for turn in conversation.turns)
    detail = f"largest log-probability difference {largest:.2g} over {compared} of {sampled} sampled tokens"
    if wrong:
        detail += f"; greedy choice differs at {', '.join(wrong)}"
    return Check("same output as recomputed without GD2FS", ok, detail), largest


def _near_tie(turn: Turn) -> bool:
    """True if the recomputed ids part from the answer's where the two choices lie within the tolerance."""
    recomputed, answer = turn.recomputed, turn.answer
    pairs = zip(recomputed.token_ids, answer.token_ids, strict=False)
    offset = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return (
        offset is not None and abs(recomputed.logprobs[offset] - answer.logprobs[offset]) < LOGPROB_TOLERANCE
    )


def negative_control(exact: float, shifted: float) -> Check:
    """The same check must see KV cache that is off by one token, and must not see an exact copy."""
    ok = exact <= LOGPROB_TOLERANCE < shifted
    return Check(
        "KV cache shifted by one token is noticed", ok, f"exact copy {exact:.2g}, shifted {shifted:.2g}"
    )


def control_rows(rows: dict[str, int], turns: int) -> Check:
    ok = rows["segments"] <= SEGMENTS_MAX and rows["chain"] <= CHAIN_ROWS_PER_TURN_MAX * turns
    return Check("control keeps few rows", ok, ", ".join(f"{count} {name}" for name, count in rows.items()))


def context(turns: list[Turn]) -> Check:
    tokens = len(turns[-1].prompt_ids)
    return Check(
        "the context is long", CONTEXT_TOKENS_MIN < tokens <= CONTEXT_TOKENS_MAX, f"{tokens} prompt tokens"
    )


def faster_than_recomputed(turn: Turn) -> Check:
    ratio = turn.recomputed.ttft_ms / turn.answer.ttft_ms
    detail = (
        f"{turn.answer.ttft_ms:.0f} ms against {turn.recomputed.ttft_ms:.0f} ms: {ratio:.1f} times shorter"
    )
    return Check(
        f"TTFT of the last turn at least {SPEEDUP_MIN:g} times shorter", ratio >= SPEEDUP_MIN, detail
    )


def as_fast_as_local(turn: Turn) -> Check:
    limit = LOCAL_FACTOR_MAX * turn.local.ttft_ms + LOCAL_SLACK_MS
    detail = f"{turn.answer.ttft_ms:.0f} ms, kept locally {turn.local.ttft_ms:.0f} ms, limit {limit:.0f} ms"
    name = f"TTFT of the last turn at most {LOCAL_FACTOR_MAX:g} x local + {LOCAL_SLACK_MS:g} ms"
    return Check(name, turn.answer.ttft_ms <= limit, detail)


def small_engines(rss_mib: dict[str, int]) -> Check:
    ok = all(size < ENGINE_RSS_MIB_MAX for size in rss_mib.values())
    return Check("engines need little host memory", ok, ", ".join(f"{k} {v} MiB" for k, v in rss_mib.items()))
