"""A query to a database as a table. Its URL is part of the spec, and so holds no password.

A query makes one record of each row of one table: ``SELECT columns FROM table WHERE conditions on the same
row``. A join, a LIMIT or a window function would make records out of several rows, so that one person
could change more than one record. A query is parsed, and every part of it must be on a list of parts that
are known to look at one row alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
import sqlglot
from sqlglot import exp

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger.urls import masked_url
from privtune.tasks._facts import TaskDataError
from privtune.tasks._reader import BATCH, Columns, Source, batched, check_file

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_DIALECTS = {
    "sqlite": "sqlite", "postgresql": "postgres", "cockroachdb": "postgres", "redshift": "redshift",
    "mysql": "mysql", "mariadb": "mysql", "duckdb": "duckdb", "mssql": "tsql", "oracle": "oracle",
    "snowflake": "snowflake", "bigquery": "bigquery", "databricks": "databricks", "trino": "trino",
}  # fmt: skip
"""How sqlglot calls the SQL of SQLAlchemy's databases."""

# What is allowed in a query, by sqlglot's names. Each part computes with the values of one row.
_KNOWN_PARTS = frozenset(
    """
        Select From Table TableAlias Where Column Star Identifier Alias Literal Null Boolean HexString Var
        Paren Tuple DataType DataTypeParam Cast TryCast Case If And Or Not Xor EQ NEQ NullSafeEQ NullSafeNEQ
        GT GTE LT LTE Is In Between Like ILike Glob SimilarTo RegexpLike Escape Neg Add Sub Mul Div IntDiv Mod
        DPipe Pow BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitwiseLeftShift BitwiseRightShift Interval
        IntervalSpan AtTimeZone JSONExtract JSONExtractScalar JSONPath JSONPathRoot JSONPathKey
        JSONPathSubscript Abs Ascii Cbrt Ceil Chr Coalesce Concat ConcatWs Contains EndsWith Exp Floor
        Greatest Hex Initcap Least Left Length Ln Log Lower MD5 Nullif NumberToStr Nvl2 Pad RegexpExtract
        RegexpReplace Repeat Replace Reverse Right Round SafeDivide Sign SplitPart Sqrt StartsWith StrPosition
        Substring ToChar ToNumber Translate Trim Trunc Typeof Unhex Unicode Upper WidthBucket Date DateAdd
        DateDiff DateFromParts DateSub DateTrunc Day DayOfMonth DayOfWeek DayOfWeekIso DayOfYear Datetime
        DatetimeAdd DatetimeDiff DatetimeSub DatetimeTrunc Extract Hour LastDay Minute Month Quarter Second
        StrToDate StrToTime StrToUnix TimeStrToDate TimeStrToTime TimeToStr TimeToUnix Timestamp TimestampAdd
        TimestampDiff TimestampSub TimestampTrunc TsOrDsAdd TsOrDsDiff TsOrDsToDate TsOrDsToDateStr
        TsOrDsToDatetime TsOrDsToTimestamp UnixToTime Week WeekOfYear Year
    """.split()  # noqa: SIM905
)
_KNOWN_FUNCTIONS = frozenset(
    """
        btrim char decode format instr printf zeroblob date date_part datetime julianday strftime time to_date
        timediff to_timestamp unixepoch weekday
    """.split()  # noqa: SIM905
)
"""Functions of one row that sqlglot has no name of its own for."""
_FIELDS: dict[type[exp.Expr], frozenset[str]] = {
    exp.Select: frozenset({"expressions", "from_", "from", "where"}),
    exp.From: frozenset({"this"}),
    exp.Table: frozenset({"this", "db", "catalog", "alias", "only"}),
    exp.TableAlias: frozenset({"this"}),
    exp.In: frozenset({"this", "expressions"}),
}
"""Of parts that may hold more than is allowed: what of them is allowed."""
_OF_SESSION = frozenset(
    """
        user uid session_user system_user current_user current_role current_catalog current_schema
        current_date current_time current_timestamp localtime localtimestamp sysdate systimestamp nextval
        currval rowid _rowid_ oid ctid xmin xmax cmin cmax tableoid rownum ora_rowscn
    """.split()  # noqa: SIM905
)
"""Names without quotes that stand for the session, or for a row's place, though they look like columns."""
_POLICIES = (
    "SELECT bool_or(c.relrowsecurity) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n "
    "ON n.oid = c.relnamespace WHERE c.relname = :table AND n.nspname = :schema"
)
_ALLOWED = "SELECT columns FROM one table WHERE conditions on the same row"
# SQLite takes subsec alone for now.
_TODAY = re.compile(
    r"(?<![^\W\d_])(now|today|tomorrow|yesterday|subsec(ond)?)(?![^\W_])", re.IGNORECASE
)


class RowError(PrivTuneError):
    """A row could not be read or computed: for the curator alone, as it may be the doing of one record."""


def check_query(url: str, query: str) -> exp.Table:
    """Return the table that a query reads row by row, or refuse the query. The URL says the dialect."""
    backend = sa.make_url(_VARIABLE.sub("x", url)).get_backend_name()
    dialect = _DIALECTS.get(backend)
    if dialect is None:
        raise _refused(query, f"SQL of {backend}, which is not known here")
    if "\\" in query:
        raise _refused(query, "a backslash, which databases read in two ways")
    try:
        tokens = sqlglot.tokenize(query, dialect=dialect)
        parsed = [part for part in sqlglot.parse(query, dialect=dialect) if part is not None]
    except (sqlglot.errors.SqlglotError, RecursionError):
        raise _refused(query, f"what is no {dialect} that can be parsed") from None
    if any(token.comments for token in tokens):
        raise _refused(query, "a comment, in which a database may see a command")
    if len(parsed) != 1:
        raise _refused(query, "several statements, or none")
    (select,) = parsed
    for part in select.walk():
        if found := _unknown(part, top=part is select):
            raise _refused(
                query, f"{found}, which may look at other rows or change from run to run"
            )
    source = (select.args.get("from_") or select.args.get("from") or select).this
    if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
        raise _refused(query, "no table, or a function in the place of one")
    names = {source.alias_or_name.casefold(), source.name.casefold(), ""}
    for column in select.find_all(exp.Column):
        if column.table.casefold() not in names:
            raise _refused(query, f"{column.sql(dialect=dialect)}, of no table that is read")
    return source


def _unknown(part: exp.Expr, *, top: bool) -> str:
    """Return what a part of a query is called that is not allowed; nothing where it is."""
    kind, name = type(part), part.key.upper()
    used = [field for field, value in part.args.items() if value not in (None, [], False)]
    if isinstance(part, exp.Anonymous):
        return "" if part.name.lower() in _KNOWN_FUNCTIONS and len(used) > 1 else part.name
    if top != (kind is exp.Select) or kind.__name__ not in _KNOWN_PARTS:
        return name
    allowed = _FIELDS.get(kind, used)
    if more := [field for field in used if field not in allowed]:
        return more[0].strip("_").upper()
    by_session = isinstance(part, exp.Func) and not isinstance(part, exp.Connector) and not used
    if by_session or (isinstance(part, exp.Literal) and _TODAY.search(part.name)):
        return f"{name} {part.name}"
    if isinstance(part, exp.DataType) and part.this == exp.DataType.Type.USERDEFINED:
        return f"type {part.sql()}"
    own = part.this if isinstance(part, exp.Column) else None
    quoted = isinstance(own, exp.Identifier) and bool(own.args.get("quoted"))
    if own is not None and own.name.lower() in _OF_SESSION and not quoted:
        return f"{own.name} (quote a column of that name)"
    return ""


def _refused(query: str, found: str) -> InvalidInputError:
    return InvalidInputError(
        "task.query",
        query,
        f"must be {_ALLOWED}, and holds {found}",
        "Store what it returns as a table, one row a record; or say rows: independent, which declares that "
        "each record of the query comes from one protected record, and is shown wherever the ε is.",
    )


def check_url(url: Any) -> str:
    """Return a database's URL, or refuse it."""
    if not isinstance(url, str):
        raise InvalidInputError(
            "task.url", url, "must be the URL of a database, as SQLAlchemy has it"
        )
    if masked_url(_VARIABLE.sub("", url)) != _VARIABLE.sub("", url) and not _VARIABLE.search(url):
        raise InvalidInputError(
            "task.url",
            masked_url(url),
            "must hold no password, for a study's spec is stored and exported",
            "Write ${NAME} in its place, and set that variable.",
        )
    try:
        sa.make_url(_VARIABLE.sub("x", url))
    except sa.exc.ArgumentError:
        raise InvalidInputError(
            "task.url", masked_url(url), "must be the URL of a database, as SQLAlchemy has it"
        ) from None
    return url


@dataclass(frozen=True)
class SqlTable:
    """The result of a query; ``${NAME}`` in its URL stands for a variable of the environment."""

    url: str
    query: str
    independent: bool = False  # its rows are declared to come from one protected record each

    def check_source(self) -> None:
        """Check that the query reads a base table and its columns: a view may hide a join."""
        if self.independent:
            return
        table = check_query(self.url, self.query)
        name, schema = table.name.casefold(), table.db or None

        def refused(said: str) -> TaskDataError:
            remedy = "Name a table, or say rows: independent."
            return TaskDataError(
                f"The query of {masked_url(self.url)} reads {table.name}, {said}. {remedy}"
            )

        with self._connected() as connection:
            try:
                inspector = sa.inspect(connection)
                tables, views = (
                    [one for one in found if one.casefold() == name]
                    for found in (
                        inspector.get_table_names(schema),
                        inspector.get_view_names(schema),
                    )
                )
                if not tables and not views:
                    raise TaskDataError(
                        f"The query of {masked_url(self.url)} cannot be read: it names no table that is "
                        "there, or that this machine's user may read."
                    )
                if len(tables) != 1 or views or table.catalog or _is_virtual(connection, tables[0]):
                    raise refused("which is no table of the database's: a view may hold other rows")
                known = {
                    "*",
                    *(c["name"].casefold() for c in inspector.get_columns(tables[0], schema)),
                }
                place = {"table": tables[0], "schema": schema or inspector.default_schema_name}
                postgres = connection.dialect.name == "postgresql"
                if postgres and connection.execute(sa.text(_POLICIES), place).scalar():
                    raise refused("whose row-level security may look at other rows")
            except (NotImplementedError, sa.exc.NoInspectionAvailable):
                raise refused("and the database does not say if that is a table") from None
        named = (column.name for column in table.root().find_all(exp.Column))
        if missing := [one for one in dict.fromkeys(named) if one.casefold() not in known]:
            raise TaskDataError(
                f"The query of {masked_url(self.url)} names {', '.join(missing)}, no column of {table.name}."
            )

    @contextmanager
    def _connected(self, *, rows: bool = False) -> Iterator[Connection]:
        """Connect. Whatever fails is told without a value of a record; of ``rows``, to the curator alone."""
        unset = [name for name in _VARIABLE.findall(self.url) if name not in os.environ]
        if unset:
            raise TaskDataError(
                f"task.url needs the variable {unset[0]} of the environment: set it."
            )
        try:
            url = sa.make_url(_VARIABLE.sub(lambda m: os.environ[m[1]], self.url))
            plain = url.database not in (None, "", ":memory:")
            if (
                url.get_backend_name() == "sqlite"
                and plain
                and not str(url.database).startswith("file:")
            ):
                check_file(Path(str(url.database)))  # SQLite would make one that is not there
            engine = sa.create_engine(url)
        except (sa.exc.SQLAlchemyError, ModuleNotFoundError, ValueError) as error:
            raise self._unreadable(error) from None
        try:
            with engine.connect() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            if rows:
                said = str(getattr(error, "orig", error)).partition("\n")[0]
                raise RowError(f"A row of the query cannot be read: {said}") from None
            raise self._unreadable(error) from None
        finally:
            engine.dispose()

    def _unreadable(self, error: Exception) -> TaskDataError:
        return TaskDataError(
            f"The query of {masked_url(self.url)} cannot be read ({type(error).__name__}): it must be "
            "one SELECT, which this machine's user may run."
        )

    def _selected(self, what: str) -> sa.TextClause:
        return sa.text(f"SELECT {what} FROM ({self.query.strip().rstrip(';')}) AS privtune_records")  # noqa: S608  the user's own query

    def open(self) -> Source:
        """Return the result by the names of its columns; no database says types that all keep to."""
        with self._connected() as connection:
            columns = connection.execute(sa.text(f"{self._selected('*').text} LIMIT 0")).keys()

        def most() -> int:
            with self._connected(rows=True) as connection:
                return int(connection.execute(self._selected("COUNT(*)")).scalar_one())

        def read(names: Sequence[str]) -> Iterator[Columns]:
            with self._connected(rows=True) as connection:
                streamed = connection.execution_options(yield_per=BATCH)
                found = streamed.execute(self._selected(_forgiving(connection, names)))
                places = [list(found.keys()).index(name) for name in names]
                yield from batched(names, ([row[place] for place in places] for row in found))

        return Source(list(columns), {}, most, read)


def _forgiving(connection: Connection, names: Sequence[str]) -> str:
    """Return the list of selected columns, as text where the driver could fail on a single value."""
    # SQLite keeps text that is not UTF-8, PostgreSQL dates that Python has not.
    if connection.dialect.name == "sqlite":
        driver: Any = connection.connection.driver_connection
        driver.text_factory = lambda text: text.decode(errors="replace")
    if connection.dialect.name != "postgresql":
        return "*"
    quoted = map(connection.dialect.identifier_preparer.quote_identifier, names)
    return ", ".join(f"CAST({name} AS TEXT) AS {name}" for name in quoted)


def _is_virtual(connection: Connection, table: str) -> bool:
    """Say whether a table of SQLite's is a virtual one, whose rows a module makes up."""
    if connection.dialect.name != "sqlite":
        return False
    asked = sa.text("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name")
    made = connection.execute(asked, {"name": table}).scalar()
    return not isinstance(made, str) or made.upper().split()[1:2] != ["TABLE"]
