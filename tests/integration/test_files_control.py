"""Paths, uploads and sessions through real control and real nodes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gd2fs
from gd2fs import errors, kv
from gd2fs.cli import main, output
from gd2fs.client import Client, Extent, Warmth
from tests.fleet import fleet

MIB = 1 << 20


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with fleet(tmp_path_factory.mktemp("fleet"), nodes=2) as cluster:
        yield cluster.control


@pytest.fixture
def client(control: str) -> Iterator[Client]:
    with gd2fs.connect(control) as one:
        yield one


def noise(length: int) -> bytes:
    return np.random.default_rng(length).bytes(length)


def test_the_life_of_a_file(client: Client) -> None:
    data = noise(5 * MIB + 17)
    client.mkdir("/life/deep")
    made = client.create("/life/deep/a")
    assert (made.path, made.is_dir, made.file_class, made.length) == ("/life/deep/a", False, "cache", 0)
    assert client.write("/life/deep/a", 0, [data[:MIB], data[MIB:]]) == len(data)
    assert client.stat("/life/deep/a").length == len(data)
    assert client.read("/life/deep/a") == data
    assert client.read("/life/deep/a", 5 * MIB, 1000) == data[5 * MIB :]
    assert client.read("/life/deep/a", len(data) + 1) == b""
    buffer = bytearray(100)
    assert client.read_into("/life/deep/a", 7, buffer) == 100
    assert buffer == data[7:107]
    assert [entry.path for entry in client.list("/life/deep")] == ["/life/deep/a"]
    client.rename("/life/deep/a", "/life/b")
    assert client.read("/life/b", 0, 10) == data[:10]
    with pytest.raises(errors.NotFound):
        client.read("/life/deep/a", 0, 10)
    assert client.exists("/life/b") and not client.exists("/life/deep/a")
    client.delete("/life/b")
    with pytest.raises(FileNotFoundError):
        client.stat("/life/b")
    with pytest.raises(FileNotFoundError):
        client.write("/life/b", 0, b"x")


def test_what_control_refuses_has_its_own_class(client: Client) -> None:
    client.mkdir("/refused")
    client.create("/refused/file")
    with pytest.raises(errors.Exists):
        client.create("/refused/file")
    with pytest.raises(errors.NotEmpty):
        client.delete("/refused")
    with pytest.raises(errors.IsADirectory):
        client.write("/refused", 0, b"x")
    with pytest.raises(errors.Unsupported, match="durable"):
        client.mkdir("/strong", "durable")
    client.delete("/refused", recursive=True)
    assert not client.exists("/refused")


def test_a_path_that_another_client_replaced_is_looked_up_again(client: Client, control: str) -> None:
    client.create("/replaced")
    client.write("/replaced", 0, b"first")
    assert client.read("/replaced", 0, 5) == b"first"
    with gd2fs.connect(control) as other:
        other.delete("/replaced")
        other.create("/replaced")
        other.write("/replaced", 0, b"other")
    assert client.read("/replaced", 0, 5) == b"other"
    client.write("/replaced", 0, b"third")
    assert client.read("/replaced", 0, 5) == b"third"


def test_a_wide_file_lies_on_both_nodes(client: Client) -> None:
    data = noise(3 * MIB)
    client.create("/wide", width=2, stripe_unit=256 << 10)
    client.write("/wide", 0, data)
    assert client.stat("/wide").width == 2
    assert client.read("/wide") == data
    with pytest.raises(errors.Hole):
        client.write("/wide", 10 * MIB, b"x")
        client.read("/wide", 3 * MIB, 1000)


def test_where_the_bytes_of_a_path_are(client: Client) -> None:
    unit = 256 << 10
    client.create("/where", width=2, stripe_unit=unit)
    assert (client.where("/where"), client.warm("/where")) == ([], Warmth())
    client.write("/where", 0, noise(3 * unit))
    client.write("/where", 5 * unit, b"end")
    whole = [Extent(0, 3 * unit, "dram"), Extent(3 * unit, 5 * unit, "hole")]
    whole.append(Extent(5 * unit, 5 * unit + 3, "dram"))
    assert client.where("/where") == whole == asyncio.run(client.awhere("/where"))
    assert client.where("/where", [(1, 2)]) == [Extent(1, 2, "dram")]
    warmth = Warmth(3 * unit + 3, 0, 2 * unit)
    assert client.warm("/where") == warmth == asyncio.run(client.awarm("/where"))
    with pytest.raises(errors.Unsupported, match=r"node\.logs"):
        client.flush("/where")
    with pytest.raises(errors.Unsupported, match=r"node\.logs"):
        asyncio.run(client.aflush("/where"))
    client.mkdir("/where-not")
    with pytest.raises(errors.IsADirectory):
        client.where("/where-not")
    with pytest.raises(errors.NotFound):
        client.warm("/nowhere")


def test_the_commands_say_the_same(
    client: Client, control: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client.create("/command")
    client.write("/command", 100, b"data")

    def command(*words: str) -> tuple[object, str]:
        monkeypatch.setattr(output, "_printed", False)  # each is a process of its own
        with pytest.raises(SystemExit) as ended:
            main([*words, "--control", control])
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    code, said = command("where", "/command", "--json")
    extents = [{"start": 0, "end": 100, "tier": "hole"}, {"start": 100, "end": 104, "tier": "dram"}]
    assert (code, json.loads(said)) == (0, {"path": "/command", "extents": extents})
    code, said = command("where", "/command")
    assert code == 0 and "hole" in said and "104" in said
    code, said = command("warm", "/command", "--json")
    warmth = {"dram": 4, "nvme": 0, "missing": 100, "unreadable": 0}
    assert (code, json.loads(said)) == (0, {"path": "/command", **warmth})
    code, said = command("warm", "/command")
    assert code == 0 and "4 bytes in memory" in said
    code, said = command("flush", "/command")
    assert code == 1 and "node.logs" in said


def test_asyncio_by_path(client: Client) -> None:
    async def one(index: int) -> None:
        data = noise(100_000 + index)
        client.create(f"/async{index}")
        assert await client.awrite(f"/async{index}", 0, data) == len(data)
        back = bytearray(len(data))
        assert await client.aread_into(f"/async{index}", 0, back) == len(data)
        assert back == data

    async def main() -> None:
        await asyncio.gather(*(one(index) for index in range(8)))

    asyncio.run(main())


@pytest.mark.parametrize("length", [0, 1, 40 * MIB + 3])
def test_upload_and_download(client: Client, tmp_path: Path, length: int) -> None:
    local, back, path = tmp_path / "local", tmp_path / "back", f"/up{length}"
    local.write_bytes(noise(length))
    seen: list[tuple[int, int]] = []
    client.upload(local, path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and (not length or seen[-1] == (length, length))
    client.download(path, str(back))
    assert back.read_bytes() == local.read_bytes()
    # Again, shorter: what was there is replaced as a whole.
    local.write_bytes(b"short")
    client.upload(local, path, progress=True)
    assert client.read(path) == b"short"
    assert sorted(os.listdir(tmp_path)) == ["back", "local"]
    assert not [entry.path for entry in client.list("/") if ".upload-" in entry.path]


def test_a_failed_upload_leaves_what_was_there(client: Client, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"good")
    client.upload(local, "/kept")
    local.write_bytes(noise(40 * MIB))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.upload(local, "/kept", progress=interrupt)
    assert client.read("/kept") == b"good"
    assert not [entry.path for entry in client.list("/") if ".upload-" in entry.path]
    with pytest.raises(FileNotFoundError):
        client.download("/none", tmp_path / "none")
    assert os.listdir(tmp_path) == ["local"]


def test_an_upload_never_takes_the_place_of_a_directory(client: Client, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"data")
    client.mkdir("/empty-directory")
    with pytest.raises(IsADirectoryError, match="/empty-directory"):
        client.upload(local, "/empty-directory")
    assert client.stat("/empty-directory").is_dir


def test_a_download_stores_every_byte_of_a_short_write(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(100_003)
    (tmp_path / "local").write_bytes(data)
    client.upload(tmp_path / "local", "/short-writes")
    whole = os.pwrite
    # As a disk does that is nearly full.
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: whole(fd, part[: max(1, len(part) // 2)], at))
    client.download("/short-writes", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


def test_sessions_are_dataclasses_of_kv(client: Client) -> None:
    form = kv.KvFormat("token", 64)
    session = client.sessions.create("identity", form, model="m")
    assert (session.tokens, session.stored, session.kv_format, session.model) == (0, (), form, "m")
    ids = list(range(100))
    plan = client.sessions.plan(session.session, ids, max_tokens=10, request_id="r1", kv_identity="identity")
    assert (plan.prompt_tokens, plan.cached_tokens) == (100, 0)
    fresh = plan.metadata.fresh[0]
    layouts = plan.kv_transfer["plan"]["layouts"]
    tokens = np.array(ids, "<u4")
    client.open_layout(layouts[fresh.kv_uri + ".tokens"]).write(4 * fresh.kv_start // 64, tokens)
    data = noise(6400)
    client.open_layout(layouts[fresh.kv_uri]).write(fresh.kv_start, data)
    column = layouts[fresh.kv_uri]["columns"][0]
    ack = {"column": 0, "epoch": column["epoch"], "incarnation": column["replicas"][0]["incarnation"]}
    written = kv.Segment(0, 100, fresh.kv_uri, fresh.kv_start, 6400)
    version, stored = client.sessions.commit(plan.token, [written], kv.digest(kv.as_ids(ids)), [ack])
    assert stored == (written,)
    again = client.sessions.get(session.session)
    assert (again.version, again.tokens, again.bytes, again.stored) == (version, 100, 6400, stored)
    assert client.sessions.tokens(session.session) == ids
    assert session.session in {one.session for one in client.sessions.list(limit=1000)}
    seen = client.sessions.estimate(session.session, [*ids, 7], max_tokens=5, kv_identity="identity")
    assert (seen.cached_tokens, seen.reusable_tokens, seen.miss, seen.version) == (100, 100, None, version)
    assert seen.estimate["fresh_tokens"] == 1 and seen.estimate["cached_bytes"] == 6400
    kept = client.sessions.extend(session.session, ttl_s=600, priority=2)
    assert (
        kept.expires_at is not None and client.sessions.extend(session.session, ttl_s=None).expires_at is None
    )
    one = client.sessions.list(model="m", kv_identity="identity")
    assert [each.session for each in one] == [session.session] and not client.sessions.list(model="other")
    fork = client.sessions.fork(session.session, 60)
    assert (fork.tokens, fork.bytes, fork.model, fork.control_rows["files"]) == (60, 3840, "m", 0)
    client.sessions.delete(session.session)
    with pytest.raises(errors.NotFound):
        client.sessions.get(session.session)
    # The bytes are there for as long as the fork is.
    plan = client.sessions.plan(
        fork.session, [*ids[:60], 7], max_tokens=1, request_id="r2", kv_identity="identity"
    )
    [stored_part] = plan.metadata.stored
    assert (plan.cached_tokens, stored_part.kv_uri, stored_part.kv_length) == (60, fresh.kv_uri, 3840)
    of_parent = client.open_layout(plan.kv_transfer["plan"]["layouts"][fresh.kv_uri])
    into = bytearray(3840)
    assert of_parent.read_into(fresh.kv_start, into) == 3840
    assert bytes(into) == data[:3840]
    client.sessions.delete(fork.session)
