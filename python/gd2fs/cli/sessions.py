"""gd2fs sessions: the conversations whose KV cache is stored."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from gd2fs.cli.connection import ControlOption, connect
from gd2fs.cli.output import JsonFlag, print_json, print_table

app = typer.Typer(help="Conversations whose KV cache is stored: list, show, delete.")

SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="A session's id.")]


def session_path(session: str) -> str:
    return f"/v1/kv/sessions/{quote(session, safe='')}"


@app.command("list")
def list_sessions(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most sessions to list.")] = 100,
    after: Annotated[str, typer.Option(help="List those after this session id.")] = "",
    control: ControlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List sessions."""
    from gd2fs.config.units import format_bytes

    with connect(control) as client:
        query = f"?limit={limit}" + (f"&after={quote(after, safe='')}" if after else "")
        reply = client.control("GET", f"/v1/kv/sessions{query}")
    if as_json:
        print_json(reply)
        return
    rows = [
        (s["session"], s.get("model"), s["version"], s["tokens"], format_bytes(s["bytes"]))
        for s in reply["sessions"]
    ]
    print_table("", ["session", "model", ">version", ">tokens", ">stored"], rows)


@app.command("show")
def show(session: SessionId, control: ControlOption = None, as_json: JsonFlag = False) -> None:
    """Show one session: its segments and its rows in control."""
    with connect(control) as client:
        facts: dict[str, Any] = client.control("GET", session_path(session))
    if as_json:
        print_json(facts)
        return
    plain = {k: v for k, v in facts.items() if k != "stored_kv_cache"}
    print_table("", ["field", "value"], plain.items())
    columns = ["token_start", "token_length", "kv_uri", "kv_start", "kv_length"]
    print_table("stored KV cache", columns, ([s.get(c) for c in columns] for s in facts["stored_kv_cache"]))


@app.command("delete")
def delete(session: SessionId, control: ControlOption = None, as_json: JsonFlag = False) -> None:
    """Delete a session; its bytes are freed at once."""
    with connect(control) as client:
        client.control("DELETE", session_path(session))
    if as_json:
        print_json({"session": session, "deleted": True})
    else:
        typer.echo(f"{session}: deleted")
