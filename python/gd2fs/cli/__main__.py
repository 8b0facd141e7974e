"""`python -m gd2fs.cli`: the same as `gd2fs`, for processes that start others with their own interpreter."""

from __future__ import annotations

from gd2fs.cli.app import main

main()
