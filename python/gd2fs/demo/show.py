"""What the demo shows: a table that grows by a row each turn, then what was checked and how to go on."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gd2fs.cli.output import console
from gd2fs.demo.checks import Check
from gd2fs.demo.conversation import REPEATS, Turn

COLUMNS = (
    "turn", "engine", "prompt", "reusable", "cached", "hit", "loaded",
    "TTFT", "recomputed", "local", "identical",
)  # fmt: skip


class Show:
    """On a terminal the table is live; elsewhere each step is a line. With `quiet`, everything goes to
    stderr.
    """

    def __init__(self, quiet: bool) -> None:
        self.console = console(stderr=quiet)
        self._table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in COLUMNS:
            self._table.add_column(name, justify="left" if name in ("engine", "identical") else "right")
        self._live: Live | None = None

    def step(self, text: str) -> None:
        """One line of what happens."""
        self.console.print(Text(text))

    def begin(self) -> None:
        if self.console.is_terminal:
            self._live = Live(self._table, console=self.console, auto_refresh=False)
            self._live.start()

    def turn(self, turn: Turn) -> None:
        fields = row(turn)
        self._table.add_row(*fields)
        if self._live:
            self._live.refresh()
        else:
            self.step("  ".join(f"{name} {value}" for name, value in zip(COLUMNS, fields, strict=True)))

    def end(self) -> None:
        """Stops the live table; safe to call again."""
        if self._live:
            self._live.stop()
            self._live = None

    def conversation(self, turns: list[Turn], questions: list[str]) -> None:
        self.console.print("\n[bold]What was said[/bold]")
        for turn, question in zip(turns, questions, strict=True):
            answer = " ".join(turn.answer.text.split())
            self.console.print(f"  {turn.number}. {escape(question)}\n     [dim]{escape(answer)}[/dim]")

    def checks(self, checks: list[Check], seconds: float) -> None:
        self.console.print("\n[bold]What was checked[/bold]")
        for check in checks:
            mark = "[green]ok[/green]    " if check.ok else "[red]FAILED[/red]"
            self.console.print(f"  {mark} {escape(check.name)} [dim]({escape(check.detail)})[/dim]")
        self.console.print(
            "\nTTFT is measured in the stream. With GD2FS: as it happened, once. Recomputed: once, for the "
            f"last turn the median of {REPEATS}. Local: the median of {REPEATS}. {seconds:.0f} s in all."
        )

    def go_on(self) -> None:
        self.console.print("\n[bold]How to go on[/bold]")
        for command, meaning in (
            ("gd2fs up --nodes 2", "a cluster that stays, on this machine"),
            ("gd2fs engine", "an engine; in another terminal, and more with --listen 127.0.0.1:8101"),
            ("gd2fs gateway", "the OpenAI API on port 8000 in front of them"),
            ("gd2fs sessions list", "the conversations that are stored"),
            ("gd2fs --help", "everything else"),
        ):
            self.console.print(f"  {command:<22} {meaning}")


def row(turn: Turn) -> list[str]:
    """The cells of a turn, in the order of COLUMNS."""
    hit = "-" if not turn.reusable_tokens else f"{100 * turn.cached_tokens / turn.reusable_tokens:.0f} %"
    return [
        str(turn.number),
        turn.engine,
        str(len(turn.prompt_ids)),
        str(turn.reusable_tokens),
        str(turn.cached_tokens),
        hit,
        f"{turn.report['loaded_bytes'] / 1e6:.1f} MB",
        f"{turn.answer.ttft_ms:.0f} ms",
        f"{turn.recomputed.ttft_ms:.0f} ms",
        f"{turn.local.ttft_ms:.0f} ms",
        "yes" if turn.answer.token_ids == turn.recomputed.token_ids else "see checks",
    ]


def result(
    turns: list[Turn],
    checks: list[Check],
    rows: dict[str, Any],
    rss_mib: dict[str, int],
    largest: float,
    killed: int,
) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "turns": [turn.to_json() for turn in turns],
        "engine_killed_after_turn": killed,
        "control_rows": rows,
        "engine_rss_mib": rss_mib,
        "max_logprob_diff": largest,
        "checks": [check.describe() for check in checks],
        "ok": all(check.ok for check in checks),
    }
