"""Files that several sessions refer to: what belongs together is named by ids, no longer by paths alone.

And the incarnation of a node that served last: one that knows only of an earlier one is an older copy.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_files = sa.table("files", sa.column("file"), sa.column("tenant"), sa.column("path"), sa.column("ids_of"))


def upgrade() -> None:
    op.add_column("nodes", sa.Column("served", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("files", sa.Column("ids_of", sa.String(32), nullable=True))
    op.create_index("ix_files_ids_of", "files", ["ids_of"])
    kv = _files.alias("kv")
    # The path that is looked for on this side, so that the index finds it.
    of = sa.func.substr(_files.c.path, 1, sa.func.length(_files.c.path) - len(".tokens"))
    beside = (kv.c.tenant == _files.c.tenant) & (kv.c.path == of)
    op.execute(
        _files.update()
        .where(_files.c.path.startswith("/.kv/"), _files.c.path.endswith(".kv.tokens"))
        .values(ids_of=sa.select(kv.c.file).where(beside).scalar_subquery())
    )
