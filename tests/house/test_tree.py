"""Rules about the tree itself that a reader would otherwise have to watch over."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAYS_NOTHING = re.compile(r"(^|/)(utils?|common|core|helpers?|misc|manager|v2)(/|\.(py|rs)$)")
UNFINISHED = re.compile(
    r"todo!\(|unimplemented!\(|raise NotImplementedError|\bTODO\b|\bFIXME\b|assert True\b"
)


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout (a source archive): the tree can't be listed")
    return [Path(name) for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def sources() -> list[Path]:
    return [path for path in tracked() if path.suffix in (".py", ".rs") and path.name != Path(__file__).name]


def test_names_say_what_they_hold() -> None:
    assert [str(path) for path in tracked() if SAYS_NOTHING.search(str(path))] == []


def test_files_are_one_noun_or_one_verb() -> None:
    long = {str(p): n for p in sources() if (n := len((ROOT / p).read_text().splitlines())) > 600}
    assert long == {}


def test_nothing_is_left_unfinished() -> None:
    found = [str(path) for path in sources() if UNFINISHED.search((ROOT / path).read_text())]
    assert found == []


def test_the_makefile_stays_small() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    assert len(targets) <= 12


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in tracked():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / path).read_text()):
            if "://" not in target and not (ROOT / path.parent / target).exists():
                broken.append(f"{path} → {target}")
    assert broken == []
