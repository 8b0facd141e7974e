"""What happens to a cluster and its clients in a loop."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from gd2fs.bench.torture.check import Violation

if TYPE_CHECKING:
    from gd2fs.bench.torture.clients import ClientProcess
    from gd2fs.bench.torture.clocks import SetClock
    from gd2fs.bench.torture.cluster import Cluster
    from gd2fs.bench.torture.loop import Counters

MORE_MAX = 3
"""Events of a loop beside the cut or kill that every loop has."""
PAUSE_S_MAX = 0.8
"""Well below a node's lease: a pause is no death."""
SLOW_MS = (5, 120)
FLIP_CHANCE = 0.05
SYNC_MS = (2, 80)
"""A sync takes so long, so that there is something that a cut can take."""
DATA_SYNC_MS = (1, 20)
"""One of the data directory: a node starts, and answers a deletion, after a few."""
CUT_START_CHANCE = 0.5
"""That the power is cut again while the node starts after a cut."""
START_SYNCS_MAX = 8
"""So many begins a start: two each for incarnation and epochs, four for the checkpoint of a log."""
BEGIN_S = 15.0
"""A client that has not begun by then never will."""

#: (event, weight); those of disks are left out where there are none, those of hooks where nodes have none.
KINDS = (
    ("kill_node", 3),
    ("kill_client", 3),
    ("pause_node", 2),
    ("pause_client", 2),
    ("kill_control", 1),
    ("pause_control", 1),
    ("stop_node", 1),
    ("kill_all", 1),
    ("slow_disk", 2),
    ("set_control_clock", 2),
    ("set_node_clock", 2),
)
OF_DISKS = ("slow_disk",)
OF_HOOKS = ("set_node_clock",)


@dataclass(slots=True)
class Events:
    """The events of one loop. ``damage``: bits were flipped, so that anything may be missing afterwards."""

    cluster: Cluster
    clients: list[ClientProcess]
    random: Random
    counters: Counters
    damage: bool
    hooks: bool = False
    """The nodes' clocks can be set: then they are, and control's, in each loop."""
    _story: list[str] = field(default_factory=list)

    @property
    def story(self) -> str:
        return " ".join(self._story)

    def run(self, seconds: float) -> None:
        """Spreads them over ``seconds``; what they stop or kill is back when this returns."""
        disks = [disk for node in self.cluster.nodes.values() for disk in node.powered]
        absent = (() if disks else OF_DISKS) + (() if self.hooks else OF_HOOKS)
        kinds = [(kind, weight) for kind, weight in KINDS if kind not in absent]
        names, weights = zip(*kinds, strict=True)
        for name in self.cluster.nodes:
            self._drag(name)
        self._await_clients()
        chosen = ["power_cut" if disks else "kill_node"]
        chosen += self.random.choices(names, weights, k=self.random.randint(0, MORE_MAX))
        if self.hooks:
            chosen += ["set_node_clock", "set_control_clock"]
        self.random.shuffle(chosen)
        for event in chosen:
            # The first needs something to destroy.
            time.sleep(self.random.uniform(0.3, 1.0) * seconds / len(chosen))
            self._story.append(event)
            getattr(self, f"_{event}")()
        time.sleep(self.random.uniform(0.1, 0.3))

    def _await_clients(self) -> None:
        until = time.monotonic() + BEGIN_S
        while not all(client.journal.exists() for client in self.clients) and time.monotonic() < until:
            time.sleep(0.02)

    def mend(self) -> None:
        """Everything is up and in order; what ended by itself is a violation. With ``damage``, the disks flip
        bits of what is read from now on: after recovery, so that there is something left to damage."""
        self.calm()
        found = self.cluster.crashed()
        self.counters.blame([Violation("crashed", "", 0, 0, what) for what in found], self.story)
        for name, node in self.cluster.nodes.items():
            if node.child is not None and not node.child.running:
                self.cluster.kill_node(name)
                self.cluster.start_node(name)
        if self.damage:
            self._story.append("flips")
            for node in self.cluster.nodes.values():
                for disk in node.disks:
                    disk.rule("flip", on=["read"], chance=FLIP_CHANCE)

    def calm(self) -> None:
        """No disk does anything wrong any more."""
        for node in self.cluster.nodes.values():
            for disk in node.powered:
                disk.clear()

    def _drag(self, name: str) -> None:
        """The node's disks take their time to sync."""
        node = self.cluster.nodes[name]
        for disk in node.powered:
            bounds = DATA_SYNC_MS if disk is node.data else SYNC_MS
            disk.rule("slow", ms=self.random.randint(*bounds), on=["sync"])

    def _node(self) -> str:
        return self.random.choice(list(self.cluster.nodes))

    def _power_cut(self) -> None:
        name = self._node()
        self._count(self.cluster.cut_power(name))
        self._drag(name)
        if self.random.random() < CUT_START_CHANCE:
            self._story.append("(again)")
            self._count(self.cluster.cut_start(name, self.random.randint(1, START_SYNCS_MAX)))
            self._drag(name)
        self.cluster.start_node(name)

    def _count(self, cuts: list[dict[str, int]]) -> None:
        self.counters.power_cuts += 1
        for cut in cuts:
            self.counters.sectors_lost += cut["sectors_lost"]
            self.counters.data_lost += cut["changes_lost"] + cut["files_lost"]

    def _kill_node(self) -> None:
        name = self._node()
        self.cluster.kill_node(name)
        self.counters.kills += 1
        self.cluster.start_node(name)

    def _stop_node(self) -> None:
        name = self._node()
        if not self.cluster.stop_node(name):
            what = f"{name} did not end in order"
            self.counters.blame([Violation("crashed", name, 0, 0, what)], self.story)
        self.cluster.start_node(name)

    def _pause_node(self) -> None:
        self._pause(self._node())

    def _pause_control(self) -> None:
        self._pause("control")

    def _pause(self, name: str) -> None:
        self.cluster.signal(name, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.05, PAUSE_S_MAX))
        self.cluster.signal(name, signal.SIGCONT)

    def _kill_control(self) -> None:
        self.cluster.kill_control()
        self.counters.kills += 1
        time.sleep(self.random.uniform(0, 0.3))
        self.cluster.start_control()

    def _kill_client(self) -> None:
        client = self.random.choice(self.clients)
        client.kill()
        self.counters.kills += 1
        client.start()

    def _pause_client(self) -> None:
        client = self.random.choice(self.clients)
        client.signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.05, PAUSE_S_MAX))
        client.signal(signal.SIGCONT)

    def _kill_all(self) -> None:
        """Everything at one moment, as a power cut of a rack."""
        for client in self.clients:
            client.kill()
        self.cluster.kill_control()
        for name in self.cluster.nodes:
            self.cluster.kill_node(name)
        self.counters.kills += 1
        self.cluster.start_control()
        for name in self.cluster.nodes:
            self.cluster.start_node(name)
        for client in self.clients:
            client.start()

    def _set_node_clock(self) -> None:
        name = self._node()
        down = self.random.random() < 0.3
        if down:
            self.cluster.kill_node(name)
        self._set(self.cluster.nodes[name].clock)
        if down:
            self.cluster.start_node(name)

    def _set_control_clock(self) -> None:
        down = self.random.random() < 0.3
        if down:
            self.cluster.kill_control()
        self._set(self.cluster.clock)
        if down:
            self.cluster.start_control()

    def _set(self, clock: SetClock) -> None:
        self._story.append(f"({clock.jump(self.random):+} s)")
        self.counters.clocks_set += 1

    def _slow_disk(self) -> None:
        node = self.cluster.nodes[self._node()]
        for disk in node.powered:
            disk.rule("slow", ms=self.random.randint(*SLOW_MS), chance=0.5, times=self.random.randint(5, 60))
