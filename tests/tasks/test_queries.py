"""Queries: one record of each row of one table, and everything else refused by name."""

from __future__ import annotations

import os
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from privtune.errors import InvalidInputError
from privtune.tables.sql import SqlTable, check_query
from privtune.tasks import TaskDataError, get_task

GIVEN = {"learning_rate": 0.5, "max_grad_norm": 1.0}
LITE, POSTGRES, MYSQL, MSSQL = "sqlite://", "postgresql://h/d", "mysql://h/d", "mssql://h/d"

REFUSED = [
    # The kinds that were taken once.
    (LITE, "SELECT age, y FROM p LIMIT 100", "LIMIT"),
    (LITE, "SELECT age - avg(age) OVER () AS age, y FROM p", "WINDOW"),
    (LITE, "SELECT rank() OVER (ORDER BY age) AS age, y FROM p", "WINDOW"),
    (LITE, "SELECT avg(age) AS age, y FROM p GROUP BY y", "GROUP"),
    (LITE, "SELECT y, age FROM p GROUP BY y HAVING count(*) > 2", "GROUP"),
    (LITE, "SELECT a.age, b.y FROM p a JOIN p b ON a.y = b.y", "JOINS"),
    (LITE, "SELECT DISTINCT age, y FROM p", "DISTINCT"),
    (LITE, "SELECT age, y FROM p UNION ALL SELECT age, y FROM p", "UNION"),
    (LITE, "SELECT age, y FROM p WHERE age > (SELECT avg(age) FROM p)", "SUBQUERY"),
    (LITE, "WITH q AS (SELECT * FROM p LIMIT 3) SELECT * FROM q", "WITH|subquery|LIMIT"),
    # Rows by other rows.
    (LITE, "SELECT a.age FROM p a, p b", "JOINS"),
    (LITE, "SELECT age FROM (SELECT age FROM p)", "SUBQUERY"),
    (LITE, "SELECT age FROM p WHERE y IN (SELECT y FROM q)", "QUERY"),
    (LITE, "SELECT age FROM p WHERE y IN q", "FIELD"),
    (LITE, "SELECT age FROM p WHERE EXISTS (SELECT 1 FROM q)", "EXISTS"),
    (LITE, "SELECT (SELECT max(age) FROM p) AS age FROM p", "SUBQUERY"),
    (LITE, "SELECT max(age) FROM p", "MAX"),
    (LITE, "SELECT total(age) FROM p", "total"),
    (LITE, "SELECT age FROM p WINDOW w AS (ORDER BY age)", "WINDOWS"),
    (LITE, "SELECT age FROM p ORDER BY age", "ORDER"),
    (LITE, "SELECT age FROM p INTERSECT SELECT 3", "INTERSECT"),
    (LITE, "VALUES (1, 2)", "VALUES"),
    (LITE, "SELECT 1", "no table"),
    (LITE, "SELECT value FROM json_each('[1, 2]')", "json_each|JSON|in the place of"),
    (LITE, "SELECT value FROM generate_series(1, 10)", "GENERATESERIES"),
    (LITE, "SELECT rowid, age FROM p", "rowid"),
    (LITE, "SELECT age FROM p WHERE random() > 0", "RAND"),
    (LITE, "SELECT last_insert_rowid() AS age FROM p", "last_insert_rowid"),
    (LITE, "SELECT mine(age) AS age FROM p", "mine"),
    (LITE, "SELECT age FROM p WHERE seen < date('now')", "LITERAL now"),
    (LITE, "SELECT date() AS age FROM p", "DATE"),
    (LITE, "SELECT julianday() AS age FROM p", "julianday"),
    (POSTGRES, "SELECT age::mine AS age FROM p", "type mine"),
    (LITE, "SELECT age FROM p WHERE seen < CURRENT_DATE", "CURRENTDATE"),
    (LITE, "SELECT age FROM p; SELECT age FROM p", "several statements"),
    (LITE, "DELETE FROM p", "DELETE"),
    (LITE, "PRAGMA table_info(p)", "PRAGMA"),
    (LITE, "SELECT age FROM p -- LIMIT 3", "comment"),
    (LITE, "SELECT age FROM p) AS a, (SELECT 1", "parsed"),
    (LITE, "SELECT FROM WHERE", "parsed|table|Where"),
    (LITE, "SELECT age FROM p INDEXED BY i", "INDEXED"),
    (LITE, "SELECT q.age FROM p", "q.age"),
    (POSTGRES, "SELECT DISTINCT ON (y) age FROM p", "DISTINCT"),
    (POSTGRES, "SELECT age FROM p TABLESAMPLE BERNOULLI (10)", "SAMPLE"),
    (POSTGRES, "SELECT age FROM p FETCH FIRST 3 ROWS ONLY", "LIMIT"),
    (POSTGRES, "SELECT age FROM p OFFSET 3", "OFFSET"),
    (POSTGRES, "SELECT age INTO q FROM p", "INTO"),
    (POSTGRES, "SELECT age FROM p FOR UPDATE", "LOCKS"),
    (POSTGRES, "SELECT age FROM p, LATERAL (SELECT 1) x", "JOINS"),
    (POSTGRES, "SELECT unnest(ages) AS age FROM p", "EXPLODE"),
    (POSTGRES, "SELECT count(*) FILTER (WHERE age > 3) FROM p", "FILTER"),
    (POSTGRES, "SELECT now() AS age FROM p", "CURRENTTIMESTAMP"),
    (POSTGRES, "SELECT age(seen) AS age FROM p", "age"),
    (POSTGRES, "SELECT user AS age FROM p", "user"),
    (POSTGRES, "SELECT nextval('s') AS age FROM p", "nextval|NextValue"),
    (POSTGRES, "SELECT ctid, age FROM p", "ctid"),
    (POSTGRES, "SELECT age FROM p WHERE seen < 'today'", "LITERAL today"),
    (POSTGRES, r"SELECT age FROM p WHERE name = E'\' LIMIT 3 --'", "backslash"),
    (MYSQL, "SELECT @n := @n + 1 AS age FROM p", "PROPERTYEQ"),
    (MYSQL, "SELECT age FROM p /*!50000 LIMIT 3 */", "comment"),
    (MYSQL, "SELECT SQL_CALC_FOUND_ROWS age FROM p", "OPERATION_MODIFIERS"),
    (MYSQL, "SELECT uuid() AS id, age FROM p", "UUID"),
    (MYSQL, "SELECT age FROM p PARTITION (p0)", "PARTITION"),
    (MSSQL, "SELECT TOP 3 age FROM p", "LIMIT"),
    ("duckdb://", "SELECT age FROM p QUALIFY row_number() OVER () < 3", "QUALIFY|window"),
    ("duckdb://", "SELECT age FROM p USING SAMPLE 10", "SAMPLE"),
    ("duckdb://", "SELECT age FROM read_csv('p.csv')", "READCSV"),
    ("duckdb://", "SELECT COLUMNS('a.*') FROM p", "COLUMNS"),
    (LITE, "SELECT date('subsec') AS age FROM p", "LITERAL subsec"),
    (LITE, "SELECT unixepoch('SUBSECOND') AS age FROM p", "LITERAL SUBSECOND"),
    (POSTGRES, "SELECT timestamp 'today 10:00' AS age FROM p", "LITERAL today 10:00"),
    (POSTGRES, "SELECT age FROM p WHERE seen < '10:00 Tomorrow'", "LITERAL 10:00 Tomorrow"),
    ("unheard://h/d", "SELECT age FROM p", "SQL of unheard"),
]  # fmt: skip

ALLOWED = [
    (LITE, "SELECT * FROM p"),
    (LITE, "SELECT * FROM p;"),
    (LITE, "SELECT t.age, t.y FROM p AS t WHERE t.age BETWEEN 18 AND 90"),
    (LITE, "SELECT age / 365.25 AS age, lower(trim(y)) AS y FROM p WHERE age IS NOT NULL"),
    (LITE, "SELECT CASE WHEN y = 'Yes' THEN 1 ELSE 0 END AS y, coalesce(age, 40) AS age FROM p"),
    (LITE, "SELECT CAST(age AS INTEGER) AS age, substr(y, 1, 1) AS y FROM p WHERE y IN ('a', 'b')"),
    (LITE, "SELECT strftime('%Y', seen) AS year, julianday(seen) - julianday(born) AS age FROM p"),
    (LITE, "SELECT iif(age > 3, 1, 0) AS age, max(age, 3) AS b FROM p WHERE NOT (y LIKE 'x%' OR age < 3)"),
    (LITE, "SELECT json_extract(more, '$.age') AS age, ifnull(y, 'no') AS y FROM main.p"),
    (LITE, "SELECT age || '-' || y AS both, abs(round(age, 1)) AS age, -y AS y, age % 2 AS odd FROM p"),
    (LITE, "SELECT age FROM p WHERE seen >= date('2020-01-01')"),
    (LITE, "SELECT date(substr(seen, 1, 10), '+1 day', 'start of month') AS seen, y = 'nowhere' AS y FROM p"),
    (LITE, "SELECT date(replace(seen, '/', '-')) AS seen, date(seen || '-01') AS month FROM p"),
    (POSTGRES, "SELECT date '2020-01-01' - seen AS age, to_date(y, 'DD Mon YYYY') AS b FROM p"),
    (POSTGRES, "SELECT extract(year FROM seen) AS age, date_trunc('month', seen) AS m FROM s.p"),
    (POSTGRES, "SELECT age::numeric(10, 2), seen + interval '1 day' AS seen FROM p WHERE y ILIKE 'a%'"),
    (POSTGRES, "SELECT \"user\", to_char(seen, 'YYYY') AS year, greatest(age, 3) AS age FROM ONLY p"),
    (POSTGRES, "SELECT more->>'age' AS age, split_part(y, '-', 1) AS y, left(y, 2) AS z FROM p"),
    (POSTGRES, "SELECT age FROM p WHERE age IS DISTINCT FROM y AND (age, y) = (1, 2)"),
    (MYSQL, "SELECT `age`, year(seen) AS year, if(age > 3, 1, 0) AS y, datediff(seen, born) AS d FROM p"),
    (MYSQL, "SELECT date_format(seen, '%Y') AS year, concat(a, b) AS c, age DIV 2 AS age FROM p"),
    (MSSQL, "SELECT [age], datediff(day, born, seen) AS d, left(y, 2) AS y FROM dbo.p WHERE age > 3"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "query", "reason"), REFUSED)
def test_what_may_look_at_other_rows_is_refused_by_name(url: str, query: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=f"and holds .*({reason})") as caught:
        check_query(url, query)
    assert "rows: independent" in str(caught.value)


@pytest.mark.parametrize(("url", "query"), ALLOWED)
def test_expressions_of_one_row_are_allowed(url: str, query: str) -> None:
    assert check_query(url, query).name == "p"


def spec(query: str, **changes: Any) -> dict[str, Any]:
    made = {
        "type": "tabular",
        "url": "sqlite:///p.db",
        "query": query,
        "target": "y",
        "classes": [0, 1],
    }
    return {
        **made,
        "columns": {"age": [0, 100]},
        "train": 40,
        "validation": 5,
        "test": 5,
        **changes,
    }


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sqlite3.Connection:
    monkeypatch.chdir(tmp_path)
    made = sqlite3.connect("p.db")
    made.executescript(
        "CREATE TABLE p (age REAL, y INTEGER, note TEXT);"
        "CREATE VIEW doubled AS SELECT a.age, b.y FROM p a, p b;"
        "CREATE VIEW P2 AS SELECT * FROM p;"
        "CREATE VIRTUAL TABLE words USING fts5(age, y);"
    )
    made.executemany("INSERT INTO p VALUES (?, ?, '')", [(20 + i, i % 2) for i in range(50)])
    made.commit()
    return made


@pytest.mark.parametrize("table", ["doubled", "p2", "words"])
def test_a_view_is_no_table(database: sqlite3.Connection, table: str) -> None:
    query = f"SELECT age, y FROM {table}"
    with pytest.raises(TaskDataError, match="is no table of the database's"):
        get_task(spec(query)).check()
    get_task(spec(query, rows="independent")).check()
    database.close()


def test_a_name_that_is_no_column_is_refused(database: sqlite3.Connection) -> None:
    with pytest.raises(TaskDataError, match=r"names hidden, no column of p"):
        get_task(spec("SELECT age, y FROM p WHERE hidden > 3")).check()
    task = get_task(spec("SELECT P.AGE AS age, y FROM p WHERE Age > 30"))
    task.check()
    data = task.load()
    assert sum(map(len, (data.train, data.validation, data.test))) == 39
    database.close()


@pytest.mark.postgres
def test_views_of_postgresql_are_no_tables() -> None:
    import sqlalchemy as sa

    url = os.environ.get("PRIVTUNE_TEST_POSTGRES_URL", "")
    if not url:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    engine = sa.create_engine(url)
    names = ("queried_p", "queried_v", "queried_m")
    drop = "DROP TABLE IF EXISTS queried_p CASCADE"
    with engine.begin() as connection:
        connection.execute(sa.text(drop))
        connection.execute(sa.text("CREATE TABLE queried_p (age float, y int)"))
        connection.execute(sa.text("CREATE VIEW queried_v AS SELECT * FROM queried_p"))
        connection.execute(sa.text("CREATE MATERIALIZED VIEW queried_m AS SELECT * FROM queried_p"))
    try:
        SqlTable(url, "SELECT age::int AS age, y FROM public.queried_p").check_source()
        for name in names[1:]:
            with pytest.raises(TaskDataError, match=r"is no table|names no table"):
                SqlTable(url, f"SELECT age, y FROM {name}").check_source()
        with pytest.raises(TaskDataError, match="no column of queried_p"):
            SqlTable(url, "SELECT age, queried_p FROM queried_p").check_source()
        with engine.begin() as connection:
            connection.execute(sa.text("ALTER TABLE queried_p ENABLE ROW LEVEL SECURITY"))
        with pytest.raises(TaskDataError, match="row-level security"):
            SqlTable(url, "SELECT y FROM queried_p").check_source()
    finally:
        with engine.begin() as connection:
            connection.execute(sa.text(drop))
        engine.dispose()


@pytest.mark.parametrize("rows", ["dependent", True, ""])
def test_rows_are_declared_in_one_word(rows: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"task\.rows"):
        get_task(spec("SELECT * FROM p LIMIT 3", rows=rows))
    without = {k: v for k, v in spec("", rows="independent").items() if k not in ("url", "query")}
    with pytest.raises(InvalidInputError, match=r"task\.rows"):
        get_task({**without, "path": "p.csv"})


def test_declared_rows_stand_in_charge_certificate_report_and_tags(
    database: sqlite3.Connection,
) -> None:
    import privtune
    from privtune.views.officer import to_markdown
    from privtune.views.report import render_study

    database.close()
    study = privtune.create_study(
        "declared",
        budget=privtune.Budget(4.0, 1e-5, name="declared"),
        task=spec("SELECT age, y FROM p LIMIT 40", rows="independent"),
        arms=[{"name": "one", "strategy": "fixed", "parameters": GIVEN}],
        epochs=1,
        expected_batch_size=8,
    )
    said = "declared independent"
    assert said in study.plans[0].public_facts["rows of the query"]
    study.run()
    (charge,) = study.certificate()["charges"]
    assert said in charge["note"]
    bodies = [entry["body"] for entry in study.export()["certificate"]["entries"]]
    assert [said in str(body["public"]) for body in bodies if "event" in body] == [True]
    page = " ".join(render_study(study).split())
    assert "Rows of a query, declared independent." in page
    assert "declared, not checked, to come from one protected record each" in page
    assert said in to_markdown(study).lower()
    study.close()


def test_a_database_that_is_down_is_no_wrong_query() -> None:
    """It was told as a query that this user may not run."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        table = SqlTable(f"postgresql+psycopg://u@127.0.0.1:{port}/d", "SELECT age FROM p")
        for read in (table.check_source, table.open):
            with pytest.raises(TaskDataError, match=rf"database .*:{port}/d cannot be reached"):
                read()


@pytest.mark.postgres
def test_a_wrong_query_is_no_database_that_is_down() -> None:
    url = os.environ.get("PRIVTUNE_TEST_POSTGRES_URL")
    if url is None:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    with pytest.raises(TaskDataError, match=r"query .* cannot be read"):
        SqlTable(url, "SELECT nothing FROM nowhere_at_all", independent=True).open()


@pytest.mark.postgres
def test_a_connection_that_is_lost_while_rows_are_read_is_no_row_s_fault() -> None:
    url = os.environ.get("PRIVTUNE_TEST_POSTGRES_URL")
    if url is None:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    dropped = "SELECT 1 AS age WHERE pg_terminate_backend(pg_backend_pid())"
    with pytest.raises(TaskDataError, match="cannot be reached"):
        SqlTable(url, dropped, independent=True).open().most()
