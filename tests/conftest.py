"""What every test finds, in a process of its own or in one of several (`pytest -n`)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# What the commands print is as wide as into a pipe. Line editing, which pytest loads, puts the width of a
# terminal that nobody has into the environment that its worker processes inherit.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)


@pytest.fixture(autouse=True)
def environment_is_left_as_it_was() -> Iterator[None]:
    """Which tests share a process, and in which order, is nobody's to know: what one leaves behind fails
    another one somewhere."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = before.keys() | after.keys()
    changed = {name for name in names if before.get(name) != after.get(name)} - {"PYTEST_CURRENT_TEST"}
    assert not changed, f"environment variables were changed and not restored: {sorted(changed)}"
