"""Plans over their time and sessions over their ttl, ended in bounded batches."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, delete, select

from gd2fs.control import schema as t
from gd2fs.control import sessions

BATCH = 64
"""Of each kind: this transaction holds up others for some milliseconds at most."""


def end(connection: Connection, now: float) -> int:
    """Ends at most BATCH of each; returns how many. Their files become reclaims."""
    plans = connection.execute(
        select(t.plans.c.plan, t.plans.c.session).where(t.plans.c.expires_at <= now).limit(BATCH)
    ).all()
    # Sorted: two control processes that sweep at once lock in the same order.
    for session in sorted({row.session for row in plans}):
        if _lock(connection, session):
            connection.execute(
                delete(t.plans).where(t.plans.c.session == session, t.plans.c.expires_at <= now)
            )
            sessions.release_unused(connection, now, session)
    overdue = connection.scalars(
        select(t.sessions.c.session).where(t.sessions.c.expires_at <= now).limit(BATCH)
    ).all()
    for session in sorted(overdue):
        # Asked again under the lock: a plan may have renewed it meanwhile.
        if _lock(connection, session, t.sessions.c.expires_at <= now):
            sessions.remove(connection, now, session)
    return len(plans) + len(overdue)


def _lock(connection: Connection, session: str, *conditions: ColumnElement[bool]) -> bool:
    query = select(t.sessions.c.session).where(t.sessions.c.session == session, *conditions).with_for_update()
    return connection.scalar(query) is not None
