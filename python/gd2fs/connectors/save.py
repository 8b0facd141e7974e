"""Saving fresh KV while the request runs: ids before the KV they describe, a bounded number of writes under
way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from gd2fs.connectors.load import CANCEL_GRACE_S, Piece, split
from gd2fs.connectors.storage import File, Miss, Transfer, described, give_up, miss_reason
from gd2fs.kv import ID_BYTES, TO_THE_END, KvFormat, Segment, ids_to_bytes

# Tokens gathered before a write: one prefill chunk, about 3 MB of the reference model. Single decoded tokens
# would each cost a round trip and a verification of the 32 KiB piece that they share.
BATCH_TOKENS = 64
OUTSTANDING_MAX = 4
# A write that takes longer has no business in a request; the saver stops there.
WRITE_TIMEOUT_S = 10.0
# How long the end of a request waits for its last acknowledgements.
DRAIN_S = 5.0


class Saver:
    """Writes tokens [fresh.token_start, ...) of a sequence from its own memory, in a thread of its own.

    `ids` is the request's growing list of token ids. `computed(end)` says that the KV of tokens below `end`
    is final; it never blocks, since what waits is only a number. `finish` returns how far everything is
    acknowledged.
    """

    def __init__(
        self,
        kv_file: File,
        tokens_file: File,
        fresh: Segment,
        kv_format: KvFormat,
        memory: memoryview,
        ids: Sequence[int],
    ) -> None:
        self._kv_file, self._tokens_file = kv_file, tokens_file
        self._fresh, self._format = fresh, kv_format
        self._memory, self._ids = memory, ids
        self._limit = None if fresh.token_length == TO_THE_END else fresh.token_end
        self._changed = threading.Condition()
        self._computed = fresh.token_start
        self._closing = False
        self._acknowledged = fresh.token_start  # only the thread writes these three
        self._error: BaseException | None = None
        self._ids_written = fresh.token_start
        self._under_way: deque[tuple[int, Piece, Transfer]] = deque()
        self._thread = threading.Thread(target=self._run, name="gd2fs-save", daemon=True)
        self._thread.start()

    def computed(self, end: int) -> None:
        """KV of tokens below `end` will not change any more."""
        with self._changed:
            self._computed = max(self._computed, end if self._limit is None else min(end, self._limit))
            self._changed.notify()

    def finish(self, timeout_s: float = DRAIN_S) -> tuple[int, str | None, str]:
        """Write the rest and wait for it. Returns (token end of what is acknowledged without a gap, reason,
        detail); the reason is None when that is everything.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return self._acknowledged, "timeout", f"writes were not acknowledged within {timeout_s:g} s"
        if self._error is not None:
            return self._acknowledged, miss_reason(self._error), described(self._error)
        return self._acknowledged, None, ""

    @property
    def idle(self) -> bool:
        """Nothing reads the sequence's memory any more."""
        return not self._thread.is_alive() and not self._under_way

    def _run(self) -> None:
        try:
            start = self._fresh.token_start
            while (end := self._next_batch(start)) > start:
                self._write(start, end)
                start = end
            while self._under_way:
                self._finish_oldest()
        except Exception as error:  # any failure of storage ends the saving, never the request
            self._error = error
            if give_up([transfer for _, _, transfer in self._under_way], CANCEL_GRACE_S):
                self._under_way.clear()

    def _next_batch(self, start: int) -> int:
        """Wait for a whole batch behind `start`, or for the end; returns the batch's end (`start`: there is
        no more).
        """
        with self._changed:
            while not self._closing and self._computed - start < BATCH_TOKENS:
                self._changed.wait()
            return min(self._computed, start + BATCH_TOKENS)

    def _write(self, start: int, end: int) -> None:
        self._write_ids(end)
        size = self._format.bytes_per_token
        offset = self._fresh.kv_start + (start - self._fresh.token_start) * size
        pieces = list(split(self._kv_file, offset, start * size, (end - start) * size))
        for piece in pieces:
            while len(self._under_way) >= OUTSTANDING_MAX:
                self._finish_oldest()
            source = self._memory[piece.start : piece.start + piece.length]
            transfer = piece.file.submit_write(piece.offset, source, timeout_s=WRITE_TIMEOUT_S)
            # A batch counts as acknowledged with its last piece.
            self._under_way.append((end if piece is pieces[-1] else start, piece, transfer))

    def _write_ids(self, end: int) -> None:
        """Make sure that the ids below `end` are acknowledged. Writes all that are known: a prompt's in one
        go.
        """
        if end <= self._ids_written:
            return
        known = self._ids[self._ids_written : self._limit]
        offset = self._fresh.token_index(self._format, self._ids_written) * ID_BYTES
        data = ids_to_bytes(known)
        transfer = self._tokens_file.submit_write(offset, data, timeout_s=WRITE_TIMEOUT_S)
        _settle(transfer, len(data), offset)
        self._ids_written += len(known)

    def _finish_oldest(self) -> None:
        end, piece, transfer = self._under_way[0]
        _settle(transfer, piece.length, piece.offset)
        self._under_way.popleft()
        self._acknowledged = max(self._acknowledged, end)


def _settle(transfer: Transfer, length: int, offset: int) -> None:
    # The transfer has its own, shorter limit; this one only keeps a broken client from holding the thread for
    # ever.
    started = time.monotonic()
    moved = transfer.wait(2 * WRITE_TIMEOUT_S)
    if moved != length:
        took = time.monotonic() - started
        raise Miss("short_write", f"{moved} of {length} bytes written at offset {offset} after {took:.1f} s")
