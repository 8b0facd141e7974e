"""Writers that may not write any more: with an epoch that is over, or below a seal. What they try must change
nothing, also after their node was killed and came back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gd2fs import errors
from gd2fs.bench.torture.check import MISSING, Violation
from gd2fs.bench.torture.cluster import SEAL, Cluster
from gd2fs.bench.torture.pattern import pattern
from gd2fs.client import Client
from gd2fs.client.files import File
from gd2fs.signing import Capability, Keys

UNIT = 64 << 10
SEALED = UNIT // 2
LIFE_S = 600
TIMEOUT_S = 5.0
_FIRST, _LATE, _LAST = 1, 2, 3
"""Versions: what stands there from the start; what must never stand anywhere; what is written at the end."""


@dataclass(slots=True)
class StaleWriters:
    """A file on each node whose epoch was raised behind its writer's back; its first half is sealed."""

    cluster: Cluster
    client: Client
    violations: list[Violation] = field(default_factory=list)
    attempts: int = 0
    _since: float = 0.0
    _losses: bool = False
    _files: dict[str, tuple[str, File]] = field(default_factory=dict)
    """Of each node, path and the writer's open file."""

    def prepare(self, directory: str) -> None:
        """Makes a file on each node, then raises its epoch and seals it there, as control would in a change
        of membership that the writer does not hear of."""
        self._since = time.monotonic()
        wanted = set(self.cluster.nodes)
        for number in range(8 * len(wanted)):
            path = f"{directory}/stale-{number}"
            info, layout = self.client.namespace.create(path, UNIT, 1)
            column = layout["columns"][0]
            node = column["replicas"][0]["node"]
            if node not in wanted:
                continue
            wanted.discard(node)
            current = _signed(self.client, layout, self.cluster.time())
            file = self.client.open_layout(layout)
            self._files[node] = path, file
            file.write(0, pattern(str(info.file_id), _FIRST, 0, UNIT))
            if self.cluster.nodes[node].disks:
                self.client.flush(path)
            item = {key: layout[key] for key in ("file", "stripe_unit", "width")}
            item |= {"column": 0, "grant": 0, "length": SEALED}
            item |= {"epoch": column["epoch"] + 1, "born": column["born"]}
            (answer,) = self.cluster.ask(node, SEAL, [item])
            if answer["status"]:
                raise errors.from_code(answer["status"], answer["message"])
            self._try_sealed(path, current)
            if not wanted:
                return

    def attempt(self, losses: bool = False) -> None:
        """Tries, and looks at the bytes, which may be missing where ``losses`` are allowed: a full node gave
        them up, or its disks flip bits. All must be up."""
        self._losses = losses
        for node, (path, old) in self._files.items():
            try:
                self._attempt(node, path, old)
            except errors.Expired as error:
                what = f"its capability is new, and: {error}"
                self.violations.append(Violation("unreadable", path, 0, UNIT, what))

    def _attempt(self, node: str, path: str, old: File) -> None:
        # Control knows nothing of the new epoch: its layout is the stale writer's.
        stale = self.client.namespace.layout(path, "read,write")
        current = _signed(self.client, stale, self.cluster.time())
        file = stale["file"]
        self._refused(path, old, file, 0, "epoch")
        self._refused(path, self.client.open_layout(stale), file, 0, "epoch")
        if self.cluster.timeline.died(node, self._since) and not self.cluster.nodes[node].disks:
            # The seal went with the bytes; the epoch is kept on its disk in any case.
            return
        self._try_sealed(path, current)
        # Above the seal whoever is current may write.
        self.client.open_layout(current).write(
            SEALED, pattern(file, _LAST, SEALED, UNIT - SEALED), timeout_s=TIMEOUT_S
        )
        self._refused(path, old, file, SEALED, "epoch")
        self._stands(path, current, _FIRST, 0, SEALED)
        self._stands(path, current, _LAST, SEALED, UNIT)

    def _try_sealed(self, path: str, current: dict[str, Any]) -> None:
        """Even the current writer changes nothing below the seal."""
        for start in (0, SEALED - 1):
            self._refused(path, self.client.open_layout(current), current["file"], start, "seal")
        self._stands(path, current, _FIRST, 0, SEALED)

    def _refused(self, path: str, writer: File, file: str, start: int, guard: str) -> None:
        self.attempts += 1
        try:
            writer.write(start, pattern(file, _LATE, start, SEALED), timeout_s=TIMEOUT_S)
        except errors.Gd2fsError:
            return
        what = f"a write that the {guard} forbids was acknowledged"
        self.violations.append(Violation("stale_writes", path, start, start + SEALED, what))

    def _stands(self, path: str, layout: dict[str, Any], version: int, start: int, end: int) -> None:
        """The range is there, with the bytes of ``version``."""
        buffer = np.zeros(end - start, np.uint8)
        try:
            moved = self.client.open_layout(layout).read_into(start, buffer, timeout_s=TIMEOUT_S)
        except (*MISSING, errors.Hole) as error:
            if not self._losses:
                self.violations.append(Violation("lost_after_flush", path, start, end, str(error)))
            return
        expected = pattern(layout["file"], version, start, end - start)
        if moved != end - start or not np.array_equal(buffer, expected):
            late = pattern(layout["file"], _LATE, start, end - start)
            kind = "stale_writes" if np.any((buffer == late) & (buffer != expected)) else "wrong_bytes"
            self.violations.append(Violation(kind, path, start, end, f"not what was written as {version}"))


def _signed(client: Client, stale: dict[str, Any], now: float) -> dict[str, Any]:
    """The layout with the next epoch, signed with the development key as control would."""
    columns = [column | {"epoch": column["epoch"] + 1} for column in stale["columns"]]
    expiry = int(now) + LIFE_S
    capability = Capability(
        tenant=client.tenant,
        file=stale["file"],
        file_class="cache",
        stripe_unit=stale["stripe_unit"],
        width=stale["width"],
        rights=("read", "write"),
        ranges=(),
        grant=0,
        columns=[(column["epoch"], column["born"]) for column in columns],
        nodes=[[column["replicas"][0]["node"]] for column in columns],
        expiry=expiry,
        bearer=True,
    )
    signed = Keys.development().sign(capability)
    return stale | {"columns": columns, "capability": signed, "expires_at": expiry, "refresh": False}
