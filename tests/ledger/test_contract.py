"""The shipped contract, on both storages."""

from __future__ import annotations

from privtune.testing.ledgers import LedgerContract


class TestLedger(LedgerContract):
    """Runs on whatever `ledger_url` gives."""
