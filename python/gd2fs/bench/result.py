"""The JSON object of a run."""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any

from gd2fs import __version__
from gd2fs.bench.cases import STREAMS, Case, Ceiling, Peer, outstanding
from gd2fs.bench.ratios import ratios
from gd2fs.bench.samples import Sample, Samples, median_cpu_s_per_gb, median_gb_per_s


def machine() -> dict[str, Any]:
    """What a reader needs to compare: processor, cores, memory, kernel, and how busy it was before."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gd2fs": __version__,
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def to_json(
    facts: dict[str, Any], samples: Samples, tried: Samples, best_raw: dict[str, Any]
) -> dict[str, Any]:
    """``samples``: of the rounds; ``tried``: of competitors' settings that were not taken into the rounds."""
    return {
        "machine": facts,
        "ceilings": _ceilings(samples, best_raw),
        "results": [_case(key, found) for key, found in samples.items() if isinstance(key, Case)],
        "peers": [
            {"name": key.name, "op": key.op, "size": key.size, "gb_per_s": _rounded(median_gb_per_s(found))}
            for key, found in {**tried, **samples}.items()
            if isinstance(key, Peer)
        ],
        "ceilings_by_size": [
            _ceiling(key, found) for key, found in samples.items() if isinstance(key, Ceiling)
        ],
        "ratios": _deep_rounded(ratios(samples)),
    }


def _ceilings(samples: Samples, best_raw: dict[str, Any]) -> dict[str, Any]:
    """Those of the biggest size that was read."""
    reads = [key for key in samples if isinstance(key, Ceiling) and key.op == "read"]
    plain = [key for key in reads if not key.name.startswith("scattered_")]
    biggest = max((key.size for key in plain), default=0)

    def rate(name: str, width: int | None) -> float | None:
        found = [key for key in plain if key.size == biggest and key.name == name]
        if width is None:
            width = max((key.width for key in found), default=None)
        return next((_rounded(median_gb_per_s(samples[key])) for key in found if key.width == width), None)

    return {
        "memcpy_1": rate("memcpy", 1),
        "memcpy_n": rate("memcpy", None),
        "stream_copy_1": rate("stream_copy", 1),
        "stream_copy_n": rate("stream_copy", None),
        "raw_tcp": rate("raw_tcp", STREAMS),
        "raw_tcp_best": best_raw,
        "size": biggest,
        "threads_n": max((key.width for key in plain if key.name == "memcpy"), default=None),
    }


def _ceiling(key: Ceiling, samples: list[Sample]) -> dict[str, Any]:
    return {
        "name": key.name,
        "op": key.op,
        "size": key.size,
        "streams" if key.name == "raw_tcp" else "threads": key.width,
        "gb_per_s": _rounded(median_gb_per_s(samples)),
        "cpu_s_per_gb": _rounded(median_cpu_s_per_gb(samples)),
    }


def _case(case: Case, samples: list[Sample]) -> dict[str, Any]:
    latencies = sorted(latency for sample in samples for latency in sample.latencies_s)
    return {
        "transport": case.transport,
        "op": case.op,
        "size": case.size,
        "scattered": case.scattered,
        "streams": case.streams,
        "verify": case.verify,
        "memory": case.memory,
        "first": case.first,
        "outstanding": outstanding(case.size),
        "gb_per_s": _rounded(median_gb_per_s(samples)),
        "p50_us": round(statistics.median(latencies) * 1e6, 1),
        "p99_us": round(latencies[min(len(latencies) - 1, len(latencies) * 99 // 100)] * 1e6, 1),
        "cpu_s_per_gb": _rounded(median_cpu_s_per_gb(samples)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _deep_rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _deep_rounded(value) if isinstance(value, dict) else _rounded(value)
        for name, value in values.items()
    }
