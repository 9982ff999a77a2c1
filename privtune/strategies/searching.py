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
from privtune.strategies.release import Ending, Outcome, TrialResult
from privtune.tasks._fine_tuning import PART, check_part
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import METHODS
from privtune.training.methods._base import check_choice
from privtune.training.methods._rate_schedule import SEARCHED, check_searched

CHANGING = ("noise_multiplier", "epochs", "expected_batch_size")
"""Hyperparameters that change what a candidate costs."""


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

    def _check_parameters(self, context: PlanningContext) -> None:
        """Refuse hyperparameters that are missing, unknown, or given twice."""
        if overlap := sorted(set(self.parameters) & set(context.space)):
            raise InvalidInputError(
                f"parameters of arm {self.arm!r}", overlap, "are searched by the space as well"
            )
        if context.define_by_run:
            check_space_of_build(context.space)
            return
        others = {*CHANGING, *SEARCHED, PART}
        drawn = {name: law for name, law in context.space.items() if name not in others}
        require_parameters(self.arm, method_class(self.method), self.parameters, drawn)
        check_space(context.space)


def check_space(space: Mapping[str, Any]) -> None:
    """Refuse parts and schedules of a space that no method can be trained with."""
    if PART in space:
        for part in getattr(space[PART], "choices", (PART,)):
            check_part(part)
    for name in SEARCHED:
        if name in space:
            check_searched(name, space[name])


def check_space_of_build(space: Mapping[str, Any]) -> None:
    """Refuse what a space cannot choose where a ``build`` makes the candidates."""
    if PART in space:
        # Only build can say it: the value would be released, and nothing would be trained by it.
        raise InvalidInputError(
            f"space.{PART}",
            space[PART],
            "is for a task's own model, and a build makes the model here",
            "Suggest it in build, and return Candidate(model, trainable=...).",
        )
    check_space(space)


def parts_of(strategy: object, space: Mapping[str, Any], plan: Plan) -> tuple[str, ...]:
    """Return which parts of the task's model an arm's candidates may train; none for the task's own."""
    given = getattr(strategy, "parameters", {})
    if PART in given:
        return (given[PART],)
    return () if plan.search is None or PART not in space else tuple(space[PART].choices)


@dataclass(frozen=True, kw_only=True)
class Drawing(Searching):
    """A search whose candidates are drawn from a space that may change what they cost.

    Args:
        guarantee: ``common`` or ``weighted``, where the space changes what a candidate costs.
            ``common`` gives every candidate the noise (for a grid of noise: the steps) of one ε and
            charges the pointwise worst of their curves. ``weighted`` charges the mixture with the
            grid's own public weights. A ``noise_multiplier`` on the grid gives proportions; all noise
            is scaled by one factor.
    """

    guarantee: str | None = None

    def _search(
        self,
        context: PlanningContext,
        *,
        epsilon: float,
        part: str = "all",
        final_records: int | None = None,
    ) -> SearchPlan:
        """Plan what candidates run, each training at about ``epsilon`` on a part of the records."""
        names = [name for name in CHANGING if name in context.space]
        require_suited(self.arm, method_class(self.method), self.options, context)
        self._check_guarantee(names)
        if not names:
            made = budgeted(context, self.method, self.options, epsilon=epsilon)
            return SearchPlan((TrainingPlan(context.schedule, made, part),))
        grid = {name: self._choices(context, name) for name in names}
        noises = grid.get("noise_multiplier", ())
        if not all(is_number(v) and v > 0 for v in noises):
            raise InvalidInputError("space.noise_multiplier", noises, "must be numbers above 0")
        points = [dict(zip(grid, v, strict=True)) for v in itertools.product(*grid.values())]
        trainings = []
        for point in points:
            # A batch size on the grid is the final training's; a candidate keeps the ratio to its records.
            schedule = _schedule(context.schedule, point, final_records)
            made = budgeted(context, self.method, self.options, epsilon=epsilon, schedule=schedule)
            if noises:
                middle = math.exp(sum(math.log(value) for value in noises) / len(noises))
                made = made.scaled(float(point["noise_multiplier"]) / middle)
            if noises and self.guarantee == "common":
                most = _most_steps(made, schedule, epsilon=epsilon, delta=context.delta)
                schedule = replace(schedule, steps=most)
            trainings.append(TrainingPlan(schedule, made, part))
        return SearchPlan(tuple(trainings), tuple(points))

    def _check_guarantee(self, names: Sequence[str]) -> None:
        """Refuse a space that changes the guarantee in a way that ``guarantee`` does not say."""
        if self.guarantee is None and names:
            raise StrategyError(
                f"Arm {self.arm!r} searches {', '.join(names)}, which changes what a candidate costs. "
                "Say guarantee: common (every candidate's noise is chosen so that all share one curve, "
                "which is charged) or guarantee: weighted (the mixture with the grid's public weights "
                "is charged)."
            )
        if self.guarantee is None:
            return
        check_choice("guarantee", self.guarantee, ("common", "weighted"))
        if not names:
            raise InvalidInputError(
                "guarantee",
                self.guarantee,
                f"is for a space that holds one of {', '.join(CHANGING)}, which change what a "
                "candidate costs",
                "Leave it out.",
            )
        if self.guarantee == "common" and {"noise_multiplier", "epochs"} <= set(names):
            raise StrategyError(
                "A grid of noise_multiplier under guarantee: common chooses the number of steps "
                "by itself. Take epochs off the grid, or say guarantee: weighted."
            )

    def _choices(self, context: PlanningContext, name: str) -> tuple[Any, ...]:
        law = context.space.distributions[name]
        if not isinstance(law, CategoricalDistribution) or context.space.sampler is not None:
            raise StrategyError(
                f"Arm {self.arm!r} draws {name} from {type(law).__name__}, but what changes a "
                "candidate's cost must be on a finite grid with public weights. Give it as "
                "{type: categorical, choices: [...]} and leave it out of a sampler of your own."
            )
        return tuple(law.choices)

    def _trial_event(self, search: SearchPlan) -> Event:
        """Return what one trial costs its training records."""
        return search_event(search, weighted=self.guarantee == "weighted")


def search_event(search: SearchPlan, *, weighted: bool) -> Event:
    """Return what one trial costs its training records: the worst of a grid, or its mixture."""
    events = [training.event for training in search.trainings]
    if len(events) == 1:
        return events[0]
    weights = (1.0 / len(events),) * len(events) if weighted else None
    return WorstOf(tuple(events), weights)


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
    """Return the largest number of steps of this noise that one training's ε allows, to a hundredth."""

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


@dataclass(frozen=True, kw_only=True)
class IndependentDrawing(Drawing):
    """A search whose candidates are drawn independently of each other and of their scores.

    Args:
        sampler: ``random``, the only one whose draws are independent.
        pruner: Refused: it compares a trial with others.
    """

    sampler: str = "random"
    pruner: str | None = None

    def _check(self, context: PlanningContext) -> None:
        """Refuse samplers, pruners and hyperparameters that a private selection cannot have."""
        require_independent(self.arm, sampler=self.sampler, pruner=self.pruner)
        self._check_parameters(context)


def select_then(
    plan: Plan, trials: Round, train: Callable[[Mapping[str, Any]], TrialResult]
) -> Outcome:
    """Run the sealed round, then train once more with what its best trial found, if it has a score."""
    results = trials.select(plan)
    if not results:
        return Outcome(None, note=NOTHING)
    best = best_of(results, trials.streams)
    if best.ended is Ending.PRUNED or best.score == -math.inf:
        return Outcome(best, note="No candidate reached a finite score; nothing more was trained.")
    return Outcome(replace(train(best.params), score=best.score, estimate=best.estimate))


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One entry of a list of methods; the study's space gives the hyperparameters that it lacks."""

    method: str
    name: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> dict[str, Any]:
        """The hyperparameters that all of the entry's candidates share, with its name."""
        return {CANDIDATE: self.name or self.method, **self.parameters}

    def drawn(self, space: Mapping[str, Any]) -> dict[str, Any]:
        """Return the laws of a space that its method needs besides."""
        needed = set(method_class(self.method).parameters) - set(self.parameters)
        return {name: space[name] for name in space if name in needed}


def check_listed(arm: str, entries: Sequence[Mapping[str, Any]], context: PlanningContext) -> None:
    """Refuse a list of methods that cannot be drawn from."""
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
    listed = [_read(arm, number, entry) for number, entry in enumerate(entries)]
    names = [entry.point[CANDIDATE] for entry in listed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidInputError(
            f"candidates of arm {arm!r}", twice, "stand there twice: give each a name of its own"
        )
    for entry in listed:
        where, method = f"{arm}: {entry.point[CANDIDATE]}", method_class(entry.method)
        if PART in entry.parameters:
            raise InvalidInputError(
                f"parameters of {where!r}",
                PART,
                "is searched by the space, for all candidates alike",
            )
        require_parameters(where, method, entry.parameters, entry.drawn(context.space))
        require_suited(where, method, entry.options, context)
    taken = {name for entry in listed for name in entry.drawn(context.space)}
    if idle := sorted(set(context.space) - taken - {*SEARCHED, PART}):
        raise InvalidInputError(
            f"candidates of arm {arm!r}",
            names,
            f"take no {', '.join(idle)}, which the space searches: list a method that does",
        )


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


def listed_plan(
    context: PlanningContext, entries: Sequence[Mapping[str, Any]], *, epsilon: float, part: str
) -> SearchPlan:
    """Plan what candidates of a list that was checked run, each training at ``epsilon``."""
    listed = [Listed(**entry) for entry in entries]
    trainings = []
    for entry in listed:
        # Where the part is searched, no entry is of one part alone.
        trained = PART if PART in context.space else entry.parameters.get(PART)
        made = budgeted(context, entry.method, entry.options, epsilon=epsilon, trainable=trained)
        trainings.append(TrainingPlan(context.schedule, made, part))
    return SearchPlan(tuple(trainings), tuple(entry.point for entry in listed))
