"""A layout: where the bytes of a file are, and the signed capability to reach them there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gd2fs.control.files import FileView
from gd2fs.signing import Capability, Keys, Right

CAPABILITY_LIFE_S = 3600
"""Nodes keep the tombstone of a deleted file for twice this, so that no capability outlives it."""


def layout(
    keys: Keys,
    view: FileView,
    *,
    rights: Sequence[Right],
    expires_at: int,
    ranges: Sequence[tuple[int, int]] = (),
    grant: int = 0,
    length: int | None = None,
    travels: bool = False,
) -> dict[str, Any]:
    """The layout of `view` as JSON.

    A layout that `travels` with a request counts for whoever presents it and can't be fetched again through
    control.
    """
    capability = Capability(
        tenant=view.tenant,
        file=view.file,
        file_class="durable" if view.file_class == "durable" else "cache",
        stripe_unit=view.stripe_unit,
        width=view.width,
        rights=rights,
        ranges=ranges,
        grant=grant,
        columns=[(column.epoch, column.born) for column in view.columns],
        nodes=[[column.node] for column in view.columns],
        expiry=expires_at,
        bearer=travels,
        priority=view.priority,
    )
    return {
        "file": view.file,
        "path": view.path,
        "class": view.file_class,
        "stripe_unit": view.stripe_unit,
        "width": view.width,
        "grant": grant,
        "columns": [
            {
                "epoch": column.epoch,
                "born": column.born,
                "replicas": [
                    {
                        "node": column.node,
                        "incarnation": column.incarnation,
                        "addresses": list(column.addresses),
                    }
                ],
            }
            for column in view.columns
        ],
        "capability": keys.sign(capability),
        "expires_at": expires_at,
        "kv_identity": view.kv_identity,
        "length": length,
        "refresh": not travels,
    }
