"""gd2fs bench: what this machine gets out of GD2FS, beside its ceilings and its competitors."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gd2fs.cli.output import CommandFailed, JsonFlag, console, print_json

app = typer.Typer(help="Measure GD2FS on this machine.", no_args_is_help=True)

#: Where a checkout keeps its results.
RESULTS = Path("benchmarks/results")


@app.command("io")
def io(
    full: Annotated[bool, typer.Option("--full", help="The whole grid; takes much longer.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also Mooncake Store and NIXL, installed on first use.")
    ] = False,
    transport: Annotated[
        Literal["all", "tcp", "shm"], typer.Option(help="Which transports of GD2FS to measure.")
    ] = "all",
    sizes: Annotated[
        str,
        typer.Option(metavar="SIZE[,SIZE...]", help="Sizes of requests, such as 64KiB,1GiB."),
    ] = "",
    rounds: Annotated[
        int, typer.Option(min=0, max=1000, help="Measurements of each figure. Default 7, with --full 3.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep result and chart there. Default in a checkout, without --json: benchmarks/results.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Reading and writing byte ranges: GD2FS beside memory copies, bare sockets and Redis, all in one run.

    Starts control, a node, a raw socket server and Redis on this machine (Debian's package is installed if it
    is missing and we are root), and ends them. Everything is measured in rounds with changing order; figures
    are medians. The default run takes at most 12 minutes on two cores. See docs/reference/bench.md.
    """
    from gd2fs.bench.cases import TRANSPORTS
    from gd2fs.bench.io import Options, run_io
    from gd2fs.bench.table import print_tables

    if output is not None and not output.is_dir():
        raise NotADirectoryError(f"--output: {output} is not a directory; make it first")
    options = Options(
        full=full,
        peers=peers,
        transports=TRANSPORTS if transport == "all" else (transport,),
        sizes=_sizes(sizes),
        rounds=rounds,
    )
    notes = console(stderr=True)
    result = run_io(options, lambda text: notes.print(text, markup=False))
    if as_json:
        print_json(result)
    else:
        print_tables(result)
        output = output or (RESULTS if RESULTS.is_dir() else None)
    if output is not None:
        for path in _keep(result, output):
            notes.print(f"wrote {path}", markup=False)


@app.command("tiers")
def tiers(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, 3 loops; at most 5 minutes.")] = False,
    loops: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Loops of torture. Default 100, with --quick 3.")
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="PART[,PART...]", help="Which parts to run; see docs/reference/bench.md.")
    ] = "",
    directory: Annotated[
        Path, typer.Option(metavar="DIR", help="On the disk to measure; needs 17 GiB, with --quick 3.")
    ] = Path("."),
    seed: Annotated[int, typer.Option(min=0, help="Of the torture's first loop.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Memory and log together: beside fio, beside a node without a log, full, killed, tortured; in one run.

    Starts its own control and nodes on this machine, and ends them. fio, Debian's package, is installed if it
    is missing and we are root. A full run takes about an hour. Ends with 1 if a target is missed (with
    --quick: one that is not about speed) or a part failed. See docs/reference/bench.md.
    """
    from gd2fs.bench.tiers.figures import shortfalls
    from gd2fs.bench.tiers.plan import QUICK, Options, Sizes
    from gd2fs.bench.tiers.run import run_tiers
    from gd2fs.bench.tiers.show import print_tables

    if not directory.is_dir():
        raise NotADirectoryError(f"--directory: {directory} is not a directory; make it first")
    sizes = QUICK if quick else Sizes()
    notes = console(stderr=True)

    def tell(text: str) -> None:
        notes.print(text, markup=False)

    parts = _parts(only, quick, tell)
    result = run_tiers(Options(directory.resolve(), parts, sizes, loops or sizes.torture_loops, seed), tell)
    if as_json:
        print_json(result)
    else:
        print_tables(result)
    if found := shortfalls(result, quick):
        raise CommandFailed("; ".join(found))


def _parts(only: str, quick: bool, tell: Callable[[str], None]) -> tuple[str, ...]:
    """The parts that were asked for, in their order."""
    from gd2fs.bench.tiers.plan import PARTS, SLOW

    wanted = [part.strip() for part in only.split(",") if part.strip()]
    for part in wanted:
        if part not in PARTS:
            raise typer.BadParameter(f"--only: {part!r} is none of {', '.join(PARTS)}")
    if quick and not wanted:
        tell(f"--quick leaves out {', '.join(SLOW)}; name them in --only")
        return tuple(part for part in PARTS if part not in SLOW)
    return tuple(part for part in PARTS if part in wanted or not wanted)


def _sizes(text: str) -> tuple[int, ...]:
    from gd2fs.config.units import parse_bytes

    found = tuple(parse_bytes(part) for part in text.split(",") if part)
    for size in found:
        # Powers of two keep requests on the bounds of stripe units, as those of an engine are.
        if size < 1024 or size & (size - 1) or size > 1 << 30:
            raise typer.BadParameter(f"--sizes: {size} bytes is not a power of two from 1KiB to 1GiB")
    return found


def _keep(result: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Writes the result, with when and how it came about, and its chart."""
    from gd2fs.bench.plot import chart

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    data = directory / f"{now[:10]}-io.json"
    command = shlex.join(["gd2fs", *sys.argv[1:]])
    record = {"date": now, "machine": result["machine"], "command": command, "result": result}
    data.write_text(json.dumps(record, indent=1) + "\n")
    picture = data.with_suffix(".svg")
    picture.write_text(chart(result))
    return data, picture
