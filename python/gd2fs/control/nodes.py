"""Storage nodes: registration, heartbeats, who is alive. Times are the cluster's."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, RowMapping, case, delete, insert, select, update

from gd2fs import errors
from gd2fs.control import requests
from gd2fs.control.clock import Look
from gd2fs.control.database import Database
from gd2fs.control.placement import Candidate
from gd2fs.control.schema import nodes, reclaims, sessions

LEASE_S = 10
HEARTBEAT_S = 2
"""Five heartbeats a lease: one or two that get lost on the way kill nobody."""
_GAP_S = 5.0
"""Control watches every 2 s; after so long without, heartbeats have failed for a reason that is not their
nodes'."""
_INCARNATION_MAX = 2**32 - 1


def register(connection: Connection, now: float, body: requests.Register) -> int:
    """Registers the node anew; its incarnation rises above the last one and above the floor it kept on its
    disk. Raises Conflict while another process lives under that name, Invalid.
    """
    row = (
        connection.execute(select(nodes).where(nodes.c.node == body.node).with_for_update())
        .mappings()
        .one_or_none()
    )
    if row is not None:
        _refuse_another(row, now, body)
    incarnation = max(row["incarnation"] if row else 0, body.incarnation_floor) + 1
    if incarnation > _INCARNATION_MAX:
        raise errors.Invalid(
            f"incarnation_floor: node {body.node} has no incarnation left; give it a new name"
        )
    values: dict[str, Any] = {
        "state": "joined",
        "incarnation": incarnation,
        # Whatever it says here: it counts as alive with its first heartbeat, when it listens and, if it has a
        # log, has reported what came back.
        "addresses": [],
        "http": body.http,
        "capacity_bytes": body.memory_bytes,
        "used_bytes": 0,
        "evictable_bytes": 0,
        "log_trouble": False,
        "has_log": body.has_log,
        "files": 0,
        "stats": {},
        "config_hash": body.config_hash,
        "registered_at": now,
        "heartbeat_at": now,
    }
    if row is None:
        connection.execute(insert(nodes).values(node=body.node, **values))
    else:
        connection.execute(update(nodes).where(nodes.c.node == body.node).values(**values))
    return incarnation


def _refuse_another(row: RowMapping, now: float, body: requests.Register) -> None:
    """Whoever registers ends the life of the one before, and with it what that has in memory alone.

    A node that was heard of has kept its incarnation in its data directory before it listened, and that has
    a lock: who brings it along is that node, started again after it was killed, and need not wait for the end
    of its lease. Who brings a lower one has another directory: of somebody else, or an older copy, whose logs
    may hold bytes that were replaced since.
    """
    floor = body.incarnation_floor
    if floor >= row["incarnation"]:
        return
    if is_alive(row, now):
        left_s = row["heartbeat_at"] + LEASE_S - now
        raise errors.Conflict(
            f"node.id: {body.node} is alive at {_address(row)}, with another node.data_dir than this one;"
            " give this node a name of its own (--id, GD2FS_NODE_ID), or stop the other one first. If that"
            f" was killed, it counts as dead in {left_s:.0f} s"
        )
    if 0 < floor < row["served"]:
        raise errors.Conflict(
            f"node.data_dir: node {body.node} has served as incarnation {row['served']}, and this directory"
            f" knows of {floor}: it is an older copy, and what its logs hold may have been replaced since."
            " Start with the directory and the logs that were used last; if they are gone, give an empty"
            " directory and remove the files of node.logs too (of block devices zero the first MiB)"
        )


def _address(row: RowMapping) -> str:
    """Where a person finds the node: it may have registered, and not listen yet."""
    return str(row["addresses"][0] if row["addresses"] else row["http"] or "an unknown address")


def heartbeat(connection: Connection, now: float, node: str, body: requests.Heartbeat) -> None:
    """Renews the lease. Raises StaleIncarnation for any registration but the current one, NotFound."""
    changed = connection.execute(
        update(nodes)
        .where(nodes.c.node == node, nodes.c.incarnation == body.incarnation, nodes.c.state == "joined")
        .values(
            addresses=body.addresses,
            http=body.http,
            used_bytes=body.used_bytes,
            capacity_bytes=body.capacity_bytes,
            evictable_bytes=body.evictable_bytes,
            log_trouble=body.log_trouble,
            files=body.files,
            stats=body.stats,
            heartbeat_at=now,
            served=body.incarnation,
        )
    )
    if changed.rowcount != 1:
        lock_current(connection, node, body.incarnation)


def lock_current(connection: Connection, node: str, incarnation: int) -> None:
    """Holds the node's row until the transaction ends, so that it is not registered anew meanwhile. Raises
    StaleIncarnation for any registration but the current one, NotFound."""
    row = (
        connection.execute(select(nodes).where(nodes.c.node == node).with_for_update())
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise errors.NotFound(f"node {node} is not registered")
    if (row["incarnation"], row["state"]) == (incarnation, "joined"):
        return
    if row["state"] == "joined" and row["incarnation"] > incarnation:
        raise errors.StaleIncarnation(
            f"incarnation {incarnation} of node {node} is over: another process has registered as {node} (at"
            f" {_address(row)}); if both are to run, each needs a node.id of its own"
        )
    raise errors.StaleIncarnation(
        f"node {node}: incarnation {incarnation} is over (current: {row['incarnation']}, {row['state']});"
        " register again"
    )


def leave(connection: Connection, node: str, incarnation: int | None = None) -> None:
    """The node ends on purpose. Without a log it takes its memory with it and nothing is left to free there;
    with one it will come back, and what is to be freed waits for it. Raises NotFound, and StaleIncarnation if
    it was registered anew since `incarnation`: who has lost a name takes nobody out of the cluster."""
    if incarnation is not None:
        lock_current(connection, node, incarnation)
    if connection.execute(update(nodes).where(nodes.c.node == node).values(state="left")).rowcount == 0:
        raise errors.NotFound(f"node {node} is not registered")
    forgetful = select(nodes.c.node).where(nodes.c.node == node, ~nodes.c.has_log)
    connection.execute(delete(reclaims).where(reclaims.c.node.in_(forgetful)))


def watch(database: Database) -> None:
    """Looks at the clock, and notes that leases are being watched. If nobody watched for a while (control was
    stopped, or hung), no node could renew its lease and no session could be used: the gap does not count for
    them, else every session would be planned as a miss after a restart of control, or be gone.
    """

    def work(connection: Connection) -> Look:
        look = database.time.look(connection)
        if look.now - look.before > _GAP_S:
            _discount(connection, look)
        return look

    database.time.keep(database.write(work))


def _discount(connection: Connection, gap: Look) -> None:
    renewed = nodes.c.heartbeat_at + (gap.now - gap.before)
    connection.execute(
        update(nodes)
        .where(nodes.c.state == "joined", nodes.c.heartbeat_at >= gap.before - LEASE_S)
        .values(heartbeat_at=case((renewed > gap.now, gap.now), else_=renewed))
    )
    connection.execute(
        update(sessions)
        .where(sessions.c.expires_at > gap.before)
        .values(expires_at=sessions.c.expires_at + (gap.now - gap.before))
    )


def is_alive(row: RowMapping, now: float) -> bool:
    """Whether the node may be asked: joined, within its lease, and already listening."""
    return row["state"] == "joined" and now - row["heartbeat_at"] <= LEASE_S and bool(row["addresses"])


def living(connection: Connection, now: float, node: str) -> RowMapping:
    """The row of a node that may be asked. Raises NotFound, Unavailable."""
    row = connection.execute(select(nodes).where(nodes.c.node == node)).mappings().one_or_none()
    if row is None:
        raise errors.NotFound(f"node {node:.80} is not registered; `gd2fs status` lists those that are")
    if not is_alive(row, now):
        raise errors.Unavailable(f"node {node} is not alive; it can only be asked when it is back")
    return row


def free_bytes(row: RowMapping) -> int:
    """What may still be written there: what is empty, and what the node would evict for it. Nothing while one
    of its logs does not take what is to become durable: a commit could only fail there."""
    if row["log_trouble"]:
        return 0
    return max(0, row["capacity_bytes"] - row["used_bytes"] + row["evictable_bytes"])


def describe(connection: Connection, now: float) -> list[dict[str, Any]]:
    """All nodes as `GET /v1/nodes` shows them."""
    rows = connection.execute(select(nodes).order_by(nodes.c.node)).mappings()
    return [
        {
            "node": row["node"],
            "state": "left" if row["state"] == "left" else "alive" if is_alive(row, now) else "dead",
            "incarnation": row["incarnation"],
            "addresses": row["addresses"],
            "http": row["http"],
            "used_bytes": row["used_bytes"],
            "capacity_bytes": row["capacity_bytes"],
            "evictable_bytes": row["evictable_bytes"],
            "log_trouble": row["log_trouble"],
            "has_log": row["has_log"],
            "files": row["files"],
            "config_hash": row["config_hash"],
            "last_heartbeat_age_s": max(0.0, round(now - row["heartbeat_at"], 3)),
            "stats": row["stats"],
        }
        for row in rows
    ]


def candidates(connection: Connection, now: float) -> list[Candidate]:
    """The living nodes with their free space."""
    rows = connection.execute(select(nodes).where(nodes.c.state == "joined")).mappings()
    return [
        Candidate(row["node"], row["incarnation"], free_bytes(row), row["log_trouble"])
        for row in rows
        if is_alive(row, now)
    ]
