"""What the native node says about itself: on standard error where the process asks for it, else nowhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gd2fs import _native, errors

# A log and a memory this small are used, with a warning each: files of the default shape do not fit.
LOG_BYTES = 16 << 20
PROGRAM = """
import json, sys
from gd2fs import _native, errors
facts, level = json.loads(sys.argv[1]), sys.argv[2]
if level:
    try:
        _native.show_messages("loud")
    except errors.Invalid as error:
        assert "loud" in str(error), error
    assert _native.show_messages(level)
    assert not _native.show_messages("trace"), "the first one counts"
_native.Node(json.dumps(facts)).stop(0)
"""


def facts_of(directory: Path) -> dict[str, Any]:
    return {
        "cluster": "c",
        "node": "n",
        "incarnation": 1,
        "listen": ["tcp://127.0.0.1:0"],
        "memory_bytes": 1 << 20,
        "data_dir": str(directory / "node"),
        "shm": "off",
        "logs": [str(directory / "log")],
        "log_bytes": LOG_BYTES,
    }


@pytest.mark.parametrize("level", ["", "error", "warn"])
def test_warnings_are_shown_where_they_are_wanted(tmp_path: Path, level: str) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(facts_of(tmp_path)), level]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    if level != "warn":
        assert done.stderr == ""
        return
    memory, log = done.stderr.splitlines()
    assert " WARN " in memory and "node.memory_bytes" in memory and "give 8388608 at least" in memory
    assert " WARN " in log and "node.log_bytes" in log and str(tmp_path / "log") in log
    assert "\x1b" not in done.stderr, "colours are for people, and this goes to a file"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_bytes": 5}, r"^INVALID: node\.memory_bytes: 5 is below 1 MiB; write for example"),
        (
            {"log_bytes": 4095},
            r"^INVALID: node\.log_bytes: 4095 is not a multiple of 1 MiB; write for example",
        ),
        ({"listen": ["rdma://x"]}, r"^INVALID: node\.listen: "),
    ],
)
def test_a_refused_start_names_the_setting_and_leaves_no_trace(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    """A check refuses the same, before there is an incarnation to start with."""
    _native.Node.check(json.dumps(facts_of(tmp_path)))
    for refusing in (_native.Node.check, _native.Node):
        with pytest.raises(errors.Invalid, match=said):
            refusing(json.dumps(facts_of(tmp_path) | change))
    assert not any(tmp_path.iterdir())


def test_a_refused_log_and_a_refused_directory_are_named_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"somebody's".ljust(LOG_BYTES, b"."))
    with pytest.raises(errors.Invalid) as refused:
        _native.Node(json.dumps(facts_of(tmp_path)))
    said = str(refused.value)
    assert said.startswith("INVALID: node.logs: ") and said.count(str(log)) == 1, said
    log.write_bytes(bytes(2 * LOG_BYTES))
    with pytest.raises(errors.Invalid) as refused:
        _native.Node(json.dumps(facts_of(tmp_path) | {"incarnation": 2}))
    said = str(refused.value)
    assert said.startswith(f"INVALID: node.logs: {log} has ") and said.count("node.logs: ") == 1, said
    own = {"incarnation": 3, "logs": [str(tmp_path / "node" / "logs.new")]}
    with pytest.raises(errors.Invalid) as refused:
        _native.Node(json.dumps(facts_of(tmp_path) | own))
    assert str(refused.value).count("node.logs") == 1, refused.value
    assert (tmp_path / "node" / "incarnation").read_bytes()[8:12] == b"\2\0\0\0", "nothing was written"
    (tmp_path / "node" / "superblock").write_bytes(b"elsewhere".ljust(4096, b"."))
    with pytest.raises(errors.Invalid, match=r'node\.data_dir: .* it begins with "elsewher"'):
        _native.Node(json.dumps(facts_of(tmp_path)))
