"""gd2fs top: what the nodes hold and do, live."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gd2fs.cli.connection import ControlOption, connect
from gd2fs.cli.output import JsonFlag, console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from gd2fs.client import Client

Stats = dict[str, Any]

# Nodes report every 2 s: looking more often shows nothing new.
INTERVAL_S = 2.0
# `--once` looks at two reports of each node, for rates; whoever has sent no second one by then has none.
ONCE_S = 5.0
POLL_S = 0.25
# When a heartbeat came is known up to the time a question takes; two come further apart than this.
SAME_S = 0.5
_HITS = ("hits_dram", "hits_nvme", "misses_lost")


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters of one heartbeat, and when it came (seconds, on the clock of whoever asks)."""

    at: float
    incarnation: int
    stats: Stats


@dataclass(slots=True)
class Meter:
    """Turns counters into rates: between the last two heartbeats of one incarnation of a node."""

    last: dict[str, Sample] = field(default_factory=dict)
    rates: dict[str, Stats] = field(default_factory=dict)

    def observe(self, nodes: list[Stats], now: float) -> list[Stats]:
        """What is shown of each node of `GET /v1/nodes`, asked at `now`. A value that its node does not say
        is None, and so is a rate before the second heartbeat."""
        return [self._observe(node, now) for node in nodes]

    def _observe(self, node: Stats, now: float) -> Stats:
        name, stats = node["node"], node["stats"] or {}
        new = Sample(now - (node["last_heartbeat_age_s"] or 0.0), node["incarnation"], stats)
        old = self.last.get(name)
        if old is None or old.incarnation != new.incarnation:
            self.rates.pop(name, None)
            self.last[name] = new
        elif new.at - old.at > SAME_S:
            self.rates[name] = _rates(old, new)
            self.last[name] = new
        elif node["state"] != "alive":
            self.rates.pop(name, None)
        return {
            "node": name,
            "state": node["state"],
            "dram_used": stats.get("arena_used"),
            "dram_capacity": stats.get("arena_capacity"),
            "nvme_used": stats.get("log_live"),
            "nvme_capacity": stats.get("log_capacity"),
            "flush_lag_ms": stats.get("flush_lag_ms"),
            "dirty_bytes": stats.get("dirty_bytes"),
            "log_failed": stats.get("log_failed"),
            "log_trouble": stats.get("log_trouble"),
            "pins": stats.get("pins"),
            "connections": stats.get("connections"),
            "errors": _errors(stats),
            **dict.fromkeys(_RATES),
            **self.rates.get(name, {}),
        }


_RATES = (
    "read_bytes_s",
    "written_bytes_s",
    "flushed_bytes_s",
    "evicted_bytes_s",
    "errors_s",
    "hit_dram",
    "hit_nvme",
    "missed",
)


def _errors(stats: Stats) -> int | None:
    """All requests that were refused or failed, whatever the code."""
    by_code = stats.get("errors")
    return sum(by_code.values()) if isinstance(by_code, dict) else None


def _rates(old: Sample, new: Sample) -> Stats:
    seconds = new.at - old.at

    def grown(*names: str) -> float | None:
        if any(name not in sample.stats for name in names for sample in (old, new)):
            return None
        return float(sum(new.stats[name] - old.stats[name] for name in names))

    def per_second(*names: str) -> float | None:
        much = grown(*names)
        return None if much is None else much / seconds

    lookups = grown(*_HITS)
    shares = [grown(name) for name in _HITS] if lookups else [None] * len(_HITS)
    failed_before, failed = _errors(old.stats), _errors(new.stats)
    return {
        "read_bytes_s": per_second("bytes_read"),
        "written_bytes_s": per_second("bytes_written"),
        "flushed_bytes_s": per_second("flushed_bytes"),
        # What is gone: with logs, what memory gives up is still there.
        "evicted_bytes_s": per_second(
            "evicted_log_bytes" if new.stats.get("log_total") else "evicted_dram_bytes"
        ),
        "errors_s": (failed - failed_before) / seconds
        if failed is not None and failed_before is not None
        else None,
        # Of what was read in this time: found in memory, found on NVMe, lost.
        **{
            name: share / lookups if share is not None and lookups else None
            for name, share in zip(("hit_dram", "hit_nvme", "missed"), shares, strict=True)
        },
    }


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once and end, after two reports.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.25, max=3600, help="Seconds between two looks.")
    ] = INTERVAL_S,
    control: ControlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Watch the nodes: memory, NVMe, rates, hits by tier, flushing, evictions. Ctrl-C ends it.

    With --json one object is printed and it ends, as with --once.
    """
    with connect(control) as client:
        if as_json or once or not console().is_terminal:
            rows = _twice(client)
            if as_json:
                print_json({"nodes": rows})
            else:
                console().print(_table(rows))
            return
        _watch(client, interval)


def _nodes(client: Client) -> list[Stats]:
    found: list[Stats] = client.control("GET", "/v1/nodes")["nodes"]
    return found


def _twice(client: Client) -> list[Stats]:
    """Rows with rates, for all nodes that report a second time within ONCE_S."""
    meter = Meter()
    deadline = time.monotonic() + ONCE_S
    while True:
        nodes = _nodes(client)
        rows = meter.observe(nodes, time.monotonic())
        living = [node["node"] for node in nodes if node["state"] == "alive" and node["stats"]]
        if all(name in meter.rates for name in living) or time.monotonic() >= deadline:
            return rows
        time.sleep(POLL_S)


def _watch(client: Client, interval: float) -> None:
    from rich.live import Live

    from gd2fs import errors

    meter, trouble = Meter(), ""
    rows: list[Stats] = []
    try:
        with Live(console=console(), auto_refresh=False, screen=True) as live:
            while True:
                try:
                    rows = meter.observe(_nodes(client), time.monotonic())
                    trouble = ""
                except (errors.Unavailable, errors.Timeout) as error:
                    trouble = f"as it was when control last answered ({error})"
                live.update(_table(rows, trouble), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return  # the way to end it


def _table(rows: list[Stats], trouble: str = "") -> Table:
    from rich import box
    from rich.table import Table

    from gd2fs.cli.output import escape

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=escape(trouble) or None)
    for column in ("node", "state"):
        table.add_column(column)
    for column in (
        *("DRAM", "NVMe", "read", "written", "hits DRAM", "NVMe ", "lost"),
        *("flush lag", "dirty", "evicted for good", "conns", "errors"),
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(escape(cell) for cell in _cells(row)))
    return table


def _cells(row: Stats) -> list[str]:
    lag = row["flush_lag_ms"]
    return [
        row["node"],
        _state(row),
        _of(row["dram_used"], row["dram_capacity"]),
        _of(row["nvme_used"], row["nvme_capacity"]),
        _speed(row["read_bytes_s"]),
        _speed(row["written_bytes_s"]),
        *(_share(row[name]) for name in ("hit_dram", "hit_nvme", "missed")),
        "-" if lag is None else f"{lag / 1000:.1f} s",
        _bytes(row["dirty_bytes"]),
        _speed(row["evicted_bytes_s"]),
        "-" if row["connections"] is None else str(row["connections"]),
        "-" if row["errors"] is None else str(row["errors"]),
    ]


def _state(row: Stats) -> str:
    """With what keeps new files away from a living node."""
    if row["state"] != "alive" or not (row["log_failed"] or row["log_trouble"]):
        return str(row["state"])
    return "LOG FAILED" if row["log_failed"] else "LOG TROUBLE"


def _bytes(count: float | None) -> str:
    from gd2fs.config.units import format_bytes

    return "-" if count is None else format_bytes(count)


def _of(used: float | None, capacity: float | None) -> str:
    return "-" if used is None or capacity is None else f"{_bytes(used)} / {_bytes(capacity)}"


def _speed(bytes_s: float | None) -> str:
    return "-" if bytes_s is None else f"{_bytes(bytes_s)}/s"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
