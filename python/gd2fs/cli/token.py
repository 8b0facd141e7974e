"""gd2fs token: credentials signed with the cluster's keys."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from gd2fs.cli.output import JsonFlag, print_json

app = typer.Typer(help="Credentials for users, nodes and services, signed with the cluster's keys.")


@app.callback()
def group() -> None:
    """Keeps `token` a group although it has one command so far."""


@app.command("create")
def create(
    role: Annotated[
        Literal["client", "node", "control", "admin"],
        typer.Option(
            help="client: files and sessions of a tenant; node: registers a node; admin: everything."
        ),
    ] = "client",
    tenant: Annotated[str, typer.Option(help="Whose files the token opens.")] = "default",
    days: Annotated[float, typer.Option(min=0.001, max=3650, help="How long it is valid, in days.")] = 30.0,
    as_json: JsonFlag = False,
) -> None:
    """Print a token; hand it to its user as GD2FS_TOKEN or in a file named by GD2FS_TOKEN_FILE.

    The keys come from GD2FS_CLUSTER_KEYS (ID:HEX[,ID:HEX...], for example `1:$(openssl rand -hex 32)`).
    Without them the token is signed with the built-in development key, which servers accept on loopback only.
    """
    from gd2fs.config import load
    from gd2fs.signing import Keys, Token

    keys = Keys.parse(load().settings.cluster.keys)
    expiry = int(time.time() + days * 86400)
    text = keys.sign(Token(tenant, role, expiry))
    if as_json:
        print_json(
            {
                "token": text,
                "tenant": tenant,
                "role": role,
                "expiry": expiry,
                "development": keys.is_development,
            }
        )
        return
    if keys.is_development:
        typer.echo(
            "signed with the development key: good on loopback only (set GD2FS_CLUSTER_KEYS)", err=True
        )
    typer.echo(text)
