"""A query to a database as a table. Its URL is part of the spec, and so holds no password."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from privtune.errors import InvalidInputError
from privtune.ledger.urls import masked_url
from privtune.tasks._files import Batch, text_columns
from privtune.tasks._task import TaskDataError

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

__all__ = ["SqlTable", "check_url"]

_BATCH = 2**15  # records that are read at once
_LOOKED_AT = 100  # records that types are inferred from
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def check_url(url: Any) -> str:
    """Return a database's URL, or refuse it.

    Raises:
        InvalidInputError: If it is none, or holds a password: specs are stored and exported.
    """
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
    """The result of a query, read some records at a time: see ``TableFile``.

    Args:
        url: Of the database; ``${NAME}`` stands for a variable of the environment.
        query: A SELECT.
    """

    url: str
    query: str

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """Connect; whatever fails is told without a value of a record."""
        unset = [name for name in _VARIABLE.findall(self.url) if name not in os.environ]
        if unset:
            raise TaskDataError(
                f"task.url needs the variable {unset[0]} of the environment: set it."
            )
        try:
            engine = sa.create_engine(_VARIABLE.sub(lambda m: os.environ[m[1]], self.url))
        except (sa.exc.SQLAlchemyError, ModuleNotFoundError, ValueError) as error:
            raise self._unreadable(error) from None
        try:
            with engine.connect() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
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

    @property
    def columns(self) -> Sequence[str]:
        """See ``TableFile``."""
        with self._connected() as connection:
            statement = sa.text(f"{self._selected('*').text} LIMIT 0")
            return list(connection.execute(statement).keys())

    @property
    def most(self) -> int:
        """See ``TableFile``."""
        with self._connected() as connection:
            return int(connection.execute(self._selected("COUNT(*)")).scalar_one())

    def text_columns(self) -> set[str]:
        """See ``TableFile``: by the first records, as of a CSV file."""
        with self._connected() as connection:
            found = connection.execute(sa.text(f"{self._selected('*').text} LIMIT {_LOOKED_AT}"))
            return text_columns(list(found.keys()), iter([tuple(row) for row in found]))

    def batches(self, names: Sequence[str], *, exact: Collection[str] = ()) -> Iterator[Batch]:
        """See ``TableFile``."""
        with self._connected() as connection:
            streamed = connection.execution_options(yield_per=_BATCH)
            found = streamed.execute(self._selected("*"))
            places = [list(found.keys()).index(name) for name in names]
            rows = iter(found)
            while records := list(itertools.islice(rows, _BATCH)):
                yield {
                    name: [row[place] for row in records]
                    for name, place in zip(names, places, strict=True)
                }
