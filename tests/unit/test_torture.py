"""The torture's own judgement: what it must notice, and what it must let pass."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.bench.torture import Settings, mutants
from gd2fs.bench.torture.check import Allowance, Reader, Violation
from gd2fs.bench.torture.ends import check_end
from gd2fs.bench.torture.journal import Journal, Operation, read
from gd2fs.bench.torture.model import INFINITE, FileModel, Timeline, models
from gd2fs.bench.torture.pattern import Bytes, pattern
from gd2fs.client import FileInfo

FILE = "0123456789abcdef" * 2
UNIT = 64 << 10


class Story:
    """A journal made by hand, second by second, and bytes that somebody could find afterwards."""

    def __init__(self) -> None:
        self.now = 0.0
        self.operations: list[Operation] = []
        self.timeline = Timeline()
        self.bytes = np.zeros(4 * UNIT, np.uint8)
        self.there = np.zeros(4 * UNIT, bool)
        self._did("create", True, path="/f", file=FILE, unit=UNIT, nodes=["n"])

    def _did(self, kind: str, ok: bool, **facts: object) -> None:
        self.now += 1
        ended = self.now + 0.5 if ok else None
        self.operations.append(Operation(len(self.operations), kind, self.now, facts, ended, ok))

    def write(self, version: int, start: int, end: int, *, ok: bool = True, put: bool = True) -> None:
        self._did("write", ok, file=FILE, start=start, end=end, version=version)
        if put:
            self.put(version, start, end)

    def put(self, version: int, start: int, end: int) -> None:
        self.bytes[start:end] = pattern(FILE, version, start, end - start)
        self.there[start:end] = True

    def flush(self) -> None:
        self._did("flush", True, file=FILE)

    def die(self) -> None:
        self.now += 1
        self.timeline.deaths.setdefault("n", []).append((self.now, self.now + 0.5))

    def stop(self) -> None:
        self.now += 1
        self.timeline.stops.setdefault("n", []).append((self.now, self.now + 0.5))

    def model(self) -> FileModel:
        return models(self.operations, self.timeline)[FILE]

    def fill(self, offset: int, buffer: Bytes) -> int:
        end = offset + len(buffer)
        if not self.there[offset:end].all():
            raise errors.Lost("gone") if self.timeline.restarted("n", 0) else errors.Hole("never written")
        buffer[:] = self.bytes[offset:end]
        return len(buffer)

    def check(self, fill: Callable[[int, Bytes], int] | None = None, damage: bool = False) -> list[Violation]:
        reader = Reader(fill or self.fill, self.model(), Allowance(self.timeline, damage))
        reader.everything()
        return reader.violations

    def kinds(self) -> list[str]:
        return sorted({violation.kind for violation in self.check()})


def test_what_was_acknowledged_is_expected() -> None:
    story = Story()
    story.write(1, 0, 2 * UNIT)
    story.write(2, 100, UNIT + 5)
    assert story.kinds() == []
    story.put(1, 200, 300)
    (found,) = story.check()
    assert found.kind == "wrong_bytes" and (found.start, found.end) == (100, UNIT), found


@pytest.mark.parametrize("at", [0, 7, UNIT - 1, UNIT, 2 * UNIT - 1])
def test_one_wrong_bit_is_noticed(at: int) -> None:
    story = Story()
    story.write(1, 0, 2 * UNIT)
    story.bytes[at] ^= 16
    assert story.kinds() == ["wrong_bytes"]


def test_bytes_of_another_place_version_or_file_and_zeros_are_noticed() -> None:
    for wrong in (
        pattern(FILE, 1, 4096, 4096),
        pattern(FILE, 2, 0, 4096),
        pattern(FILE[::-1], 1, 0, 4096),
        np.zeros(4096, np.uint8),
    ):
        story = Story()
        story.write(1, 0, UNIT)
        story.bytes[:4096] = wrong
        assert story.kinds() == ["wrong_bytes"]


def test_a_write_without_an_answer_is_there_or_not_but_whole_in_a_chunk() -> None:
    for seen in ((), (1,), (0, 1)):
        story = Story()
        story.write(1, 0, 2 * UNIT)
        story.write(2, 1000, 2 * UNIT - 1000, ok=False, put=False)
        for chunk in seen:
            story.put(2, max(1000, chunk * UNIT), min(2 * UNIT - 1000, (chunk + 1) * UNIT))
        assert story.kinds() == []
    story.put(1, 3000, 4000)
    assert story.kinds() == ["wrong_bytes"], "a part of the old one inside of the new one"


def test_a_torn_write_over_pieces_of_different_age_is_noticed() -> None:
    story = Story()
    story.write(1, 0, UNIT)
    story.write(2, 500, 900)
    story.write(3, 0, UNIT, ok=False, put=False)
    story.put(3, 0, 500)
    (found,) = story.check()
    assert found.kind == "wrong_bytes" and "in part" in found.what
    story.put(3, 0, UNIT)
    assert story.kinds() == []
    # A later write hides whether the earlier one is there.
    story.write(4, 0, 500)
    story.put(1, 900, UNIT)
    story.put(2, 500, 900)
    assert story.kinds() == []


def test_a_first_write_without_an_answer_is_no_torn_one() -> None:
    story = Story()
    story.write(1, 0, 1000)
    story.write(2, 500, 2000, ok=False, put=False)
    assert story.kinds() == []
    story.put(2, 500, 1000)
    assert story.kinds() == ["wrong_bytes"], "over the old bytes, but not behind them"


def test_what_is_missing_without_a_death_is_noticed() -> None:
    story = Story()
    story.write(1, 0, UNIT)
    story.there[:] = False
    assert story.kinds() == ["lost_after_flush"]


def test_a_death_takes_what_was_not_flushed_and_nothing_else() -> None:
    story = Story()
    story.write(1, 0, UNIT)
    story.flush()
    story.write(2, UNIT, 2 * UNIT)
    story.die()
    story.there[UNIT:] = False
    assert story.kinds() == []
    story.there[10:20] = False
    assert story.kinds() == ["lost_after_flush"]
    assert story.check(damage=True) == []


def test_an_overwrite_of_what_was_flushed_is_kept_and_never_undone() -> None:
    story = Story()
    story.write(1, 0, UNIT)
    story.flush()
    story.write(2, 0, 100)
    story.die()
    assert story.kinds() == []
    story.put(1, 0, 100)
    assert story.kinds() == ["wrong_bytes"]
    story.there[:100] = False
    assert story.kinds() == ["lost_after_flush"]


def test_a_flush_after_a_death_says_nothing_about_what_was_lost_before() -> None:
    story = Story()
    story.write(1, 0, UNIT)
    story.die()
    story.flush()
    story.there[:] = False
    assert story.kinds() == []


def test_a_stop_in_order_is_a_flush() -> None:
    story = Story()
    story.write(1, 0, UNIT)
    story.stop()
    assert story.kinds() == []
    story.there[:] = False
    assert story.kinds() == ["lost_after_flush"]
    story.there[:] = True
    story.write(2, UNIT, 2 * UNIT)
    story.die()
    story.there[UNIT:] = False
    assert story.kinds() == [], "written after the stop, and never flushed"


def test_zeros_where_nothing_was_written_are_noticed() -> None:
    story = Story()
    story.write(1, 1000, 2000)
    assert story.kinds() == []
    story.there[:1000] = True
    assert story.kinds() == ["wrong_bytes"]


def test_a_hole_in_the_place_of_acknowledged_bytes_is_noticed() -> None:
    story = Story()
    story.write(1, 0, 1000)

    def hole(offset: int, buffer: Bytes) -> int:
        raise errors.Hole("never written")

    def short(offset: int, buffer: Bytes) -> int:
        return 0

    for fill in (hole, short):
        assert {found.kind for found in story.check(fill)} == {"lost_after_flush"}


def test_bytes_that_do_not_match_their_sums_are_wrong_bytes() -> None:
    story = Story()
    story.write(1, 0, 1000)

    def damaged(offset: int, buffer: Bytes) -> int:
        raise errors.Checksum("sums differ")

    assert {found.kind for found in story.check(damaged)} == {"wrong_bytes"}


def test_a_new_grant_drops_what_the_former_wrote_beyond_the_seal() -> None:
    story = Story()
    story._did("write", True, file=FILE, start=0, end=2000, version=1, grant=1)
    story.put(1, 0, 2000)
    story._did("commit", True, file=FILE, end=1000)
    story._did("write", True, file=FILE, start=1000, end=1500, version=2, grant=2)
    story.put(2, 1000, 1500)
    story.there[1500:] = False
    assert story.kinds() == []
    story.there[900:1000] = False
    assert story.kinds() == ["lost_after_flush"]


def test_a_journal_outlives_its_writer_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    assert journal.open() == []
    journal.end(journal.begin("write", file=FILE, start=0, end=5, version=1))
    journal.begin("flush", file=FILE)
    with open(path, "ab") as torn:
        torn.write(b'{"n":3,"t":1.0,"op":"wri')
    again = Journal(path)
    before = again.open()
    assert [(one.kind, one.ok, one.ended is None) for one in before] == [
        ("write", True, False),
        ("flush", False, True),
    ]
    again.end(again.begin("write", file=FILE, start=5, end=9, version=2), "LOST")
    assert [(one.number, one.error) for one in read(path)] == [(1, ""), (2, ""), (3, "LOST")]


def test_random_histories_leave_exactly_one_version_of_every_byte() -> None:
    """The pieces of a model against an array with one number for each byte."""
    random = np.random.default_rng(1)
    model = FileModel(FILE, "/f", UNIT, ("n",), 0.0)
    bytes_of = np.zeros(4 * UNIT, np.int64)
    for version in range(1, 400):
        start = int(random.integers(0, 4 * UNIT - 1))
        end = int(min(4 * UNIT, start + random.integers(1, UNIT)))
        model.write(start, end, version, float(version), float(version))
        bytes_of[start:end] = version
        for chunk, pieces in model.pieces():
            assert pieces[0].start == chunk * UNIT and pieces[-1].end == (chunk + 1) * UNIT
            for piece, following in pairwise(pieces):
                assert piece.end == following.start and piece.versions != following.versions
            for piece in pieces:
                assert (bytes_of[piece.start : piece.end] == piece.versions[0]).all()
                assert piece.acknowledged == (INFINITE if piece.versions == (0,) else piece.versions[0])


@pytest.mark.parametrize(("arguments", "logs"), [([], 1), (["--logs", "0"], 0)])
def test_the_mutants_have_a_log_unless_somebody_wants_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], logs: int
) -> None:
    asked: list[Settings] = []

    def run(settings: Settings, module: Path) -> dict[str, dict[str, object]]:
        asked.append(settings)
        return {"": {"caught": False}}

    monkeypatch.setattr(mutants, "build", Path)
    monkeypatch.setattr(mutants, "run_mutants", run)
    monkeypatch.setattr("sys.argv", ["mutants", *arguments])
    assert mutants.main() == 0 and [one.logs for one in asked] == [logs]
    assert ("NOT TESTED without logs: checksum, sync" in capsys.readouterr().err) == (logs == 0)


class ByPath:
    """What somebody is told who asks for a file by its path."""

    def __init__(self, length: int | None, read: int | None = None, **more: bool) -> None:
        self._told, self._read, self._more = length, length if read is None else read, more

    def stat(self, path: str) -> FileInfo:
        return FileInfo(path, False, FILE, "cache", self._told, 0, UNIT, 1, 0.0, **self._more)

    def read(self, path: str) -> bytes:
        if self._read is None:
            raise errors.Lost("gone")
        return bytes(self._read)


def _ends(story: Story, told: ByPath, damage: bool = False) -> list[str]:
    found = check_end(told, story.model(), Allowance(story.timeline, damage))
    assert all(violation.kind == "lost_after_flush" for violation in found)
    return [violation.what for violation in found]


def test_a_file_that_is_shorter_than_what_was_acknowledged_is_noticed() -> None:
    story = Story()
    story.write(1, 0, UNIT)
    story.write(2, UNIT, UNIT + 10)
    story.write(3, UNIT + 10, UNIT + 20, ok=False)
    story.die()
    for end in (UNIT + 10, UNIT + 20):
        assert _ends(story, ByPath(end)) == []
    for end in (0, UNIT, UNIT + 9):
        assert len(_ends(story, ByPath(end))) == 2, "the length and the bytes"
    assert len(_ends(story, ByPath(UNIT + 10, UNIT))) == 1
    assert len(_ends(story, ByPath(UNIT + 21))) == 2, "nobody wrote so far"
    for lost in ("lost", "end_lost"):
        assert _ends(story, ByPath(None, **{lost: True})) == [], "it says so"


def test_an_end_that_was_flushed_stays_known() -> None:
    story = Story()
    unknown = ByPath(None, end_lost=True)
    story.write(1, 0, 100)
    assert len(_ends(story, unknown)) == 1, "nobody died"
    story.flush()
    story.die()
    assert len(_ends(story, unknown)) == 1 and _ends(story, unknown, damage=True) == []
    story.write(2, 50, 100)
    story.die()
    assert len(_ends(story, unknown)) == 1, "it did not grow"
    story.write(3, 100, 200)
    story.stop()
    assert len(_ends(story, unknown)) == 1, "it was told to end"
    story.die()
    assert _ends(story, unknown) == []
    story.flush()
    assert _ends(story, unknown) == [], "a flush finds no end again"
    story = Story()
    story.write(1, 0, 100)
    story.flush()
    story.write(2, 100, 200, ok=False)
    story.flush()
    story.die()
    assert _ends(story, unknown) == [], "the write may have come later"
