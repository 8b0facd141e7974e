"""The tree of commands, and what becomes of their failures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gd2fs.cli import bench, configuration, doctor, files, run, sessions, status, token, top, upkeep
from gd2fs.cli.output import INTERRUPTED, report_failure

CLUSTER = "Cluster"
FILES = "Files"
MACHINE = "This machine"

app = typer.Typer(
    name="gd2fs",
    help=(
        "GD2FS keeps the KV cache of LLM conversations in a distributed file system, so that any "
        "engine can serve any turn. Begin with [bold]gd2fs demo[/bold], or with [bold]gd2fs up[/bold] for a "
        "cluster on this machine."
    ),
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from gd2fs import __version__

        typer.echo(f"gd2fs {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options of every command."""


app.command("demo", rich_help_panel=CLUSTER)(run.demo)
app.command("up", rich_help_panel=CLUSTER)(run.up)
app.command("control", rich_help_panel=CLUSTER)(run.control)
app.command("node", rich_help_panel=CLUSTER)(run.node)
app.command("engine", rich_help_panel=CLUSTER)(run.engine)
app.command("gateway", rich_help_panel=CLUSTER)(run.gateway)
app.command("status", rich_help_panel=CLUSTER)(status.status)
app.command("top", rich_help_panel=CLUSTER)(top.top)
app.command("fsck", rich_help_panel=CLUSTER)(upkeep.fsck)
app.command("scrub", rich_help_panel=CLUSTER)(upkeep.scrub)
app.command("ls", rich_help_panel=FILES)(files.ls)
app.command("stat", rich_help_panel=FILES)(files.stat)
app.command("put", rich_help_panel=FILES)(files.put)
app.command("get", rich_help_panel=FILES)(files.get)
app.command("cat", rich_help_panel=FILES)(files.cat)
app.command("rm", rich_help_panel=FILES)(files.rm)
app.command("where", rich_help_panel=FILES)(files.where)
app.command("warm", rich_help_panel=FILES)(files.warm)
app.command("flush", rich_help_panel=FILES)(files.flush)
app.add_typer(sessions.app, name="sessions", rich_help_panel=FILES)
app.add_typer(configuration.app, name="config", rich_help_panel=MACHINE)
app.add_typer(token.app, name="token", rich_help_panel=MACHINE)
app.add_typer(bench.app, name="bench", rich_help_panel=MACHINE)
app.command("doctor", rich_help_panel=MACHINE)(doctor.doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # Asked here and not in the commands, because wrong usage is found before any command runs.
    as_json = "--json" in arguments
    try:
        code = app(arguments, standalone_mode=False, prog_name="gd2fs")
    except BrokenPipeError:
        # The reader of our output went away (`gd2fs ls | head`): nobody is left to tell.
        sys.stderr.close()
        raise SystemExit(1) from None
    except (Exception, KeyboardInterrupt) as error:
        raise SystemExit(report_failure(error, as_json)) from None
    if code == INTERRUPTED:
        # typer turns Ctrl-C into a return value, without a word.
        report_failure(KeyboardInterrupt(), as_json)
    raise SystemExit(code if isinstance(code, int) else 0)
