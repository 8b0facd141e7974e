"""Configuration: one tree of knobs, read once from flags, environment, file and defaults.

Call load() to get a Loaded; its `.settings` is a frozen Settings, its `.origins` says where each value came
from.
"""

from __future__ import annotations

from gd2fs.config.listen import Listen, bind, require_authentication
from gd2fs.config.load import Loaded, load
from gd2fs.config.tree import (
    ClientConfig,
    ClusterConfig,
    ControlConfig,
    EngineConfig,
    GatewayConfig,
    NodeConfig,
    Settings,
)

__all__ = [
    "ClientConfig",
    "ClusterConfig",
    "ControlConfig",
    "EngineConfig",
    "GatewayConfig",
    "Listen",
    "Loaded",
    "NodeConfig",
    "Settings",
    "bind",
    "load",
    "require_authentication",
]
