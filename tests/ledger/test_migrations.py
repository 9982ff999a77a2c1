"""The schema, and beside Optuna's."""

from __future__ import annotations

import optuna
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from privtune.accounting import Gaussian
from privtune.ledger import (
    Budget,
    ChargeRequest,
    Ledger,
    LedgerCorruptedError,
    LedgerSchemaError,
)
from privtune.ledger.schema import HEAD, VERSION_TABLE, metadata
from tests.ledger.conftest import make_other


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "privtune.ledger:migrations")
    return config


def test_the_head_is_the_newest_migration() -> None:
    assert ScriptDirectory.from_config(_config()).get_current_head() == HEAD


def _catalogue(connection: sa.Connection) -> dict[str, object]:
    """Everything that the database knows of our tables, but for the order of columns."""
    inspector = sa.inspect(connection)
    tables = {}
    for name in sorted(n for n in inspector.get_table_names() if n.startswith("privtune_")):
        tables[name] = {
            "columns": sorted(str(column) for column in inspector.get_columns(name)),
            "key": str(inspector.get_pk_constraint(name)),
            "foreign": sorted(map(str, inspector.get_foreign_keys(name))),
            "checks": sorted(map(str, inspector.get_check_constraints(name))),
            "indexes": sorted(map(str, inspector.get_indexes(name))),
            "unique": sorted(map(str, inspector.get_unique_constraints(name))),
        }
    if connection.dialect.name == "sqlite":
        query = "SELECT name, sql FROM sqlite_master WHERE type NOT IN ('table', 'index')"
    else:
        query = (
            "SELECT tgname, pg_get_triggerdef(t.oid) || pg_get_functiondef(tgfoid) FROM pg_trigger t"
            " WHERE NOT tgisinternal"
        )
    found = connection.execute(sa.text(query)).all()
    rest = {name: " ".join(text.split()) for name, text in found}
    versions = connection.execute(sa.text(f"SELECT * FROM {VERSION_TABLE}")).all()
    return {"tables": tables, "triggers": rest, "version": [tuple(row) for row in versions]}


def test_a_new_ledger_is_what_the_migrations_make(ledger_url: str) -> None:
    """The one is made at once, the other by Alembic: neither may know what the other lacks."""
    with Ledger(ledger_url) as ledger:
        storage = ledger.log.storage
        with storage.read() as connection:
            new = _catalogue(connection)
        with storage.write() as connection:
            metadata.drop_all(connection)
            connection.execute(sa.text(f"DROP TABLE {VERSION_TABLE}"))
            if storage.dialect == "postgresql":
                connection.execute(sa.text("DROP FUNCTION privtune_append_only"))
        with storage.write() as connection:
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, HEAD)
        with storage.read() as connection:
            assert _catalogue(connection) == new
    assert len(new["triggers"]) == (2 if storage.dialect == "sqlite" else 1)
    assert new["version"] == [(HEAD,)]


def test_a_ledger_of_another_version_is_refused(ledger_url: str) -> None:
    make_other(ledger_url)
    with pytest.raises(LedgerSchemaError, match=f"holds schema 0005, .* schema {HEAD} alone"):
        Ledger(ledger_url)


@pytest.mark.parametrize("first", ["optuna", "ledger"])
def test_optuna_shares_the_database(ledger_url: str, first: str) -> None:
    def optuna_part() -> None:
        storage = optuna.storages.RDBStorage(ledger_url)
        study = optuna.create_study(storage=storage, study_name=f"s-{first}", load_if_exists=True)
        study.add_trial(optuna.trial.create_trial(value=1.0))
        storage.remove_session()
        storage.engine.dispose()

    if first == "optuna":
        optuna_part()
    with Ledger(ledger_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        [charge] = ledger.reserve("b", [ChargeRequest(Gaussian(9.0))])
        optuna_part()
        ledger.start(charge.id)
        optuna_part()
        with ledger.log.storage.read() as connection:
            versions = {
                name: MigrationContext.configure(
                    connection, opts={"version_table": name}
                ).get_current_revision()
                for name in ("alembic_version", VERSION_TABLE)
            }
    assert versions[VERSION_TABLE] == HEAD
    assert versions["alembic_version"] not in (None, HEAD)


@pytest.mark.postgres
@pytest.mark.parametrize("statement", ["UPDATE {} SET charge = 9", "DELETE FROM {}", "TRUNCATE {}"])
def test_postgres_itself_refuses_edits(postgres_url: str, statement: str) -> None:
    with Ledger(postgres_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        with (
            pytest.raises(LedgerCorruptedError, match="append-only"),
            ledger.log.storage.write() as connection,
        ):
            connection.execute(sa.text(statement.format("privtune_entries")))
