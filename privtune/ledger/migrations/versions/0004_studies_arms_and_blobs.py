"""Studies, their arms and their results. Studies of versions before are not carried over."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0002"


def upgrade() -> None:
    """Create the four tables."""
    op.create_table(
        "privtune_studies",
        sa.Column("name", sa.String(512), primary_key=True),
        sa.Column("uid", sa.String(32), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("root", sa.Text, nullable=False),
    )
    op.create_table(
        "privtune_arms",
        sa.Column("study", sa.String(512), sa.ForeignKey("privtune_studies.name"), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("plan", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("secret", sa.String(64), nullable=False),
        sa.Column("release", sa.Text, nullable=True),
        sa.Column("announced", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("study", "name", name="privtune_arms_pk"),
    )
    op.create_table(
        "privtune_blobs",
        sa.Column("study", sa.String(512), sa.ForeignKey("privtune_studies.name"), nullable=False),
        sa.Column("name", sa.String(1024), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=True),
        sa.PrimaryKeyConstraint("study", "name", name="privtune_blobs_pk"),
    )
    op.create_table(
        "privtune_failures",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("study", sa.String(512), sa.ForeignKey("privtune_studies.name"), nullable=False),
        sa.Column("arm", sa.String(512), nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("traceback", sa.Text, nullable=False),
    )
