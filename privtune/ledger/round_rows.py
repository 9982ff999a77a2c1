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

__all__ = [
    "at_work",
    "count_open",
    "find_round",
    "finish_task",
    "first_free",
    "forget_secret",
    "insert_round",
    "lock_round",
    "of_round",
    "of_task",
    "open_tasks",
]


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
    """Lock the round's row.

    Raises:
        UnknownChargeError: The charge has no round.
    """
    row = storage.lock(connection, sa.select(rounds).where(*_key(charge_id)), {})
    if (opened := _read(charge_id, row)) is None:
        raise UnknownChargeError(f"charge {charge_id} has no round.")
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
    moved = connection.execute(
        sa.update(tasks)
        .where(*of_task(charge_id, number), tasks.c.done == 0)
        .values(done=1, score=stored, result=canonical(result))
    )
    return moved.rowcount == 1


def count_open(connection: Connection, charge_id: str) -> int:
    """Return how many tasks have no result yet."""
    query = sa.select(sa.func.count()).select_from(tasks)
    return int(
        connection.execute(query.where(*of_round(charge_id), tasks.c.done == 0)).scalar_one()
    )


def first_free(connection: Connection, charge_id: str, now: float, most: int) -> list[Row[Any]]:
    """Return the first open tasks that nobody works on: few rows, however many there are."""
    query = sa.select(tasks).where(
        *of_round(charge_id), tasks.c.done == 0, tasks.c.leased_until <= now
    )
    return list(connection.execute(query.order_by(tasks.c.number).limit(most)))


def at_work(connection: Connection, charge_id: str, worker: str, now: float) -> tuple[int, int]:
    """Return how many open tasks are free, and how many other workers hold one."""
    mine, free = of_round(charge_id), tasks.c.leased_until <= now
    count = sa.select(sa.func.count()).select_from(tasks)
    others = sa.select(sa.func.count(sa.distinct(tasks.c.worker)))
    held = others.where(*mine, tasks.c.done == 0, sa.not_(free), tasks.c.worker != worker)
    query = count.where(*mine, tasks.c.done == 0, free)
    return (
        int(connection.execute(query).scalar_one()),
        int(connection.execute(held).scalar_one()),
    )
