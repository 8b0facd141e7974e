"""The node agent: starts the native node, registers it with control, reports, and lets itself be observed."""

from __future__ import annotations

from gd2fs.node.agent import Agent, run

__all__ = ["Agent", "run"]
