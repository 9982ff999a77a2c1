"""Searches over the hyperparameters of a method: what a candidate may be, and what it costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optuna.distributions import CategoricalDistribution

from privtune.accounting import Event, WorstOf
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.numbers import is_number, show_left
from privtune.strategies._base import Round, StrategyError, best_of
from privtune.strategies.arms import require_independent
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import budgeted, method_class, require_parameters, require_suited
from privtune.strategies.laws import NOTHING
from privtune.strategies.options import check_types, reject_unknown_options
from privtune.strategies.plan import CANDIDATE, Plan, SearchPlan, TrainingPlan
from privtune.strategies.release import Outcome, TrialResult
from privtune.tasks._fine_tuning import PART, check_part
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import METHODS
from privtune.training.methods._rate_schedule import SEARCHED, check_searched

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
        made = made.scaled(share)
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


def parts_of(strategy: object, space: Mapping[str, Any], plan: Plan) -> tuple[str, ...]:
    """Return which parts of the task's model an arm's candidates may train; none for the task's own.

    Args:
        strategy: The arm's strategy.
        space: The study's space.
        plan: The arm's plan.
    """
    given = getattr(strategy, "parameters", {})
    if PART in given:
        return (given[PART],)
    return () if plan.search is None or PART not in space else tuple(space[PART].choices)


@dataclass(frozen=True, kw_only=True)
class Searching:
    """A search over the hyperparameters of one training method.

    Args:
        arm: Name of the arm.
        method: The training method whose hyperparameters are searched.
        parameters: Hyperparameters held fixed; the study's space gives the others.
        options: Further options of the method.
    """

    arm: str
    method: str = "dpsgd"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def check_parameters(self, context: PlanningContext) -> None:
        """Refuse hyperparameters that are missing, unknown, or given twice.

        Args:
            context: Public facts: task, schedule, space, δ, scoring.

        Raises:
            InvalidInputError: Naming them.
        """
        if context.define_by_run:
            return
        if overlap := sorted(set(self.parameters) & set(context.space)):
            raise InvalidInputError(
                f"parameters of arm {self.arm!r}", overlap, "are searched by the space as well"
            )
        others = {*CHANGING, *SEARCHED, PART}
        drawn = {name: law for name, law in context.space.items() if name not in others}
        require_parameters(self.arm, method_class(self.method), self.parameters, drawn)
        check_space(context.space)


def check_space(space: Mapping[str, Any]) -> None:
    """Refuse what no method can be trained with, of what a space says of parts and schedules.

    Args:
        space: Distributions by name.

    Raises:
        InvalidInputError: Naming it.
    """
    if PART in space:
        for part in getattr(space[PART], "choices", (PART,)):
            check_part(part)
    for name in SEARCHED:
        if name in space:
            check_searched(name, space[name])


@dataclass(frozen=True, kw_only=True)
class Drawing(Searching):
    """A search whose candidates are drawn from a space that may change what they cost.

    Args:
        guarantee: ``common`` or ``weighted``, where the space changes what a candidate costs.
    """

    guarantee: str | None = None

    def search(
        self,
        context: PlanningContext,
        *,
        epsilon: float,
        part: str = "all",
        final_records: int | None = None,
    ) -> SearchPlan:
        """Plan what candidates run, each training at about ``epsilon``.

        Args:
            context: Public facts: task, schedule, space, δ, scoring.
            epsilon: What each training may cost alone.
            part: The records it sees: ``all``, ``subset`` or ``rest``.
            final_records: Records of the final training, where that is another.

        Returns:
            The plan of the search.
        """
        return search_plan(
            context,
            arm=self.arm,
            method=self.method,
            options=self.options,
            guarantee=self.guarantee,
            epsilon=epsilon,
            part=part,
            final_records=final_records,
        )

    def trial_event(self, search: SearchPlan) -> Event:
        """Return what one trial costs its training records.

        Args:
            search: What a candidate runs.
        """
        return search_event(search, weighted=self.guarantee == "weighted")


@dataclass(frozen=True, kw_only=True)
class IndependentDrawing(Drawing):
    """A search whose candidates are drawn independently of each other and of their scores.

    Args:
        sampler: ``random``, the only one whose draws are independent.
        pruner: Refused: it compares a trial with others.
    """

    sampler: str = "random"
    pruner: str | None = None

    def check(self, context: PlanningContext) -> None:
        """Refuse what private selection does not cover, while planning.

        Args:
            context: Public facts: task, schedule, space, δ, scoring.

        Raises:
            StrategyError: If a sampler or pruner lets candidates depend on each other.
        """
        require_independent(self.arm, sampler=self.sampler, pruner=self.pruner)
        self.check_parameters(context)


def select_then(
    plan: Plan, trials: Round, train: Callable[[Mapping[str, Any]], TrialResult]
) -> Outcome:
    """Run the sealed round, then train once more with what its best trial found.

    The release has the score of that trial; it is that trial if none reached a finite score.
    """
    results = trials.select(plan)
    if not results:
        return Outcome(None, note=NOTHING)
    best = best_of(results, trials.streams)
    if best.score == -math.inf:
        return Outcome(best, note="No candidate reached a finite score; nothing more was trained.")
    return Outcome(replace(train(best.params), score=best.score))


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
