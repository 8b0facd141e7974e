"""GD2FS: a GPU-direct distributed file system for LLM KV cache.

``gd2fs.connect("gd2fs://127.0.0.1:7527")`` gives a client; ``gd2fs.errors`` holds every exception it raises.
The compiled module is loaded with the first use of the client, so that the pure parts (``gd2fs.kv``,
``gd2fs.errors``) work without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gd2fs.client.client import Client
    from gd2fs.client.connect import connect

__version__ = "0.1.0"
__all__ = ["Client", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    if name in ("Client", "connect"):
        return getattr(import_module("gd2fs.client"), name)
    raise AttributeError(f"module 'gd2fs' has no attribute {name!r}")
