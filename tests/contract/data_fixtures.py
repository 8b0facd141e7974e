"""Fixtures of the data plane's contract suite: every transport, a node, files on it, a client."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from gd2fs.client import Client
from tests.client_real_node import RealNode
from tests.contract.data_plane import GIB, TRANSPORTS, Files, Transport


@pytest.fixture
def rng() -> np.random.Generator:
    """Other numbers in every run. A failure shows the seed; GD2FS_TEST_SEED repeats it."""
    seed = int(os.environ.get("GD2FS_TEST_SEED") or secrets.randbits(32))
    print(f"repeat with GD2FS_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="module", params=TRANSPORTS, ids=lambda transport: transport.name)
def transport(request: pytest.FixtureRequest) -> Transport:
    one: Transport = request.param
    return one


@pytest.fixture(
    scope="module", params=[one for one in TRANSPORTS if one.is_stream], ids=lambda transport: transport.name
)
def stream(request: pytest.FixtureRequest) -> Transport:
    one: Transport = request.param
    return one


@pytest.fixture(scope="module")
def node() -> Iterator[RealNode]:
    """A node for tests that leave it running."""
    with RealNode("steady", memory_bytes=2 * GIB) as one:
        yield one


@pytest.fixture
def files(node: RealNode) -> Iterator[Files]:
    """Files on `node`."""
    made = Files([node])
    yield made
    made.delete_all()
    made.check_memory_is_back()


@pytest.fixture
def client(transport: Transport) -> Iterator[Client]:
    with transport.client() as one:
        yield one
