"""Torture: clients that write down what was acknowledged to them, processes that die at random moments, and a
check of every byte afterwards.

- `pattern`: the bytes of any place of any version of any file, so that nobody keeps data;
- `journal`: what a client was about to do, and what it was told; outside of the node, and it outlives its
  writer;
- `model`: what each byte may be, from those journals;
- `writer`, `turns`: the clients;
- `stale`: writers that must not be able to write any more;
- `disk`, `clocks`, `cluster`: disks whose power can be cut, clocks that can be set, control and nodes;
- `check`: reads everything back;
- `loop`: one loop after the other; `mutants`: the same with one guard switched off, which must be noticed.

Everything that is left to chance comes from a seed: the operations of each client, the moments and kinds of
events, what a power cut leaves. Threads and processes still race, so a seed repeats the story, not its every
interleaving.
"""

from gd2fs.bench.torture.loop import CLUSTERS, Counters, Settings, Torture

__all__ = ["CLUSTERS", "Counters", "Settings", "Torture"]
