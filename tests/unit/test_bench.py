"""The arithmetic of `gd2fs bench io`: pairing, ratios, the JSON's shape, the chart."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from gd2fs.bench import cases, ratios
from gd2fs.bench.buffers import ordinary, pattern, slots
from gd2fs.bench.cases import GIB, KIB, MIB, Case, Ceiling, Key, Peer
from gd2fs.bench.plot import chart
from gd2fs.bench.redis import Redis
from gd2fs.bench.redis_server import RedisUnavailable, ensure_installed
from gd2fs.bench.result import machine, to_json
from gd2fs.bench.samples import Sample, Samples, cpu_seconds, interleave
from gd2fs.bench.table import print_tables
from gd2fs.client.connect import connect
from tests.bench_shape import assert_shape

FRAGMENTS_TOTAL = cases.scattered_bytes(GIB)


def at(rates: list[float], total: int = GIB, cpu_s_per_gb: float = 0.5) -> list[Sample]:
    """Samples of these GB/s, one a round."""
    return [
        Sample(total, total / rate / 1e9, cpu_s_per_gb * total / 1e9, [total / rate / 1e9]) for rate in rates
    ]


def a_run() -> Samples:
    """Three rounds, the last on a machine that was twice as slow for everybody."""
    shm = Case("shm", "read", GIB, memory="library")
    small = cases.requests(4 * KIB, GIB) * 4 * KIB
    return {
        Ceiling("memcpy", "read", GIB, 1): at([10, 10, 5]),
        Ceiling("memcpy", "read", GIB, 2): at([20, 20, 10]),
        Ceiling("stream_copy", "read", GIB, 2): at([16, 24, 8]),
        Ceiling("raw_tcp", "read", GIB, 4): at([6, 6, 3], cpu_s_per_gb=0.4),
        Ceiling("raw_tcp", "read", 4 * MIB, 4): at([5, 5, 2.5], cpu_s_per_gb=0.5),
        Ceiling("raw_tcp", "read", 64 * KIB, 4): at([1, 1, 1]),
        Case("tcp", "read", GIB): at([5.4, 5.4, 2.7], cpu_s_per_gb=0.44),
        Case("tcp", "read", 4 * MIB): at([4, 4, 2], cpu_s_per_gb=0.6),
        Case("tcp", "read", 64 * KIB): at([0.1, 0.1, 0.1]),
        Case("tcp", "read", GIB, verify=False): at([6, 6, 6]),
        shm: at([18, 18, 9]),
        Case("shm", "read", GIB): at([4, 4, 4]),
        Peer("redis 1x2", "read", 4 * MIB, GIB): at([3, 2, 1]),
        Peer("redis 2x2", "read", MIB, GIB): at([2, 3, 1.5]),
        Peer("redis-py", "read", 4 * MIB, GIB): at([0.6, 0.6, 0.3]),
        Peer("redis 1x64", "read", 4 * KIB, small): at([1.5, 1.5, 1.5], small),
        Case("tcp", "read", 4 * KIB): at([1.2, 1.8, 1.2], small),
        Ceiling("scattered_memcpy", "read", FRAGMENTS_TOTAL, 2): at([8, 8, 8], FRAGMENTS_TOTAL),
        Ceiling("scattered_stream_copy", "read", FRAGMENTS_TOTAL, 2): at([9, 7, 9], FRAGMENTS_TOTAL),
        Case("shm", "read", FRAGMENTS_TOTAL, memory="library"): at([8, 8, 8], FRAGMENTS_TOTAL),
        Case("shm", "read", FRAGMENTS_TOTAL, scattered=True, memory="library"): at(
            [6, 6, 6], FRAGMENTS_TOTAL
        ),
    }


def test_ratios_are_of_rounds_and_the_worst_of_sizes() -> None:
    found = ratios.ratios(a_run())
    assert found["tcp_read"] == pytest.approx(0.8)  # 4 MiB is worse than 1 GiB; 64 KiB does not count
    assert found["tcp_write"] is None
    assert found["shm_read"] == pytest.approx(0.9)  # 18/20, 18/24, 9/10: of the faster copy with all threads
    assert found["scattered_read"] == {"tcp": None, "shm": pytest.approx(0.75)}
    assert found["load_vs_local_dram"] == {"tcp": None, "shm": pytest.approx(1.5)}
    assert found["cpu_tcp_read"] == pytest.approx(1.2)  # of 4 MiB; 1 GiB has 1.1


def test_competitors_are_met_at_their_best_in_each_round() -> None:
    found = ratios.ratios(a_run())
    assert found["read_1gib_vs_redis"] == {"tcp": pytest.approx(1.8), "shm": pytest.approx(6.0)}
    assert found["read_1gib_vs_redis_py"] == {"tcp": pytest.approx(9.0), "shm": pytest.approx(30.0)}
    assert found["read_4kib_vs_redis"] == pytest.approx(0.8)
    assert found["read_1gib_vs_mooncake"] is None and found["read_1gib_vs_nixl_shm"] is None


def test_every_ratio_has_a_target() -> None:
    assert list(ratios.ratios({})) == list(ratios.TARGETS)
    assert set(ratios.LOWER_IS_BETTER) <= set(ratios.TARGETS)


def test_the_json_has_the_promised_shape() -> None:
    tried: Samples = {Peer("redis-py", "read", 64 * MIB, GIB): at([0.2, 0.2])}
    result = to_json(machine(), a_run(), tried, {"gb_per_s": 6.0, "streams": 4})
    assert_shape(result)
    assert result["ceilings"]["memcpy_1"] == 10 and result["ceilings"]["memcpy_n"] == 20
    assert result["ceilings"]["stream_copy_1"] is None and result["ceilings"]["raw_tcp"] == 6
    assert {"name": "redis-py", "op": "read", "size": 64 * MIB, "gb_per_s": 0.2} in result["peers"]
    row = next(row for row in result["results"] if row["size"] == 4 * MIB)
    assert row["outstanding"] == 16 and row["gb_per_s"] == 4 and row["cpu_s_per_gb"] == 0.6
    assert row["p50_us"] == round(GIB / 4 / 1e3, 1) and row["p99_us"] == round(GIB / 2 / 1e3, 1)


def test_the_chart_has_a_line_for_each_kind_and_is_well_formed() -> None:
    result = to_json(machine(), a_run(), {}, {})
    texts = [text.text for text in ElementTree.fromstring(chart(result)).iter() if text.tag.endswith("text")]
    for label in ("memcpy, all cores", "raw TCP sockets", "GD2FS over TCP", "Redis, redis-py", "1 GiB"):
        assert label in texts
    assert "625 MiB" not in texts


def test_tables_name_what_did_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(to_json(machine(), a_run(), {}, {}))
    lines = capsys.readouterr().out.splitlines()
    assert any("read_1gib_vs_mooncake" in line and "not run" in line for line in lines)
    assert any("foreign memory" in line for line in lines)
    assert any("tcp_read" in line and "0.80" in line and "at least 0.9" in line for line in lines)


def test_rounds_pair_samples_and_change_the_order() -> None:
    order: list[Key] = []

    def contender(key: Key) -> Any:
        def run() -> Sample:
            order.append(key)
            return Sample(1, float(len(order)))

        return run

    keys: list[Key] = [Case("tcp", "read", 1 << size) for size in range(12, 16)]
    samples = interleave({key: contender(key) for key in keys}, 5)
    rounds = [order[start : start + 4] for start in range(0, 20, 4)]
    assert all(set(one) == set(keys) for one in rounds) and len({tuple(one) for one in rounds}) > 1
    for key in keys:
        assert [int(sample.seconds - 1) // 4 for sample in samples[key]] == [0, 1, 2, 3, 4]


def test_cases_stay_within_memory_and_bounds() -> None:
    parameters = inspect.signature(connect).parameters
    assert parameters["streams"].default == cases.STREAMS
    assert [cases.outstanding(size) for size in cases.DEFAULT_SIZES] == [64, 64, 64, 16, 1, 1]
    for sizes in (cases.DEFAULT_SIZES, (KIB,), (8 * KIB, MIB)):
        length = cases.span(sizes)
        for size in sizes:
            assert 0 < cases.requests(size, length) * size <= length
        assert cases.scattered_bytes(length) <= length
    for make in (cases.default_cases, cases.full_cases):
        found = [case for size in cases.FULL_SIZES for case in make("write", size, cases.TRANSPORTS)]
        assert len(found) == len(set(found)) and any(case.first for case in found)


def test_the_clock_of_another_process_runs_with_its_work() -> None:
    before = cpu_seconds(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert 0.05 <= cpu_seconds(os.getpid()) - before < 1
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 10
        while cpu_seconds(other.pid) < 0.05:
            assert time.monotonic() < deadline
    finally:
        other.kill()
        other.wait()


def test_places_of_fragments_are_distinct_and_scattered() -> None:
    places = slots(64 * MIB, 500)
    assert len(set(places.tolist())) == 500 and max(places) < 64 * MIB // cases.FRAGMENT_BYTES
    assert np.count_nonzero(np.diff(places.astype(np.int64)) == 1) < 10


def test_a_missing_redis_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gd2fs.bench.debian.shutil.which", lambda name: None)
    monkeypatch.setattr("gd2fs.bench.debian.os.geteuid", lambda: 1000)
    with pytest.raises(RedisUnavailable, match="apt-get install redis-server"):
        ensure_installed()


@pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is not installed")
def test_redis_reads_what_was_stored(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="redis-py is not installed: Redis is not compared with")
    length = 4 * MIB
    source, target = pattern(length), ordinary(length)
    with Redis(tmp_path, source, target, length) as redis:
        best, tried = redis.tournament(length, lambda text: None)
        assert {peer.size for peer in tried if isinstance(peer, Peer)} == {256 * KIB, MIB, 4 * MIB}
        assert any(key.name == "redis-py, memory kept" for key in tried if isinstance(key, Peer))
        names = [key.name for key in best if isinstance(key, Peer)]
        assert len(names) == 3 and names[2].startswith("redis-py")
        for contender in [*best.values(), *redis.small().values()]:
            sample = contender()
            assert sample.bytes == length and sample.seconds > 0
