"""Checks values as rows are read: a wrong type is an error with the table, the column and the row.

SQLite keeps a value of any type in any column, and whoever may write the file may write any value. Each
column of the schema therefore checks what it reads (:class:`Checked`), texts of JSON are parsed here alone
(:func:`read_object`), and what is built from them is built inside of :func:`parsing`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Dialect, Engine

from privtune.errors import PrivTuneError, UnreachableFileError
from privtune.ledger.errors import (
    OUT_OF_REACH,
    SENSELESS,
    LedgerCorruptedError,
    Place,
    StudyCorruptedError,
)

HEX = "hex"
"""Mark of a column, in its ``info``: digits of a secret."""

TIME = "time"
"""Mark of a column, in its ``info``: Unix seconds."""

INFINITE = "infinite"
"""Mark of a column, in its ``info``: a number that may be infinite."""

_SEALED_KEYS = {
    "privtune_tasks": ("budget", "charge"),
    "privtune_rounds": ("budget", "charge"),
}
_SEALED = "sealed/"
_YEAR_10000 = 253_402_300_800.0  # beyond it a time has no date
_SECRET = re.compile(r"([0-9a-f]{64})?")
_LAST_STATEMENT = "privtune_asked"
_LONGEST_KEY = 100
_STRANGE = "holds a document that this program does not write"

ColumnType = sa.types.TypeEngine[Any]
"""The type that a column has in the database."""


class Checked(sa.types.TypeDecorator[Any]):
    """A column's type that refuses values of a wrong type or range when they are read.

    Args:
        kind: The type that the column has in the database.
        table, column: Where it is, for the error.
        nullable: Whether NULL was written, too.
        mark: What else a value must be: one of the marks above, or nothing.
    """

    impl: Any = sa.types.NullType
    cache_ok = True

    def __init__(
        self,
        kind: ColumnType,
        table: str,
        column: str,
        nullable: bool,
        mark: str,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.table = table
        self.column = column
        self.nullable = nullable
        self.mark = mark
        self.impl = kind  # whose operators, binding and name in the database it has

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Return a function that reads a value of the column, and refuses one of a wrong type."""
        check, exact = _check_of(self.kind, self.mark)

        def refuse(value: Any) -> Any:
            """Convert NULL, a whole number or a memoryview to the column's type, and refuse all else."""
            if value is None and self.nullable:
                return None
            is_whole = exact is float and type(value) is int
            if is_whole and check is not None and check(value):
                return float(value)  # what a database computed of whole numbers
            if exact is bytes and isinstance(value, memoryview):
                return bytes(value)
            content = "nothing"
            if value is not None:
                content = f"{type(value).__name__} of no such value"
            expected = _words(self.kind, self.mark)
            place = Place(self.table, self.column)
            raise place.error(f"holds {content}, where {expected} was written")

        def read(value: object) -> Any:
            """Return a value unchanged if it has the column's type, else pass it to ``refuse``."""
            # A long log has many values: what nearly all of them are is asked first.
            if type(value) is exact and (check is None or check(value)):
                return value
            return refuse(value)

        return read


def checked(column: sa.Column[Any], table: str) -> sa.Column[Any]:
    """Return a column of a table whose values are checked when they are read."""
    marks = (mark for mark in (HEX, TIME, INFINITE) if column.info.get(mark))
    column.type = Checked(
        column.type,
        table,
        column.name,
        nullable=bool(column.nullable) and not column.primary_key,
        mark=next(marks, ""),
    )
    return column


def _check_of(kind: ColumnType, mark: str) -> tuple[Callable[[Any], bool] | None, type[Any]]:
    """Return the test that a column's values must pass, None without one, and their Python type."""
    if isinstance(kind, sa.Integer):
        return (lambda value: value >= 0), int
    if isinstance(kind, sa.Double):
        if mark == INFINITE:
            return (lambda value: not math.isnan(value)), float
        if mark == TIME:
            return (lambda value: 0.0 <= value < _YEAR_10000), float
        return math.isfinite, float
    if isinstance(kind, sa.LargeBinary):
        return None, bytes
    if mark == HEX:
        return (lambda value: _SECRET.fullmatch(value) is not None), str
    return None, str


def _words(kind: ColumnType, mark: str) -> str:
    """Return a text on what a column's values are, such as ``a whole number from 0``."""
    match kind:
        case sa.Integer():
            return "a whole number from 0"
        case sa.Double():
            return "a Unix time" if mark == TIME else "a number"
        case sa.LargeBinary():
            return "bytes"
        case _:
            return "a secret in hexadecimal digits" if mark == HEX else "a text"


def watch(engine: Engine) -> None:
    """Have an engine's connections remember their last statement and its values, for :func:`naming`."""

    def remember(
        connection: Connection,
        statement: object,
        many: object,
        values: object,
        _options: object,
    ) -> None:
        """Store a statement, and the values of one run or of many, with its connection."""
        connection.info[_LAST_STATEMENT] = statement, many or values

    sa.event.listen(engine, "before_execute", remember)


@contextmanager
def naming(connection: Connection) -> Iterator[None]:
    """Add the key of the damaged row to an error of the ``with`` block about an unreadable column."""
    try:
        yield
    except (LedgerCorruptedError, StudyCorruptedError) as error:
        place = error.place
        if place is None or place.key:
            raise
        key = _find_key(connection, place)
        if not key:
            raise
        place_of_row = Place(place.table, place.column, key)
        raise place_of_row.error(error.why) from None


def _find_key(connection: Connection, place: Place) -> str:
    """Run the last statement again for raw values, and return the key of the first damaged row."""
    statement, values = connection.info.get(_LAST_STATEMENT, (None, None))
    if not isinstance(statement, sa.Select):
        return ""
    table = _find_table(statement, place.table)
    if table is None:
        return ""
    damaged = table.c[place.column]
    read = damaged.type.result_processor(connection.dialect, None)
    if read is None:
        return ""
    keys: tuple[str, ...] | None = _SEALED_KEYS.get(place.table)
    if keys is None:
        keys = tuple(key.name for key in table.primary_key)
    raw = []
    for name in (*keys, place.column):
        raw.append(sa.type_coerce(table.c[name], sa.types.NullType()))
    query = statement.with_only_columns(*raw)
    try:
        rows = connection.execute(query, values or {}).all()
    except (sa.exc.SQLAlchemyError, *SENSELESS):
        return ""
    for *key, value in rows:
        try:
            read(value)
        except (LedgerCorruptedError, StudyCorruptedError):
            key_by_name = dict(zip(keys, key, strict=True))
            return show_key(key_by_name)
    return ""


def _find_table(statement: sa.Select[Any], name: str) -> sa.Table | None:
    """Return the table of a name among those that a statement reads, None if it reads no such table."""
    for table in statement.get_final_froms():
        if isinstance(table, sa.Table) and table.name == name:
            return table
    return None


def show_key(key: Mapping[str, object]) -> str:
    """Return a row's key as text, without the number of a sealed trial.

    Example:
        >>> show_key({"study": "digits", "name": "sealed/defaults/7"})
        "study = 'digits', name = 'sealed/defaults/...'"
    """
    words = [f"{name} = {_show_value(value)}" for name, value in key.items()]
    return ", ".join(words)


def _show_value(value: object) -> str:
    """Return one value of a row's key as text, cut if long, without a sealed trial's number."""
    if isinstance(value, str) and value.startswith(_SEALED):
        arm, _, _ = value.rpartition("/")
        value = f"{arm}/..."
    text = repr(value)
    return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}..."


def read_object(text: str | bytes, place: Place) -> dict[str, Any]:
    """Return the JSON object that a text holds, or raise an error that names the text's table and row."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # broken off, or nested without end
        value = None
    if not isinstance(value, dict):
        raise place.error("holds no JSON object, where one was written")
    return value


@contextmanager
def parsing(place: Place, *, refusals: bool = True) -> Iterator[None]:
    """Turn an error in the ``with`` block about a malformed document into one that names its place.

    Args:
        place: Where the document is.
        refusals: Whether refusals of our own count, too: of values that no program of ours writes.
    """
    try:
        yield
    # A connection that is lost while a document's files are read is no damage: the step is taken again.
    except (LedgerCorruptedError, StudyCorruptedError, UnreachableFileError, *OUT_OF_REACH):
        raise
    except PrivTuneError:
        if not refusals:
            raise
        raise place.error(_STRANGE) from None
    except SENSELESS:  # whose words may come from a sealed value
        raise place.error(_STRANGE) from None
