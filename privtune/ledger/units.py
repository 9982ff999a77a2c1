"""The unit of privacy, in words: what a budget protects, and a charge counts as one."""

from __future__ import annotations

import re

from privtune.errors import InvalidInputError
from privtune.ledger.errors import UnitMismatchError
from privtune.ledger.values import RECORD

_UNIT_RULE = (
    "must be 1 to 40 letters, digits, spaces and hyphens, beginning with a letter, as person"
)
_LONGEST_UNIT = 40


def check_unit(unit: str) -> str:
    """Return a unit of privacy that a new budget may promise.

    Args:
        unit: What one neighbour adds, removes or replaces, in a word.

    Raises:
        InvalidInputError: If it is no word that a statement could name.

    Example:
        >>> check_unit("hospital")
        'hospital'
    """
    if not re.fullmatch(r"[^\W\d_][^\W_]*(?:[ -][^\W_]+)*", unit) or len(unit) > _LONGEST_UNIT:
        raise InvalidInputError("unit", unit, _UNIT_RULE)
    return unit


def refuse_other_unit(unit: str, protected: str, who: str, budget: str) -> None:
    """Refuse what counts another unit than the budget protects.

    Args:
        unit: What is sampled, clipped and charged as one.
        protected: The budget's unit.
        who: Who asks, as the sentence begins.
        budget: The budget's name.

    Raises:
        UnitMismatchError: Says how both can be the same.

    Example:
        >>> refuse_other_unit("record", "person", "The arm", "clinic")
        Traceback (most recent call last):
            ...
        privtune.ledger.errors.UnitMismatchError: The arm counts each record by itself, but budget ...
    """
    if unit == protected:
        return
    if protected == RECORD:
        why = f"one row more changes what its {unit} adds by up to twice what is charged"
        remedy = f"Draw on a budget of unit: {unit}."
    else:
        why = f"one {protected} may have many of them"
        remedy = (
            f"Group by {protected} (a table: group, max_per_group and unit: {protected}; a task or "
            "data of your own: privtune.tasks.by_unit or unit_records), or draw on a budget of "
            f"unit: {unit}."
        )
    counts = "each record by itself" if unit == RECORD else f"all rows of one {unit} together"
    raise UnitMismatchError(
        f"{who} counts {counts}, but budget {budget!r} protects every {protected}: {why}. {remedy}"
    )


def show_adjacency(adjacency: str, unit: str) -> str:
    """Return an adjacency for people: of records where nothing else is said.

    Args:
        adjacency: Which datasets are neighbours.
        unit: What one of them has more, or other.

    Example:
        >>> show_adjacency("add-remove", "person")
        'add-remove of one person'
    """
    return str(adjacency) if unit == RECORD else f"{adjacency} of one {unit}"
