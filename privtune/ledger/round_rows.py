"""The rows of rounds and their tasks, in whatever transaction asks. Sealed."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from privtune.ledger.chain import canonical
from privtune.ledger.errors import UnknownChargeError
from privtune.ledger.ledger import Ledger
from privtune.ledger.round_values import OpenRound
from privtune.ledger.schema import rounds, tasks
from privtune.ledger.storage import Storage

# Run for every task, built once.
_FINISH = (
    sa.update(tasks)
    .where(
        tasks.c.budget == sa.bindparam("of_budget"),
        tasks.c.charge == sa.bindparam("of_charge"),
        tasks.c.number == sa.bindparam("of_number"),
        tasks.c.done == 0,
    )
    .values(done=1, score=sa.bindparam("score"), result=sa.bindparam("result"))
)
_IDLE = 120  # seconds for a model to become a file, in the transaction that accepts its result


def _key(charge_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    budget, charge = Ledger.parse(charge_id)
    return rounds.c.budget == budget, rounds.c.charge == charge


def _read(charge_id: str, row: Row[Any] | None) -> OpenRound | None:
    return None if row is None else OpenRound(charge_id, row.tasks, bytes.fromhex(row.secret))


def find_round(connection: Connection, charge_id: str) -> OpenRound | None:
    """Return the round of a charge, if it was opened."""
    query = sa.select(rounds).where(*_key(charge_id))
    return _read(charge_id, connection.execute(query).one_or_none())


def lock_round(storage: Storage, connection: Connection, charge_id: str) -> OpenRound:
    """Lock the row of a round that is not over.

    Raises:
        UnknownChargeError: The charge has no round.
        ChargeStateError: The charge is settled.
    """
    row = storage.lock(connection, sa.select(rounds).where(*_key(charge_id)), {})
    if (opened := _read(charge_id, row)) is None:
        raise UnknownChargeError(f"charge {charge_id} has no round.")
    opened.check_open()
    return opened


def of_round(charge_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    """What the tasks of a round have in common."""
    budget, charge = Ledger.parse(charge_id)
    return tasks.c.budget == budget, tasks.c.charge == charge


def of_task(charge_id: str, number: int) -> tuple[sa.ColumnElement[bool], ...]:
    """What only this task of a round has."""
    return *of_round(charge_id), tasks.c.number == number


def forget_secret(connection: Connection, charge_id: str) -> None:
    """Forget what a round's seeds derive from: with it, noise could be drawn again and subtracted."""
    connection.execute(sa.update(rounds).where(*_key(charge_id)).values(secret=""))


def insert_round(
    connection: Connection, charge_id: str, count: int, secret: bytes | None
) -> OpenRound:
    """Insert a round and its tasks."""
    budget, charge = Ledger.parse(charge_id)
    opened = OpenRound(charge_id, count, secrets.token_bytes(32) if secret is None else secret)
    connection.execute(
        sa.insert(rounds).values(
            budget=budget, charge=charge, tasks=count, secret=opened.secret.hex()
        )
    )
    _insert_tasks(connection, charge_id, range(count))
    return opened


def _insert_tasks(connection: Connection, charge_id: str, numbers: Iterable[int]) -> None:
    budget, charge = Ledger.parse(charge_id)
    fresh = {"attempts": 0, "worker": "", "leased_until": 0.0, "done": 0}
    rows = [{"budget": budget, "charge": charge, "number": n, **fresh} for n in numbers]
    if rows:
        connection.execute(sa.insert(tasks), rows)


def open_tasks(connection: Connection, charge_id: str, numbers: Sequence[int]) -> None:
    """Open tasks, anew if their results were lost; those that have none stay with who works on them."""
    known = set(connection.scalars(sa.select(tasks.c.number).where(*of_round(charge_id))))
    _insert_tasks(connection, charge_id, [number for number in numbers if number not in known])
    for number in known.intersection(numbers):
        connection.execute(
            sa.update(tasks)
            .where(*of_task(charge_id, number), tasks.c.done == 1)
            .values(done=0, score=None, result=None, attempts=0, leased_until=0.0)
        )
    count = len(known.union(numbers))
    connection.execute(sa.update(rounds).where(*_key(charge_id)).values(tasks=count))


def finish_task(
    connection: Connection, charge_id: str, number: int, score: float, result: Mapping[str, Any]
) -> bool:
    """Store a task's result; return whether it was the first."""
    # −∞ has no portable literal in a column: it is stored as NULL.
    stored = None if math.isnan(score) or score == -math.inf else score
    budget, charge = Ledger.parse(charge_id)
    key = {"of_budget": budget, "of_charge": charge, "of_number": number}
    values = {**key, "score": stored, "result": canonical(result)}
    if connection.dialect.name != "postgresql":
        return connection.execute(_FINISH, values).rowcount == 1
    # From here on the task's row is locked. A worker that is stopped or cut off now loses its session,
    # not the round; said in this statement's own answer, it costs no question.
    limit = sa.func.set_config("idle_in_transaction_session_timeout", f"{_IDLE}s", True)
    statement = _FINISH.returning(tasks.c.number, limit)
    return connection.execute(statement, values).first() is not None


def count_open(connection: Connection, charge_id: str) -> int:
    """Return how many tasks have no result yet."""
    query = sa.select(sa.func.count()).select_from(tasks)
    return int(
        connection.execute(query.where(*of_round(charge_id), tasks.c.done == 0)).scalar_one()
    )


def among_found(connection: Connection, found: sa.CTE) -> sa.ColumnElement[bool]:
    """What tasks that were found have, so that they are looked up by their key.

    PostgreSQL takes a round that was just opened for a short one, and would read all of it.
    """
    numbers = sa.select(found.c.number)
    if connection.dialect.name != "postgresql":
        return tasks.c.number.in_(numbers)
    first, last = (f(found.c.number) for f in (sa.func.min, sa.func.max))
    return sa.and_(
        tasks.c.number == sa.any_(sa.func.array(numbers.scalar_subquery())),
        # It takes the line above for a filter of the whole round, and these for where to look.
        tasks.c.number >= sa.select(first).scalar_subquery(),
        tasks.c.number <= sa.select(last).scalar_subquery(),
    )


def close_after(connection: Connection, charge_id: str, number: int, result: str) -> None:
    """Give every open task after one a result, in the order in which others lock them."""
    after = (
        sa.select(tasks.c.number)
        .where(*of_round(charge_id), tasks.c.number > number, tasks.c.done == 0)
        .order_by(tasks.c.number)
        .with_for_update()
        .cte("after")
    )
    connection.execute(
        sa.update(tasks)
        .where(*of_round(charge_id), among_found(connection, after))
        .values(done=1, score=None, result=result)
    )
