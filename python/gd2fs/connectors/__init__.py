"""The engines' side of GD2FS: stored KV in, fresh KV out, and never a failed inference because of storage."""

from __future__ import annotations
