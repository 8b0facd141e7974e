"""The Python client: files by path or by layout, sessions, uploads."""

from __future__ import annotations

from gd2fs.client.client import Client
from gd2fs.client.completions import Request
from gd2fs.client.connect import connect
from gd2fs.client.files import File
from gd2fs.client.namespace import FileInfo
from gd2fs.client.sessions import Plan, Session, Sessions
from gd2fs.client.tiers import Extent, Tier, Warmth

__all__ = [
    "Client",
    "Extent",
    "File",
    "FileInfo",
    "Plan",
    "Request",
    "Session",
    "Sessions",
    "Tier",
    "Warmth",
    "connect",
]
