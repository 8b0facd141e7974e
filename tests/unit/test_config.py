"""Configuration: who wins, what is refused, what is shown."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gd2fs.config import Listen, bind, load, require_authentication
from gd2fs.config.listen import bound
from gd2fs.config.load import ConfigError, environment_names, extra, knobs
from gd2fs.config.reference import render
from gd2fs.config.tree import control_urls
from gd2fs.config.units import format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gd2fs.toml of the developer's may leak in."""
    monkeypatch.chdir(tmp_path)


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text('[node]\nid = "file"\nmemory_bytes = "2GiB"\ndrain_s = 1.5\n')
    environ = {"GD2FS_CONFIG": str(file), "GD2FS_NODE_ID": "env", "GD2FS_NODE_MEMORY_BYTES": "3GiB"}
    loaded = load({"node.id": "flag", "node.data_dir": None}, environ=environ)
    node = loaded.settings.node
    assert (node.id, node.memory_bytes, node.drain_s, node.connections_max) == ("flag", 3 << 30, 1.5, 4096)
    assert loaded.origins["node.id"] == "flag"
    assert loaded.origins["node.memory_bytes"] == "environment GD2FS_NODE_MEMORY_BYTES"
    assert loaded.origins["node.drain_s"] == f"file {file}"
    assert loaded.origins["node.data_dir"] == "default"


def test_a_file_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "gd2fs.toml").write_text('[cluster]\nid = "here"\n')
    assert load(environ={}).settings.cluster.id == "here"


def test_short_environment_names_win_over_general_ones() -> None:
    environ = {"GD2FS_CONTROL": "gd2fs://10.0.0.1:1", "GD2FS_CLUSTER_CONTROL": "gd2fs://10.0.0.2:2"}
    loaded = load(environ=environ)
    assert loaded.settings.cluster.control == "gd2fs://10.0.0.1:1"
    assert loaded.origins["cluster.control"] == "environment GD2FS_CONTROL"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"GD2FS_NODE_MEMORY": "1GiB"}, "GD2FS_NODE_MEMORY"),
        ({"GD2FS_NODE_MEMORY_BYTES": "lots"}, "node.memory_bytes (from environment GD2FS_NODE_MEMORY_BYTES)"),
        ({"GD2FS_CONTROL": "http://x"}, "cluster.control"),
        ({"GD2FS_CONTROL_LISTEN": "7527"}, "control.listen"),
        ({"GD2FS_NODE_LISTEN": "rdma://10.0.0.1"}, "node.listen"),
        ({"GD2FS_NODE_LISTEN": "tcp://0.0.0.0:7528"}, "node.advertise"),
        ({"GD2FS_CONTROL_PLAN_TTL_S": "0"}, "control.plan_ttl_s"),
        ({"GD2FS_CONTROL_PLAN_TTL_S": "3601"}, "control.plan_ttl_s"),
        ({"GD2FS_GATEWAY_ENGINES": "127.0.0.1:8100"}, "gateway.engines"),
        ({"GD2FS_CLUSTER_ID": "a/b"}, "cluster.id"),
        ({"GD2FS_NODE_LOGS": "/a/log,/b/../a/log", "GD2FS_NODE_LOG_BYTES": "1GiB"}, "node.logs"),
        ({"GD2FS_NODE_LOG_BYTES": "1GiB"}, "node.log_bytes"),
        ({"GD2FS_NODE_LOG_BYTES": "much"}, "node.log_bytes (from environment GD2FS_NODE_LOG_BYTES)"),
        (
            {"GD2FS_NODE_LOG_BYTES": "99999999999999999999"},
            "node.log_bytes (from environment GD2FS_NODE_LOG_BYTES)",
        ),
        ({"GD2FS_NODE_LOG_ENGINE": "aio"}, "node.log_engine"),
        ({"GD2FS_NODE_FLUSH_DELAY_MS": "-1"}, "node.flush_delay_ms"),
        ({"GD2FS_NODE_FLUSH_S": "0"}, "node.flush_s"),
        ({"GD2FS_NODE_FLUSH_S": "inf"}, "node.flush_s"),
        ({"GD2FS_NODE_DRAIN_S": "nan"}, "node.drain_s"),
        ({"GD2FS_CLIENT_TIMEOUT_S": "86401"}, "client.timeout_s"),
        ({"GD2FS_NODE_MESSAGE_LEVEL": "loud"}, "node.message_level"),
        ({"GD2FS_NODE_TENANT_SHARE": "0"}, "node.tenant_share"),
        ({"GD2FS_NODE_TENANT_SHARE": "1.01"}, "node.tenant_share"),
        ({"GD2FS_NODE_DIRTY_BYTES_MAX": "2GiB"}, "node.dirty_bytes_max"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ)
    assert named in str(caught.value)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_bytes(b"\xff\xfe[node]")
    with pytest.raises(ConfigError, match=r"g\.toml is not TOML"):
        load(environ={}, file=file)


def test_unknown_names_in_a_file_are_all_named(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text("[node]\nmemory = 1\n[notes]\nx = 1\n")
    with pytest.raises(ConfigError, match=r"node\.memory, notes"):
        load(environ={}, file=file)


def test_a_file_that_is_named_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(environ={"GD2FS_CONFIG": "nowhere.toml"})


def test_foreign_environment_is_left_alone() -> None:
    load(environ={"GD2FS_DPADDR": "tcp://10.0.0.1", "GD2FS_STREAMS": "8"})


def test_secrets_are_masked_and_not_in_the_digest() -> None:
    one = load(environ={"GD2FS_TOKEN": "very-secret", "GD2FS_CLUSTER_KEYS": "1:" + "ab" * 16})
    assert "very-secret" not in repr(list(one.rows())) and "abab" not in repr(list(one.rows()))
    assert one.token() == "very-secret"
    assert one.digest() == load(environ={}).digest() != load(environ={"GD2FS_NODE_DRAIN_S": "9"}).digest()


def test_the_token_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert load(environ={"GD2FS_TOKEN_FILE": str(file)}).token() == "from-file"
    with pytest.raises(ConfigError, match=r"cluster\.token_file"):
        load(environ={"GD2FS_TOKEN_FILE": str(tmp_path / "missing")}).token()


def test_every_knob_is_described_and_has_one_environment_name_of_its_own() -> None:
    seen: dict[str, str] = {}
    for name, field in knobs():
        description = field.description or ""
        assert description.endswith(".") and "\n" not in description, name
        assert extra(field, "hot") in (True, False), name
        assert not name.endswith(("timeout", "size", "memory", "interval")), f"{name}: units last"
        for environment in environment_names(name, field):
            assert seen.setdefault(environment, name) == name


def test_the_reference_is_current() -> None:
    page = ROOT / "docs" / "reference" / "configuration.md"
    assert page.read_text() == render(), "run: .venv/bin/python -m gd2fs.config.reference > " + str(page)


@pytest.mark.parametrize(
    ("text", "count"), [("1GiB", 1 << 30), ("64 MiB", 64 << 20), ("1.5k", 1500), ("4096", 4096), (7, 7)]
)
def test_sizes(text: int | str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 apple", True])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [(1 << 60) + 1, "1048577TiB", "9" * 400])
def test_sizes_end_somewhere(size: int | str) -> None:
    assert parse_bytes(1 << 60) == parse_bytes("1048576TiB") == 1 << 60
    with pytest.raises(ValueError, match="is more than 1 EiB"):
        parse_bytes(size)


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]


def test_control_uris() -> None:
    assert control_urls("gd2fs://a:1,b/path?cluster=c") == ["http://a:1", "http://b:7527"]


def test_nothing_leaves_loopback_without_authentication() -> None:
    inside = [Listen.parse("127.0.0.1:1"), Listen.parse("[::1]:1"), Listen.parse("localhost:1")]
    require_authentication("it", inside, "", "set KEYS")
    for outside in ("0.0.0.0:1", "10.1.2.3:1", "[::]:1", "example.org:1"):
        with pytest.raises(PermissionError, match="set KEYS"):
            require_authentication("it", [*inside, Listen.parse(outside)], "", "set KEYS")
        require_authentication("it", [Listen.parse(outside)], "secret", "set KEYS")


def test_a_port_that_is_taken_is_named() -> None:
    with bind(Listen("127.0.0.1", 0)) as first:
        taken = bound(first)
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{taken.port}.*another port"):
            bind(taken)


def test_servers_answer_without_waiting_for_acknowledgements() -> None:
    """A server on a socket of ours sends at once (TCP_NODELAY), whatever it takes to write one answer."""

    async def accepted() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            theirs = writer.get_extra_info("socket")
            seen.set_result(theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind(Listen("127.0.0.1", 0)) as listener:
            async with await asyncio.start_server(on_connection, sock=listener):
                _, writer = await asyncio.open_connection("127.0.0.1", bound(listener).port)
                writer.close()
                return await asyncio.wait_for(seen, 5)

    assert asyncio.run(accepted()) == 1


def test_servers_may_open_as_many_files_as_the_machine_allows() -> None:
    script = (
        "import resource; from gd2fs.config.serving import allow_many_files;"
        "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, most)); allow_many_files();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "True"
