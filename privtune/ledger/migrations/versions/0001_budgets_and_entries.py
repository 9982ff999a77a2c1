"""Budgets and their append-only logs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_SQLITE = """
CREATE TRIGGER privtune_entries_no_{verb} BEFORE {verb} ON privtune_entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END
"""
_POSTGRES_FUNCTION = """
CREATE FUNCTION privtune_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$
"""
_POSTGRES_TRIGGER = """
CREATE TRIGGER privtune_entries_append_only BEFORE UPDATE OR DELETE OR TRUNCATE
ON privtune_entries EXECUTE FUNCTION privtune_append_only()
"""


def upgrade() -> None:
    """Create the two tables and the triggers that keep the log append-only."""
    op.create_table(
        "privtune_budgets",
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("entries", sa.Integer, nullable=False),
        sa.Column("charges", sa.Integer, nullable=False),
        sa.Column("head", sa.String(64), nullable=False),
    )
    op.create_table(
        "privtune_entries",
        sa.Column("budget", sa.String(100), sa.ForeignKey("privtune_budgets.name"), nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("charge", sa.Integer, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("previous", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("budget", "seq", name="privtune_entries_pk"),
        sa.CheckConstraint("seq > 0", name="privtune_entries_seq"),
    )
    if op.get_bind().dialect.name == "sqlite":
        op.execute(_SQLITE.format(verb="UPDATE"))
        op.execute(_SQLITE.format(verb="DELETE"))
    else:
        op.execute(_POSTGRES_FUNCTION)
        op.execute(_POSTGRES_TRIGGER)
