"""Token ids as bytes, their digests and common prefixes. Ids are u32, little-endian wherever they are
bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gd2fs.kv.segment import SegmentError

ID_BYTES = 4
_LITTLE_U32 = np.dtype("<u4")

Ids = npt.NDArray[np.uint32]


def as_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> Ids:
    """Ids as a one-dimensional u32 array. Raises SegmentError for anything outside 0..2^32-1."""
    if isinstance(ids, np.ndarray) and ids.dtype == _LITTLE_U32 and ids.ndim == 1:
        return ids.view(_LITTLE_U32)
    try:
        wide = np.asarray(ids, dtype=np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise SegmentError("token_ids", f"must be whole numbers in 0..2^32-1 ({error})") from error
    if wide.ndim != 1:
        raise SegmentError("token_ids", "must be a flat list")
    if wide.size and not (wide.min() >= 0 and wide.max() < 2**32):
        raise SegmentError("token_ids", "must be whole numbers in 0..2^32-1")
    return wide.astype(_LITTLE_U32)


def ids_to_bytes(ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """4 bytes an id, as a `.tokens` file holds them."""
    return as_ids(ids).tobytes()


def ids_from_bytes(data: bytes | bytearray | memoryview) -> Ids:
    return np.frombuffer(data, dtype=_LITTLE_U32)


def lcp(a: Sequence[int] | npt.NDArray[np.integer], b: Sequence[int] | npt.NDArray[np.integer]) -> int:
    """Length of the longest common prefix."""
    left, right = as_ids(a), as_ids(b)
    shorter = min(left.size, right.size)
    different = left[:shorter] != right[:shorter]
    first = int(different.argmax()) if shorter else 0
    return first if shorter and different[first] else shorter


def digest(ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
    """SHA-256 in hex of all ids from 0 on."""
    return hashlib.sha256(ids_to_bytes(ids)).hexdigest()


class RunningDigest:
    """SHA-256 of growing prefixes of one id list, each id hashed once."""

    def __init__(self, ids: Ids) -> None:
        self._bytes = memoryview(ids.tobytes())
        self._hash = hashlib.sha256()
        self._end = 0

    @property
    def tokens(self) -> int:
        """Ids hashed so far."""
        return self._end // ID_BYTES

    def at(self, tokens: int) -> str:
        """Digest of the first `tokens` ids; must not be smaller than before."""
        if not self._end <= tokens * ID_BYTES <= len(self._bytes):
            raise ValueError(f"a digest at {tokens} ids is behind {self.tokens} or beyond the list")
        self._hash.update(self._bytes[self._end : tokens * ID_BYTES])
        self._end = tokens * ID_BYTES
        return self._hash.hexdigest()

    def copy(self) -> RunningDigest:
        """A second digest that goes on from here."""
        other = RunningDigest.__new__(RunningDigest)
        other._bytes, other._hash, other._end = self._bytes, self._hash.copy(), self._end
        return other
