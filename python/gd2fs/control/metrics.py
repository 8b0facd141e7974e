"""What control counts, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """One registry per app, so that several live in one process (tests, `gd2fs up`)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "gd2fs_control_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "gd2fs_control_request_seconds",
            "Time to answer a request.",
            ["route"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
            registry=self._registry,
        )
        self.plans = Counter(
            "gd2fs_control_plans",
            "Plans made, by what kept them from all that is stored.",
            ["miss"],
            registry=self._registry,
        )
        self.plan_tokens = Counter(
            "gd2fs_control_plan_tokens",
            "Tokens of planned prompts: prompt, stored, reusable, cached. hit = cached / reusable.",
            ["kind"],
            registry=self._registry,
        )
        self.commits = Counter(
            "gd2fs_control_commits", "Commits, by result.", ["result"], registry=self._registry
        )
        self.nodes = Gauge("gd2fs_control_nodes", "Nodes, by state.", ["state"], registry=self._registry)
        self.rows = Gauge("gd2fs_control_rows", "Rows, by table.", ["table"], registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)
