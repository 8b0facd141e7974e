"""One client process: threads that do random things to files of their own and write down what they are told.

It ends with SIGTERM, after the operations under way; or it is killed, and another one goes on with its
journal.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from gd2fs import errors
from gd2fs.bench.torture.check import Allowance, Reader
from gd2fs.bench.torture.journal import Journal, Operation
from gd2fs.bench.torture.model import FileModel, models
from gd2fs.bench.torture.pattern import pattern
from gd2fs.bench.torture.turns import Conversation
from gd2fs.client import Client
from gd2fs.client.connect import connect
from gd2fs.config.serving import die_with_parent

ROOT = "/torture"
THREADS = 4
TIMEOUT_S = 3.0
"""Of one request; longer than a node needs to be back after a kill would hide nothing and cost time."""
PAUSE_S = 0.004
"""Between operations, on average: the machine is shared with the nodes."""
TROUBLE_S = 0.1
UNITS = (64 << 10, 128 << 10, 256 << 10, 1 << 20)
WRITE_BYTES_MAX = 256 << 10
FILE_BYTES_MAX = 2 << 20
FILES_MAX = 8
"""Of one thread."""

#: (operation, weight)
MIX = (
    ("write", 60),
    ("read", 14),
    ("flush", 8),
    ("create", 5),
    ("turn", 6),
    ("warm", 3),
    ("delete", 3),
    ("forget", 1),
)


@dataclass(slots=True)
class Worker:
    """One thread and its files, of at most ``budget`` bytes."""

    client: Client
    journal: Journal
    random: Random
    name: str
    budget: int
    width_max: int
    files: dict[str, FileModel] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    made: int = 0
    conversation: Conversation | None = None

    def run(self, stop: threading.Event) -> None:
        self.conversation = Conversation(
            self.client, self.journal, self.random, self._adopt, self._version, self._applied, TIMEOUT_S
        )
        kinds, weights = zip(*MIX, strict=True)
        while not stop.is_set():
            (kind,) = self.random.choices(kinds, weights)
            try:
                getattr(self, f"_{kind}")()
            except errors.Gd2fsError:
                stop.wait(self.random.uniform(0, TROUBLE_S))
            stop.wait(self.random.expovariate(1 / PAUSE_S))

    def go_on(self, operations: list[Operation]) -> None:
        """Takes the files over that a killed process had in this thread."""
        prefix = f"{ROOT}/{self.name}-"
        mine = [one for one in models(operations).values() if one.path.startswith(prefix)]
        self.files = {model.file: model for model in mine if not model.doomed}
        for operation in operations:
            if operation.kind == "write":
                file = operation.facts["file"]
                self.last[file] = max(self.last.get(file, 0), operation.facts["version"])
        self.made = sum(operation.kind == "create" for operation in operations)

    def _adopt(self, model: FileModel) -> None:
        self.files[model.file] = model

    def _version(self, file: str) -> int:
        self.last[file] = self.last.get(file, 0) + 1
        return self.last[file]

    def _applied(self, operation: Operation) -> None:
        model = self.files.get(operation.facts["file"])
        if model is not None:
            model.apply(operation, None)

    def _plain(self) -> list[FileModel]:
        return [model for model in self.files.values() if not model.session]

    def _any(self) -> FileModel | None:
        return self.random.choice(list(self.files.values())) if self.files else None

    def _create(self) -> None:
        files = self._plain()
        if len(files) >= FILES_MAX or sum(model.length for model in files) > self.budget:
            return self._delete()
        self.made += 1
        path = f"{ROOT}/{self.name}-{self.made}"
        unit, width = self.random.choice(UNITS), self.random.randint(1, self.width_max)
        operation = self.journal.begin("create", path=path, unit=unit)
        try:
            info, layout = self.client.namespace.create(path, unit, width)
        except errors.Gd2fsError as error:
            # It may exist; nobody ever uses it.
            self.journal.end(operation, error)
            raise
        nodes = [column["replicas"][0]["node"] for column in layout["columns"]]
        self.journal.end(operation, file=info.file_id, nodes=nodes)
        self.files.update(models([operation]))
        return None

    def _write(self) -> None:
        files = self._plain()
        if not files or sum(model.length for model in files) > self.budget:
            return self._create()
        model = self.random.choice(files)
        start, length = self._range(model)
        version = self._version(model.file)
        data = pattern(model.file, version, start, length)
        facts = {"file": model.file, "start": start, "end": start + length, "version": version}
        return self._journaled(
            "write", facts, lambda: self.client.write(model.path, start, data, timeout_s=TIMEOUT_S)
        )

    def _range(self, model: FileModel) -> tuple[int, int]:
        """Where to write: over what is there, behind it, or beyond; sizes of all magnitudes."""
        length = max(1, int(math.exp(self.random.uniform(0, math.log(WRITE_BYTES_MAX)))))
        place = self.random.random()
        if place < 0.5:
            start = self.random.randint(0, model.length)
        elif place < 0.85:
            start = model.length
        else:
            start = model.length + self.random.randint(1, 128 << 10)
        if self.random.random() < 0.3:
            unit = self.random.choice((4 << 10, 32 << 10, model.unit))
            start, length = start // unit * unit, max(length // unit, 1) * unit
        start = min(start, FILE_BYTES_MAX)
        return start, min(length, WRITE_BYTES_MAX)

    def _read(self) -> None:
        model = self._any()
        if model is None or model.length == 0:
            return
        start = self.random.randint(0, model.length - 1)
        end = min(model.length, start + self.random.randint(1, WRITE_BYTES_MAX))
        reader = Reader(
            lambda offset, buffer: self.client.read_into(model.path, offset, buffer, timeout_s=TIMEOUT_S),
            model,
            Allowance(),
        )
        reader.part(start, end)
        for found in reader.violations:
            place = {"path": found.path, "start": found.start, "end": found.end}
            self.journal.end(self.journal.begin("violation", blame=found.kind, what=found.what, **place))

    def _flush(self) -> None:
        model = self._any()
        if model is not None:
            self._journaled("flush", {"file": model.file}, lambda: self.client.flush(model.path))

    def _warm(self) -> None:
        model = self._any()
        if model is not None:
            self.client.warm(model.path)

    def _delete(self) -> None:
        files = self._plain()
        if not files:
            return
        model = self.random.choice(files)
        # Whatever comes of it, this thread has no use for it any more.
        del self.files[model.file]
        self._journaled("delete", {"file": model.file}, lambda: self.client.delete(model.path))

    def _turn(self) -> None:
        assert self.conversation is not None
        if self.conversation.stored_bytes > FILE_BYTES_MAX:
            return self._forget()
        return self.conversation.turn()

    def _forget(self) -> None:
        assert self.conversation is not None
        for file in self.conversation.files():
            self.files.pop(file, None)
        self.conversation.forget()

    def _journaled(self, kind: str, facts: dict[str, object], work: Callable[[], object]) -> None:
        operation = self.journal.begin(kind, **facts)
        try:
            work()
            self.journal.end(operation)
        except errors.Gd2fsError as error:
            self.journal.end(operation, error)
            raise
        finally:
            self._applied(operation)


def _fail(failed: threading.ExceptHookArgs) -> None:
    traceback.print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    sys.stderr.flush()
    os._exit(70)


def _connected(control: str, stop: threading.Event) -> Client:
    """A client, as soon as control is there: it may just be killed, too."""
    while True:
        try:
            return connect(control, timeout_s=TIMEOUT_S)
        except errors.Gd2fsError as error:
            if stop.wait(TROUBLE_S):
                raise SystemExit(0) from error


def main() -> None:
    parser = argparse.ArgumentParser(description="One client of the torture; see gd2fs.bench.torture.")
    parser.add_argument("--control", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--budget", type=int, required=True, help="Bytes that each thread keeps.")
    parser.add_argument("--width", type=int, default=1, help="Nodes that a file may lie on.")
    options = parser.parse_args()
    die_with_parent()
    # A thread that dies of a mistake of its own must not pass for one that had nothing to say.
    threading.excepthook = _fail
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    journal = Journal(options.journal)
    before = journal.open()
    with _connected(options.control, stop) as client:
        threads = []
        for number in range(THREADS):
            # Another one after a kill does other things.
            random = Random(f"{options.seed}-{number}-{len(before)}")
            name = f"{options.name}-{number}"
            worker = Worker(client, journal, random, name, options.budget, options.width)
            worker.go_on(before)
            threads.append(threading.Thread(target=worker.run, args=(stop,), name=name))
            threads[-1].start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)


if __name__ == "__main__":
    main()
