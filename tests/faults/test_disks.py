"""Disks that rot, are slow, full, or fail to sync: what a node does, and what its clients see."""

from __future__ import annotations

import errno
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gd2fs import errors
from gd2fs.bench.torture.cluster import Cluster
from gd2fs.bench.torture.pattern import pattern
from gd2fs.cli.processes import ProcessFailed
from gd2fs.client import Client
from tests.faults.conftest import Start, not_tested
from tests.fleet import eventually

MIB = 1 << 20
UNIT = 64 << 10
NODE = "node-1"


def written(client: Client, path: str, length: int, unit: int = UNIT) -> str:
    """A new file with the bytes of version 1; its id."""
    file = str(client.create(path, stripe_unit=unit).file_id)
    client.write(path, 0, pattern(file, 1, 0, length))
    return file


def holds(client: Client, path: str, file: str, start: int, end: int) -> bool:
    buffer = np.zeros(end - start, np.uint8)
    return client.read_into(path, start, buffer) == end - start and np.array_equal(
        buffer, pattern(file, 1, start, end - start)
    )


def takes_no_files(client: Client) -> bool:
    """Whether control places nothing new on the only node, since its log is in trouble."""
    try:
        client.create("/probe")
    except errors.NoNodes as error:
        assert "1 of them take no new files" in str(error)
        return True
    client.delete("/probe")
    return False


def places(stored: Path, sample: bytes) -> list[int]:
    """Where the sample lies in what is durable."""
    held, found, at = stored.read_bytes(), [], -1
    while (at := held.find(sample, at + 1)) >= 0:
        found.append(at)
    return found


def said_by(cluster: Cluster) -> str:
    """The node's standard error, of all its lives."""
    return (cluster.directory / f"{NODE}.log").read_text()


@pytest.mark.parametrize("when", ["while the node is away", "while it runs"])
def test_a_bit_that_rots_in_the_log_is_never_served(start: Start, when: str) -> None:
    cluster, connect = start()
    client = connect()
    file = written(client, "/rots", 4 * UNIT)
    client.flush("/rots")
    # What lies in memory is no use of the log: after a restart everything is cold.
    assert cluster.stop_node(NODE)
    (disk,) = cluster.nodes[NODE].disks
    damaged = places(disk.backing, pattern(file, 1, 2 * UNIT + 20_000, 64).tobytes())
    assert damaged, "the log holds the chunk"
    if when == "while it runs":
        cluster.start_node(NODE)
    for offset in damaged:
        disk.flip(offset + 5, 3)
    if when != "while it runs":
        cluster.start_node(NODE)
    client = connect()
    for start_of, length in ((2 * UNIT, UNIT), (2 * UNIT + 20_000, 64), (2 * UNIT, 100)):
        with pytest.raises((errors.Corrupt, errors.Lost)):
            client.read_into("/rots", start_of, np.zeros(length, np.uint8))
    for chunk in (0, 1, 3):
        assert holds(client, "/rots", file, chunk * UNIT, (chunk + 1) * UNIT)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "gd2fs-test", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        not_tested(f"no file system can be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_log_that_does_not_fit_on_its_disk_is_refused_at_the_start(
    tmp_path: Path, small_disk: Path
) -> None:
    log = small_disk / "log"
    with Cluster(
        tmp_path, nodes=0, environment={"GD2FS_NODE_LOGS": str(log), "GD2FS_NODE_LOG_BYTES": "64MiB"}
    ) as cluster:
        cluster.add_node(NODE)
        with pytest.raises(ProcessFailed) as failed:
            cluster.start_node(NODE)
        assert str(log) in str(failed.value) and "free" in str(failed.value)
        assert not log.exists(), "what is of no use keeps no space"
        assert cluster.alive() == []


def test_a_slow_disk_holds_up_neither_reads_of_memory_nor_writes_below_the_watermark(start: Start) -> None:
    cluster, connect = start(environment={"GD2FS_NODE_DIRTY_BYTES_MAX": "8MiB"})
    client = connect()
    resident = written(client, "/resident", 2 * MIB)
    client.flush("/resident")
    (disk,) = cluster.nodes[NODE].disks
    disk.rule("slow", ms=1500, on=["write", "durable_write", "sync"])
    file = str(client.create("/grows", stripe_unit=UNIT).file_id)
    begun = time.monotonic()
    for chunk in range(2 * MIB // UNIT):
        client.write("/grows", chunk * UNIT, pattern(file, 1, chunk * UNIT, UNIT))
    assert time.monotonic() - begun < 1.4, "acknowledged in memory, not by the disk"
    # Beyond the watermark writers wait for the disk, but none beyond its time.
    waits, reads, chunk, refused = [], [], 2 * MIB // UNIT, 0
    until = time.monotonic() + 3
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            data = pattern(file, 1, chunk * UNIT, 16 * UNIT)
            client.write("/grows", chunk * UNIT, data, timeout_s=0.5)
            chunk += 16
        except (errors.Timeout, errors.Overloaded, errors.NoSpace):
            refused += 1
        waits.append(time.monotonic() - begun)
        begun = time.monotonic()
        assert holds(client, "/resident", resident, 0, UNIT)
        reads.append(time.monotonic() - begun)
    assert refused, "no watermark was reached"
    assert max(waits) < 1.0, f"waited {max(waits):.2f} s with 0.5 s to live"
    assert statistics.median(reads) < 0.1, "resident reads wait for the disk"
    disk.clear()
    client.flush("/grows")
    assert holds(client, "/grows", file, 0, 2 * MIB)


def test_a_disk_that_fails_to_write_for_a_while(start: Start) -> None:
    """Nothing that was flushed is given up for it, clients learn why, and all goes on without a restart."""
    cluster, connect = start()
    client = connect()
    kept = written(client, "/kept", 4 * MIB)
    client.flush("/kept")
    (disk,) = cluster.nodes[NODE].disks
    before = cluster.metrics(NODE)
    disk.rule("error", on=["write", "durable_write"], code=errno.EIO)
    later = written(client, "/later", 2 * MIB)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        with pytest.raises(errors.Gd2fsError, match="Input/output error"):
            client.flush("/later")
        assert {extent.tier for extent in client.where("/kept", [(0, 4 * MIB)])} <= {"dram", "nvme"}
        time.sleep(0.1)
    after = cluster.metrics(NODE)
    assert after["gd2fs_node_evicted_log_bytes_total"] == 0
    assert after["gd2fs_node_log_live"] == before["gd2fs_node_log_live"] > 4 * MIB
    # This, too, is said with the heartbeats.
    eventually(lambda: takes_no_files(client), 10, "no new files for a node that can't flush")
    used = before["gd2fs_node_log_free"] - after["gd2fs_node_log_free"]
    assert used < before["gd2fs_node_log_total"] / 10, f"{used} bytes of the log were used up"
    disk.clear()
    begun = time.monotonic()
    while True:
        try:
            client.flush("/later")
            break
        except errors.Gd2fsError:
            assert time.monotonic() - begun < 3, "it does not go on by itself"
            time.sleep(0.05)
    eventually(lambda: not takes_no_files(client), 10, "new files again, without a restart")
    cluster.kill_node(NODE)
    cluster.start_node(NODE)
    client = connect()
    assert holds(client, "/kept", kept, 0, 4 * MIB) and holds(client, "/later", later, 0, 2 * MIB)


def test_a_disk_that_fails_to_sync(start: Start) -> None:
    """Writing goes on in memory; whoever asks for more is told that there is none, and so is the operator."""
    cluster, connect = start()
    client = connect()
    kept = written(client, "/kept", 4 * UNIT)
    client.flush("/kept")
    (disk,) = cluster.nodes[NODE].disks
    disk.rule("error", on=["sync", "durable_write"])
    file = written(client, "/later", 4 * UNIT)
    with pytest.raises(errors.Gd2fsError):
        client.flush("/later")
    assert holds(client, "/later", file, 0, 4 * UNIT) and holds(client, "/kept", kept, 0, 4 * UNIT)
    assert (
        cluster.metrics(NODE)["gd2fs_node_log_failed"] == cluster.metrics(NODE)["gd2fs_node_log_trouble"] == 1
    )
    eventually(lambda: takes_no_files(client), 10, "no new files for a node whose log has failed")
    disk.clear()
    with pytest.raises(errors.Gd2fsError):
        client.flush("/later")  # what the disk lost with the failed sync nobody knows
    cluster.kill_node(NODE)
    cluster.start_node(NODE)
    client = connect()
    assert holds(client, "/kept", kept, 0, 4 * UNIT)
    more = written(client, "/more", UNIT)
    client.flush("/more")
    assert holds(client, "/more", more, 0, UNIT)


def test_a_disk_that_cannot_be_read_for_a_while_costs_nothing(start: Start) -> None:
    cluster, connect = start()
    client = connect()
    file = written(client, "/kept", 8 * UNIT)
    client.flush("/kept")
    assert cluster.stop_node(NODE)
    cluster.start_node(NODE)
    client = connect()
    (disk,) = cluster.nodes[NODE].disks
    disk.rule("error", on=["read"], code=errno.EIO)
    for _ in range(3):
        with pytest.raises(errors.Internal, match="Input/output error"):
            client.read_into("/kept", 0, np.zeros(UNIT, np.uint8))
    begun = time.monotonic()
    while client.warm("/kept", [(0, 8 * UNIT)]).unreadable < 8 * UNIT:
        assert time.monotonic() - begun < 10, "warm does not say that it gets nowhere"
        time.sleep(0.05)
    metrics = cluster.metrics(NODE)
    assert metrics["gd2fs_node_log_read_errors_total"] >= 11
    assert metrics["gd2fs_node_checksum_failures_total"] == metrics["gd2fs_node_corrupt_total"] == 0
    told = [line for line in said_by(cluster).splitlines() if "Input/output error" in line]
    assert 1 <= len(told) <= 3 and all(str(disk.path) in line for line in told), told
    disk.clear()
    assert holds(client, "/kept", file, 0, 8 * UNIT)


def test_a_stop_says_what_a_disk_did_not_take(start: Start) -> None:
    """Patience first; then the bytes, the log and the reason, and an exit code that is not 0."""
    cluster, connect = start(environment={"GD2FS_NODE_FLUSH_S": "3", "GD2FS_NODE_FLUSH_DELAY_MS": "60000"})
    client = connect()
    file = written(client, "/waits", 4 * UNIT)
    (disk,) = cluster.nodes[NODE].disks
    disk.rule("error", on=["write", "durable_write"], code=errno.EIO)
    clearing = threading.Timer(0.7, disk.clear)
    clearing.start()
    assert cluster.stop_node(NODE), "it waits for a disk that fails for a while"
    clearing.join()
    cluster.start_node(NODE)
    client = connect()
    assert holds(client, "/waits", file, 0, 4 * UNIT)
    written(client, "/lost", 4 * UNIT)
    disk.rule("error", on=["write", "durable_write"], code=errno.EIO)
    assert not cluster.stop_node(NODE)
    said = said_by(cluster)
    assert f"{4 * UNIT} bytes did not reach this log and are lost" in said and "Input/output error" in said
    disk.clear()
