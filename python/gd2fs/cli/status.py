"""gd2fs status: is the cluster well?"""

from __future__ import annotations

from typing import Any

from gd2fs.cli.connection import ControlOption, connect
from gd2fs.cli.output import CommandFailed, JsonFlag, print_json, print_table


def _state(node: dict[str, Any]) -> str:
    """With what keeps new files away from a living node."""
    return "alive, LOG TROUBLE" if node["state"] == "alive" and node.get("log_trouble") else node["state"]


def status(control: ControlOption = None, as_json: JsonFlag = False) -> None:
    """Show the cluster and its nodes. Exit code 1 if no node is alive."""
    from gd2fs.config.units import format_bytes

    with connect(control) as client:
        cluster = client.control("GET", "/v1/cluster")
        nodes = client.control("GET", "/v1/nodes")["nodes"]
    alive = [node for node in nodes if node["state"] == "alive"]
    facts = {
        "cluster": cluster["cluster"],
        "version": cluster["version"],
        "tenant": cluster["tenant"],
        "role": cluster["role"],
        "nodes_alive": len(alive),
        "nodes": nodes,
        "ok": bool(alive),
    }
    if not as_json:
        print_table(
            f"cluster {facts['cluster']} (version {facts['version']}), tenant {facts['tenant']}",
            ["node", "state", ">incarnation", ">used", ">capacity", ">last heard", "data"],
            (
                (
                    node["node"],
                    _state(node),
                    node["incarnation"],
                    format_bytes(node["used_bytes"] or 0),
                    format_bytes(node["capacity_bytes"] or 0),
                    f"{node['last_heartbeat_age_s']:.1f} s ago"
                    if node["last_heartbeat_age_s"] is not None
                    else "",
                    " ".join(node["addresses"] or ()),
                )
                for node in nodes
            ),
        )
    if not alive:
        raise CommandFailed("no node is alive; start one with `gd2fs node`", data=facts)
    if as_json:
        print_json(facts)
