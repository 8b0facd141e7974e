"""The command line as its users see it: exit codes, stdout, stderr."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gd2fs.cli.output import report_failure
from gd2fs.cli.probes import examine
from gd2fs.cli.processes import Processes, ProcessFailed
from gd2fs.cli.run import UP_DIRECTORY
from gd2fs.config import Listen, bind
from gd2fs.config.listen import bound
from gd2fs.signing import Keys, Token

# Nothing listens there: port 1 is reserved and needs root.
NOWHERE = "gd2fs://127.0.0.1:1"
START_S_MAX = 2.0


def gd2fs(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GD2FS_")}
    root = Path(__file__).resolve().parents[2] / "python"
    return subprocess.run(
        [sys.executable, "-m", "gd2fs.cli", *arguments],
        env={**clean, "PYTHONPATH": str(root), "COLUMNS": "200", **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def one_object(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    data = json.loads(done.stdout)
    assert isinstance(data, dict)
    return data


def test_help_lists_every_command(tmp_path: Path) -> None:
    done = gd2fs(cwd=tmp_path)
    assert done.returncode == 0
    for command in [
        "up",
        "node",
        "control",
        "engine",
        "gateway",
        "demo",
        "ls",
        "stat",
        "put",
        "get",
        "cat",
        "rm",
        "where",
        "warm",
        "flush",
        "sessions",
        "status",
        "top",
        "fsck",
        "scrub",
        "config",
        "token",
        "doctor",
    ]:
        assert f" {command} " in done.stdout


@pytest.mark.parametrize(
    "command", ["up", "node", "control", "engine", "gateway", "demo", "put", "sessions list", "fsck"]
)
def test_every_help_text_says_something(tmp_path: Path, command: str) -> None:
    done = gd2fs(*command.split(), "--help", cwd=tmp_path)
    assert done.returncode == 0 and "Usage: gd2fs" in done.stdout


def test_it_starts_quickly_and_imports_nothing_heavy(tmp_path: Path) -> None:
    start = time.monotonic()
    heavy = [
        "numpy",
        "pydantic",
        "fastapi",
        "sqlalchemy",
        "httpx2",
        "tokenizers",
        "gd2fs._native",
        "gd2fs.client",
        "rich.table",
    ]
    code = f"import gd2fs.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    root = str(Path(__file__).resolve().parents[2] / "python")
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": root}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done
    assert time.monotonic() - start < START_S_MAX


def test_config_show_says_where_values_come_from(tmp_path: Path) -> None:
    (tmp_path / "gd2fs.toml").write_text('[node]\nid = "from-file"\n')
    done = gd2fs("config", "show", "--json", cwd=tmp_path, GD2FS_TOKEN="sesame", GD2FS_NODE_DRAIN_S="2")
    knobs = {knob["name"]: knob for knob in one_object(done)["knobs"]}
    assert knobs["node.id"] | {"value": "from-file", "origin": "file gd2fs.toml"} == knobs["node.id"]
    assert knobs["node.drain_s"]["origin"] == "environment GD2FS_NODE_DRAIN_S"
    assert knobs["cluster.token"]["value"] == "********" and "sesame" not in done.stdout
    assert "from-file" in gd2fs("config", "show", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["ls", "--json", "--limit", "x"], 2, "--limit"),
        (["nonsense", "--json"], 2, "nonsense"),
        (["node", "--memory", "lots", "--json"], 2, "--json"),
        (["config", "show", "--json"], 1, "GD2FS_NODE_TYPO"),
    ],
)
def test_failures_are_one_object_too(tmp_path: Path, arguments: list[str], code: int, named: str) -> None:
    environ = {"GD2FS_NODE_TYPO": "1"} if code == 1 else {}
    done = gd2fs(*arguments, cwd=tmp_path, **environ)
    assert done.returncode == code
    assert named in one_object(done)["error"]["message"]
    last = done.stderr.rstrip("\n").rsplit("\n", 1)[-1]
    assert last.startswith("gd2fs: ") and named in last


@pytest.mark.parametrize(
    "arguments",
    [
        "ls",
        "stat /a",
        "put FILE /a",
        "get /a here",
        "cat /a",
        "rm /a",
        "where /a",
        "status",
        "top",
        "fsck",
        "scrub",
        "sessions list",
        "sessions show s",
    ],
)
def test_a_control_that_is_away_is_said_to_be_away(tmp_path: Path, arguments: str) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    words = [str(file) if word == "FILE" else word for word in arguments.split()]
    done = gd2fs(*words, "--json", "--control", NOWHERE, cwd=tmp_path)
    assert done.returncode == 1
    error = one_object(done)["error"]
    assert error["name"] == "UNAVAILABLE" and "127.0.0.1:1" in error["message"]
    assert "Traceback" not in done.stderr


def test_a_bad_knob_is_named_with_its_origin(tmp_path: Path) -> None:
    done = gd2fs("node", "--memory", "lots", cwd=tmp_path)
    assert done.returncode == 1 and "node.memory_bytes (from flag)" in done.stderr


def test_no_server_leaves_loopback_without_authentication(tmp_path: Path) -> None:
    for command, remedy in (
        (["control", "--listen", "0.0.0.0:0"], "GD2FS_CLUSTER_KEYS"),
        (["gateway", "--listen", "0.0.0.0:0"], "GD2FS_GATEWAY_API_KEYS"),
        (["node", "--listen", "tcp://10.1.2.3:0"], "GD2FS_CLUSTER_KEYS"),
    ):
        done = gd2fs(*command, cwd=tmp_path)
        assert done.returncode == 1 and remedy in done.stderr, done.stderr


def test_tokens_are_signed_with_the_clusters_keys(tmp_path: Path) -> None:
    keys = "7:" + "cd" * 16
    done = gd2fs(
        *["token", "create", "--role", "node", "--tenant", "t", "--days", "2", "--json"],
        cwd=tmp_path,
        GD2FS_CLUSTER_KEYS=keys,
    )
    reply = one_object(done)
    token = Keys.parse(keys).verify(reply["token"], Token)
    assert (token.tenant, token.role, reply["development"]) == ("t", "node", False)
    assert 1.9 * 86400 < token.expiry - time.time() < 2.1 * 86400
    warned = gd2fs("token", "create", cwd=tmp_path)
    assert "development key" in warned.stderr and warned.stdout.startswith("gd2fs1.0.")


def test_doctor_looks_at_everything(tmp_path: Path) -> None:
    findings = one_object(gd2fs("doctor", "--json", cwd=tmp_path))["findings"]
    names = [finding["name"] for finding in findings]
    assert names == ["cpu", "huge_pages", "shared_memory", "memlock", "io_uring", "rdma", "cuda", "fuse"]
    for finding in findings:
        assert finding["status"] in ("ok", "limited", "missing") and finding["found"]
        assert finding["status"] == "ok" or finding["remedy"], f"{finding['name']} names no remedy"


def test_a_probe_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(1, "memfd_create is not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    found = {finding.name: finding for finding in examine()}
    assert found["shared_memory"].status == "missing" and "not permitted" in found["shared_memory"].found


def test_the_gateway_starts_while_control_is_away(tmp_path: Path) -> None:
    announced = tmp_path / "gateway.json"
    arguments = f"gateway --listen 127.0.0.1:0 --engines http://127.0.0.1:1 --control {NOWHERE}"
    root = Path(__file__).resolve().parents[2] / "python"
    gateway = subprocess.Popen(
        [sys.executable, "-m", "gd2fs.cli", *arguments.split(), "--announce", str(announced)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
    )
    try:
        deadline = time.monotonic() + 30
        while not announced.exists():
            assert gateway.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        url = json.loads(announced.read_text())["url"]
        answer = httpx2.get(f"{url}/health", timeout=30)
        assert answer.status_code == 503 and answer.json()["status"] == "no_engine"
        body = {"messages": [{"role": "user", "content": "x"}]}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        gateway.terminate()
        assert gateway.wait(30) == 0
    finally:
        gateway.kill()
        gateway.wait()


def test_a_port_that_is_taken_ends_up_in_words(tmp_path: Path) -> None:
    (tmp_path / "gd2fs-data").mkdir()
    (tmp_path / "gd2fs-data" / "control.log").write_text("of an earlier run\n")
    with bind(Listen("127.0.0.1", 0)) as taken:
        done = gd2fs("up", "--port", str(bound(taken).port), cwd=tmp_path)
    assert done.returncode == 1 and "choose another port" in done.stderr
    for noise in ("Traceback", "Errno", "earlier run"):
        assert noise not in done.stderr


def test_a_second_up_leaves_the_first_ones_directory_alone(tmp_path: Path) -> None:
    (tmp_path / "gd2fs-data").mkdir()
    with open(tmp_path / "gd2fs-data" / "running.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = gd2fs("up", "--port", "0", cwd=tmp_path)
    assert done.returncode == 1 and "--data-dir" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "gd2fs-data").iterdir()] == ["running.lock"]


def test_up_without_its_log_leaves_what_that_holds_alone(tmp_path: Path) -> None:
    log = tmp_path / "gd2fs-data" / "node-2" / "log"
    log.parent.mkdir(parents=True)
    log.write_bytes(bytes(3 << 20))
    done = gd2fs("up", "--port", "0", "--nodes", "2", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
    for part in ("--log 3MiB", "stale for good", str(log), "another --data-dir"):
        assert part in done.stderr
    assert log.read_bytes() == bytes(3 << 20) and not (tmp_path / "gd2fs-data" / "control").exists()


def test_what_is_wrong_has_no_noise_around_it(tmp_path: Path) -> None:
    done = gd2fs("engine", "--model", "nowhere.gguf", cwd=tmp_path)
    assert done.stderr == "gd2fs: engine.model: nowhere.gguf is not a file; name a GGUF file\n"
    done = gd2fs("token", "create", "--role", "boss", cwd=tmp_path)
    assert done.returncode == 2 and "'boss' is not one of" in done.stderr and "Value error" not in done.stderr


def test_a_start_that_fails_says_why_before_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Processes(tmp_path) as processes:
        child = processes.start("node-1", ["node", "--memory", "much"])
        with pytest.raises(ProcessFailed) as failed:
            processes.wait_ready(child, 30)
    report_failure(failed.value, False)
    *above, last = capsys.readouterr().err.splitlines()
    assert "much" in "".join(above)
    assert last.startswith("gd2fs: node-1 ended with code ") and last.endswith("node-1.log above)")


def test_up_keeps_its_state_in_one_plain_directory() -> None:
    assert str(UP_DIRECTORY) == "gd2fs-data"
