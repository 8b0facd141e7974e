"""What a person is shown while a file is copied."""

from __future__ import annotations

import re
import time

import pytest

from gd2fs.client.transfer import _reported

MB = 1_000_000


def test_the_rate_is_that_of_the_whole_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that land at one moment, as they do in memory, are no speed of their own."""
    monkeypatch.setenv("COLUMNS", "150")
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with _reported(True, "put /big") as report:
        for tenths in (5, 10, 10, 10, 10):
            now = 100 + tenths / 10
            report(tenths * 2 * MB, 20 * MB)
    out = capsys.readouterr().out
    assert re.search(r"put /big .*20\.0/20\.0 MB 20\.0 MB/s", out), out


def test_a_function_is_told_and_nobody_else(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, int]] = []
    with _reported(lambda *what: told.append(what), "put") as report:
        report(1, 2)
    with _reported(None, "put") as report:
        report(3, 4)
    assert told == [(1, 2)] and capsys.readouterr().out == ""
