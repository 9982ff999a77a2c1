"""Creates and upgrades the schema, and refuses to work on another version of it."""

from __future__ import annotations

from contextlib import closing

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.ledger.errors import LedgerSchemaError
from privtune.ledger.schema import HEAD, VERSION_TABLE, metadata, version
from privtune.ledger.storage import Storage

__all__ = ["prepare", "schema_version", "upgrade", "upgrade_storage"]

# One advisory lock for all who create or upgrade the schema of a PostgreSQL database.
_LOCK = 0x707269767475


def schema_version(connection: Connection) -> str | None:
    """Return the version of the ledger's schema, None where there is none yet."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608


def prepare(storage: Storage) -> None:
    """Create the schema in an empty storage; refuse an older or a newer one.

    Raises:
        LedgerSchemaError: The schema is another version's; says which command upgrades it.
    """
    with storage.read() as connection:
        found = schema_version(connection)
    if found is None:
        upgrade(storage, create=True)
    elif found != HEAD:
        _refuse(storage, found)


def upgrade(storage: Storage, *, create: bool = False) -> tuple[str | None, str]:
    """Bring the schema to this program's version, in one transaction.

    Args:
        storage: Where.
        create: Create the schema in an empty storage, and refuse to upgrade an older one.

    Returns:
        The version before and the version after.

    Raises:
        LedgerSchemaError: The storage holds no ledger, or a newer one.
    """
    with storage.write() as connection:
        if storage.dialect == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        found = schema_version(connection)  # again, now that nobody else can change it
        if found is None and not create:
            raise LedgerSchemaError(f"{storage.safe_url} holds no ledger to upgrade.")
        if found == HEAD:
            return found, HEAD
        if found is not None and (create or not _is_older(found)):
            _refuse(storage, found)
        if found is None:
            _create(connection)
        else:
            _run(connection)
    return found, HEAD


def upgrade_storage(url: str) -> tuple[str | None, str]:
    """Upgrade the ledger at a URL; see :func:`upgrade`.

    Args:
        url: The storage.

    Returns:
        The version before and the version after.

    Example:
        >>> from privtune.ledger import Ledger
        >>> Ledger("sqlite:///new.db").close()
        >>> before, after = upgrade_storage("sqlite:///new.db")
        >>> before == after  # nothing to do
        True
    """
    with closing(Storage(url)) as storage:
        return upgrade(storage)


def _refuse(storage: Storage, found: str) -> None:
    if _is_older(found):
        raise LedgerSchemaError(
            f"{storage.safe_url} holds schema {found}, this program needs {HEAD}: make a copy "
            f"(privtune budget backup FILE --storage {storage.safe_url}), then run: "
            f"privtune budget upgrade --storage {storage.safe_url}"
        )
    raise LedgerSchemaError(
        f"{storage.safe_url} holds schema {found}, which is newer than {HEAD}, the newest that "
        "this program knows: update privtune."
    )


def _is_older(version: str) -> bool:
    return version.isdigit() and int(version) < int(HEAD)


def _create(connection: Connection) -> None:
    """Make what all migrations make, at once: see ``tests/ledger/test_migrations.py``."""
    metadata.create_all(connection, checkfirst=False)
    version.create(connection, checkfirst=False)
    connection.execute(sa.insert(version).values(version_num=HEAD))


def _run(connection: Connection) -> None:
    # Imported here: only an older ledger should pay for Alembic.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "privtune.ledger:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)
    missing = set(metadata.tables) - set(sa.inspect(connection).get_table_names())
    if missing:
        raise LedgerSchemaError(f"the migrations did not create {', '.join(sorted(missing))}.")
