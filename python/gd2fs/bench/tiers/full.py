"""A full store: reads of what is resident, while one writer offers many times what fits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gd2fs import errors
from gd2fs.bench.cases import MIB, STREAMS
from gd2fs.bench.samples import Sample
from gd2fs.bench.tiers.figures import GRACE_S, latencies_ms, over, rates
from gd2fs.bench.tiers.plan import Sizes
from gd2fs.bench.tiers.stage import Stage
from gd2fs.bench.tiers.traffic import Memory, Traffic
from gd2fs.client import Client

#: The writer offers so many times the size of the log, which is what the store keeps.
OFFERED = 10
#: Read from start to end, again and again, in less than the quarter of a second for which nothing goes that
#: was used.
HOT_BYTES = 64 * MIB
READ_BYTES, WRITE_BYTES = MIB, 4 * MIB
READS_OUTSTANDING = 16
FILE_WRITES = 8
DEADLINE_S = 10.0
#: What a caller waits after a refusal that says "try again later".
PAUSE_S = 0.05
#: Reads of what is resident that may have had to wait for the log all the same.
COLD_MAX = 0.02
RESIDENT = "/resident"


class Writer:
    """One client that writes new files until it has offered ``budget`` bytes, refused ones included, or is
    told to stop. It waits for each request and makes the next one at once."""

    def __init__(self, client: Client, budget: int) -> None:
        self._client = client
        self._writes = budget // WRITE_BYTES
        self._stopped = threading.Event()
        self._buffer = bytes(range(256)) * (WRITE_BYTES // 256)
        self.refused: Counter[str] = Counter()
        self.accepted = 0
        self.longest_s = 0.0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Raises what went wrong and is no refusal."""
        self._stopped.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            for number in range(self._writes):
                if self._stopped.is_set():
                    break
                self._one(number)
        except BaseException as error:
            self.failure = error

    def _one(self, number: int) -> None:
        path = f"/offered-{id(self)}-{number // FILE_WRITES}"
        if number % FILE_WRITES == 0:
            self._client.create(path)
        begun = time.monotonic()
        refusal = ""
        try:
            self._client.write(path, number % FILE_WRITES * WRITE_BYTES, self._buffer)
        except (errors.NoSpace, errors.Overloaded, errors.Timeout) as error:
            refusal = type(error).__name__
        self.longest_s = max(self.longest_s, time.monotonic() - begun)
        if refusal:
            self.refused[refusal] += 1
            self._stopped.wait(PAUSE_S)
        else:
            self.accepted += WRITE_BYTES


def measure(directory: Path, sizes: Sizes, memory: Memory) -> dict[str, Any]:
    """Rounds of reads alone, and of the same beside the writer."""
    size = sizes.full_memory // 4
    with ExitStack() as stack:
        stage = stack.enter_context(Stage(directory / "full", sizes.full_memory, sizes.full_log))
        reader = Traffic(
            stack.enter_context(stage.connect(STREAMS, DEADLINE_S)), memory, READS_OUTSTANDING, DEADLINE_S
        )
        writing = stack.enter_context(stage.connect(STREAMS, DEADLINE_S))
        reader.fill(RESIDENT, size)
        # Until both tiers are full. What is read meanwhile stays.
        _, filler = _round(stage, reader, size, Writer(writing, sizes.full_log * 3 // 2))
        alone, beside, writers = [], [], [filler]
        before = stage.metrics()
        for _ in range(sizes.rounds):
            alone.append(_pass(reader, size, 4))
            sample, writer = _round(
                stage, reader, size, Writer(writing, OFFERED * sizes.full_log // sizes.rounds)
            )
            beside.append(sample)
            writers.append(writer)
        after = stage.metrics()
    counted = {name: after.get(name, 0) - before.get(name, 0) for name in after}
    hot = _refusing(directory, memory)
    cold, dram = counted["hits_nvme_total"], counted["hits_dram_total"]
    if cold > COLD_MAX * (cold + dram):
        raise RuntimeError(f"{cold:.0f} of {cold + dram:.0f} reads of resident data found it in the log only")
    longest = max(
        [hot["longest_request_s"], *(writer.longest_s for writer in writers)]
        + [max(sample.latencies_s) for sample in alone + beside]
    )
    return {
        "ratio": over(beside, alone),
        "alone": rates(alone) | latencies_ms(alone),
        "beside_writer": rates(beside) | latencies_ms(beside),
        "offered_bytes": OFFERED * sizes.full_log,
        "accepted_bytes": sum(writer.accepted for writer in writers[1:]),
        "evicted_log_bytes": int(counted["evicted_log_bytes_total"]),
        "refusals_of_node": hot["refusals_of_node"],
        "refusals_before_payload": hot["refusals_before_payload"],
        "refusing": hot,
        "longest_request_s": longest,
        "deadline_s": DEADLINE_S,
        "within_deadline": longest <= DEADLINE_S + GRACE_S,
    }


def _refusing(directory: Path, memory: Memory) -> dict[str, Any]:
    """A store without a log and full of what is read all the time, so that nothing may go: the writer is
    refused. Raises Lost if something went."""
    with ExitStack() as stack:
        stage = stack.enter_context(Stage(directory / "refusing", HOT_BYTES, None))
        reader = Traffic(
            stack.enter_context(stage.connect(STREAMS, DEADLINE_S)), memory, READS_OUTSTANDING, DEADLINE_S
        )
        reader.fill(RESIDENT, HOT_BYTES)
        before = stage.metrics()
        writing = stack.enter_context(stage.connect(STREAMS, DEADLINE_S))
        sample, writer = _round(stage, reader, HOT_BYTES, Writer(writing, OFFERED * HOT_BYTES))
        after = stage.metrics()
    counted = {name: after.get(name, 0) - before.get(name, 0) for name in after}
    return {
        "offered_bytes": OFFERED * HOT_BYTES,
        "accepted_bytes": writer.accepted,
        "refused": dict(writer.refused),
        "refusals_of_node": int(sum(value for name, value in counted.items() if name in _REFUSALS)),
        "refusals_before_payload": int(counted["writes_refused_unread_total"]),
        "gb_per_s": round(sample.gb_per_s, 3),
        "longest_request_s": round(max(writer.longest_s, *sample.latencies_s), 3),
    }


_REFUSALS = ("errors_total NO_SPACE", "errors_total OVERLOADED")


def _pass(reader: Traffic, size: int, times: int) -> Sample:
    offsets = [offset for _ in range(times) for offset in range(0, size, READ_BYTES)]
    return reader.read(RESIDENT, offsets, READ_BYTES)


def _round(stage: Stage, reader: Traffic, size: int, writer: Writer) -> tuple[Sample, Writer]:
    """Reads from the writer's first request to its last."""
    passes = []
    writer.start()
    try:
        while not writer.over:
            passes.append(_pass(reader, size, 1))
    finally:
        writer.stop()
    # The next reads alone shall be alone.
    stage.settle()
    latencies = [latency for sample in passes for latency in sample.latencies_s]
    total, seconds = sum(s.bytes for s in passes), sum(s.seconds for s in passes)
    return Sample(total, seconds, None, latencies), writer
