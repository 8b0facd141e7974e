"""gd2fs config: what holds here, and why."""

from __future__ import annotations

import typer

from gd2fs.cli.output import JsonFlag, print_json, print_table

app = typer.Typer(help="The configuration: what holds here and where each value comes from.")


@app.callback()
def group() -> None:
    """Keeps `config` a group although it has one command so far."""


@app.command("show")
def show(as_json: JsonFlag = False) -> None:
    """Show every knob: its value (secrets masked), where the value comes from, and the environment name
    that sets it.
    """
    from gd2fs.config import load
    from gd2fs.config.load import environment_names, extra

    loaded = load()
    knobs = [
        {
            "name": name,
            "value": value,
            "origin": origin,
            "environment": environment_names(name, field),
            "hot": bool(extra(field, "hot")),
            "description": field.description,
        }
        for name, value, origin, field in loaded.rows()
    ]
    if as_json:
        print_json({"knobs": knobs, "digest": loaded.digest()})
        return
    rows = ((k["name"], k["value"], k["origin"], k["environment"][0], k["description"]) for k in knobs)
    print_table("", ["knob", "value", "from", "environment", "meaning"], rows)
