"""`gd2fs demo`: stateless inference on this machine, shown and checked turn by turn."""

from __future__ import annotations

from gd2fs.demo.run import run_demo

__all__ = ["run_demo"]
