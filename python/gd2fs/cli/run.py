"""The commands that run something: control, node, engine, gateway, up and demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gd2fs.cli.connection import ControlOption
from gd2fs.cli.output import JsonFlag

AnnounceOption = Annotated[
    Path | None,
    typer.Option(
        "--announce",
        metavar="FILE",
        help="Write the real addresses to FILE as JSON once it serves; for scripts that use port 0.",
    ),
]


UP_DIRECTORY = Path("gd2fs-data")


def _begin(flags: dict[str, Any]) -> Any:
    """Reads the configuration for a process that serves; its log goes to stderr."""
    import logging

    from gd2fs.config import load
    from gd2fs.config.serving import allow_many_files, die_with_parent

    die_with_parent()
    allow_many_files()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return load(flags)


def control(
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to listen. Default 127.0.0.1:7527.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Directory of the SQLite database.")] = None,
    database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL, instead of SQLite in the data directory.")
    ] = None,
    announce: AnnounceOption = None,
) -> None:
    """Run control: names, layouts, membership and sessions. It never touches file bytes."""
    loaded = _begin({"control.listen": listen, "control.data_dir": data_dir, "control.database": database})
    from gd2fs.cli.servers import run_control

    run_control(loaded, announce)


def node(
    id: Annotated[
        str | None, typer.Option("--id", help="Name of this node. Default: the host's name.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="tcp://HOST:PORT",
            help="Data addresses, with commas between. Default tcp://127.0.0.1:7528.",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help="For /health and /metrics. Default 127.0.0.1:7529."),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Directory of the node's own state.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="DRAM for file data, such as 4GiB. Default 1GiB.")
    ] = None,
    logs: Annotated[
        str | None,
        typer.Option(
            metavar="PATH[,PATH...]", help="Log files or block devices. Default: none, memory only."
        ),
    ] = None,
    log_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size to make each log file with, such as 100GiB.")
    ] = None,
    control: ControlOption = None,
    announce: AnnounceOption = None,
) -> None:
    """Run a storage node: it owns bytes and serves them."""
    loaded = _begin(
        {
            "node.id": id,
            "node.listen": listen,
            "node.http_listen": http,
            "node.data_dir": data_dir,
            "node.memory_bytes": memory,
            "node.logs": logs,
            "node.log_bytes": log_bytes,
            "cluster.control": control,
        }
    )
    from gd2fs.node import run

    raise typer.Exit(run(loaded, str(announce) if announce else None))


def engine(
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to listen. Default 127.0.0.1:8100.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE", help="A GGUF file. Default: SmolLM2-135M-Instruct.")
    ] = None,
    keep_local: Annotated[
        bool | None,
        typer.Option(
            "--keep-local/--stateless",
            help="Keep KV cache between requests, for comparison. Default: stateless.",
        ),
    ] = None,
    storage: Annotated[
        bool | None,
        typer.Option(
            "--storage/--no-storage",
            help="Use GD2FS also for requests that bring KV metadata without a plan. Default: yes.",
        ),
    ] = None,
    control: ControlOption = None,
    announce: AnnounceOption = None,
) -> None:
    """Run the reference engine: a small real model on the CPU behind the OpenAI API."""
    loaded = _begin(
        {
            "engine.listen": listen,
            "engine.model": model,
            "engine.keep_local": keep_local,
            "engine.storage": storage,
            "cluster.control": control,
        }
    )
    from gd2fs.cli.servers import run_engine

    run_engine(loaded, announce)


def gateway(
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to listen. Default 127.0.0.1:8000.")
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option("--engines", metavar="URL[,URL...]", help="The engines. Default http://127.0.0.1:8100."),
    ] = None,
    control: ControlOption = None,
    announce: AnnounceOption = None,
) -> None:
    """Run the gateway: the OpenAI API in front of the engines, with KV cache planned for every request."""
    loaded = _begin({"gateway.listen": listen, "gateway.engines": engines, "cluster.control": control})
    from gd2fs.cli.servers import run_gateway

    run_gateway(loaded, announce)


def up(
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Storage nodes to run.")] = 1,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="DRAM of each node.")] = "1GiB",
    log: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Give each node a log file of this size in its directory: data outlives a restart.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Control's port; 0 for any free one.")] = 7527,
    data_dir: Annotated[
        Path, typer.Option(help="Directory for the cluster's state and logs.")
    ] = UP_DIRECTORY,
    as_json: JsonFlag = False,
) -> None:
    """Run a whole cluster on this machine: control and storage nodes, until Ctrl-C.

    With --json, one object with the addresses is printed once everything serves.
    """
    from gd2fs.cli.up import run_cluster

    run_cluster(nodes, memory, log, port, data_dir, as_json)


def demo(
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Another conversation, in the form of the shipped one."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep-logs", metavar="DIR", help="Keep the logs of all processes in DIR.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """See it work: a conversation of eight turns, each served by another engine from KV cache in GD2FS.

    Starts control, two storage nodes, engines with a real model and a gateway on this machine; kills one
    engine on the way; checks every turn by recomputation. Takes a few minutes, leaves nothing behind. Exit
    code 1 if a check fails.
    """
    from gd2fs.demo import run_demo

    run_demo(text, keep, as_json)
