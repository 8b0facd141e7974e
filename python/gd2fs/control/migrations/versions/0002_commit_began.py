"""Plans know when their commit began, so that the next plan can wait for it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("plans", sa.Column("commit_began_at", sa.Double(), nullable=True))
