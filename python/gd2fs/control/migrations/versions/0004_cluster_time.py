"""The cluster's time does not jump with the database's clock: how far it is ahead of that."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("cluster", sa.Column("clock_ahead_s", sa.Double(), nullable=False, server_default="0"))
