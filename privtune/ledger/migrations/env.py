"""Alembic's entry point: migrations run in the transaction of the caller."""

from __future__ import annotations

from alembic import context

from privtune.ledger.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
