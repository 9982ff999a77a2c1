"""A selection over methods: what a trial may be stands on a short public list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from privtune.errors import InvalidInputError
from privtune.strategies._base import StrategyError
from privtune.strategies._options import check_types, reject_unknown_options
from privtune.strategies.context import PlanningContext
from privtune.strategies.grid import CHANGING
from privtune.strategies.in_run import (
    budgeted,
    method_class,
    require_parameters,
    require_suited,
)
from privtune.strategies.searching import check_space
from privtune.strategies.trainings import CANDIDATE, SearchPlan, TrainingPlan
from privtune.tasks._fine_tuning import PART
from privtune.training.methods import METHODS
from privtune.training.methods._rate_schedule import SEARCHED


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One entry of the list.

    Args:
        method: Its training method.
        name: What it is called in releases; the method's name unless given.
        parameters: Hyperparameters held fixed; the study's space gives the others that it needs.
        options: Further options of the method.
    """

    method: str
    name: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> dict[str, Any]:
        """What distinguishes its candidates from those of other entries."""
        return {CANDIDATE: self.name or self.method, **self.parameters}


def check_listed(arm: str, entries: Sequence[Mapping[str, Any]], context: PlanningContext) -> None:
    """Refuse a list that cannot be drawn from.

    Args:
        arm: Name of the arm, for messages.
        entries: As they stand in a spec.
        context: Public facts.

    Raises:
        InvalidInputError: Naming the entry and what is wrong with it.
        StrategyError: If the study has no task, or its space changes what a candidate costs.
    """
    if context.define_by_run:
        raise StrategyError(
            f"Arm {arm!r} chooses among training methods, but a function of your own trains by the "
            "one of its study. Declare a task, or leave candidates out."
        )
    if changing := [name for name in CHANGING if name in context.space]:
        raise StrategyError(
            f"Arm {arm!r} chooses among candidates of equal cost, but the space searches "
            f"{', '.join(changing)}, which changes it. Take it out of the space, or leave "
            "candidates out."
        )
    check_space(context.space)
    listed = _read_all(arm, entries)
    names = [entry.point[CANDIDATE] for entry in listed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidInputError(
            f"candidates of arm {arm!r}", twice, "stand there twice: give each a name of its own"
        )
    for entry in listed:
        _check(f"{arm}: {entry.point[CANDIDATE]}", entry, context)
    taken = {name for entry in listed for name in _drawn(entry, context)}
    if idle := sorted(set(context.space) - taken - {*SEARCHED, PART}):
        raise InvalidInputError(
            f"candidates of arm {arm!r}",
            names,
            f"take no {', '.join(idle)}, which the space searches: list a method that does",
        )


def listed_plan(
    context: PlanningContext,
    arm: str,
    entries: Sequence[Mapping[str, Any]],
    *,
    epsilon: float,
    part: str = "all",
) -> SearchPlan:
    """Plan what candidates of a list that was checked run, each training at ``epsilon``.

    Args:
        context: Public facts.
        arm: Name of the arm, for messages.
        entries: As they stand in a spec.
        epsilon: Target of one training.
        part: Which records candidates see.
    """
    listed = _read_all(arm, entries)
    return SearchPlan(
        tuple(
            TrainingPlan(
                context.schedule,
                budgeted(
                    context,
                    entry.method,
                    entry.options,
                    epsilon=epsilon,
                    # Where the part is searched, no entry is of one part alone.
                    trainable=PART if PART in context.space else entry.parameters.get(PART),
                ),
                part,
            )
            for entry in listed
        ),
        tuple(entry.point for entry in listed),
    )


def _read_all(arm: str, entries: Sequence[Mapping[str, Any]]) -> tuple[Listed, ...]:
    return tuple(_read(arm, number, entry) for number, entry in enumerate(entries))


def _read(arm: str, number: int, entry: object) -> Listed:
    where = f"candidate {number + 1} of arm {arm!r}"
    if not isinstance(entry, Mapping) or "method" not in entry:
        raise InvalidInputError(
            where, entry, "must be a mapping with a method, like {method: adadp}"
        )
    reject_unknown_options(where, entry, ("method", "name", "parameters", "options"))
    check_types(Listed, entry, where=where)
    method_class(entry["method"])
    check_types(METHODS[entry["method"]], entry.get("options", {}), where=where)
    return Listed(**entry)


def _drawn(entry: Listed, context: PlanningContext) -> list[str]:
    """Return what the space gives an entry."""
    needed = set(method_class(entry.method).parameters) - set(entry.parameters)
    return [name for name in context.space if name in needed]


def _check(where: str, entry: Listed, context: PlanningContext) -> None:
    method = method_class(entry.method)
    if PART in entry.parameters:
        raise InvalidInputError(
            f"parameters of {where!r}", PART, "is searched by the space, for all candidates alike"
        )
    drawn = {name: context.space[name] for name in _drawn(entry, context)}
    require_parameters(where, method, entry.parameters, drawn)
    require_suited(where, method, entry.options, context)
