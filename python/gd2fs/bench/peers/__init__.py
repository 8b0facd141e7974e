"""The systems that ``gd2fs bench io --peers`` measures beside GD2FS, each in an environment of its own.

``mooncake.Peer`` and ``nixl.Peer`` have one face: ``start(directory)``, ``read(size_bytes)`` and ``close()``.
Every one of their processes is a child of the command and ends with it.
"""

from __future__ import annotations

from gd2fs.bench.peers.failures import PeerFailed, PeerUnavailable, WrongBytes

__all__ = ["PeerFailed", "PeerUnavailable", "WrongBytes"]
