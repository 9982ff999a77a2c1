"""The schema, and beside Optuna's."""

from __future__ import annotations

import optuna
import pytest
import sqlalchemy as sa

from privtune.accounting import Gaussian
from privtune.ledger import Budget, ChargeRequest, Ledger, LedgerCorruptedError, LedgerSchemaError
from privtune.ledger.schema import HEAD
from privtune.ledger.storage import schema_version
from tests.ledger.conftest import make_other


def test_a_new_ledger_refuses_edits_by_triggers_and_notes_its_version(ledger_url: str) -> None:
    with Ledger(ledger_url) as ledger, ledger.log.storage.read() as connection:
        assert schema_version(connection) == HEAD
        if connection.dialect.name == "sqlite":
            query = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        else:
            # Other tests keep schemas of their own in this database.
            query = """
                SELECT tgname FROM pg_trigger
                JOIN pg_class ON pg_class.oid = tgrelid
                JOIN pg_namespace ON pg_namespace.oid = relnamespace
                WHERE nspname = current_schema() AND NOT tgisinternal
            """
        triggers = connection.execute(sa.text(query)).all()
        assert len(triggers) == (2 if connection.dialect.name == "sqlite" else 1)


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
            theirs = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
            assert schema_version(connection) == HEAD
    assert theirs not in (None, HEAD)


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
