"""Pytest plugin: the fixtures that all tests of the engine share. Modules name it in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gd2fs.engine.loaded import LoadedModel, load_model
from tests.engine_doubles import MemoryStorage


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """SmolLM2-135M-Instruct, with its real weights."""
    return load_model()


@pytest.fixture
def storage() -> Iterator[MemoryStorage]:
    memory = MemoryStorage()
    yield memory
    memory.close()
