"""The reference engine: a small real model on the CPU behind the OpenAI API, with its KV cache in GD2FS.

It is the embedded default and the example for authors of connectors; it does not compete with GPU engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gd2fs.engine.server import serve

__all__ = ["serve"]


def __getattr__(name: str) -> Any:
    # Loaded with the first use, so that the parts of the engine can be imported without the server's
    # dependencies.
    if name == "serve":
        from gd2fs.engine.server import serve

        return serve
    raise AttributeError(f"module 'gd2fs.engine' has no attribute {name!r}")
