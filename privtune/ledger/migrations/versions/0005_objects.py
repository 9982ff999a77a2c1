"""Where a large result is that is neither in its row nor in the study's folder."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column; what is there stays where it is."""
    op.add_column("privtune_blobs", sa.Column("place", sa.Text, nullable=True))
