"""What the gateway counts, in Prometheus text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gd2fs.gateway.admission import Admission
from gd2fs.gateway.engines import Pool

# From a warm short prompt on a GPU to a long prefill on a CPU.
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One registry for each app, so that several apps in one process do not mix."""

    def __init__(self, admission: Admission, pool: Pool) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "gd2fs_gateway_requests", "Answers by HTTP status.", ["status"], registry=self._registry
        )
        self._planning = Counter(
            "gd2fs_gateway_planning",
            "What planning came to, by outcome.",
            ["outcome"],
            registry=self._registry,
        )
        self._tokens = Counter(
            "gd2fs_gateway_tokens", "Prompt tokens by kind.", ["kind"], registry=self._registry
        )
        self._ttft = Histogram(
            "gd2fs_gateway_ttft_seconds",
            "Time from a request to its first token (or whole answer if not streamed).",
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        active = Gauge("gd2fs_gateway_active", "Requests worked on.", registry=self._registry)
        active.set_function(lambda: admission.active)
        waiting = Gauge("gd2fs_gateway_waiting", "Requests waiting for a place.", registry=self._registry)
        waiting.set_function(lambda: admission.waiting)
        healthy = Gauge(
            "gd2fs_gateway_engines_healthy", "Engines that can be chosen.", registry=self._registry
        )
        healthy.set_function(lambda: sum(engine.healthy for engine in pool.engines))

    def answered(self, status: int) -> None:
        self._requests.labels(status).inc()

    def outcome(self, name: str) -> None:
        self._planning.labels(name).inc()

    def began(self, plan: dict[str, int], ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        for kind in ("prompt_tokens", "stored_tokens", "reusable_tokens", "cached_tokens"):
            self._tokens.labels(kind.removesuffix("_tokens")).inc(plan.get(kind, 0))

    def text(self) -> bytes:
        return generate_latest(self._registry)
