"""Fresh storages: a SQLite file, or a schema of its own on the PostgreSQL test server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

POSTGRES = os.environ.get("PRIVTUNE_TEST_POSTGRES_URL", "")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def postgres_url() -> Iterator[str]:
    if not POSTGRES:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    schema = f"privtune_test_{uuid.uuid4().hex[:12]}"
    engine = sa.create_engine(POSTGRES, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE SCHEMA {schema}"))
    url = sa.make_url(POSTGRES).update_query_dict({"options": f"-csearch_path={schema}"})
    yield url.render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.execute(sa.text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def ledger_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")
