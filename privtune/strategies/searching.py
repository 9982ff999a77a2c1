"""Searches over the hyperparameters of a method: the candidates that they draw, and their cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution

from privtune.accounting import Event, WorstOf
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.numbers import is_number, show_left
from privtune.strategies.arms import require_independent
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import budgeted, method_class, require_parameters, require_suited
from privtune.strategies.laws import NOTHING
from privtune.strategies.options import check_types, reject_unknown_options
from privtune.strategies.plan import CANDIDATE, Plan, SearchPlan, TrainingPlan
from privtune.strategies.release import Ending, Outcome, TrialResult
from privtune.strategies.requests import NamedTraining, Request, SealedRound, StrategyRun
from privtune.strategies.strategy import Round, StrategyError, best_of
from privtune.tasks.pretrained import PART, check_part
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import METHODS
from privtune.training.methods.method import Method, check_choice
from privtune.training.methods.rate_schedule import SEARCHED, check_searched

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
                f"parameters of arm {self.arm!r}",
                overlap,
                "are searched by the space as well",
            )
        if context.define_by_run:
            check_space_of_build(context.space)
            return
        others = {*CHANGING, *SEARCHED, PART}
        space: dict[str, BaseDistribution] = {}
        for name, law in context.space.items():
            if name not in others:
                space[name] = law
        require_parameters(self.arm, method_class(self.method), self.parameters, space)
        check_space(context.space)


def check_space(space: Mapping[str, BaseDistribution]) -> None:
    """Refuse parts and schedules of a space that no method can be trained with.

    A candidate that drew one would fail in the middle of a round that is charged.
    """
    if PART in space:
        for part in getattr(space[PART], "choices", (PART,)):
            check_part(part)
    for name in SEARCHED:
        if name in space:
            check_searched(name, space[name])


def check_space_of_build(space: Mapping[str, BaseDistribution]) -> None:
    """Check a space for candidates that ``build`` makes, refusing a choice of the trained part."""
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
    """Return the parts of the task's model that an arm's candidates may train, or none for the default."""
    parameters = getattr(strategy, "parameters", {})
    if PART in parameters:
        return (parameters[PART],)
    if plan.search is None or PART not in space:
        return ()
    return tuple(space[PART].choices)


@dataclass(frozen=True, kw_only=True)
class Drawing(Searching):
    """A search that draws candidates from a space in which their costs may differ.

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
        """Plan the trainings of candidates, each at about ``epsilon`` on a part of the records.

        Args:
            context: Public facts.
            epsilon: What one training costs alone.
            part: Which records candidates see, as of `TrainingPlan`.
            final_records: Records of the training after the search, if its candidates see fewer: a batch
                size on the grid is that training's, and a candidate keeps the ratio to its records.

        Returns:
            One training; or one for each point of the grid of what changes a candidate's cost.
        """
        names = [name for name in CHANGING if name in context.space]
        require_suited(self.arm, method_class(self.method), self.options, context)
        self._check_guarantee(names)
        if not names:
            method = budgeted(context, self.method, self.options, epsilon=epsilon)
            return SearchPlan((TrainingPlan(context.schedule, method, part),))
        grid = {name: self._choices(context, name) for name in names}
        noises = grid.get("noise_multiplier", ())
        are_noises = all(is_number(noise) and noise > 0 for noise in noises)
        if not are_noises:
            raise InvalidInputError("space.noise_multiplier", noises, "must be numbers above 0")
        points = []
        trainings = []
        for values in itertools.product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            points.append(point)
            schedule = _schedule(context.schedule, point, final_records)
            training = self._grid_training(context, schedule, point, noises, epsilon=epsilon)
            trainings.append(replace(training, part=part))
        return SearchPlan(tuple(trainings), tuple(points))

    def _grid_training(
        self,
        context: PlanningContext,
        schedule: Schedule,
        point: Mapping[str, Any],
        noises: Sequence[float],
        *,
        epsilon: float,
    ) -> TrainingPlan:
        """Return the training of one point of the grid.

        Noise multipliers on the grid are proportions: the method's own noise at ``epsilon`` stands for their
        geometric mean, so that the grid moves as one with the budget.
        """
        method = budgeted(context, self.method, self.options, epsilon=epsilon, schedule=schedule)
        if not noises:
            return TrainingPlan(schedule, method)
        logarithms = [math.log(noise) for noise in noises]
        middle = math.exp(sum(logarithms) / len(noises))
        proportion = float(point["noise_multiplier"]) / middle
        method = method.scaled(proportion)
        if self.guarantee == "common":
            steps = _most_steps(method, schedule, epsilon=epsilon, delta=context.delta)
            schedule = replace(schedule, steps=steps)
        return TrainingPlan(schedule, method)

    def _check_guarantee(self, names: Sequence[str]) -> None:
        """Refuse a space that changes a candidate's cost without a suitable ``guarantee``, or the reverse."""
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
        """Return the equally probable choices of a hyperparameter that changes a candidate's cost.

        A user's own sampler may draw them with others, which would not be those that are charged.
        """
        law = context.space.distributions[name]
        if not isinstance(law, CategoricalDistribution) or context.space.sampler is not None:
            raise StrategyError(
                f"Arm {self.arm!r} draws {name} from {type(law).__name__}, but what changes a "
                "candidate's cost must be on a finite grid with public weights. Give it as "
                "{type: categorical, choices: [...]} and leave it out of a sampler of your own."
            )
        return tuple(law.choices)

    def _trial_event(self, search: SearchPlan) -> Event:
        """Return the event of one trial for its training records."""
        return search_event(search, weighted=self.guarantee == "weighted")


def search_event(search: SearchPlan, *, weighted: bool) -> Event:
    """Return one event for all trainings of a search: the worst over its grid, or their mixture."""
    events = [training.event for training in search.trainings]
    if len(events) == 1:
        return events[0]
    if not weighted:
        return WorstOf(tuple(events), None)
    weight = 1.0 / len(events)
    weights = (weight,) * len(events)
    return WorstOf(tuple(events), weights)


def _schedule(base: Schedule, point: Mapping[str, Any], final_records: int | None) -> Schedule:
    """Return the schedule of a grid point, with the base's epochs unless the point sets others."""
    rate = base.sample_rate
    if "expected_batch_size" in point:
        # That of the final training; a candidate keeps the ratio to its records.
        records = final_records or base.records
        batch = _check_batch(point["expected_batch_size"], records)
        rate = batch / records
    epochs = float(point.get("epochs", base.steps * base.sample_rate))
    # A quotient that rounding lifts just above a whole number is that number of steps.
    steps = math.ceil(epochs / rate - 1e-9)
    return replace(base, sample_rate=rate, steps=max(1, steps))


def _check_batch(batch: Any, records: int) -> float:
    """Return an expected batch size of the grid, which no training of so many records may exceed."""
    is_numeric = isinstance(batch, int | float) and not isinstance(batch, bool)
    if not is_numeric or not 0 < batch <= records:
        raise InvalidInputError(
            "space.expected_batch_size",
            batch,
            f"must be above 0 and at most {records}, the records of a training",
        )
    return float(batch)


def _most_steps(method: Method, schedule: Schedule, *, epsilon: float, delta: float) -> int:
    """Return the largest number of steps of this noise that one training's ε allows, to a hundredth.

    The search doubles a number of steps until it is too large, and then halves the interval. It gives up
    at 2^20, where a training would never end.
    """

    def fits(steps: int) -> bool:
        event = method.event(replace(schedule, steps=steps))
        return account(event, delta).epsilon <= epsilon

    if not fits(1):
        raise StrategyError(
            "The smallest noise_multiplier of the grid does not allow a single step at epsilon = "
            f"{show_left(epsilon)}. Leave it out, or give the arm more budget."
        )
    low = 1
    high = 2
    while high <= 2**20 and fits(high):
        low = high
        high = 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
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
    trials: Round,
    request_final: Callable[[Mapping[str, object]], NamedTraining],
) -> StrategyRun:
    """Run the sealed round, then train once more with the hyperparameters of its best trial.

    The released model has the score of that trial: it was paid for, and one of its own was not.

    Args:
        trials: The arm's trials.
        request_final: Returns the last training, of the best trial's hyperparameters.
    """
    best = yield from _best_of_round(trials)
    if best is None:
        return Outcome(None, note=NOTHING)
    if best.ended is Ending.PRUNED or best.score == -math.inf:
        return Outcome(best, note="No candidate reached a finite score; nothing more was trained.")
    (result,) = yield request_final(best.params)
    return Outcome(replace(result, score=best.score, estimate=best.estimate))


def _best_of_round(
    trials: Round,
) -> Generator[Request, Sequence[TrialResult], TrialResult | None]:
    """Run the sealed round; return its best trial, or None where the law drew no run.

    The others are let go of here: repetitions wait for each other's last trainings, and all of their trials
    would be in memory.
    """
    results = yield SealedRound()
    if not results:
        return None
    return best_of(results, trials.streams)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An entry of a list of methods, whose missing hyperparameters the study's space gives."""

    method: str
    name: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> dict[str, Any]:
        """The entry's name, and the hyperparameters that all its candidates share."""
        return {CANDIDATE: self.name or self.method, **self.parameters}

    def select_space(self, space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
        """Return the part of a space with the hyperparameters that the entry's method still needs."""
        method = method_class(self.method)
        missing = set(method.parameters) - set(self.parameters)
        laws: dict[str, Any] = {}
        for name, law in space.items():
            if name in missing:
                laws[name] = law
        return laws


def check_listed(
    arm: str, entries: Sequence[Mapping[str, object]], context: PlanningContext
) -> None:
    """Refuse a list of methods from which an arm cannot draw candidates of equal cost.

    Raises:
        StrategyError: If a function of the user's own trains, or the space changes what a candidate costs.
        InvalidInputError: If an entry is none, or shares its name with another, or its method lacks a
            hyperparameter; or if the space searches one that no method takes.
    """
    if context.define_by_run:
        raise StrategyError(
            f"Arm {arm!r} chooses among training methods, but a function of your own trains by the "
            "one of its study. Declare a task, or leave candidates out."
        )
    changing = [name for name in CHANGING if name in context.space]
    if changing:
        raise StrategyError(
            f"Arm {arm!r} chooses among candidates of equal cost, but the space searches "
            f"{', '.join(changing)}, which changes it. Take it out of the space, or leave "
            "candidates out."
        )
    check_space(context.space)
    listed = [_read(arm, number, entry) for number, entry in enumerate(entries)]
    names = [entry.point[CANDIDATE] for entry in listed]
    twice: set[str] = set()
    for name in names:
        if names.count(name) > 1:
            twice.add(name)
    if twice:
        raise InvalidInputError(
            f"candidates of arm {arm!r}",
            sorted(twice),
            "stand there twice: give each a name of its own",
        )
    useful = {*SEARCHED, PART}
    for entry in listed:
        _check_entry(arm, entry, context)
        useful.update(entry.select_space(context.space))
    idle = sorted(set(context.space) - useful)
    if idle:
        raise InvalidInputError(
            f"candidates of arm {arm!r}",
            names,
            f"take no {', '.join(idle)}, which the space searches: list a method that does",
        )


def _check_entry(arm: str, entry: Listed, context: PlanningContext) -> None:
    """Refuse an entry whose method lacks a hyperparameter or is unsuited to the task."""
    where = f"{arm}: {entry.point[CANDIDATE]}"
    method = method_class(entry.method)
    if PART in entry.parameters:
        raise InvalidInputError(
            f"parameters of {where!r}",
            PART,
            "is searched by the space, for all candidates alike",
        )
    space = entry.select_space(context.space)
    require_parameters(where, method, entry.parameters, space)
    require_suited(where, method, entry.options, context)


def _read(arm: str, number: int, entry: object) -> Listed:
    """Return an entry of a spec's list of methods, after checking its fields' names and types."""
    where = f"candidate {number + 1} of arm {arm!r}"
    if not isinstance(entry, Mapping) or "method" not in entry:
        raise InvalidInputError(
            where,
            entry,
            "must be a mapping with a method, like {method: adadp}",
        )
    reject_unknown_options(where, entry, ("method", "name", "parameters", "options"))
    check_types(Listed, entry, where=where)
    method_class(entry["method"])
    method = METHODS[entry["method"]]
    method_options = entry.get("options", {})
    check_types(method, method_options, where=where)
    return Listed(**entry)


def listed_plan(
    context: PlanningContext,
    entries: Sequence[Mapping[str, Any]],
    *,
    epsilon: float,
    part: str,
) -> SearchPlan:
    """Plan the trainings of a checked list of methods, each at ``epsilon``."""
    trainings = []
    points = []
    for fields in entries:
        entry = Listed(**fields)
        # Where the part is searched, no entry is of one part alone.
        trainable = entry.parameters.get(PART)
        if PART in context.space:
            trainable = PART
        method = budgeted(
            context,
            entry.method,
            entry.options,
            epsilon=epsilon,
            trainable=trainable,
        )
        trainings.append(TrainingPlan(context.schedule, method, part))
        points.append(entry.point)
    return SearchPlan(tuple(trainings), tuple(points))
