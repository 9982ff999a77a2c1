"""What the chain keeps of a round: one digest of all its results, in the sealed part."""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.ledger.schema import tasks


def round_digest(connection: Connection, budget: str, charge: int) -> str | None:
    """Return the digest of a finished round's results; None where none is, or some are missing.

    It covers the number of rows, which is sealed as well: only entries' sealed parts may hold it.
    """
    rows = connection.execute(
        sa.select(tasks.c.number, tasks.c.score, tasks.c.result, tasks.c.done)
        .where(tasks.c.budget == budget, tasks.c.charge == charge)
        .order_by(tasks.c.number)
    ).all()
    if not rows or not all(row.done for row in rows):
        return None
    text = json.dumps([[row.number, repr(row.score), row.result] for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()
