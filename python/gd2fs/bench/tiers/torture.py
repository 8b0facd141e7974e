"""The torture of gd2fs.bench.torture, and its mutants, as parts of this run."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from gd2fs.bench.tiers.plan import Options, Tell
from gd2fs.bench.torture import CLUSTERS, Counters, Settings, Torture
from gd2fs.bench.torture.mutants import build, run_mutants

#: Kept in the result; all are told.
VIOLATIONS_MAX = 50


def measure(options: Options, tell: Tell) -> dict[str, Any]:
    """Loops on nodes with logs, kill -9 and power cuts. Raises NoDisk where no power can be cut."""
    begun, counters = time.monotonic(), Counters()
    for nodes, logs, share in CLUSTERS:
        if not (loops := round(share * options.loops)):
            continue
        directory = options.directory / f"torture-{nodes}"
        directory.mkdir()
        tell(f"{loops} loops of {nodes} node(s) with {logs} log(s)")
        with Torture(Settings(directory, seed=options.seed, nodes=nodes, logs=logs)) as torture:
            counters.add(torture.run(loops, tell))
    found = asdict(counters)
    found["violations"] = found["violations"][:VIOLATIONS_MAX]
    return found | {"clean": counters.clean, "seconds": round(time.monotonic() - begun, 1)}


def mutants(options: Options, tell: Tell) -> dict[str, Any]:
    """One guard off at a time. Raises RuntimeError if nothing can be built, or if the torture finds faults
    with all guards on, which proves nothing."""
    tell("Building nodes whose guards can be switched off")
    module = build()
    results = run_mutants(Settings(options.directory, seed=options.seed, logs=1), module)
    plain = results.pop("")
    if plain["caught"]:
        raise RuntimeError(f"with all guards on, the torture found faults: {plain['by']}")
    caught = sum(bool(result["caught"]) for result in results.values())
    return {"tried": len(results), "caught": caught, "guards": results}
