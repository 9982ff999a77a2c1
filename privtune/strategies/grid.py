"""Candidates that differ in their guarantee: noise, rate or number of steps on a public grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optuna.distributions import CategoricalDistribution

from privtune.accounting import Event, WorstOf
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.numbers import is_number, show_left
from privtune.strategies._base import StrategyError
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import budgeted, method_class, require_suited
from privtune.strategies.trainings import SearchPlan, TrainingPlan
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods._base import scale_noise_of

CHANGING = ("noise_multiplier", "epochs", "expected_batch_size")
"""Hyperparameters that change what a candidate costs."""

_SHARES = ("common", "weighted")


def search_plan(
    context: PlanningContext,
    *,
    arm: str,
    method: str,
    options: Mapping[str, Any],
    guarantee: str | None,
    epsilon: float,
    part: str = "all",
    final_records: int | None = None,
) -> SearchPlan:
    """Plan what candidates run, each training at about ``epsilon``.

    Args:
        context: Public facts.
        arm: Name of the arm, for messages.
        method: Training method.
        options: Its options.
        guarantee: ``common`` chooses every candidate's noise (for a grid of noise: its steps) so
            that one training of each meets the same ε; the pointwise worst of their curves is
            charged. ``weighted`` charges the mixture with the grid's own public weights. A
            ``noise_multiplier`` on the grid gives proportions; all noise is scaled by one factor.
        epsilon: Target of one training.
        part: Which records candidates see.
        final_records: Records of the final training, where that is another: an expected batch size
            on the grid is its, and a candidate keeps the ratio to its own records.

    Raises:
        StrategyError: If the space changes the guarantee and ``guarantee`` does not say how.
    """
    names = [name for name in CHANGING if name in context.space]
    require_suited(arm, method_class(method), options, context)
    if guarantee is not None and guarantee not in _SHARES:
        raise InvalidInputError("guarantee", guarantee, f"must be one of {', '.join(_SHARES)}")
    if guarantee is not None and not names:
        raise InvalidInputError(
            "guarantee",
            guarantee,
            f"is for a space that holds one of {', '.join(CHANGING)}, which change what a candidate costs",
            "Leave it out.",
        )
    if not names:
        return SearchPlan((_training(context, method, options, epsilon, part=part, point={}),))
    if guarantee is None:
        raise StrategyError(
            f"Arm {arm!r} searches {', '.join(names)}, which changes what a candidate costs. Say "
            "guarantee: common (every candidate's noise is chosen so that all share one curve, "
            "which is charged) or guarantee: weighted (the mixture with the grid's public weights "
            "is charged)."
        )
    choices = [_choices(context, arm, name) for name in names]
    if "noise_multiplier" in names:
        _check_noises(choices[names.index("noise_multiplier")])
    points = tuple(dict(zip(names, values, strict=True)) for values in itertools.product(*choices))
    trainings = tuple(
        _training(
            context,
            method,
            options,
            epsilon,
            part=part,
            point=point,
            final_records=final_records,
            share=_share(point, choices, names),
            fit=guarantee == "common",
        )
        for point in points
    )
    return SearchPlan(trainings, points)


def search_event(search: SearchPlan, *, weighted: bool) -> Event:
    """Return what one trial costs its training records."""
    events = [training.event for training in search.trainings]
    if len(events) == 1:
        return events[0]
    weights = (1.0 / len(events),) * len(events) if weighted else None
    return WorstOf(tuple(events), weights)


def _choices(context: PlanningContext, arm: str, name: str) -> tuple[Any, ...]:
    distribution = context.space.distributions[name]
    if not isinstance(distribution, CategoricalDistribution) or context.space.sampler is not None:
        raise StrategyError(
            f"Arm {arm!r} draws {name} from {type(distribution).__name__}, but what changes a "
            "candidate's cost must be on a finite grid with public weights. Give it as "
            "{type: categorical, choices: [...]} and leave it out of a sampler of your own."
        )
    return tuple(distribution.choices)


def _training(
    context: PlanningContext,
    method: str,
    options: Mapping[str, Any],
    epsilon: float,
    *,
    part: str,
    point: Mapping[str, Any],
    final_records: int | None = None,
    share: float | None = None,
    fit: bool = True,
) -> TrainingPlan:
    schedule = _schedule(context.schedule, point, final_records)
    made = budgeted(context, method, options, epsilon=epsilon, schedule=schedule)
    if share is not None:
        made = scale_noise_of(made, share)
        if fit:
            if "epochs" in point:
                raise StrategyError(
                    "A grid of noise_multiplier under guarantee: common chooses the number of steps "
                    "by itself. Take epochs off the grid, or say guarantee: weighted."
                )
            steps = _most_steps(made, schedule, epsilon=epsilon, delta=context.delta)
            schedule = replace(schedule, steps=steps)
    return TrainingPlan(schedule, made, part)


def _share(
    point: Mapping[str, Any], choices: list[tuple[Any, ...]], names: list[str]
) -> float | None:
    """Return the point's noise over the geometric mean of the grid's."""
    if "noise_multiplier" not in names:
        return None
    values = [float(v) for v in choices[names.index("noise_multiplier")]]
    middle = math.exp(sum(map(math.log, values)) / len(values))
    return float(point["noise_multiplier"]) / middle


def _check_noises(values: tuple[Any, ...]) -> None:
    if not all(is_number(v) and v > 0 for v in values):
        raise InvalidInputError("space.noise_multiplier", values, "must be numbers above 0")


def _schedule(base: Schedule, point: Mapping[str, Any], final_records: int | None) -> Schedule:
    rate = base.sample_rate
    if "expected_batch_size" in point:
        records, batch = final_records or base.records, point["expected_batch_size"]
        number = isinstance(batch, int | float) and not isinstance(batch, bool)
        if not number or not 0 < batch <= records:
            raise InvalidInputError(
                "space.expected_batch_size",
                batch,
                f"must be above 0 and at most {records}, the records of a training",
            )
        rate = float(batch) / records
    epochs = float(point.get("epochs", base.steps * base.sample_rate))
    return replace(base, sample_rate=rate, steps=max(1, math.ceil(epochs / rate - 1e-9)))


def _most_steps(method: Any, schedule: Schedule, *, epsilon: float, delta: float) -> int:
    """Return the largest number of steps of this noise that one training's ε allows."""

    def fits(steps: int) -> bool:
        event = method.event(replace(schedule, steps=steps))
        return account(event, delta).epsilon <= epsilon

    if not fits(1):
        raise StrategyError(
            "The smallest noise_multiplier of the grid does not allow a single step at epsilon = "
            f"{show_left(epsilon)}. Leave it out, or give the arm more budget."
        )
    low, high = 1, 2
    while high <= 2**20 and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
