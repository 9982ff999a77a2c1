"""Creates the schema, and refuses to work on another version of it."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.ledger.errors import LedgerSchemaError
from privtune.ledger.schema import HEAD, VERSION_TABLE, metadata, version
from privtune.ledger.storage import Storage

# One advisory lock for all who create the schema of a PostgreSQL database.
_LOCK = 0x707269767475


def schema_version(connection: Connection) -> str | None:
    """Return the version of the ledger's schema, None where there is none yet."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608


def prepare(storage: Storage) -> None:
    """Create the schema in an empty storage; refuse another version of it.

    Raises:
        LedgerSchemaError: The storage holds another version of the schema.
    """
    with storage.read() as connection:
        found = schema_version(connection)
    if found is None:
        found = _create(storage)
    if found != HEAD:
        raise LedgerSchemaError(
            f"{storage.safe_url} holds schema {found}, and this program works on schema {HEAD} alone: "
            "use the version of privtune that made it, or another storage."
        )


def _create(storage: Storage) -> str:
    """Create the schema in one transaction, unless another process has; return its version."""
    with storage.write() as connection:
        if storage.dialect == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        found = schema_version(connection)  # again, now that nobody else can create it
        if found is not None:
            return found
        # Alembic would do the same, a second later.
        metadata.create_all(connection, checkfirst=False)
        version.create(connection, checkfirst=False)
        connection.execute(sa.insert(version).values(version_num=HEAD))
        return HEAD
