"""I11 with signing keys: a tenant reaches its own files and nothing else, through every door there is."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gd2fs
from gd2fs import errors
from gd2fs.signing import Capability, Keys, Role, Token
from tests.fleet import Fleet, fleet

KEYS = "7:" + "5a" * 32


def token(tenant: str, role: Role = "client", keys: str = KEYS, life_s: float = 600) -> str:
    return Keys.parse(keys).sign(Token(tenant, role, int(time.time() + life_s)))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GD2FS_CLUSTER_KEYS", KEYS)
        patch.setenv("GD2FS_TOKEN", token("ops", "admin"))
        with fleet(tmp_path_factory.mktemp("tenants"), nodes=1, memory="128MiB") as running:
            yield running


@pytest.fixture
def alice(secured: Fleet) -> Iterator[gd2fs.Client]:
    with gd2fs.connect(secured.control, token=token("alice")) as client:
        yield client


@pytest.fixture
def mallory(secured: Fleet) -> Iterator[gd2fs.Client]:
    with gd2fs.connect(secured.control, token=token("mallory")) as client:
        yield client


def test_names_of_others_do_not_exist(alice: gd2fs.Client, mallory: gd2fs.Client) -> None:
    alice.create("/diary")
    alice.write("/diary", 0, b"alice's own")
    assert mallory.list("/") == []
    for attempt in (mallory.stat, mallory.delete, mallory.read):
        with pytest.raises(FileNotFoundError):
            attempt("/diary")
    mallory.create("/diary")
    mallory.write("/diary", 0, b"mallory's")
    assert alice.read("/diary") == b"alice's own"


def test_a_layout_by_id_is_refused_to_others(alice: gd2fs.Client, mallory: gd2fs.Client) -> None:
    info = alice.create("/by-id")
    with pytest.raises((FileNotFoundError, PermissionError)):
        mallory.control("GET", f"/v1/fs/layout?file={info.file_id}&rights=read")


def test_a_stolen_capability_opens_nothing(alice: gd2fs.Client, mallory: gd2fs.Client) -> None:
    alice.create("/stolen")
    alice.write("/stolen", 0, b"x" * 100)
    layout = alice.control("GET", "/v1/fs/layout?path=/stolen&rights=read,write")
    with pytest.raises(PermissionError):
        mallory.open_layout(layout).read_into(0, bytearray(100))
    with pytest.raises(PermissionError):
        mallory.open_layout(layout).write(0, b"y" * 100)
    assert alice.read("/stolen") == b"x" * 100


def test_a_changed_capability_is_forged(alice: gd2fs.Client, mallory: gd2fs.Client) -> None:
    alice.create("/forged")
    alice.write("/forged", 0, b"x" * 100)
    layout = alice.control("GET", "/v1/fs/layout?path=/forged&rights=read")
    head, key, payload, signature = layout["capability"].split(".")
    said = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    said["tenant"], said["rights"] = "mallory", ["read", "write"]
    changed = base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")
    layout["capability"] = ".".join((head, key, changed, signature))
    with pytest.raises(errors.BadSignature):
        mallory.open_layout(layout).read_into(0, bytearray(100))


def test_an_expired_capability_is_refused(secured: Fleet, alice: gd2fs.Client) -> None:
    alice.create("/expired")
    alice.write("/expired", 0, b"x" * 100)
    layout = alice.control("GET", "/v1/fs/layout?path=/expired&rights=read")
    keys = Keys.parse(KEYS)
    valid = keys.verify(layout["capability"], Capability)
    layout["capability"] = keys.sign(dataclasses.replace(valid, expiry=int(time.time()) - 1))
    layout["refresh"] = False
    with pytest.raises(errors.Expired):
        alice.open_layout(layout).read_into(0, bytearray(100))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("", errors.Unauthenticated),
        ("nonsense", PermissionError),
        (token("alice", keys="7:" + "11" * 32), errors.BadSignature),
        (token("alice", keys="8:" + "5a" * 32), errors.BadSignature),
        (token("alice", life_s=-10), errors.Expired),
    ],
)
def test_bad_tokens(
    secured: Fleet, wrong: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GD2FS_TOKEN", raising=False)
    with pytest.raises(error), gd2fs.connect(secured.control, token=wrong) as client:
        client.list("/")


def test_roles_are_kept_apart(alice: gd2fs.Client) -> None:
    with pytest.raises(PermissionError):
        alice.control(
            "POST",
            "/v1/nodes/register",
            {
                "node": "evil",
                "addresses": ["tcp://127.0.0.1:1"],
                "http": "http://127.0.0.1:1",
                "memory_bytes": 1,
                "incarnation_floor": 0,
                "config_hash": "",
            },
        )


@pytest.mark.parametrize("command", ["control", "node"])
def test_nothing_listens_beyond_loopback_without_keys(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GD2FS_CLUSTER_KEYS", raising=False)
    listen = "0.0.0.0:0" if command == "control" else "tcp://0.0.0.0:0"
    done = subprocess.run(
        [sys.executable, "-m", "gd2fs.cli", command, "--listen", listen, "--data-dir", str(tmp_path)],
        env={**os.environ, "GD2FS_NODE_ADVERTISE": "tcp://127.0.0.1:7999"},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode != 0
    assert b"GD2FS_CLUSTER_KEYS" in done.stderr
