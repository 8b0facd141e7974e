"""The JSON object of `gd2fs bench io`: its keys and the types behind them."""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)
BOTH = {"tcp", "shm"}
RATIOS = {
    "tcp_read", "tcp_write", "shm_read", "shm_write", "read_4kib_vs_redis", "read_1gib_vs_mooncake",
    "read_1gib_vs_nixl_shm", "cpu_tcp_read",
}  # fmt: skip
RATIOS_OF_BOTH = {"scattered_read", "read_1gib_vs_redis", "read_1gib_vs_redis_py", "load_vs_local_dram"}
RESULT = {
    "transport": str, "op": str, "size": int, "scattered": bool, "streams": int, "verify": bool,
    "gb_per_s": NUMBER, "p50_us": NUMBER, "p99_us": NUMBER, "cpu_s_per_gb": NUMBER,
}  # fmt: skip
PEER = {"name": str, "op": str, "size": int, "gb_per_s": NUMBER}


def assert_shape(result: dict[str, Any]) -> None:
    """What others read out of it is there, under these names."""
    assert {"machine", "ceilings", "results", "peers", "ratios"} <= set(result)
    assert {"cpu", "cores", "memory_gib", "kernel", "load_before"} <= set(result["machine"])
    for name in ("memcpy_1", "memcpy_n", "stream_copy_1", "raw_tcp"):
        assert _number_or_none(result["ceilings"][name]), name
    assert result["results"], "nothing was measured"
    for rows, shape in ((result["results"], RESULT), (result["peers"], PEER)):
        for row in rows:
            for key, kind in shape.items():
                assert isinstance(row[key], kind), (key, row)
            assert row["gb_per_s"] > 0
    assert set(result["ratios"]) == RATIOS | RATIOS_OF_BOTH
    assert all(_number_or_none(result["ratios"][name]) for name in RATIOS)
    for name in RATIOS_OF_BOTH:
        assert set(result["ratios"][name]) == BOTH and all(
            map(_number_or_none, result["ratios"][name].values())
        )


def _number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, NUMBER) and value > 0)
