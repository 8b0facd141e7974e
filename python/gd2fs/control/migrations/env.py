"""Alembic runs this; the connection comes from gd2fs.control.migrate, inside its transaction."""

from __future__ import annotations

from alembic import context

from gd2fs.control.schema import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
