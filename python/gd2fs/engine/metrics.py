"""What the engine counts, in Prometheus text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gd2fs.connectors.commit import Committer
from gd2fs.engine.generate import Result
from gd2fs.engine.memory import rss_mib
from gd2fs.engine.scheduler import Scheduler

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One registry for each app, so that several apps in one process do not mix."""

    def __init__(self, scheduler: Scheduler, committer: Committer) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "gd2fs_engine_requests", "Answers by how they ended.", ["end"], registry=registry
        )
        self._tokens = Counter(
            "gd2fs_engine_tokens",
            "Tokens: prompt, stored, cached, local, output.",
            ["kind"],
            registry=registry,
        )
        self._misses = Counter(
            "gd2fs_engine_kv_misses",
            "Requests whose stored KV was not used to the end, by reason.",
            ["reason"],
            registry=registry,
        )
        self._bytes = Counter("gd2fs_engine_kv_bytes", "KV bytes: loaded, saved.", ["way"], registry=registry)
        self._commits = Counter(
            "gd2fs_engine_kv_commits",
            "Plans by what the commit came to at the end of the request.",
            ["outcome"],
            registry=registry,
        )
        self._ttft = Histogram(
            "gd2fs_engine_ttft_seconds",
            "From arrival to the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._load = Histogram(
            "gd2fs_engine_kv_load_seconds", "Loads, ids included.", buckets=_SECONDS, registry=registry
        )
        self._gauge("gd2fs_engine_active", "Generations computing or finishing.", lambda: scheduler.active)
        self._gauge("gd2fs_engine_waiting", "Requests waiting for the model.", lambda: scheduler.waiting)
        self._gauge("gd2fs_engine_resident_mib", "Resident memory of the process.", rss_mib)
        self._gauge(
            "gd2fs_engine_commits_late",
            "Commits that succeeded behind the answer.",
            lambda: committer.committed_late,
        )
        self._gauge(
            "gd2fs_engine_commits_given_up", "Commits and aborts given up.", lambda: committer.given_up
        )

    def refused(self, reason: str) -> None:
        """A request that was not begun."""
        self._requests.labels(reason).inc()

    def ended(self, result: Result, prompt_tokens: int) -> None:
        kv = result.kv
        self._requests.labels(result.finish_reason).inc()
        counts = {
            "prompt": prompt_tokens,
            "stored": kv.stored_tokens,
            "cached": kv.cached_tokens,
            "local": result.local_cached_tokens,
            "output": len(result.token_ids),
        }
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
        self._bytes.labels("loaded").inc(kv.loaded_bytes)
        self._bytes.labels("saved").inc(kv.saved_bytes)
        if kv.miss is not None:
            self._misses.labels(kv.miss).inc()
        if kv.committed or kv.commit_error is not None:
            self._commits.labels("committed" if kv.committed else "failed").inc()
        if result.ttft_ms:
            self._ttft.observe(result.ttft_ms / 1e3)
        if kv.load_ms:
            self._load.observe(kv.load_ms / 1e3)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str, value: object) -> None:
        Gauge(name, text, registry=self._registry).set_function(value)  # type: ignore[arg-type]
