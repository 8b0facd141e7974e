"""Nodes with a log come back: columns know how far they are valid, nodes whether they have one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("file_columns", sa.Column("valid", sa.BigInteger(), nullable=True))
    op.add_column("nodes", sa.Column("has_log", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("nodes", sa.Column("evictable_bytes", sa.BigInteger(), nullable=False, server_default="0"))
