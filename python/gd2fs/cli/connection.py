"""Connecting to the cluster that the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gd2fs.client import Client
    from gd2fs.config import Loaded

ControlOption = Annotated[
    str | None,
    typer.Option(
        "--control",
        metavar="URI",
        help="Where control is, gd2fs://HOST:PORT. Default: $GD2FS_CONTROL or this machine.",
    ),
]


def connect(control: str | None) -> Client:
    """A client for the configured cluster; a context manager."""
    from gd2fs.config import load

    return connect_loaded(load({"cluster.control": control}))


def connect_loaded(loaded: Loaded, *, lazily: bool = False) -> Client:
    """A client for the cluster of a configuration that was read already.

    lazily: do not ask control for the cluster's name but believe the configuration, so that a service starts
    while control is away.
    """
    from gd2fs.client.connect import connect

    knobs, cluster = loaded.settings.client, loaded.settings.cluster
    named = "?" in cluster.control  # gd2fs://HOST:PORT?cluster=ID says itself what the cluster is
    return connect(
        f"{cluster.control}?cluster={cluster.id}" if lazily and not named else cluster.control,
        token=loaded.token() or None,
        nics=knobs.nics or None,
        io_threads=knobs.io_threads,
        memory_threads=knobs.memory_threads,
        streams=knobs.streams,
        transport=knobs.transport,
        timeout_s=knobs.timeout_s,
        verify=knobs.verify,
    )
