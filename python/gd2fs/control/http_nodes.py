"""Routes of nodes and of the service itself."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy import select

import gd2fs
from gd2fs.control import nodes, ranges, requests
from gd2fs.control.http_edge import Caller, Control

router = APIRouter()


@router.get("/health")
def health(control: Control) -> dict[str, Any]:
    """Answers only if the database does. Needs no token."""
    control.read(lambda connection, now: connection.execute(select(1)))
    return {"status": "ok", "cluster": control.cluster, "version": gd2fs.__version__}


@router.get("/metrics")
def metrics(control: Control, caller: Caller) -> Response:
    """Prometheus' format. Where the cluster has keys, any token of it will do."""
    return Response(control.metrics_text(), media_type="text/plain; version=0.0.4")


@router.get("/v1/cluster")
def cluster(control: Control, caller: Caller) -> dict[str, Any]:
    """Who the caller is, and the nodes in short."""
    found = control.read(nodes.describe)
    short = ("node", "state", "incarnation", "addresses", "used_bytes", "capacity_bytes")
    return {
        "cluster": control.cluster,
        "version": gd2fs.__version__,
        "tenant": caller.tenant,
        "role": caller.role,
        "nodes": [{name: node[name] for name in short} for node in found],
    }


@router.post("/v1/nodes/register")
def register(control: Control, caller: Caller, body: requests.Register) -> dict[str, Any]:
    """Registers a node; its incarnation is higher than any it had before. Refused while another process lives
    under that name."""
    caller.require("node")
    incarnation = control.write(lambda connection, now: nodes.register(connection, now, body))
    control.reclaimer.wake()
    return {
        "cluster": control.cluster,
        "incarnation": incarnation,
        "now": control.database.time.now(),
        "lease_s": nodes.LEASE_S,
        "heartbeat_s": nodes.HEARTBEAT_S,
    }


@router.post("/v1/nodes/{node}/heartbeat")
def heartbeat(control: Control, caller: Caller, node: str, body: requests.Heartbeat) -> dict[str, Any]:
    """Renews the node's lease; refused for every registration but the current one. Says what time it is."""
    caller.require("node")
    control.write(lambda connection, now: nodes.heartbeat(connection, now, node, body))
    return {"now": control.database.time.now()}


@router.post("/v1/nodes/{node}/ranges")
def take_ranges(control: Control, caller: Caller, node: str, body: requests.Ranges) -> dict[str, Any]:
    """How far the node's columns are valid: all of them before its first heartbeat, later what changed."""
    caller.require("node")
    return control.write(lambda connection, now: ranges.take(connection, node, body))


@router.post("/v1/fsck")
def fsck(control: Control, caller: Caller, body: requests.Fsck) -> dict[str, Any]:
    """Compares a page of a node's columns with what control believes of them, and repairs if asked to."""
    caller.require("admin")
    page = control.fsck.page(body)
    if body.repair:
        control.reclaimer.wake()
    return page


@router.post("/v1/nodes/{node}/scrub")
def start_scrub(control: Control, caller: Caller, node: str) -> dict[str, Any]:
    """Has a node read again and verify everything that it keeps, if it does not do so already."""
    return _scrub(control, caller, node, start=True)


@router.get("/v1/nodes/{node}/scrub")
def get_scrub(control: Control, caller: Caller, node: str) -> dict[str, Any]:
    """How far the node's scrub is."""
    return _scrub(control, caller, node, start=False)


def _scrub(control: Control, caller: Caller, node: str, *, start: bool) -> dict[str, Any]:
    caller.require("admin")
    row = control.read(lambda connection, now: nodes.living(connection, now, node))
    incarnation, state = control.link.scrub(row["addresses"], start)
    return {"node": node, "incarnation": incarnation, **state}


@router.get("/v1/nodes")
def list_nodes(control: Control, caller: Caller) -> dict[str, Any]:
    return {"nodes": control.read(nodes.describe)}


@router.delete("/v1/nodes/{node}")
def leave(
    control: Control, caller: Caller, node: str, incarnation: requests.U32 | None = None
) -> dict[str, Any]:
    """The node ends on purpose, with everything in its memory; what it has on a log comes back with it.
    `incarnation`: only if that is the current one."""
    caller.require("node")
    control.write(lambda connection, now: nodes.leave(connection, node, incarnation))
    return {"ok": True}
