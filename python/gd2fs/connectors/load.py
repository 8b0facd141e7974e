"""Loading stored KV: the ids first, then the bytes, in pieces, straight into the sequence's memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gd2fs.connectors.storage import File, Miss, Transfer, described, give_up, miss_reason
from gd2fs.kv import ID_BYTES, Ids, KvFormat, Segment, cut, lcp, tokens_of

# The default stripe unit: a piece then lies in one chunk of one node.
PIECE_BYTES = 4 << 20
# Enough to keep several substreams busy, little enough that a failure leaves few transfers to wait for.
OUTSTANDING_MAX = 8
# How long a cancelled transfer may take to let go of its memory before the sequence moves away from it.
CANCEL_GRACE_S = 0.25


@dataclass(frozen=True)
class Piece:
    """Bytes [offset, offset + length) of `file`, which belong at byte `start` of the sequence."""

    file: File
    offset: int
    start: int
    length: int


@dataclass(frozen=True)
class Loaded:
    """`prefix_bytes` of the sequence are filled. `in_doubt`: a transfer may still write behind them, so the
    memory must not be used on. `miss` and `detail` say why it is not all that was asked for.
    """

    prefix_bytes: int
    miss: str | None = None
    detail: str = ""
    in_doubt: bool = False


class Pace:
    """How fast loads and prefills have been lately, to know when a load is no longer worth waiting for."""

    SHORTEST_S = 1.0  # no load is given up sooner
    _WEIGHT = 0.3

    def __init__(self) -> None:
        # Before anything was measured: slower than loopback and than this engine, so that nothing is given up
        # early.
        self._load_bytes_s = 100e6
        self._prefill_tokens_s = 200.0

    def loaded(self, nbytes: int, seconds: float) -> None:
        if nbytes >= PIECE_BYTES:  # smaller loads measure latency
            self._load_bytes_s += self._WEIGHT * (nbytes / max(seconds, 1e-6) - self._load_bytes_s)

    def prefilled(self, tokens: int, seconds: float) -> None:
        if tokens:
            self._prefill_tokens_s += self._WEIGHT * (tokens / max(seconds, 1e-6) - self._prefill_tokens_s)

    def load_limit_s(self, tokens: int, nbytes: int) -> float:
        """Twice the expected time, but no longer than recomputing would take, and at least `SHORTEST_S`."""
        return max(self.SHORTEST_S, min(2 * nbytes / self._load_bytes_s, tokens / self._prefill_tokens_s))


def matching_tokens(
    files: Callable[[str], File], stored: Sequence[Segment], kv_format: KvFormat, prompt: Ids, deadline: float
) -> int:
    """How many leading tokens of `stored` are those of `prompt`, read from the `.tokens` files.

    `files` opens the file of a URI. Raises Miss or a GD2FS error when the ids can't be read.
    """
    # No further than the prompt: metadata may claim any length.
    ids = np.zeros(min(tokens_of(stored), len(prompt)), "<u4")
    raw = ids.view(np.uint8).data
    transfers: deque[tuple[Transfer, int]] = deque()
    try:
        for segment in cut(stored, len(ids), kv_format):
            offset = segment.token_index(kv_format, segment.token_start) * ID_BYTES
            target = raw[segment.token_start * ID_BYTES : segment.token_end * ID_BYTES]
            while len(transfers) >= OUTSTANDING_MAX:
                _finish_ids(transfers, deadline)
            file = files(segment.kv_uri + ".tokens")
            transfers.append((file.submit_read(offset, target, timeout_s=_left(deadline)), len(target)))
        while transfers:
            _finish_ids(transfers, deadline)
    finally:
        # One that does not end in time keeps the array alive, and nobody else reads it.
        give_up([transfer for transfer, _ in transfers], CANCEL_GRACE_S)
    return lcp(ids, prompt)


def _finish_ids(transfers: deque[tuple[Transfer, int]], deadline: float) -> None:
    transfer, length = transfers[0]
    if transfer.wait(_left(deadline)) != length:
        raise Miss("hole", "the .tokens file ends before the ids of the stored segments")
    transfers.popleft()


def pieces_of(
    files: Callable[[str], File], stored: Sequence[Segment], kv_format: KvFormat, tokens: int
) -> Iterator[Piece]:
    """The first `tokens` tokens of `stored` as pieces, split at multiples of PIECE_BYTES of each file."""
    for segment in stored:
        count = min(segment.token_end, tokens) - segment.token_start
        if count <= 0:
            return
        file = files(segment.kv_uri)
        start = segment.token_start * kv_format.bytes_per_token
        yield from split(file, segment.kv_start, start, count * kv_format.bytes_per_token)


def split(file: File, offset: int, start: int, length: int) -> Iterator[Piece]:
    """`length` bytes at `offset` of the file, in pieces that end on multiples of PIECE_BYTES of the file."""
    end = offset + length
    while offset < end:
        size = min(end, (offset // PIECE_BYTES + 1) * PIECE_BYTES) - offset
        yield Piece(file, offset, start, size)
        offset += size
        start += size


def load(pieces: Iterator[Piece], memory: memoryview, deadline: float) -> Loaded:
    """Read `pieces` into `memory`, several at a time. Never raises: what could not be read ends the prefix.

    Returns only when every transfer has completed, or is `in_doubt` (it did not end although it was
    cancelled).
    """
    under_way: deque[tuple[Piece, Transfer]] = deque()
    done = 0
    try:
        for piece in pieces:
            if len(under_way) >= OUTSTANDING_MAX:
                done = _finish_oldest(under_way, deadline)
            target = memory[piece.start : piece.start + piece.length]
            under_way.append((piece, piece.file.submit_read(piece.offset, target, timeout_s=_left(deadline))))
        while under_way:
            done = _finish_oldest(under_way, deadline)
    except Exception as error:  # any failure of storage is a miss
        in_doubt = not give_up([transfer for _, transfer in under_way], CANCEL_GRACE_S)
        return Loaded(done, miss_reason(error), described(error), in_doubt)
    return Loaded(done)


def _finish_oldest(under_way: deque[tuple[Piece, Transfer]], deadline: float) -> int:
    """Wait for the oldest transfer; returns where the filled prefix ends. A failed one stays in the queue."""
    piece, transfer = under_way[0]
    moved = transfer.wait(_left(deadline))
    if moved != piece.length:
        raise Miss(
            "hole", f"{moved} of {piece.length} bytes at offset {piece.offset}: the file ends too early"
        )
    under_way.popleft()
    return piece.start + piece.length


def _left(deadline: float) -> float:
    """Seconds until `deadline`; raises Miss when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise Miss("timeout", "the load took longer than recomputing is expected to")
    return left
