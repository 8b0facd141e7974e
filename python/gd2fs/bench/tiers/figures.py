"""What a run comes to: ratios of medians, and the object that --json prints."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gd2fs.bench.samples import Sample, median_gb_per_s

#: Part → the ratio that it gives.
RATIOS = {
    "cold": "cold_read_vs_fio",
    "random": "cold_random_read_vs_fio",
    "write": "sustained_write_vs_fio",
    "ingest": "writeback_ingest_vs_dram",
    "full": "full_store_read",
}
#: What each must reach, as the project has set itself.
AT_LEAST = {
    "cold_read_vs_fio": 0.90,
    "cold_random_read_vs_fio": 0.85,
    "sustained_write_vs_fio": 0.85,
    "writeback_ingest_vs_dram": 0.85,
    "full_store_read": 0.70,
}
#: What a request may take beyond its deadline: it is ended by a timer on a busy machine.
GRACE_S = 0.5
AT_MOST = {"recovery_s_10gib": 5.0, "rss_over_arena_mib": 300.0}
TORTURE = ("loops", "power_cuts", "wrong_bytes", "lost_after_flush", "phantoms")
#: Counters of the torture, in its details, that must stay 0.
FAULTS = (
    "wrong_bytes", "phantoms", "lost_after_flush", "stale_writes", "unreported", "unreadable", "crashed",
)  # fmt: skip
#: Of loops and of power cuts: what fewer find, or do not, says too little.
ENOUGH = 100

Details = Mapping[str, Mapping[str, Any]]


def over(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """Median of the one over the median of the other."""
    return round(median_gb_per_s(list(ours)) / median_gb_per_s(list(theirs)), 3)


def rates(samples: Sequence[Sample]) -> dict[str, Any]:
    """GB/s: the median, and every round."""
    each = [round(sample.gb_per_s, 3) for sample in samples]
    return {"gb_per_s": round(statistics.median(each), 3), "rounds": each}


def latencies_ms(samples: Iterable[Sample]) -> dict[str, float]:
    """Of single requests, in milliseconds."""
    found = sorted(latency for sample in samples for latency in sample.latencies_s)
    return {
        "p50_ms": round(statistics.median(found) * 1e3, 2),
        "p99_ms": round(found[len(found) * 99 // 100] * 1e3, 2),
        "longest_ms": round(found[-1] * 1e3, 1),
    }


def to_json(facts: dict[str, Any], details: Details, failed: Mapping[str, str]) -> dict[str, Any]:
    """``details``: of each part that ran; None stands for what did not, ``failed`` has the reasons."""

    def of(part: str, name: str) -> Any:
        return details[part].get(name) if part in details else None

    return {
        "ratios": {ratio: of(part, "ratio") for part, ratio in RATIOS.items()},
        "recovery_s_10gib": of("recovery", "recovery_s_10gib"),
        "rss_over_arena_mib": of("memory", "rss_over_arena_mib"),
        "torture": {name: of("torture", name) for name in TORTURE},
        "mutants": {name: of("mutants", name) for name in ("tried", "caught")},
        "machine": facts,
        "details": dict(details),
        "failed": dict(failed),
    }


def verdicts(result: Mapping[str, Any]) -> list[tuple[str, float | None, str, bool | None]]:
    """Name, value, target as text, and whether it is met; None: not run."""
    rows: list[tuple[str, float | None, str, bool | None]] = []
    for name, least in AT_LEAST.items():
        value = result["ratios"][name]
        rows.append((name, value, f"at least {least:g}", None if value is None else value >= least))
    for name, most in AT_MOST.items():
        value = result[name]
        rows.append((name, value, f"at most {most:g}", None if value is None else value <= most))
    torture, full = (result["details"].get(part, {}) for part in ("torture", "full"))
    for name in TORTURE[:2]:
        value = torture.get(name)
        rows.append((f"torture {name}", value, f"{ENOUGH} tell", True if (value or 0) >= ENOUGH else None))
    for name in FAULTS:
        value = torture.get(name)
        rows.append((f"torture {name}", value, "0", None if value is None else value == 0))
    tried, caught = result["mutants"]["tried"], result["mutants"]["caught"]
    met = None if tried is None else tried == caught > 0
    rows.append(("mutants caught", caught, "all" if tried is None else f"{tried}", met))
    if full:
        refused, unread = full["refusals_of_node"], full["refusals_before_payload"]
        rows.append(("refusals before payload", unread, f"all {refused}, and any", unread == refused > 0))
        longest, limit = full["longest_request_s"], full["deadline_s"] + GRACE_S
        rows.append(("longest_request_s", longest, f"at most {limit:g}", longest <= limit))
    return rows


def shortfalls(result: Mapping[str, Any], quick: bool) -> list[str]:
    """What missed its target, and the parts that failed. Of a ``quick`` run speed and size do not count."""
    aside = {*AT_LEAST, *AT_MOST} if quick else set()
    missed = [
        f"{name}: {value:g}, not {target}"
        for name, value, target, met in verdicts(result)
        if met is False and name not in aside
    ]
    return missed + [f"{part} failed" for part in result["failed"]]
