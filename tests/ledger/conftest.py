"""Fresh storages: a SQLite file, or a schema on the PostgreSQL test server; tasks one at a time."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import sqlalchemy as sa

from privtune.ledger import Ledger
from privtune.ledger.rounds import Lease, Rounds, Submission
from privtune.ledger.schema import VERSION_TABLE

POSTGRES = os.environ.get("PRIVTUNE_TEST_POSTGRES_URL", "")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


class PostgresSchemas:
    """Hands out fresh schemas of the test database, and drops them at the end."""

    def __enter__(self) -> Self:
        self._engine = sa.create_engine(POSTGRES, isolation_level="AUTOCOMMIT")
        self._names: list[str] = []
        return self

    def fresh(self) -> str:
        name = f"privtune_test_{uuid.uuid4().hex[:12]}"
        with self._engine.connect() as connection:
            connection.execute(sa.text(f"CREATE SCHEMA {name}"))
        self._names.append(name)
        url = sa.make_url(POSTGRES).update_query_dict({"options": f"-csearch_path={name}"})
        return url.render_as_string(hide_password=False)

    def __exit__(self, *_: object) -> None:
        with self._engine.connect() as connection:
            for name in self._names:
                connection.execute(sa.text(f"DROP SCHEMA {name} CASCADE"))
        self._engine.dispose()


@pytest.fixture
def postgres_url() -> Iterator[str]:
    if not POSTGRES:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    with PostgresSchemas() as schemas:
        yield schemas.fresh()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def ledger_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


def make_other(url: str) -> None:
    """Create a ledger whose schema says another version."""
    with Ledger(url) as ledger, ledger.log.storage.write() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '0005'"))


def lease_one(rounds: Rounds, charge_id: str, worker: str) -> Lease | None:
    return next(iter(rounds.lease_some(charge_id, worker, most=1)), None)


def renew_one(rounds: Rounds, lease: Lease) -> Lease | None:
    return next(iter(rounds.renew_some([lease])), None)


def complete_one(
    rounds: Rounds, lease: Lease, score: float, result: Mapping[str, Any], **more: Any
) -> bool:
    return bool(rounds.complete_some([Submission(lease, score, result, **more)]))
