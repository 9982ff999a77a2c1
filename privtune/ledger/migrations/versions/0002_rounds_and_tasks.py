"""Rounds of a private selection and their tasks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the two tables. Nothing that exists changes."""
    op.create_table(
        "privtune_rounds",
        sa.Column("budget", sa.String(100), nullable=False),
        sa.Column("charge", sa.Integer, nullable=False),
        sa.Column("tasks", sa.Integer, nullable=False),
        sa.Column("secret", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("budget", "charge", name="privtune_rounds_pk"),
        sa.ForeignKeyConstraint(["budget"], ["privtune_budgets.name"]),
    )
    op.create_table(
        "privtune_tasks",
        sa.Column("budget", sa.String(100), nullable=False),
        sa.Column("charge", sa.Integer, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("worker", sa.String(200), nullable=False),
        sa.Column("leased_until", sa.Double, nullable=False),
        sa.Column("done", sa.Integer, nullable=False),
        sa.Column("score", sa.Double, nullable=True),
        sa.Column("result", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("budget", "charge", "number", name="privtune_tasks_pk"),
        sa.ForeignKeyConstraint(
            ["budget", "charge"], ["privtune_rounds.budget", "privtune_rounds.charge"]
        ),
        sa.CheckConstraint("done IN (0, 1)", name="privtune_tasks_done"),
    )
