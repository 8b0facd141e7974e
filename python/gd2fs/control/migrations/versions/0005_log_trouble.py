"""A node says whether its logs take what is to become durable: without, nothing new is placed there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("nodes", sa.Column("log_trouble", sa.Boolean(), nullable=False, server_default=sa.false()))
