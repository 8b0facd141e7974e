"""The command line, `gd2fs`. Modules that are slow to import are imported by the commands that need them."""

from __future__ import annotations

from gd2fs.cli.app import main

__all__ = ["main"]
