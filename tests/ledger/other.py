"""Ledgers of another version of the program."""

from __future__ import annotations

import sqlalchemy as sa

from privtune.ledger import Ledger
from privtune.ledger.schema import VERSION_TABLE


def make_other(url: str, version: str = "0005") -> str:
    """Create a ledger whose schema says another version."""
    with Ledger(url) as ledger, ledger.log.storage.write() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '{version}'"))
    return url
