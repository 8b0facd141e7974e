"""The engines of the pool: a static list, looked at now and then, taken in turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import httpx2

log = logging.getLogger("gd2fs.gateway")

# An engine that is busy with a long prefill still answers its health within this time.
PROBE_TIMEOUT_S = 5.0


@dataclass
class Engine:
    """One engine and what its last health report said. kv_identity None: it takes no KV metadata."""

    url: str
    healthy: bool = False
    reason: str = "not looked at yet"
    model: str = ""
    max_context: int = 0
    kv_identity: str | None = None
    kv_format: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "healthy": self.healthy,
            "reason": self.reason,
            "model": self.model,
            "kv_identity": self.kv_identity,
        }


class Pool:
    """Round robin over the healthy engines of a static list."""

    def __init__(self, urls: list[str], http: httpx2.AsyncClient, probe_s: float) -> None:
        self.engines = [Engine(url) for url in urls]
        self._http = http
        self._probe_s = probe_s
        self._next = 0

    async def watch(self) -> None:
        """Looks at every engine again and again; cancel to end. Call probe() before, for the first look."""
        while True:
            await asyncio.sleep(self._probe_s)
            await self.probe()

    async def probe(self) -> None:
        """Looks at every engine once, all at the same time."""
        await asyncio.gather(*(self._probe(engine) for engine in self.engines))

    def choose(self, model: str | None, exclude: Collection[str] = ()) -> Engine | None:
        """The next healthy engine that serves `model` (None: any) and is not in `exclude`; None if there is
        none.
        """
        count = len(self.engines)
        for step in range(count):
            position = (self._next + step) % count
            engine = self.engines[position]
            if engine.healthy and engine.url not in exclude and model in (None, "", engine.model):
                self._next = position + 1
                return engine
        return None

    def serves(self, model: str | None) -> bool:
        """False only if `model` is named and no engine, healthy or not, is known to serve it."""
        known = {engine.model for engine in self.engines if engine.model}
        return not model or not known or model in known

    def failed(self, engine: Engine, reason: str) -> None:
        """Leaves `engine` out until it is seen healthy again."""
        if engine.healthy:
            log.warning("engine %s is left out: %s", engine.url, reason)
        engine.healthy, engine.reason = False, reason

    async def _probe(self, engine: Engine) -> None:
        try:
            response = await self._http.get(f"{engine.url}/health", timeout=PROBE_TIMEOUT_S)
            response.raise_for_status()
            report = response.json()
            engine.model = str(report.get("model") or "")
            engine.max_context = int(report.get("max_context") or 0)
            engine.kv_identity = report.get("kv_identity") or None
            engine.kv_format = report.get("kv_format") or {}
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, TypeError, AttributeError) as error:
            self.failed(engine, f"/health: {error or type(error).__name__}")
            return
        if not engine.healthy:
            log.info("engine %s is healthy", engine.url)
        engine.healthy, engine.reason = True, ""
