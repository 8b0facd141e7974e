"""What a node lets others see: /health and /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from gd2fs.errors import AuthError
from gd2fs.signing import Keys, Token

Stats = dict[str, Any]

# The counters that only rise; numbers that are not here are gauges.
_RISING = frozenset(
    [
        "bytes_read",
        "bytes_written",
        "reads",
        "writes",
        "writes_refused_unread",
        "connections_refused",
        "checksum_failures",
        "stale_refused",
        "flushed_bytes",
        "evicted_dram_bytes",
        "evicted_log_bytes",
        "hits_dram",
        "hits_nvme",
        "misses_lost",
        "lifted_bytes",
        "corrupt",
        "scrub_bytes",
        "scrub_corrupt",
        "scrub_unreadable",
        "log_read_errors",
    ]
)


def create_app(describe: Callable[[], Stats], stats: Callable[[], Stats], keys: str) -> FastAPI:
    """`describe` answers /health, `stats` feeds /metrics. keys: with them, /metrics asks for a token of the
    cluster (strangers beyond loopback learn only that the node lives); empty on loopback.
    """
    app = FastAPI(title="GD2FS node", openapi_url=None)
    known = Keys.parse(keys) if keys else None

    def stranger(request: Request) -> bool:
        if known is None:
            return False
        text = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        try:
            known.verify(text, Token)
        except AuthError:
            return True
        return False

    @app.get("/health")
    def health(request: Request) -> Response:
        facts = describe()
        return JSONResponse({"status": facts["status"]} if stranger(request) else facts)

    @app.get("/metrics")
    def metrics(request: Request) -> Response:
        if stranger(request):
            return PlainTextResponse("Authorization: Bearer with a token of this cluster is needed\n", 401)
        return PlainTextResponse(prometheus_text(describe(), stats()))

    return app


def prometheus_text(facts: Stats, stats: Stats) -> str:
    """The native counters as Prometheus text, all labelled with the node's name.

    A number becomes a counter or a gauge, `errors` a counter by code, a latency a histogram, and milliseconds
    become seconds, as Prometheus has them.
    """
    node = str(facts["node"]).replace("\\", "\\\\").replace('"', '\\"')
    lines: list[str] = []
    for name, value in stats.items():
        if isinstance(value, dict) and "bounds_us" in value:
            lines.extend(_histogram(f"gd2fs_node_{name}_seconds", f'node="{node}"', value))
        elif isinstance(value, dict):
            lines.append(f"# TYPE gd2fs_node_{name}_total counter")
            lines.extend(
                f'gd2fs_node_{name}_total{{node="{node}",code="{code}"}} {count}'
                for code, count in value.items()
            )
        else:
            if name.endswith("_ms"):
                name, value = name.removesuffix("_ms") + "_seconds", value / 1000
            rising = name in _RISING
            full = f"gd2fs_node_{name}" + ("_total" if rising else "")
            lines.append(f"# TYPE {full} {'counter' if rising else 'gauge'}")
            lines.append(f'{full}{{node="{node}"}} {value}')
    return "\n".join(lines) + "\n"


def _histogram(name: str, label: str, value: Stats) -> Iterator[str]:
    yield f"# TYPE {name} histogram"
    below = 0
    for bound_us, count in zip(value["bounds_us"], value["counts"], strict=False):
        below += count
        yield f'{name}_bucket{{{label},le="{bound_us / 1e6:g}"}} {below}'
    yield f'{name}_bucket{{{label},le="+Inf"}} {value["count"]}'
    yield f"{name}_sum{{{label}}} {value['sum_us'] / 1e6}"
    yield f"{name}_count{{{label}}} {value['count']}"
