"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "cluster",
        sa.Column("row", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cluster", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("watched_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("row", name=op.f("pk_cluster")),
    )
    op.create_table(
        "nodes",
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("addresses", sa.JSON(), nullable=False),
        sa.Column("http", sa.Text(), nullable=False),
        sa.Column("capacity_bytes", sa.BigInteger(), nullable=False),
        sa.Column("used_bytes", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("stats", sa.JSON(), nullable=False),
        sa.Column("config_hash", sa.String(length=128), nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_nodes")),
    )
    op.create_table(
        "sessions",
        sa.Column("session", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("kv_identity", sa.String(length=256), nullable=False),
        sa.Column("format_name", sa.String(length=64), nullable=False),
        sa.Column("bytes_per_token", sa.BigInteger(), nullable=False),
        sa.Column("granule", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("ttl_s", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("next_number", sa.Integer(), nullable=False),
        sa.Column("last_plan", sa.String(length=32), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("session", name=op.f("pk_sessions")),
    )
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"])
    op.create_index("ix_sessions_tenant_session", "sessions", ["tenant", "session"])

    op.create_table(
        "files",
        sa.Column("file", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("path", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), nullable=False),
        sa.Column("parent", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), nullable=False),
        sa.Column("is_dir", sa.Boolean(), nullable=False),
        sa.Column("class", sa.String(length=16), nullable=False),
        sa.Column("stripe_unit", sa.Integer(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("kv_identity", sa.String(length=256), nullable=True),
        sa.Column("session", sa.String(length=32), nullable=True),
        sa.Column("sealed", sa.BigInteger(), nullable=False),
        sa.Column("write_grant", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session"], ["sessions.session"], name=op.f("fk_files_session"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("file", name=op.f("pk_files")),
        sa.UniqueConstraint("tenant", "path", name=op.f("uq_files_tenant_path")),
    )
    op.create_index("ix_files_session", "files", ["session"])
    op.create_index("ix_files_tenant_parent_path", "files", ["tenant", "parent", "path"])

    op.create_table(
        "reclaims",
        sa.Column("file", sa.String(length=32), nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_try_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["node"], ["nodes.node"], name=op.f("fk_reclaims_node")),
        sa.PrimaryKeyConstraint("file", "ordinal", name=op.f("pk_reclaims")),
    )
    op.create_index("ix_reclaims_node_next_try_at", "reclaims", ["node", "next_try_at"])

    op.create_table(
        "file_columns",
        sa.Column("file", sa.String(length=32), nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("born", sa.BigInteger(), nullable=False),
        sa.Column("node", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["file"], ["files.file"], name=op.f("fk_file_columns_file"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["node"], ["nodes.node"], name=op.f("fk_file_columns_node")),
        sa.PrimaryKeyConstraint("file", "ordinal", name=op.f("pk_file_columns")),
    )
    op.create_index("ix_file_columns_node", "file_columns", ["node"])

    op.create_table(
        "plans",
        sa.Column("plan", sa.String(length=32), nullable=False),
        sa.Column("session", sa.String(length=32), nullable=False),
        sa.Column("request_id", sa.String(length=256), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_digest", sa.String(length=64), nullable=False),
        sa.Column("file", sa.String(length=32), nullable=True),
        sa.Column("kv_start", sa.BigInteger(), nullable=False),
        sa.Column("write_grant", sa.BigInteger(), nullable=False),
        sa.Column("kv_identity", sa.String(length=256), nullable=False),
        sa.Column("format_name", sa.String(length=64), nullable=False),
        sa.Column("bytes_per_token", sa.BigInteger(), nullable=False),
        sa.Column("granule", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["file"], ["files.file"], name=op.f("fk_plans_file")),
        sa.ForeignKeyConstraint(
            ["session"], ["sessions.session"], name=op.f("fk_plans_session"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("plan", name=op.f("pk_plans")),
    )
    op.create_index("ix_plans_expires_at", "plans", ["expires_at"])
    op.create_index("ix_plans_file", "plans", ["file"])
    op.create_index("ix_plans_session", "plans", ["session"])

    op.create_table(
        "segments",
        sa.Column("session", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("token_start", sa.BigInteger(), nullable=False),
        sa.Column("token_length", sa.BigInteger(), nullable=False),
        sa.Column("file", sa.String(length=32), nullable=False),
        sa.Column("kv_start", sa.BigInteger(), nullable=False),
        sa.Column("kv_length", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["file"], ["files.file"], name=op.f("fk_segments_file")),
        sa.ForeignKeyConstraint(
            ["session"], ["sessions.session"], name=op.f("fk_segments_session"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("session", "position", name=op.f("pk_segments")),
    )
    op.create_index("ix_segments_file", "segments", ["file"])
