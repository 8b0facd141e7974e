"""The control service: namespace, layouts, membership, sessions, plans. Stateless over SQL; touches no file
bytes."""

from __future__ import annotations

from gd2fs.control.app import create_app

__all__ = ["create_app"]
