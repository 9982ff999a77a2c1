"""The first schema. Before it first changes after a release, write its tables out here."""

from __future__ import annotations

from alembic import op

from privtune.ledger.schema import metadata

revision = "1"
down_revision = None


def upgrade() -> None:
    """Create every table, and the triggers that keep the log append-only."""
    metadata.create_all(op.get_bind(), checkfirst=False)
