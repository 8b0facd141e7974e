"""What commands print: tables for people, or exactly one JSON object; and how failures look."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text, also on failure.")
]
# The exit code of a shell command that Ctrl-C ended.
INTERRUPTED = 130
PIPE_COLUMNS = 250


class CommandFailed(Exception):
    """A command that did its work and found something wrong. `data`: what --json prints instead of an
    error.
    """

    def __init__(self, message: str, data: dict[str, Any] | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.data = data
        self.exit_code = exit_code


_printed = False


def print_json(data: dict[str, Any]) -> None:
    """The one JSON object of a command: what fails after it only says so on stderr, and by its exit code."""
    global _printed
    if not _printed:
        _printed = True
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        sys.stdout.flush()


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on stdout. Columns whose name begins with ">" are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console().print(table)


def console(*, stderr: bool = False) -> Console:
    """Where text for people goes. A pipe or a log has no width to fit into: there, lines stay whole."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = PIPE_COLUMNS
    return found


def escape(cell: Any) -> str:
    """Text that rich prints as it is; file names may look like its markup."""
    from rich.markup import escape as escape_markup

    return "" if cell is None else escape_markup(str(cell))


def report_failure(error: BaseException, as_json: bool) -> int:
    """Prints what failed, last line of stderr included, and returns the exit code."""
    if isinstance(error, typer.TyperException):
        message = error.format_message().replace("Value error, ", "")  # pydantic's, within typer
        code = getattr(error, "exit_code", 2)
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        name = "USAGE"
    elif isinstance(error, (KeyboardInterrupt, typer.Abort)):
        message, code, hint, name = "interrupted", INTERRUPTED, "", "INTERRUPTED"
    else:
        message, hint = str(error) or type(error).__name__, ""
        if isinstance(error, OSError) and error.strerror and not hasattr(error, "retryable"):
            # Without "[Errno 2]", which tells people nothing.
            message = error.strerror + (f": {error.filename}" if error.filename is not None else "")
        code = getattr(error, "exit_code", 1)
        known = hasattr(error, "retryable")  # an error of GD2FS itself, with a code and a name of its own
        name = getattr(error, "name", "") if known else type(error).__name__
        if not known and not isinstance(error, (CommandFailed, OSError, ValueError)):
            # Not an error that anybody foresaw: whoever reports it needs to see where it came from.
            traceback.print_exception(error, file=sys.stderr)
    if as_json:
        data = getattr(error, "data", None)
        facts = {"name": str(name), "message": message, "code": int(getattr(error, "code", 0) or 0)}
        print_json(data if data is not None else {"error": facts})
    # What belongs to it, such as the end of a log, goes before: the last line names what failed.
    summary, _, detail = message.strip().partition("\n")
    if detail:
        sys.stderr.write(detail + "\n")
    sys.stderr.write(f"gd2fs: {summary}{hint}\n")
    return int(code)
