"""Alembic migrations of the ledger's schema, from the first one on."""
