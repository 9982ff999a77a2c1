"""Tables that are the result of a query to a database, whose URL holds no password.

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
from privtune.facts import TaskDataError
from privtune.ledger.urls import masked_url
from privtune.tables.reader import BATCH, Columns, Source, batched, check_file

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_DIALECTS = {
    "sqlite": "sqlite", "postgresql": "postgres", "cockroachdb": "postgres", "redshift": "redshift",
    "mysql": "mysql", "mariadb": "mysql", "duckdb": "duckdb", "mssql": "tsql", "oracle": "oracle",
    "snowflake": "snowflake", "bigquery": "bigquery", "databricks": "databricks", "trino": "trino",
}  # fmt: skip
"""sqlglot's names of the SQL dialects of SQLAlchemy's databases."""

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
"""Functions of one row that sqlglot has no class for."""
_FIELDS: dict[type[exp.Expr], frozenset[str]] = {
    exp.Select: frozenset({"expressions", "from_", "from", "where"}),
    exp.From: frozenset({"this"}),
    exp.Table: frozenset({"this", "db", "catalog", "alias", "only"}),
    exp.TableAlias: frozenset({"this"}),
    exp.In: frozenset({"this", "expressions"}),
}
"""Allowed fields of those parts of a query that may also hold forbidden ones."""
_OF_SESSION = frozenset(
    """
        user uid session_user system_user current_user current_role current_catalog current_schema
        current_date current_time current_timestamp localtime localtimestamp sysdate systimestamp nextval
        currval rowid _rowid_ oid ctid xmin xmax cmin cmax tableoid rownum ora_rowscn
    """.split()  # noqa: SIM905
)
"""Unquoted names that look like columns, but mean the session or a row's place."""
_POLICIES = (
    "SELECT bool_or(c.relrowsecurity) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n "
    "ON n.oid = c.relnamespace WHERE c.relname = :table AND n.nspname = :schema"
)
_URL = "must be the URL of a database, as SQLAlchemy has it"
_ALLOWED = "SELECT columns FROM one table WHERE conditions on the same row"
# SQLite takes subsec alone for now.
_TODAY = re.compile(
    r"(?<![^\W\d_])(now|today|tomorrow|yesterday|subsec(ond)?)(?![^\W_])",
    re.IGNORECASE,
)


class RowError(PrivTuneError):
    """A row could not be read or computed, an error for the curator alone."""


def check_query(url: str, query: str) -> exp.Table:
    """Return the table that a query reads row by row, or refuse the query.

    Args:
        url: Of the database; variables of the environment may stand in it.
        query: One SELECT.

    Raises:
        InvalidInputError: If a part of it is not on the list of those that look at one row alone.
    """
    url_without_variables = _VARIABLE.sub("x", url)
    backend = sa.make_url(url_without_variables).get_backend_name()
    dialect = _DIALECTS.get(backend)
    if dialect is None:
        raise _refused(query, f"SQL of {backend}, which is not known here")
    select = _parse(query, dialect)
    for part in select.walk():
        name = _name_refused(part, top=part is select)
        if name:
            raise _refused(query, f"{name}, which may look at other rows or change from run to run")
    source = _source_of(select, query)
    alias = source.alias_or_name.casefold()
    tables = {alias, source.name.casefold(), ""}
    for column in select.find_all(exp.Column):
        if column.table.casefold() not in tables:
            text = column.sql(dialect=dialect)
            raise _refused(query, f"{text}, of no table that is read")
    return source


def _source_of(select: exp.Expr, query: str) -> exp.Table:
    """Return the table in a parsed query's FROM, or refuse a query without a named table.

    Args:
        select: The query, parsed: by the version of sqlglot its table is under another key.
        query: As it is declared, for an error.
    """
    clause = select.args.get("from_") or select.args.get("from") or select
    source = clause.this
    if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
        raise _refused(query, "no table, or a function in the place of one")
    return source


def _parse(query: str, dialect: str) -> exp.Expr:
    """Return the single statement of a query, parsed, or refuse ambiguous text such as comments.

    Args:
        query: As it is declared.
        dialect: How sqlglot calls the database's SQL.
    """
    if "\\" in query:
        raise _refused(query, "a backslash, which databases read in two ways")
    try:
        tokens = sqlglot.tokenize(query, dialect=dialect)
        parsed = sqlglot.parse(query, dialect=dialect)
    except (sqlglot.errors.SqlglotError, RecursionError):
        raise _refused(query, f"what is no {dialect} that can be parsed") from None
    if any(token.comments for token in tokens):
        raise _refused(query, "a comment, in which a database may see a command")
    statements = [statement for statement in parsed if statement is not None]
    if len(statements) != 1:
        raise _refused(query, "several statements, or none")
    return statements[0]


def _name_refused(part: exp.Expr, *, top: bool) -> str:
    """Return the name of a query's part if it is forbidden, or an empty text if it is allowed.

    Args:
        part: A node of the parsed query.
        top: Whether it is the query itself, which alone may be a SELECT.
    """
    kind = type(part)
    name = part.key.upper()
    used = _fields_in_use(part)
    if isinstance(part, exp.Anonymous):
        is_known = part.name.lower() in _KNOWN_FUNCTIONS
        is_allowed = is_known and len(used) > 1
        return "" if is_allowed else part.name
    if top != (kind is exp.Select) or kind.__name__ not in _KNOWN_PARTS:
        return name
    allowed = _FIELDS.get(kind, used)
    more = [field for field in used if field not in allowed]
    if more:
        return more[0].strip("_").upper()
    if _is_of_the_moment(part, used):
        return f"{name} {part.name}"
    if isinstance(part, exp.DataType) and part.this == exp.DataType.Type.USERDEFINED:
        return f"type {part.sql()}"
    if isinstance(part, exp.Column) and _is_of_session(part):
        return f"{part.this.name} (quote a column of that name)"
    return ""


def _fields_in_use(part: exp.Expr) -> list[str]:
    """Return the names of the fields of a query's part that are not empty."""
    names = []
    for name, value in part.args.items():
        is_empty = value in (None, [], False)
        if not is_empty:
            names.append(name)
    return names


def _is_of_the_moment(part: exp.Expr, used: Sequence[str]) -> bool:
    """Return whether a part calls a function without arguments, such as RANDOM(), or means now.

    Either would make other records of the same table when the query runs again.
    """
    if isinstance(part, exp.Literal):
        return _TODAY.search(part.name) is not None
    is_function = isinstance(part, exp.Func) and not isinstance(part, exp.Connector)
    return is_function and not used


def _is_of_session(column: exp.Column) -> bool:
    """Return whether an apparent column means a value of the session, or a row's place.

    A name in quotes is a column whatever it is.
    """
    identifier = column.this
    if identifier.name.lower() not in _OF_SESSION:
        return False
    is_quoted = isinstance(identifier, exp.Identifier) and identifier.args.get("quoted")
    return not is_quoted


def _refused(query: str, part: str) -> InvalidInputError:
    """Return the error for a query that holds a forbidden part."""
    return InvalidInputError(
        "task.query",
        query,
        f"must be {_ALLOWED}, and holds {part}",
        "Store what it returns as a table, one row a record; or say rows: independent, which declares that "
        "each record of the query comes from one protected record, and is shown wherever the ε is.",
    )


def check_url(url: Any) -> str:
    """Return a database's URL, or refuse one that is invalid or holds a password.

    Raises:
        InvalidInputError: If it is none, or holds a password: a spec is stored and exported.
    """
    if not isinstance(url, str):
        raise InvalidInputError("task.url", url, _URL)
    rest = _VARIABLE.sub("", url)
    has_password = masked_url(rest) != rest
    if has_password and not _VARIABLE.search(url):
        raise InvalidInputError(
            "task.url",
            masked_url(url),
            "must hold no password, for a study's spec is stored and exported",
            "Write ${NAME} in its place, and set that variable.",
        )
    url_without_variables = _VARIABLE.sub("x", url)
    try:
        sa.make_url(url_without_variables)
    except sa.exc.ArgumentError:
        raise InvalidInputError("task.url", masked_url(url), _URL) from None
    return url


@dataclass(frozen=True)
class SqlTable:
    """The result of a query, with environment variables as ``${NAME}`` in the database's URL.

    Attributes:
        url: The database, without a password.
        query: One SELECT.
        independent: Whether its rows are declared to come from one protected record each.
    """

    url: str
    query: str
    independent: bool = False

    def check_source(self) -> None:
        """Check that the query reads columns of a base table, since a view may hide a join.

        Only the catalogue of the database is read, and no row.

        Raises:
            TaskDataError: If it reads something else, or the database does not say.
        """
        if self.independent:
            return
        table = check_query(self.url, self.query)
        with self._connected() as connection:
            try:
                columns = self._columns_of(table, connection)
            except (NotImplementedError, sa.exc.NoInspectionAvailable):
                reason = "and the database does not say if that is a table"
                raise self._refused(table, reason) from None
        columns.add("*")
        query_columns = table.root().find_all(exp.Column)
        names = dict.fromkeys(column.name for column in query_columns)
        missing = [name for name in names if name.casefold() not in columns]
        if missing:
            listing = ", ".join(missing)
            raise TaskDataError(
                f"The query of {masked_url(self.url)} names {listing}, no column of {table.name}."
            )

    def _columns_of(self, table: exp.Table, connection: Connection) -> set[str]:
        """Return the columns of a base table, in lower case, or refuse a view or an absent table.

        A table with row-level security is refused, too: its policy may look at other rows.
        """
        schema = table.db or None
        inspector = sa.inspect(connection)
        table_names = inspector.get_table_names(schema)
        view_names = inspector.get_view_names(schema)
        tables = _find_name(table.name, table_names)
        views = _find_name(table.name, view_names)
        if not tables and not views:
            raise TaskDataError(
                f"The query of {masked_url(self.url)} cannot be read: it names no table that is "
                "there, or that this machine's user may read."
            )
        if len(tables) != 1 or views or table.catalog or _is_virtual(connection, tables[0]):
            reason = "which is no table of the database's: a view may hold other rows"
            raise self._refused(table, reason)
        (name,) = tables
        columns = inspector.get_columns(name, schema)
        if connection.dialect.name == "postgresql":
            place = {"table": name, "schema": schema or inspector.default_schema_name}
            has_policies = connection.execute(sa.text(_POLICIES), place).scalar()
            if has_policies:
                raise self._refused(table, "whose row-level security may look at other rows")
        return {column["name"].casefold() for column in columns}

    def _refused(self, table: exp.Table, reason: str) -> TaskDataError:
        """Return the error for a query that reads something other than a base table."""
        remedy = "Name a table, or say rows: independent."
        return TaskDataError(
            f"The query of {masked_url(self.url)} reads {table.name}, {reason}. {remedy}"
        )

    @contextmanager
    def _connected(self, *, rows: bool = False) -> Iterator[Connection]:
        """Connect to the database; errors show a value of a record only if ``rows`` are read.

        Args:
            rows: Whether rows are read, so that an error may be the doing of one of them.

        Raises:
            RowError: If reading rows fails; what the database says may hold a value.
            TaskDataError: If anything else fails.
        """
        engine = self._make_engine()
        try:
            try:
                connection = engine.connect()
            except sa.exc.DBAPIError as error:
                raise self._unreachable(error) from None
            with connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            # Lost within, by no row and no query.
            if getattr(error, "connection_invalidated", False):
                raise self._unreachable(error) from None
            if rows:
                cause = getattr(error, "orig", error)
                reason, _, _ = str(cause).partition("\n")
                raise RowError(f"A row of the query cannot be read: {reason}") from None
            raise self._unreadable(error) from None
        finally:
            engine.dispose()

    def _make_engine(self) -> sa.Engine:
        """Return SQLAlchemy's engine for the URL, with its environment variables filled in.

        Raises:
            TaskDataError: If a variable is not set, the file of SQLite is not there, or no driver is.
        """
        unset = [name for name in _VARIABLE.findall(self.url) if name not in os.environ]
        if unset:
            raise TaskDataError(
                f"task.url needs the variable {unset[0]} of the environment: set it."
            )
        try:
            url_with_values = _VARIABLE.sub(_value_of_variable, self.url)
            url = sa.make_url(url_with_values)
            file = url.database or ""
            is_file = file not in ("", ":memory:") and not file.startswith("file:")
            if is_file and url.get_backend_name() == "sqlite":
                check_file(Path(file))  # SQLite would make one that is not there
            return sa.create_engine(url)
        except (sa.exc.SQLAlchemyError, ModuleNotFoundError, ValueError) as error:
            raise self._unreadable(error) from None

    def _unreachable(self, error: Exception) -> TaskDataError:
        """Return the error for a database that does not answer."""
        return TaskDataError(
            f"The database {masked_url(self.url)} cannot be reached ({type(error).__name__}): see that it "
            "runs, that this machine reaches it, and that this user may connect."
        )

    def _unreadable(self, error: Exception) -> TaskDataError:
        """Return the error for a query that the database refuses, without the database's message."""
        return TaskDataError(
            f"The query of {masked_url(self.url)} cannot be read ({type(error).__name__}): it must be "
            "one SELECT, which this machine's user may run."
        )

    def _select(self, what: str) -> sa.TextClause:
        """Return a statement that selects columns, or a count, of the query's result."""
        query = self.query.strip().rstrip(";")
        return sa.text(f"SELECT {what} FROM ({query}) AS privtune_records")  # noqa: S608  the user's own query

    def open(self) -> Source:
        """Open the result of the query: read the names of its columns, but no row yet.

        The number of records is counted by a query of its own, and they are read as a stream.
        """
        with self._connected() as connection:
            all_columns = self._select("*")
            header = sa.text(f"{all_columns.text} LIMIT 0")
            columns = list(connection.execute(header).keys())

        def most() -> int:
            count = self._select("COUNT(*)")
            with self._connected(rows=True) as connection:
                return int(connection.execute(count).scalar_one())

        def read(names: Sequence[str]) -> Iterator[Columns]:
            with self._connected(rows=True) as connection:
                streamed = connection.execution_options(yield_per=BATCH)
                selected_columns = _forgiving_columns(connection, names)
                result = streamed.execute(self._select(selected_columns))
                keys = list(result.keys())
                places = [keys.index(name) for name in names]
                records = ([row[place] for place in places] for row in result)
                yield from batched(names, records)

        return Source(columns, {}, most, read)


def _value_of_variable(match: re.Match[str]) -> str:
    """Return the value of the environment variable that a match in a URL names."""
    name = match[1]
    return os.environ[name]


def _find_name(name: str, names: Sequence[str]) -> list[str]:
    """Return the names that equal a name but for upper and lower case."""
    folded = name.casefold()
    return [other for other in names if other.casefold() == folded]


def _forgiving_columns(connection: Connection, names: Sequence[str]) -> str:
    """Return the columns of a SELECT, cast to text where a driver could fail on a single value.

    One value that a driver cannot read would else end the reading of all rows.
    """
    # SQLite keeps text that is not UTF-8, PostgreSQL dates that Python has not.
    if connection.dialect.name == "sqlite":
        driver: Any = connection.connection.driver_connection
        driver.text_factory = lambda text: text.decode(errors="replace")
    if connection.dialect.name != "postgresql":
        return "*"
    quote = connection.dialect.identifier_preparer.quote_identifier
    casts = []
    for name in names:
        quoted = quote(name)
        casts.append(f"CAST({quoted} AS TEXT) AS {quoted}")
    return ", ".join(casts)


def _is_virtual(connection: Connection, table: str) -> bool:
    """Return whether a table of SQLite's is virtual, with rows that a module generates."""
    if connection.dialect.name != "sqlite":
        return False
    statement = sa.text("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name")
    definition = connection.execute(statement, {"name": table}).scalar()
    if not isinstance(definition, str):
        return True
    words = definition.upper().split()
    return words[1:2] != ["TABLE"]
