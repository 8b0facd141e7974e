"""Where a new column goes. Pure: the same file and the same nodes give the same answer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A living node; `free_bytes` as of its last heartbeat. With `log_trouble` they are 0, whatever is
    empty."""

    node: str
    incarnation: int
    free_bytes: int
    log_trouble: bool = False


def place(file: str, candidates: Sequence[Candidate], width: int, bytes_needed: int = 1) -> list[Candidate]:
    """`width` different nodes for the columns of `file`, or none at all if there are not so many with room.

    Weighted rendezvous hashing: a node is chosen with a probability proportional to its free space. Simply
    taking the emptiest would send everything that arrives between two heartbeats to one node.
    """
    fitting = [candidate for candidate in candidates if candidate.free_bytes >= max(bytes_needed, 1)]
    if len(fitting) < width:
        return []
    return sorted(fitting, key=lambda candidate: _score(file, candidate))[:width]


def _score(file: str, candidate: Candidate) -> float:
    seed = hashlib.blake2b(f"{file}/{candidate.node}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(seed, "big") + 1) / (2**64 + 1)
    # Exponential with rate free_bytes: the smallest of them belongs to node i with probability free_i /
    # sum(free).
    return -math.log(uniform) / candidate.free_bytes
