"""Strategies that release every trial: charged with any Optuna sampler, or a grid without guarantee."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution

import privtune.accounting as acc
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.imports import find_extra
from privtune.names import refuse_name
from privtune.strategies.arms import OBJECT, meet
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import budgeted
from privtune.strategies.plan import SEALED_STEPS, Plan, SearchPlan, TrainingPlan
from privtune.strategies.release import Ending, Outcome, TrialResult
from privtune.strategies.requests import NamedTraining, NumberedTrials, StrategyRun
from privtune.strategies.searching import Drawing, Searching
from privtune.strategies.strategy import Needs, Round, StrategyError, best_of

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from privtune.spaces import SearchSpace
    from privtune.training.mechanism.streams import Streams


SAMPLERS = ("random", "tpe", "gp", "cmaes", "qmc", "grid")
STARTUP_TRIALS = 10
"""Trials that Optuna's ``tpe`` and ``gp`` draw at random before they learn, unless a plan says it."""

_INDEPENDENT = ("random", "grid")


@dataclass(frozen=True, kw_only=True)
class Everything(Drawing):
    """Run a fixed number of trials, charge each of them, release all of them.

    Args:
        trials: How many; public.
        sampler: Any of Optuna's: ``tpe``, ``random``, ``gp``, ``cmaes``, ``qmc``, ``grid``. It sees
            the noised scores of earlier trials, which are paid for.
        batch: How many trials ``tpe`` proposes at once, to train them together; those under way count
            as bad ones (constant liar), but for functions of one's own.
        pruner: Refused: ``study.optimize(pruner=...)`` takes one, where the validation split is public.

    Example:
        >>> strategy = Everything(trials=3, sampler="tpe", parameters={"max_grad_norm": 1.0})
        >>> plan = strategy.plan(study.spec.planning_context(), epsilon=4.0)
        >>> plan.search.trials, plan.is_sealed
        (3, False)
    """

    name: ClassVar[str] = "everything"
    summary: ClassVar[str] = "every trial is charged and released; any Optuna sampler"
    needs: ClassVar[Needs] = Needs(score=True)

    arm: str = "everything"
    trials: int = 10
    sampler: str = "tpe"
    batch: int = 1
    pruner: str | None = None

    def _check_options(self, context: PlanningContext) -> None:
        """Refuse options outside their ranges, and a sampler that the space or the batch rules out."""
        if self.trials < 1:
            raise InvalidInputError("trials", self.trials, "must be a whole number of at least 1")
        if self.sampler not in SAMPLERS:
            remedy = ""
            if not isinstance(self.sampler, str):
                remedy = OBJECT.format("sampler")
            refuse_name("sampler", self.sampler, SAMPLERS, remedy=remedy)
        if self.sampler == "cmaes":
            find_extra("cmaes", extra="cmaes", what="sampler: cmaes")
        if self.batch < 1:
            raise InvalidInputError("batch", self.batch, "must be a whole number of at least 1")
        if self.batch > 1 and self.sampler != "tpe":
            raise InvalidInputError(
                "batch",
                self.batch,
                f"is for sampler tpe, not for {self.sampler}",
                f"{' and '.join(_INDEPENDENT)} train together as many as pay by themselves.",
            )
        if self.sampler == "grid" and context.define_by_run:
            raise InvalidInputError(
                "sampler",
                self.sampler,
                "walks through a space that is declared, and a function of yours suggests more",
                "Use tpe, random or qmc.",
            )
        if self.pruner not in (None, "none"):
            raise StrategyError(
                f"Arm {self.arm!r} asks for pruner {self.pruner!r}, but a strategy has none: scores of "
                "trials under way are exact. On a public validation split give a pruner of Optuna's to "
                "study.optimize(..., pruner=...)."
            )
        self._check_parameters(context)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan all trials together at ``epsilon``, without touching data."""
        self._check_options(context)
        search = self._search(context, epsilon=epsilon / 4)

        # A validation record meets every score, and no training.
        cost = partial(acc.Repeated, self.trials)
        search, score, event = meet(
            search,
            lambda scaled: cost(self._trial_event(scaled)),
            cost,
            context=context,
            epsilon=epsilon,
        )
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=event,
            training=search.trainings[0],
            params=dict(self.parameters),
            score=score,
            released=("every trial: model, hyperparameters, noised score", "the number of trials"),
            sealed=SEALED_STEPS,
            search=SearchPlan(search.trainings, search.points, self.trials),
            final=False,
            details={"sampler": self.sampler, "batch": self.batch, "liar": self._is_liar(context)},
        )

    def _is_liar(self, context: PlanningContext) -> bool:
        """Return whether trials under way count as bad ones (Optuna's constant liar)."""
        # What a function suggests to a trial under way is unknown to other processes.
        draws_declared = len(context.space) > 0 and not context.define_by_run
        return self.batch > 1 and draws_declared

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Draw, train and score every trial, and release the best one with all others."""
        if plan.search is None:
            raise InvalidInputError("plan.search", None, "needs trials")
        total = plan.search.trials or 0
        batch = plan.details["batch"]
        if self.sampler in _INDEPENDENT:
            # What is drawn without a look at scores can be drawn and trained as many at once as pays.
            batch = trials.at_once
        results: list[TrialResult] = []
        for first in range(0, total, batch):
            candidates = {}
            end = min(first + batch, total)
            for number in range(first, end):
                make = partial(sampler_of, plan, trials.streams, number)
                suggestions = trials.ask(number, make)
                candidates[number] = {**plan.params, **suggestions}
            batch_results = yield NumberedTrials(candidates)
            for number, result in zip(candidates, batch_results, strict=True):
                trials.tell(number, result)
                results.append(result)
        best = best_of(results, trials.streams)
        note = ""
        if best.ended is Ending.PRUNED:
            note = "Every candidate was pruned; there is no model."
        return Outcome(best, trials=tuple(results), note=note)


def sampler_of(plan: Plan, streams: Streams, number: int, space: SearchSpace) -> BaseSampler:
    """Return the sampler that draws trial ``number`` of a plan of ``everything``, equal in every process.

    A grid is shuffled by its seed and walked once, so all trials share that of the first.
    """
    name = plan.details["sampler"]
    stream = 0 if name == "grid" else number
    seed = streams.seed("search", stream) % 2**32
    details = plan.details
    startup = details.get("startup_trials", STARTUP_TRIALS)
    return make_sampler(name, space, seed, liar=details["liar"], startup=startup)


def make_sampler(
    name: str,
    space: SearchSpace,
    seed: int,
    *,
    liar: bool = False,
    startup: int = STARTUP_TRIALS,
) -> BaseSampler:
    """Return an Optuna sampler by its name.

    Args:
        name: One of `SAMPLERS`.
        space: What a grid is made of.
        seed: From 0 to below 2^32.
        liar: Whether ``tpe`` counts trials under way as bad ones.
        startup: Trials that ``tpe`` and ``gp`` draw at random before they learn from scores.
    """
    kinds: Mapping[str, Any] = {
        "random": optuna.samplers.RandomSampler,
        "tpe": partial(optuna.samplers.TPESampler, constant_liar=liar, n_startup_trials=startup),
        "gp": partial(optuna.samplers.GPSampler, n_startup_trials=startup),
        "cmaes": optuna.samplers.CmaEsSampler,
        "qmc": optuna.samplers.QMCSampler,
    }
    if name == "grid":
        return optuna.samplers.GridSampler(grid_of(space), seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler: BaseSampler = kinds[name](seed=seed)
    return sampler


def grid_of(space: SearchSpace, points: int = 5) -> dict[str, list[Any]]:
    """Return the grid values of each hyperparameter: all choices, or points evenly spaced on its scale."""
    grid: dict[str, list[Any]] = {}
    for name, law in space.items():
        if isinstance(law, CategoricalDistribution):
            grid[name] = list(law.choices)
        else:
            grid[name] = _grid_values(law, points)
    return grid


def _grid_values(law: Any, points: int) -> list[Any]:
    """Return some values of an interval, evenly spaced on its scale and in order, both ends included.

    A geometric sequence may leave the interval by a rounding, which Optuna's grid refuses.
    """
    low = float(law.low)
    high = float(law.high)
    if getattr(law, "log", False):
        values = np.geomspace(low, high, points)
    else:
        values = np.linspace(low, high, points)
    if isinstance(law, IntDistribution):
        integers = {round(value) for value in values}
        return sorted(integers)
    numbers: set[float] = set()
    for value in values:
        number = max(float(value), low)
        numbers.add(min(number, high))
    return sorted(numbers)


def selection_instead(
    plan: Plan,
    *,
    delta: float,
    adjacency: acc.Adjacency,
) -> acc.Guarantee | None:
    """Return the cost of releasing only the best at the same noise, or None for a dependent sampler.

    It is shown beside the arm's own cost, as the price of seeing every trial.
    """
    search = plan.search
    if search is None or search.trials is None or plan.final:
        return None
    if plan.details.get("sampler") != "random":
        return None
    training = search.trainings[0]
    event: acc.Event = acc.Repeated(1, training.event)
    if plan.score is not None and plan.score.event is not None:
        event = acc.Parallel((event, plan.score.event))
    law = acc.Geometric(float(search.trials))
    selection = acc.PrivateSelection(event, law)
    instead = replace(plan, event=selection)
    return account(instead.charged, delta, adjacency=adjacency)


class NonPrivateError(PrivTuneError):
    """A study holds an arm without any guarantee and was to be run without leave for that."""


@dataclass(frozen=True, kw_only=True)
class NonPrivateGrid(Searching):
    """Train every point of a grid and score it, both without noise, and keep the best.

    Its event is ``non_private`` (ε = ∞). It is no part of any budget and runs only with
    ``--non-private``: on public data, or to see how far the private arms are from the best.

    Args:
        points: Points of each hyperparameter that is not categorical.

    Example:
        >>> strategy = NonPrivateGrid(points=5, parameters={"max_grad_norm": 1.0})
        >>> plan = strategy.plan(study.spec.planning_context(), epsilon=2.0)
        >>> plan.is_private, plan.search.trials
        (False, 5)
    """

    name: ClassVar[str] = "non-private-grid"
    summary: ClassVar[str] = "NOT PRIVATE: a grid without noise, the papers' upper bound on utility"
    needs: ClassVar[Needs] = Needs(task=True, score=True, non_private=True)

    arm: str = "non-private-grid"
    points: int = 5

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan the grid from public facts; its ε is infinite, and it takes nothing from a budget."""
        if self.points < 1:
            raise InvalidInputError("points", self.points, "must be a whole number of at least 1")
        self._check_parameters(context)
        method = budgeted(context, self.method, self.options, epsilon=1.0)
        training = TrainingPlan(context.schedule, method.scaled(0.0))
        if not isinstance(training.event, acc.NonPrivate):
            raise StrategyError(
                f"Arm {self.arm!r}: method {self.method!r} has no form without noise. Use dpsgd."
            )
        count = 1
        for values in grid_of(context.space, self.points).values():
            count *= len(values)
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=acc.NonPrivate(),
            training=training,
            params=dict(self.parameters),
            score=context.exact_score(),
            released=("every trial, without any protection",),
            sealed=(),
            search=SearchPlan((training,), trials=count),
            final=False,
        )

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Train every point of the grid in order, and release the best one with all others."""
        grid = grid_of(trials.space, self.points)
        results: list[TrialResult] = []
        for number, values in enumerate(itertools.product(*grid.values())):
            point = dict(zip(grid, values, strict=True))
            params = {**plan.params, **point}
            name = f"trial-{number}"
            (result,) = yield NamedTraining(name, plan.training, params, scored=True)
            results.append(result)
        return Outcome(best_of(results, trials.streams), trials=tuple(results))
