"""A large log of small records, and how soon its node serves again after kill -9."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from gd2fs import errors
from gd2fs.bench.cases import GIB, KIB, MIB, STREAMS
from gd2fs.bench.tiers.plan import Sizes, Tell
from gd2fs.bench.tiers.stage import Stage
from gd2fs.bench.tiers.traffic import Memory, Traffic
from gd2fs.client.connect import connect

RECORD_BYTES = 64 * KIB
FILE_BYTES = GIB
STEP_BYTES = 64 * MIB
#: What lives, with headers, is at most four fifths of a log; and it is killed after up to a checkpoint more.
LOG_SHARE, LOG_MORE = 1.4, 2 * GIB
#: Killed when so much of the way to the next checkpoint is done, as far as the former ones tell.
BEFORE_CHECKPOINT = 0.9
READ_S, AGAIN_S, LIMIT_S = 2.0, 0.02, 300.0
CHECKED = 2_000


class NoRoom(RuntimeError):
    """The disk is too small for this."""


def measure(directory: Path, sizes: Sizes, memory: Memory, tell: Tell) -> dict[str, Any]:
    """Fills, kills just before a checkpoint, and times the way back. Raises NoRoom."""
    log = int(sizes.recovered * LOG_SHARE + LOG_MORE) // MIB * MIB
    free = shutil.disk_usage(directory).free
    if free < log + GIB:
        raise NoRoom(
            f"{log / GIB:.1f} GiB of log, and a rest, do not fit into {free / GIB:.1f} GiB free in "
            f"{directory}; name another --directory"
        )
    with ExitStack() as stack:
        # Every step ends when all is in the log: there is nothing to wait for.
        options = {"GD2FS_NODE_FLUSH_DELAY_MS": "0"}
        stage = stack.enter_context(Stage(directory / "recovery", 2 * sizes.memory, log, options))
        empty_s = _start_again(stage)
        written, behind = _fill(stage, memory, sizes.recovered, tell)
        before = stage.metrics()
        stage.kill_node()
        begun = time.monotonic()
        stage.begin_node()
        served_s = _first_read(stage, memory, begun)
        stage.await_node()
        after = stage.metrics()
        with stage.connect() as client:
            _check(Traffic(client, memory, 16), written)
    return {
        "recovery_s_10gib": round(served_s, 2) if sizes.recovered == Sizes().recovered else None,
        "seconds": round(served_s, 2),
        "seconds_empty": round(empty_s, 2),
        "bytes": written,
        "records": written // RECORD_BYTES,
        "bytes_behind_checkpoint": behind,
        "log_live_before": int(before["log_live"]),
        "log_live_after": int(after["log_live"]),
        "records_checked": CHECKED,
    }


def _start_again(stage: Stage) -> float:
    """Seconds that a node needs that has nothing to recover."""
    stage.kill_node()
    begun = time.monotonic()
    stage.start_node()
    return time.monotonic() - begun


def _fill(stage: Stage, memory: Memory, size: int, tell: Tell) -> tuple[int, int]:
    """Writes at least ``size`` bytes, and on until a checkpoint is near. Bytes in all, and since the last."""
    written, marks, begun = 0, [0], time.monotonic()
    seen = _checkpoint(stage)
    with stage.connect(STREAMS) as client:
        traffic = Traffic(client, memory, 16)
        while True:
            path, offset = _path(written)
            if offset == 0:
                client.create(path, stripe_unit=RECORD_BYTES)
            traffic.write(path, range(offset, offset + STEP_BYTES, 4 * MIB), 4 * MIB)
            written += STEP_BYTES
            # Without a sync the kernel may keep what it likes; what is read below must be there.
            client.flush(path)
            if (now := _checkpoint(stage)) != seen:
                seen = now
                marks.append(written)
            if written >= size and len(marks) < 3:
                behind = written - marks[-1]
                break  # too small for two checkpoints: killed wherever it is
            behind = written - marks[-1]
            if written >= size and behind >= BEFORE_CHECKPOINT * _interval(marks) - STEP_BYTES:
                break
    tell(f"filled {written / GIB:.1f} GiB in {time.monotonic() - begun:.0f} s, {len(marks) - 1} checkpoints")
    return written, behind


def _interval(marks: list[int]) -> float:
    """Bytes between two checkpoints, as seen."""
    return float(np.median(np.diff(marks[1:])))


def _checkpoint(stage: Stage) -> int:
    """Changes with every checkpoint."""
    return max((path.stat().st_mtime_ns for path in stage.directory.glob("node-1/checkpoint-*")), default=0)


def _path(position: int) -> tuple[str, int]:
    return f"/records-{position // FILE_BYTES}", position % FILE_BYTES


def _first_read(stage: Stage, memory: Memory, begun: float) -> float:
    """Seconds from the start of the process to the first bytes of old data, as a new client gets them."""
    expected = memory.source.array[:RECORD_BYTES].tobytes()
    with connect(stage.control, transport="tcp", timeout_s=READ_S) as client:
        while True:
            try:
                found = client.read(_path(0)[0], 0, RECORD_BYTES)
            except (errors.Gd2fsError, OSError) as error:
                if time.monotonic() - begun > LIMIT_S:
                    raise RuntimeError(f"nothing was served within {LIMIT_S:g} s: {error}") from error
                time.sleep(AGAIN_S)
                continue
            if found != expected:
                raise RuntimeError("the first read after the recovery brought other bytes than were written")
            return time.monotonic() - begun


def _check(traffic: Traffic, written: int) -> None:
    """Reads records from all over the log; `Traffic.read` compares them."""
    order = np.random.default_rng(3).permutation(written // RECORD_BYTES)[:CHECKED]
    by_path: dict[str, list[int]] = {}
    for number in order:
        path, offset = _path(int(number) * RECORD_BYTES)
        by_path.setdefault(path, []).append(offset)
    for path, offsets in by_path.items():
        traffic.read(path, offsets, RECORD_BYTES)
