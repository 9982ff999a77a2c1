"""Limits on δ for the number of protected records, checked whenever arms are planned.

A mechanism that draws one record at random and publishes it whole is (0, 1/n)-differentially private, since
each of n records is drawn with probability 1/n. At such a δ the guarantee says nothing about anybody.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from privtune.errors import InvalidInputError
from privtune.ledger import RECORD

if TYPE_CHECKING:
    from privtune.tasks import Task

_log = logging.getLogger(__name__)

_ROUNDING = 1.0 + 1e-9
ANYWAY = "Or go on all the same: --force (in Python force=True)."
"""The remedy of whoever has reason to keep such a δ."""


def protected_records(task: Task) -> int:
    """Return the declared number of a task's records, or units, that are not in public splits."""
    records = task.train_records
    if not task.public_validation:
        records += task.validation_records
    if not task.public_test:
        records += task.test_records
    return records


def check_delta_of(task: Task, delta: float, *, force: bool) -> None:
    """Refuse a δ that is too large for the declared sizes of a task, as :func:`check_delta` does."""
    check_delta(
        delta,
        protected_records(task),
        unit=task.unit or RECORD,
        benchmark=task.benchmark,
        force=force,
    )


def check_delta(
    delta: float,
    records: int,
    *,
    unit: str = RECORD,
    benchmark: bool = False,
    force: bool = False,
    more: str = ANYWAY,
) -> None:
    """Refuse a δ above 1/n for n protected records, and warn of one above 1/(10 n).

    Args:
        delta: δ of the budget.
        records: The declared number n of protected records, or units.
        unit: What is counted, in a word.
        benchmark: Whether all records are declared public: then nobody is at risk, and a warning is enough.
        force: Whether the user was told, and goes on.
        more: What the user can do besides.

    Raises:
        InvalidInputError: If δ is above 1/n.
    """
    limit = 1.0 / max(records, 1)
    if delta <= 0.1 * limit * _ROUNDING:
        return
    usual = 10.0 ** math.floor(math.log10(0.1 * limit * _ROUNDING))
    remedy = f"Create a budget under another name, with a δ such as {usual:g}."
    why = (
        f"a program that publishes one random {unit} of {records:,} in full satisfies δ = "
        f"1/{records:,} = {limit:.2g}"
    )
    if delta > limit * _ROUNDING and not (benchmark or force):
        raise InvalidInputError(
            "budget.delta",
            delta,
            f"is above 1 / (number of protected {unit}s): {why}",
            f"{remedy} {more}".strip(),
        )
    _log.warning("budget.delta = %g is large for its %ss: %s. %s", delta, unit, why, remedy)
