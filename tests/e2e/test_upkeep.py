"""One real node with a log: what fsck finds and repairs there, what a scrub drops, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gd2fs
from gd2fs import errors, kv
from gd2fs.client import Client
from tests.fleet import Fleet, eventually, fleet

pytestmark = pytest.mark.timeout(120)

NODE = "node-1"
UNIT = 1 << 20
IDENTITY = "upkeep"
BYTES_PER_TOKEN = 4096
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    # Nothing reaches the log by itself: only what is flushed, and with the end of the node.
    unhurried = {"GD2FS_NODE_FLUSH_DELAY_MS": "60000"}
    directory = tmp_path_factory.mktemp("upkeep")
    with fleet(directory, nodes=1, memory="64MiB", log="256MiB", environment=unhurried) as cluster:
        yield cluster


@pytest.fixture
def client(running: Fleet) -> Iterator[Client]:
    with gd2fs.connect(running.control, timeout_s=10) as connected:
        yield connected


def cli(running: Fleet, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "gd2fs.cli", *arguments, "--json", "--control", running.control]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def fsck(client: Client, repair: bool = False) -> list[tuple[str, str | None, bool]]:
    """Kind, path and whether it was repaired, of every finding on the node."""
    body = {"node": NODE, "repair": repair, "after": None, "limit": 1024}
    answer = client.control("POST", "/v1/fsck", body)
    assert answer["next"] is None
    return sorted((one["kind"], one["path"] or "", one["repaired"]) for one in answer["findings"])


@contextlib.contextmanager
def database(running: Fleet) -> Iterator[sqlite3.Connection]:
    """Control's own, behind its back."""
    path = running.directory / "control" / "control.sqlite"
    with contextlib.closing(sqlite3.connect(path, timeout=5)) as opened, opened:
        yield opened


def written(client: Client, path: str, units: int) -> bytes:
    """A new file of so many stripe units, durable."""
    data = os.urandom(units * UNIT)
    client.create(path, stripe_unit=UNIT)
    client.write(path, 0, data)
    client.flush(path)
    return data


def test_what_control_and_a_node_have_each_for_itself_is_found_and_repaired(
    running: Fleet, client: Client
) -> None:
    kept = written(client, "/kept", 1)
    for path in ("/orphan", "/restored", "/unreported"):
        written(client, path, 2)
    files = running.metrics(NODE)["gd2fs_node_files"]
    with database(running) as rows:
        restored = [
            (table, rows.execute(f"SELECT * FROM {table} WHERE file = ?", (file,)).fetchall())
            for (file,) in rows.execute("SELECT file FROM files WHERE path = '/restored'")
            for table in ("files", "file_columns")
        ]
    client.delete("/restored")
    with database(running) as rows:
        for table, saved in restored:
            for row in saved:
                rows.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", row)
        chosen = "(SELECT file FROM files WHERE path = ?)"
        rows.execute(f"DELETE FROM file_columns WHERE file IN {chosen}", ("/orphan",))
        rows.execute("DELETE FROM files WHERE path = '/orphan'")
        rows.execute(f"UPDATE file_columns SET born = born - 1 WHERE file IN {chosen}", ("/unreported",))
    assert client.stat("/unreported").lost and client.exists("/restored")

    found = [("deleted", "/restored"), ("orphan", ""), ("unreported", "/unreported")]
    code, facts, err = cli(running, "fsck")
    assert code == 1 and "fsck --repair" in err
    assert sorted((one["kind"], one["path"] or "") for one in facts["findings"]) == found
    assert fsck(client, repair=True) == [(*one, True) for one in found]
    assert fsck(client) == []
    assert not client.exists("/restored") and not client.stat("/unreported").lost
    # /orphan and /restored are gone from the node, and nothing else is.
    assert running.metrics(NODE)["gd2fs_node_files"] == files - 2
    assert client.read("/kept") == kept


def turn(client: Client, session: str, tokens: int, commit: bool = True) -> kv.Segment:
    """Plans, writes and commits the session up to so many tokens; what was fresh."""
    ids = list(range(tokens))
    request = f"{tokens} of {session}"
    plan = client.sessions.plan(session, ids, max_tokens=1, request_id=request, kv_identity=IDENTITY)
    (fresh,) = plan.metadata.fresh
    layouts = plan.kv_transfer["plan"]["layouts"]
    start, count = fresh.token_start, tokens - fresh.token_start
    layout, id_start = layouts[fresh.kv_uri], fresh.kv_start // BYTES_PER_TOKEN * kv.ID_BYTES
    client.open_layout(layout).write(fresh.kv_start, os.urandom(count * BYTES_PER_TOKEN))
    client.open_layout(layouts[f"{fresh.kv_uri}.tokens"]).write(id_start, kv.ids_to_bytes(ids[start:]))
    written = kv.Segment(start, count, fresh.kv_uri, fresh.kv_start, count * BYTES_PER_TOKEN)
    if commit:
        (column,) = layout["columns"]
        ack = {
            "column": 0,
            "epoch": column["epoch"],
            "incarnation": column["replicas"][0]["incarnation"],
        }
        client.sessions.commit(plan.token, [written], kv.digest(ids), [ack])
    return written


def test_a_database_of_before_is_brought_up_to_a_real_node(running: Fleet, client: Client) -> None:
    """Grants, seals and deletions that a backup of control's database does not know."""
    granted, sealed, deleted = (
        client.sessions.create(IDENTITY, kv.KvFormat("token", BYTES_PER_TOKEN)).session for _ in range(3)
    )
    for session in (granted, sealed, deleted):
        turn(client, session, 100)
    turn(client, sealed, 150, commit=False)
    # A table that refers to another comes after it.
    of_session = {table: "session" for table in ("sessions", "files", "segments")}
    with database(running) as rows:
        saved = [
            (table, rows.execute(f"SELECT * FROM {table} WHERE {key} = ?", (deleted,)).fetchall())
            for table, key in of_session.items()
        ]
        columns = rows.execute(
            "SELECT * FROM file_columns WHERE file IN (SELECT file FROM files WHERE session = ?)", (deleted,)
        ).fetchall()
    client.sessions.delete(deleted)
    with database(running) as rows:
        for table, lines in [*saved, ("file_columns", columns)]:
            for line in lines:
                rows.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(line))})", line)
        rows.execute("UPDATE files SET write_grant = 0 WHERE session = ?", (granted,))
        rows.execute(
            "UPDATE segments SET token_length = 150, kv_length = ? WHERE session = ?",
            (150 * BYTES_PER_TOKEN, sealed),
        )
        rows.execute("UPDATE sessions SET tokens = 150 WHERE session = ?", (sealed,))

    of = {"grant": granted, "missing": deleted, "seal": sealed}
    found = [(kind, session) for kind, session in of.items() for _ in ("kv", "tokens")]

    def shown(repair: bool) -> list[tuple[str, str]]:
        findings = fsck(client, repair)
        assert all(repaired == repair for _, _, repaired in findings)
        return [(kind, next(one for one in of.values() if one in str(path))) for kind, path, _ in findings]

    assert shown(repair=False) == found
    assert shown(repair=True) == found
    assert fsck(client) == []
    valid = {
        kind: client.control("GET", f"/v1/kv/sessions/{session}")["valid_tokens"]
        for kind, session in of.items()
    }
    assert valid == {"grant": 100, "missing": 0, "seal": 150}
    # The next writer has a grant that the node takes.
    turn(client, granted, 120)
    assert client.sessions.get(granted).tokens == 120
    for session in of.values():
        client.sessions.delete(session)


def test_what_was_lost_is_no_finding_and_a_killed_node_is_not_asked(running: Fleet, client: Client) -> None:
    client.create("/lost", stripe_unit=UNIT)
    client.write("/lost", 0, bytes(UNIT))
    running.kill(NODE)
    for command in (["fsck"], ["scrub", "--wait"]):
        code, facts, err = cli(running, *command)
        said = facts["not_asked"] if command == ["fsck"] else err
        assert code == 1 and (NODE in said if command == ["fsck"] else "no node is alive" in said), (
            facts,
            err,
        )
        assert f"{NODE} can't be asked" in err and "?" not in err
    code, facts, _ = cli(running, "stat", "/lost")
    assert code == 0 and facts["length"] is None and "its node can't be reached" in facts["length_unknown"]
    running.start_node(1)
    with gd2fs.connect(running.control, timeout_s=10) as fresh:
        with pytest.raises(errors.Lost):
            fresh.read_into("/lost", 0, np.empty(UNIT, np.uint8))
        assert fsck(fresh) == []


def test_a_start_that_is_refused_does_not_end_the_node_of_that_name(
    running: Fleet, client: Client, tmp_path: Path
) -> None:
    client.create("/in-memory", stripe_unit=UNIT)
    client.write("/in-memory", 0, b"only here")
    [before] = client.control("GET", "/v1/nodes")["nodes"]
    own = ["--data-dir", str(running.directory / NODE)]
    other = ["--data-dir", str(tmp_path / "other")]
    for more, said in (
        ([*other, "--memory", "64MiB"], f"node.id: {NODE} is alive at tcp://127.0.0.1"),
        ([*other, "--memory", "1KiB"], "node.memory_bytes"),
        ([*other, "--memory", "64MiB", "--logs", str(tmp_path / "l"), "--log-bytes", "5"], "node.log_bytes"),
        ([*own, "--memory", "64MiB"], "another `gd2fs node` runs in"),
    ):
        arguments = ["--id", NODE, "--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", *more]
        command = [sys.executable, "-m", "gd2fs.cli", "node", *arguments, "--control", running.control]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr

    def heard() -> bool:
        [now] = client.control("GET", "/v1/nodes")["nodes"]
        assert (now["state"], now["incarnation"]) == ("alive", before["incarnation"])
        return bool(now["stats"]["bytes_written"] > before["stats"]["bytes_written"])

    eventually(heard, 10, "another heartbeat")
    assert client.read("/in-memory") == b"only here"
    # Killed and started again at once, within its lease, it has its name again.
    running.kill(NODE)
    running.start_node(1)
    [again] = client.control("GET", "/v1/nodes")["nodes"]
    assert (again["state"], again["incarnation"]) == ("alive", before["incarnation"] + 1)


def test_a_deadline_covers_the_look_up_of_a_path(running: Fleet, client: Client) -> None:
    """Control asks the node, too: a node that hangs must not cost its time on top."""
    written(client, "/slow", 1)
    out = np.empty(UNIT, np.uint8)
    with gd2fs.connect(running.control, timeout_s=10) as fresh:
        running.signal(NODE, signal.SIGSTOP)
        try:
            for read in (
                lambda: fresh.read_into("/slow", 0, out, timeout_s=0.5),
                lambda: asyncio.run(fresh.aread_into("/slow", 0, out, timeout_s=0.5)),
            ):
                begun = time.monotonic()
                with pytest.raises(errors.Timeout):
                    read()
                assert time.monotonic() - begun < 1.5
        finally:
            running.signal(NODE, signal.SIGCONT)
        eventually(lambda: fresh.read_into("/slow", 0, out) == UNIT, 10, "a read once it runs again")


def test_what_a_node_did_is_counted(running: Fleet, client: Client) -> None:
    def risen(before: dict[str, float], name: str) -> float:
        return running.metrics(NODE)[f"gd2fs_node_{name}"] - before[f"gd2fs_node_{name}"]

    begun = running.metrics(NODE)
    data = written(client, "/counted", 8)
    assert client.read("/counted") == data
    assert risen(begun, "bytes_written_total") == risen(begun, "bytes_read_total") == len(data)
    assert risen(begun, "writes_total") >= 8 and risen(begun, "hits_dram_total") >= 8
    assert risen(begun, "flushed_bytes_total") >= len(data) and risen(begun, "log_live") >= len(data)
    assert risen(begun, "flush_latency_seconds_count") >= 8
    assert running.metrics(NODE)["gd2fs_node_dirty_bytes"] == 0
    assert risen(begun, "hits_nvme_total") == 0

    running.stop(NODE)
    rot(running.directory / NODE / "log", data[3 * UNIT + 4096 :][:64])
    running.start_node(1)
    fresh = running.metrics(NODE)
    assert fresh["gd2fs_node_flushed_bytes_total"] == 0 < fresh["gd2fs_node_log_live"]
    with gd2fs.connect(running.control, timeout_s=10) as again:
        out = np.empty(2 * UNIT, np.uint8)
        assert again.read_into("/counted", 0, out) == len(out) and out.tobytes() == data[: len(out)]
        assert risen(fresh, "hits_nvme_total") >= 2 and risen(fresh, "lifted_bytes_total") >= len(out)
        assert risen(fresh, "cold_read_latency_seconds_count") >= 2
        first, second = scrubbed(running, again), scrubbed(running, again)
        assert first["scrub_corrupt_total"] == first["corrupt_total"] == 1
        assert second["scrub_corrupt_total"] == 1, "a second round finds nothing, and takes nothing back"
        assert second["scrub_bytes_total"] > first["scrub_bytes_total"] >= len(data)
        with pytest.raises(errors.Lost):
            again.read_into("/counted", 3 * UNIT, out[:UNIT])
        assert risen(fresh, "misses_lost_total") == 1
        # What control was told of it, fsck has nothing to add to.
        eventually(lambda: again.stat("/counted").valid == 3 * UNIT, 10, "a report of the loss")
        assert fsck(again) == []
        with database(running) as rows:
            counted = "(SELECT file FROM files WHERE path = '/counted')"
            rows.execute(f"UPDATE file_columns SET valid = NULL WHERE file = {counted}")
        assert again.stat("/counted").valid is None
        assert fsck(again, repair=True) == [("shrunken", "/counted", True)]
        assert again.stat("/counted").valid == 3 * UNIT and fsck(again) == []
    log = (running.directory / f"{NODE}.log").read_text()
    assert re.search(r"ERROR .*does not hold what was written", log), "the operator reads of it, too"


def rot(log: Path, sample: bytes) -> None:
    """Turns a bit of what the log has of a file."""
    with open(log, "r+b") as stream:
        at = stream.read().index(sample)
        stream.seek(at)
        stream.write(bytes([sample[0] ^ 1]))


def scrubbed(running: Fleet, client: Client) -> dict[str, float]:
    """The node's counters once a scrub is through."""
    client.control("POST", f"/v1/nodes/{NODE}/scrub")
    until = time.monotonic() + 30
    while client.control("GET", f"/v1/nodes/{NODE}/scrub")["running"]:
        assert time.monotonic() < until, "the scrub does not end"
        time.sleep(0.02)
    return {name.removeprefix("gd2fs_node_"): value for name, value in running.metrics(NODE).items()}


def test_every_metric_of_a_node_is_documented_and_every_documented_one_is_there(running: Fleet) -> None:
    documented = set(re.findall(r"^\| `(gd2fs_node_\w+)`", PAGE.read_text(), re.M))
    shown = {re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", name) for name in running.metrics(NODE)}
    # Shown once there was one.
    assert documented - {"gd2fs_node_errors_total"} == shown - {"gd2fs_node_errors_total"}
