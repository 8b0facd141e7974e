"""The gateway: an OpenAI-compatible front door that plans each request's KV cache and holds no state of its
own.
"""

from __future__ import annotations

from gd2fs.gateway.app import create_app

__all__ = ["create_app"]
