"""docs/reference/metrics.md names what control, gateway and engine show (nodes: tests/e2e/test_upkeep.py)."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gd2fs.control.metrics import Metrics as ControlMetrics
from gd2fs.engine.metrics import Metrics as EngineMetrics
from gd2fs.gateway.metrics import Metrics as GatewayMetrics

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
IDLE: Any = SimpleNamespace(active=0, waiting=0, engines=(), committed_late=0, given_up=0)


@pytest.mark.parametrize(
    ("process", "shown"),
    [
        ("control", ControlMetrics().text()),
        ("gateway", GatewayMetrics(IDLE, IDLE).text()),
        ("engine", EngineMetrics(IDLE, IDLE).text()),
    ],
)
def test_the_page_names_every_metric(process: str, shown: bytes) -> None:
    documented = set(re.findall(rf"^\| `(gd2fs_{process}_\w+)`", PAGE.read_text(), re.M))
    names = set(re.findall(r"^# TYPE (\w+) ", shown.decode(), re.M))
    assert names and documented == {name for name in names if not name.endswith("_created")}
