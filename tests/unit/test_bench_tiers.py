"""The arithmetic of `gd2fs bench tiers`: ratios, verdicts, the JSON's shape; refusals that are counted."""

from __future__ import annotations

import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from gd2fs import errors
from gd2fs.bench.cases import MIB
from gd2fs.bench.samples import Sample
from gd2fs.bench.tiers import recovery
from gd2fs.bench.tiers.figures import FAULTS, latencies_ms, over, rates, shortfalls, to_json, verdicts
from gd2fs.bench.tiers.fio import Fio, FioUnavailable, Job
from gd2fs.bench.tiers.full import WRITE_BYTES, Writer
from gd2fs.bench.tiers.plan import PARTS, SLOW, Sizes
from gd2fs.bench.tiers.show import print_tables
from gd2fs.bench.tiers.stage import Stage
from gd2fs.bench.tiers.traffic import Memory, Traffic
from gd2fs.bench.torture import CLUSTERS, Counters
from gd2fs.cli.bench import _parts

RATIOS = {
    "cold_read_vs_fio", "cold_random_read_vs_fio", "sustained_write_vs_fio", "writeback_ingest_vs_dram",
    "full_store_read",
}  # fmt: skip


def at(*gb_per_s: float) -> list[Sample]:
    return [Sample(10**9, 1 / rate, None, [1 / rate, 2 / rate]) for rate in gb_per_s]


def test_a_ratio_is_that_of_the_medians() -> None:
    # One disturbed round on each side; the median of the quotients would be another.
    assert over(at(1.0, 9.0, 1.8), at(2.0, 2.0, 0.1)) == 0.9
    assert rates(at(1.0, 9.0, 1.8)) == {"gb_per_s": 1.8, "rounds": [1.0, 9.0, 1.8]}
    assert latencies_ms(at(1.0, 2.0)) == {"p50_ms": 1000.0, "p99_ms": 2000.0, "longest_ms": 2000.0}


def test_the_json_has_its_keys_whatever_ran(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = to_json({"cpu": "x"}, {}, {"turn": "RuntimeError: no model"})
    assert set(nothing["ratios"]) == RATIOS and set(nothing["ratios"].values()) == {None}
    assert nothing["recovery_s_10gib"] is nothing["rss_over_arena_mib"] is None
    assert nothing["torture"] == dict.fromkeys(
        ("loops", "power_cuts", "wrong_bytes", "lost_after_flush", "phantoms")
    )
    assert nothing["mutants"] == {"tried": None, "caught": None}
    assert all(met is None for *_, met in verdicts(nothing))
    details: dict[str, dict[str, Any]] = {
        "cold": {"ratio": 0.9, "sizes": [{"size": 1, "gd2fs": {"gb_per_s": 1.0, "rounds": [1.0]}}]},
        "full": {
            "ratio": 0.69, "refusals_of_node": 3, "refusals_before_payload": 3,
            "longest_request_s": 10.6, "deadline_s": 10.0,
        },
        "recovery": {"recovery_s_10gib": 5.01},
        "memory": {"rss_over_arena_mib": 300.0},
        "torture": dict.fromkeys(FAULTS, 0)
        | {"loops": 100, "power_cuts": 99, "lost_after_flush": 1, "crashed": 2},
        "mutants": {"tried": 5, "caught": 4},
    }  # fmt: skip
    result = to_json({"cpu": "x"}, details, {"turn": "RuntimeError: no model"})
    found = {name: met for name, _, _, met in verdicts(result)}
    assert found == {
        "cold_read_vs_fio": True, "cold_random_read_vs_fio": None, "sustained_write_vs_fio": None,
        "writeback_ingest_vs_dram": None, "full_store_read": False, "recovery_s_10gib": False,
        "rss_over_arena_mib": True, "torture loops": True, "torture power_cuts": None,
        "torture wrong_bytes": True, "torture phantoms": True, "torture lost_after_flush": False,
        "torture stale_writes": True, "torture unreported": True, "torture unreadable": True,
        "torture crashed": False, "mutants caught": False, "refusals before payload": True,
        "longest_request_s": False,
    }  # fmt: skip
    of_speed = ["full_store_read: 0.69, not at least 0.7", "recovery_s_10gib: 5.01, not at most 5"]
    others = [
        "torture lost_after_flush: 1, not 0", "torture crashed: 2, not 0", "mutants caught: 4, not 5",
        "longest_request_s: 10.6, not at most 10.5", "turn failed",
    ]  # fmt: skip
    assert shortfalls(result, quick=False) == of_speed + others
    assert shortfalls(result, quick=True) == others
    print_tables(result)
    shown = capsys.readouterr().out
    assert "MISSED" in shown and "not run" in shown and "sizes gd2fs gb_per_s" in shown


def test_no_mutant_tried_proves_nothing() -> None:
    result = to_json({}, {"mutants": {"tried": 0, "caught": 0}}, {})
    assert verdicts(result)[-1][3] is False


@pytest.mark.parametrize(("refused", "unread"), [(0, 0), (3, 2)])
def test_refusals_count_only_before_payload(refused: int, unread: int) -> None:
    """No refusal proves nothing."""
    full = {"refusals_of_node": refused, "refusals_before_payload": unread}
    result = to_json({}, {"full": full | {"longest_request_s": 1.0, "deadline_s": 10.0}}, {})
    assert [row[3] for row in verdicts(result)[-2:]] == [False, True]


def test_clusters_are_counted_together() -> None:
    one, two = Counters(loops=3, wrong_bytes=1, violations=["a"]), Counters(loops=2, violations=["b"])
    one.add(two)
    assert one == Counters(loops=5, wrong_bytes=1, violations=["a", "b"])
    assert sum(share for *_, share in CLUSTERS) == 1
    assert set(FAULTS) <= {field.name for field in fields(Counters)}


def test_parts_are_chosen_by_name() -> None:
    told: list[str] = []
    assert _parts("", False, told.append) == PARTS and not told
    assert _parts("recovery, cold", True, told.append) == ("cold", "recovery") and not told
    assert not set(_parts("", True, told.append)) & set(SLOW) and all(name in told[0] for name in SLOW)
    with pytest.raises(typer.BadParameter, match="'warm' is none of cold"):
        _parts("cold,warm", False, told.append)


def test_a_missing_fio_says_what_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gd2fs.bench.debian.shutil.which", lambda name: None)
    monkeypatch.setattr("gd2fs.bench.debian.os.geteuid", lambda: 1000)
    with pytest.raises(FioUnavailable, match="apt-get install fio"):
        Fio(tmp_path)


def test_fio_is_told_the_pattern_and_read_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        text = 'note: both\n{"jobs": [{"read": {"io_bytes": 1000, "bw_bytes": 500}, "write": {}}]}'
        return subprocess.CompletedProcess(command, int("--ioengine=io_uring" in command), text, "")

    monkeypatch.setattr("gd2fs.bench.tiers.fio.ensure_installed", lambda program, package: None)
    monkeypatch.setattr("gd2fs.bench.tiers.fio.subprocess.run", run)
    fio = Fio(tmp_path)
    assert fio.engine == "libaio"
    job = Job("randread", 8 * MIB, 65536, 32, 2 * MIB, 2)
    assert [fio.run(job).seconds for _ in range(3)] == [2.0] * 3
    files = [next(word for word in call if word.startswith("--filename")) for call in calls[2:]]
    assert files[0] == files[2] != files[1]
    assert {"--direct=1", "--rw=randread", "--bs=65536", "--iodepth=32", "--io_size=2097152"} <= set(calls[2])


class FakeClient:
    """Refuses every third write, and fails the one with ``broken`` in order."""

    def __init__(self, broken: int = 1 << 30) -> None:
        self.writes, self.broken = 0, broken

    def create(self, path: str) -> None:
        pass

    def write(self, path: str, offset: int, buffer: bytes) -> int:
        self.writes += 1
        if self.writes == self.broken:
            raise errors.Checksum("not a refusal")
        if self.writes % 3 == 0:
            raise errors.NoSpace("full")
        return len(buffer)


def test_a_writer_counts_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gd2fs.bench.tiers.full.PAUSE_S", 0.0)
    client = FakeClient()
    writer = Writer(client, 30 * WRITE_BYTES)  # type: ignore[arg-type]
    writer.start()
    while not writer.over:
        pass
    writer.stop()
    assert client.writes == 30 and writer.refused == {"NoSpace": 10}
    assert writer.accepted == 20 * WRITE_BYTES and writer.longest_s > 0


def test_a_writer_tells_what_is_no_refusal() -> None:
    writer = Writer(FakeClient(broken=2), 30 * WRITE_BYTES)  # type: ignore[arg-type]
    writer.start()
    with pytest.raises(errors.Checksum):
        writer.stop()


def test_places_of_records_and_the_way_to_a_checkpoint() -> None:
    assert recovery._path(recovery.FILE_BYTES + 5) == ("/records-1", 5)
    # The first mark is the begin of the log, which no checkpoint preceded.
    assert recovery._interval([0, 900, 2000, 3000, 4100]) == 1100


def test_a_disk_too_small_for_recovery_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "gd2fs.bench.tiers.recovery.shutil.disk_usage", lambda path: type("U", (), {"free": 5})
    )
    memory: Any = None
    with pytest.raises(recovery.NoRoom, match=r"16.0 GiB of log.*0.0 GiB free.*--directory"):
        recovery.measure(tmp_path, Sizes(), memory, lambda text: None)


def test_a_node_is_read_after_kill_and_after_a_clean_stop(tmp_path: Path) -> None:
    memory = Memory(4 * MIB)
    with Stage(tmp_path / "stage", 64 * MIB, 256 * MIB) as stage:
        with stage.connect() as client:
            Traffic(client, memory, 4).fill("/file", 12 * MIB)
            client.flush("/file")
        stage.kill_node()
        stage.start_node()
        with stage.connect() as client:
            traffic = Traffic(client, memory, 4)
            assert traffic.read("/file", range(0, 12 * MIB, MIB), MIB).bytes == 12 * MIB
            traffic.write("/file", [0], MIB)
            memory.source.array[MIB : 2 * MIB] ^= np.uint8(1)
            with pytest.raises(
                RuntimeError, match="other bytes than were written in 1048576 from 1048576 on"
            ):
                traffic.read("/file", [0, MIB], MIB)
        stage.restart_node()
        assert stage.metrics()["log_live"] > 12 * MIB and stage.memory_peak() > MIB
