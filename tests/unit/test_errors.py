"""The error tree: complete, equal to the table in Rust, and well-behaved as Python exceptions."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gd2fs import errors


def test_every_code_is_the_same_in_rust() -> None:
    native = pytest.importorskip("gd2fs._native")
    table = {row[0]: row[1:] for row in native.error_table() if row[0] != 0}
    assert set(table) == set(errors.BY_CODE)
    for code, kind in errors.BY_CODE.items():
        assert (kind.name, kind.errno, kind.retryable, kind.may_have_changed) == table[code], kind


def test_the_docstring_draws_the_tree() -> None:
    assert errors.__doc__
    drawn = re.findall(r"[├└]── (\w+) +(\d+) +(retry)? +(\w+)", errors.__doc__)
    assert {int(code) for _, code, _, _ in drawn} == set(errors.BY_CODE)
    for name, code, retry, base in drawn:
        kind = errors.BY_CODE[int(code)]
        assert kind.__name__ == name
        assert kind.retryable == (retry == "retry"), name
        assert base in {parent.__name__ for parent in kind.__mro__}, name


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_an_error_survives_pickling_and_copying(code: int) -> None:
    error = errors.from_code(code, "/a [0, 4): why; do this")
    error.add_note("seen in a test")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error) is errors.BY_CODE[code]
        assert (str(other), other.message, other.errno) == (str(error), error.message, error.errno)
        assert other.__notes__ == ["seen in a test"]
    assert str(error) == f"{error.name}: /a [0, 4): why; do this"
    if isinstance(error, OSError):
        assert error.strerror == error.message


def test_ranges_and_builtins() -> None:
    ranges = [
        errors.WireError,
        errors.StoreError,
        errors.LayoutError,
        errors.AuthError,
        errors.ControlError,
        errors.KvError,
    ]
    for code, kind in errors.BY_CODE.items():
        assert issubclass(kind, ranges[code // 100 - 1])
        assert issubclass(kind, errors.Gd2fsError)
    with pytest.raises(FileNotFoundError, match="NOT_FOUND: /a"):
        raise errors.from_code(501, "/a")
    with pytest.raises(TimeoutError):
        raise errors.Timeout("t")
    with pytest.raises(ConnectionError):
        raise errors.Disconnected("d")


def test_an_unknown_code_keeps_its_number() -> None:
    error = errors.from_code(999, "from the future")
    assert isinstance(error, errors.Internal)
    assert "999" in str(error) and "from the future" in str(error)


def test_a_subclass_keeps_what_it_inherits() -> None:
    class MyHole(errors.Hole):
        pass

    assert (MyHole.code, MyHole.name) == (201, "HOLE")
    assert errors.BY_CODE[201] is errors.Hole


def test_local_errors_have_no_code() -> None:
    assert errors.ForkedError.code == errors.ClosedError.code == 0
    assert str(errors.ClosedError("the client is closed")) == "CLOSED: the client is closed"


def test_it_can_be_imported_without_the_compiled_module() -> None:
    script = (
        "import sys; sys.modules['gd2fs._native'] = None; import gd2fs.errors as e; print(e.Hole('x').errno)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(errors.__file__).parents[1])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "61"), done.stderr
