"""The demo's own checks: each holds on a good conversation, and fails on the one thing it is there for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gd2fs._native import crc32c
from gd2fs.cli.output import CommandFailed
from gd2fs.demo import checks, run
from gd2fs.demo.checks import Check
from gd2fs.demo.conversation import Conversation, Turn
from gd2fs.demo.script import SHIPPED, read_script
from gd2fs.demo.show import row
from gd2fs.demo.talk import Answer, Score

BYTES = 64  # a token
TURNS = 8
NEW = 300  # tokens of each turn's prompt
SAMPLED = 3


def answer(number: int, **report: Any) -> Answer:
    ids = [number * 10 + i for i in range(SAMPLED)]
    return Answer(ttft_ms=100.0, token_ids=ids, logprobs=[-0.5] * SAMPLED, report=report)


def good() -> list[Turn]:
    """Eight turns in which all is well; the KV cache of token t is the byte t, again and again."""
    turns: list[Turn] = []
    ids: list[int] = []
    saved = 0
    engines = ["a", "b", "a", "b", "a", "c", "a", "c"]
    for number in range(1, TURNS + 1):
        stored, prompt = saved, ids + [7] * NEW
        whole = b"".join(bytes([t % 251] * BYTES) for t in range(len(prompt) + SAMPLED - 1))
        report = {
            "cached_tokens": stored,
            "loaded_bytes": stored * BYTES,
            "loaded_crc32c": crc32c(whole[: stored * BYTES]) if stored else None,
            "saved_bytes": len(whole) - stored * BYTES,
            "saved_crc32c": crc32c(whole[stored * BYTES :]),
            "miss": None,
        }
        turns.append(
            Turn(
                number=number,
                engine=f"engine-{engines[number - 1]}",
                pid=ord(engines[number - 1]),
                stored_tokens=stored,
                reusable_tokens=stored,
                prompt_ids=prompt,
                answer=answer(number, **report),
                node_bytes_read=stored * (BYTES + 4),
                recomputed=answer(number),
                local=answer(number, local_cached_tokens=stored),
            )
        )
        turns[-1].recomputed.ttft_ms = 900.0
        ids = prompt + turns[-1].answer.token_ids
        saved = len(ids) - 1
    return turns


def scores(turns: list[Turn]) -> list[Score | None]:
    count = len(turns[-1].prompt_ids) + SAMPLED
    return [None, *(Score(-0.5, -0.5) for _ in range(count - 1))]


def recomputed(turns: list[Turn], found: list[Score | None]) -> Check:
    conversation = Conversation.__new__(Conversation)
    conversation.turns = turns
    return checks.equals_recomputed(conversation, found)[0]


def change(turns: list[Turn], number: int, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(turns[number - 1], name, value)


CASES: dict[str, tuple[Callable[[list[Turn]], Check], Callable[[list[Turn]], None]]] = {
    "a token not cached": (checks.hits, lambda t: t[4].report.update(cached_tokens=5)),
    "a stored token not reusable": (checks.hits, lambda t: change(t, 3, reusable_tokens=5)),
    "a miss": (checks.hits, lambda t: t[4].report.update(miss="lost")),
    "bytes that nobody needed": (
        lambda t: checks.bytes_moved(t, BYTES),
        lambda t: t[2].report.update(loaded_bytes=8),
    ),
    "nodes that sent nothing": (
        lambda t: checks.bytes_moved(t, BYTES),
        lambda t: change(t, 3, node_bytes_read=0),
    ),
    "nodes that sent twice": (
        lambda t: checks.bytes_moved(t, BYTES),
        lambda t: change(t, 3, node_bytes_read=2 * t[2].node_bytes_read),
    ),
    "the same engine twice": (checks.alternation, lambda t: change(t, 3, pid=t[1].pid)),
    "the dead engine answers": (
        lambda t: checks.survived_the_kill(t, "engine-b"),
        lambda t: change(t, 6, engine="engine-b"),
    ),
    "no new engine": (
        lambda t: checks.survived_the_kill(t, "engine-b"),
        lambda t: [change(t, n, engine="engine-a") for n in (6, 8)] and None,
    ),
    "loaded is not what was saved": (checks.loaded_is_saved, lambda t: t[5].report.update(loaded_crc32c=1)),
    "one bit differs from local": (
        checks.equals_local,
        lambda t: t[3].local.logprobs.__setitem__(0, -0.5000001),
    ),
    "local kept nothing": (checks.equals_local, lambda t: t[3].local.report.update(local_cached_tokens=0)),
    "other ids than recomputed": (
        lambda t: recomputed(t, scores(t)),
        lambda t: (
            setattr(t[2].recomputed, "token_ids", [1, 2, 3])
            or setattr(t[2].recomputed, "logprobs", [-9.0] * 3)
        ),
    ),
    "another probability": (
        lambda t: recomputed(t, [s and Score(s.own - 0.01, s.best - 0.01) for s in scores(t)]),
        lambda t: None,
    ),
    "not the likeliest": (
        lambda t: recomputed(t, [s and Score(s.own, s.own + 0.01) for s in scores(t)]),
        lambda t: None,
    ),
    "a short context": (checks.context, lambda t: change(t, 8, prompt_ids=[1] * 2000)),
    "not fast": (
        lambda t: checks.faster_than_recomputed(t[-1]),
        lambda t: setattr(t[-1].recomputed, "ttft_ms", 499.0),
    ),
    "slower than local": (
        lambda t: checks.as_fast_as_local(t[-1]),
        lambda t: setattr(t[-1].local, "ttft_ms", 60.0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_check_sees_what_it_is_there_for(name: str) -> None:
    check, harm = CASES[name]
    turns = good()
    if name not in ("another probability", "not the likeliest"):
        assert check(turns).ok, check(turns).detail
    harm(turns)
    found = check(turns)
    assert not found.ok and found.detail


def test_recomputation_agrees_on_a_good_conversation() -> None:
    turns = good()
    assert recomputed(turns, scores(turns)).ok and all(turn.identical for turn in turns)


def test_a_near_tie_is_the_same_and_anything_else_is_not() -> None:
    turns = good()
    turns[2].recomputed.token_ids = [30, 99, 98]
    turns[2].recomputed.logprobs = [-0.5, -0.5005, -3.0]
    assert recomputed(turns, scores(turns)).ok
    turns[2].recomputed.logprobs = [-0.5, -0.6, -3.0]
    assert not recomputed(turns, scores(turns)).ok and not turns[2].identical


def test_the_negative_control_must_fail_and_the_exact_copy_must_not() -> None:
    assert checks.negative_control(1e-5, 3.0).ok
    assert not checks.negative_control(1e-5, 1e-4).ok
    assert not checks.negative_control(0.1, 3.0).ok


def test_rows_and_memory_have_limits() -> None:
    assert checks.control_rows({"segments": 2, "chain": 16, "plans": 0, "files": 2}, 8).ok
    assert not checks.control_rows({"segments": 3, "chain": 2}, 8).ok
    assert not checks.control_rows({"segments": 1, "chain": 17}, 8).ok
    assert checks.small_engines({"a": 700}).ok and not checks.small_engines({"a": 700, "b": 4096}).ok


def test_the_shipped_conversation_is_whole() -> None:
    pieces = read_script(None)
    assert len(pieces) == TURNS and all(piece.question.endswith("?") for piece in pieces)
    assert SHIPPED.samefile(Path(__file__).resolve().parents[2] / "examples" / SHIPPED.name)


def test_a_failed_check_is_an_exit_code_and_the_whole_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {"turns": [], "checks": [Check("it works", False, "it does not").describe()], "ok": False}
    monkeypatch.setattr(run, "_perform", lambda *_: bad)
    # The demo makes its process forget what is configured for others.
    with mock.patch.dict(os.environ), pytest.raises(CommandFailed, match="it works") as caught:
        run.run_demo(None, None, as_json=True)
    assert caught.value.data == bad and caught.value.exit_code == 1
    assert capsys.readouterr().out == ""
    json.dumps(caught.value.data)


def test_a_row_has_a_cell_for_each_column() -> None:
    turn = good()[3]
    assert row(turn)[5] == "100 %" and row(good()[0])[5] == "-"
