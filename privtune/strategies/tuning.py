"""Strategies that search at a low cost, on a subset or at a small ε, and then train once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import privtune.accounting as acc
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.names import refuse_name
from privtune.strategies.arms import (
    SearchThenFinal,
    check_given,
    factor_for,
    meet,
    require_independent,
)
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import budgeted
from privtune.strategies.laws import OptionsOfLaw
from privtune.strategies.plan import SEALED_STEPS, SEALED_TRIALS, Plan, SearchPlan, TrainingPlan
from privtune.strategies.release import Outcome, TrialResult
from privtune.strategies.requests import NamedTraining, StrategyRun
from privtune.strategies.searching import (
    CHANGING,
    IndependentDrawing,
    Searching,
    search_event,
    select_then,
)
from privtune.strategies.strategy import Needs, Round, StrategyError, best_of
from privtune.training.methods import METHODS

SCALE = "scale-learning-rate"
_RULES = (SCALE, "keep")
_FEW = 2000  # records: the best rate of fewer says little about that of all


def rule_of(extrapolation: str, method: str) -> str:
    """Return the rule by which learning rates go from a subset to the final training, with auto resolved."""
    if extrapolation != "auto":
        return extrapolation
    # What is divided by a root of its own square does not grow with the batch.
    is_scale_free = getattr(METHODS.get(method), "scale_free", False)
    return "keep" if is_scale_free else SCALE


def check_subset(*, variant: int, rate: float, extrapolation: str) -> None:
    """Refuse options of a search on a Poisson subset that are outside their ranges.

    Raises:
        InvalidInputError: If one is.
    """
    if variant not in (1, 2):
        raise InvalidInputError("variant", variant, "must be 1 or 2")
    if not 0.0 < rate < 1.0:
        raise InvalidInputError("rate", rate, "must lie strictly between 0 and 1")
    if extrapolation not in _RULES:
        refuse_name("extrapolation", extrapolation, ("auto", *_RULES))


@dataclass(frozen=True, kw_only=True)
class SubsampledTuningStrategy(OptionsOfLaw, IndependentDrawing):
    """Select hyperparameters on a Poisson subset of the data, then train once with them.

    Args:
        variant: 1 trains the final model on the records that were not tuned on, 2 on all.
        rate: Probability that a record is tuned on, in (0, 1).
        extrapolation: ``scale-learning-rate`` (for SGD: a candidate of rate η is tried on m of n
            records at η·m/n), ``keep`` (for Adam, whose steps do not depend on the gradient's scale),
            or ``auto`` (the one that goes with the method). The space is that of the final training.
        law: As for ``papernot-steinke``, of the selection on the subset.
        min_runs: Fewest runs; unless given 3, as the tuning costs little beside the final training. 2
            of a mean or cap below 6, none below 4 or for laws with K = 0; 1 takes the law as it is.

    References:
        Koskela and Kulkarni 2023, arXiv 2301.11989.

    Example:
        >>> from privtune.strategies import SubsampledTuning
        >>> strategy = SubsampledTuning(variant=2, rate=0.1, mean_runs=20)
        >>> strategy.run_law().quantile(0.99), strategy.extrapolation
        (83, 'scale-learning-rate')
    """

    name: ClassVar[str] = "subsampled-tuning"
    summary: ClassVar[str] = "private selection on a random part of the data, then one training"
    needs: ClassVar[Needs] = Needs(
        score=True,
        independent=True,
        parameters={"learning_rate": ("extrapolation", "scale-learning-rate")},
    )
    floor: ClassVar[int] = 3
    most_sure: ClassVar[float] = 0.5

    arm: str = "subsampled-tuning"
    variant: int = 1
    rate: float = 0.1
    extrapolation: str = "auto"

    def __post_init__(self) -> None:
        rule = rule_of(self.extrapolation, self.method)
        object.__setattr__(self, "extrapolation", rule)

    def _check_options(self) -> None:
        """Refuse options outside their ranges, and ``auto``, which is for selections that are a whole arm."""
        check_subset(variant=self.variant, rate=self.rate, extrapolation=self.extrapolation)
        if self.law == "auto":
            raise StrategyError(
                f"Arm {self.arm!r}: law: auto weighs the noise of a selection that is the whole arm, "
                "but most of this arm's cost is its final training. Give the law of the tuning."
            )
        if self.mean_runs == "auto":
            raise StrategyError(
                f"Arm {self.arm!r}: mean_runs: auto fits the number of runs of a selection that is "
                "the whole arm, but most of this arm's cost is its final training. Give the mean "
                "number of runs of the tuning."
            )

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan tuning and final training of at most ``epsilon`` together, without touching data."""
        self._check_options()
        law = self.run_law()
        self._check(context)
        records = context.schedule.records
        subset_records = max(1, round(self.rate * records))
        final_records = records
        if self.variant == 1:
            final_records = max(1, records - subset_records)
        subset_schedule = replace(context.schedule, records=subset_records)
        search = self._search(
            replace(context, schedule=subset_schedule),
            epsilon=epsilon / 2,
            part="subset",
            final_records=final_records,
        )

        # A validation record is in no subset: it meets the selection's scores, nothing else.
        cost = partial(acc.PrivateSelection, runs=law)
        event_of = partial(self._event, law=law)
        search, score, event = meet(search, event_of, cost, context=context, epsilon=epsilon)
        final = _final(search.trainings[0], final_records, self.variant)
        if self.extrapolation == "scale-learning-rate":
            factor = subset_records / final_records
            search = search.each(lambda training: replace(training, rate_factor=factor))
        baseline = law.expected_runs * context.schedule.expected_gradient_evaluations
        details = {
            "variant": self.variant,
            "extrapolation": self.extrapolation,
            "ratio": final_records / subset_records,
            "baseline_gradient_evaluations": baseline,
        }
        warning = warn_of_few(subset_records)
        if warning:
            details["advice"] = warning
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=event,
            training=final,
            params=dict(self.parameters),
            runs=law,
            score=score,
            released=("the final model", "its hyperparameters", "the winner's score in the tuning"),
            sealed=(
                "every other candidate: hyperparameters, score, model",
                "the number of runs",
                "which records were tuned on",
                "times and progress of the round",
            ),
            search=search,
            rate=self.rate,
            details=details,
        )

    def _event(self, search: SearchPlan, law: acc.RunLaw) -> acc.Event:
        """Return the joint event of the tuning on the subset and the final training."""
        tuning = acc.PrivateSelection(self._trial_event(search), law)
        # With a grid, the final training is whichever point won: the worst is charged.
        training = search_event(search, weighted=False)
        return acc.SubsampledTuning(self.variant, self.rate, tuning, training)

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Select on the subset, train once with the winner's hyperparameters."""
        if plan.search is None:
            raise InvalidInputError("plan.search", None, "subsampled tuning needs a search")
        search = plan.search

        def request_final(params: Mapping[str, object]) -> NamedTraining:
            check_given(self, params)  # a function may suggest it to some candidates alone
            records = plan.training.schedule.records
            training = _final(search.training_of(params), records, self.variant)
            return NamedTraining("final", training, params)

        return (yield from select_then(trials, request_final))


def warn_of_few(records: int) -> str:
    """Return a warning about a subset of few records, in words, or an empty text if they are enough."""
    if records >= _FEW:
        return ""
    return (
        f"The search uses about {records:,} records, fewer than {_FEW:,}. The best learning rate on so few "
        "says little about the best one on all. Use a larger rate, or papernot-steinke."
    )


def _final(training: TrainingPlan, records: int, variant: int) -> TrainingPlan:
    """Return the final training of a candidate: its rate, steps and noise, on other records."""
    schedule = replace(training.schedule, records=records)
    part = "rest" if variant == 1 else "all"
    return TrainingPlan(schedule, training.method, part)


@dataclass(frozen=True, kw_only=True)
class DPHyper(OptionsOfLaw, IndependentDrawing):
    """Select hyperparameters at a share of ε, on all the data, then train once with the rest.

    Args:
        share: What the search may cost, as a share of ε, in (0, 1).
        law: As for ``papernot-steinke``, of the search.

    References:
        Bu and Liu 2025, Section 5 (the baseline DP-hyper); Papernot and Steinke 2022, arXiv 2110.03620.

    Example:
        >>> strategy = DPHyper(mean_runs=3, parameters={"max_grad_norm": 1.0})
        >>> plan = strategy.plan(study.spec.planning_context(), epsilon=2.0)
        >>> [part.type for part in plan.event.events], plan.final
        (['composed', 'private_selection'], True)
    """

    name: ClassVar[str] = "dp-hyper"
    summary: ClassVar[str] = "private selection with a share of ε, then one training with the rest"
    needs: ClassVar[Needs] = Needs(score=True, independent=True)

    arm: str = "dp-hyper"
    share: float = 0.15

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan the search and the training of at most ``epsilon`` together, without touching data."""
        if not 0.0 < self.share < 1.0:
            raise InvalidInputError("share", self.share, "must lie strictly between 0 and 1")
        if self.law == "auto" or self.mean_runs == "auto":
            raise StrategyError(
                f"Arm {self.arm!r}: auto weighs the noise of a selection that is the whole arm, but "
                "most of this arm's cost is its final training. Give law and mean_runs."
            )
        changing = [name for name in CHANGING if name in context.space]
        if changing:
            raise StrategyError(
                f"Arm {self.arm!r} searches {', '.join(changing)}, which changes what a candidate "
                "costs, but its final training costs the same whatever wins. Leave it out."
            )
        law = self.run_law()
        self._check(context)
        search = self._search(context, epsilon=epsilon * self.share)
        selection = acc.PrivateSelection(self._trial_event(search), law)
        factor = factor_for(selection, context, epsilon * self.share)
        search = search.scaled(factor)
        rest = self._search(context, epsilon=epsilon * (1.0 - self.share))
        final = rest.trainings[0]

        cost = partial(acc.PrivateSelection, runs=law)
        event_of = partial(self._event, law=law)
        trained = SearchThenFinal(search, final)
        trained, score, event = meet(trained, event_of, cost, context=context, epsilon=epsilon)
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=event,
            training=trained.final,
            params=dict(self.parameters),
            runs=law,
            score=score,
            released=("the final model", "its hyperparameters", "the winner's score in the search"),
            sealed=SEALED_TRIALS,
            search=trained.search,
            details={"share": self.share},
        )

    def _event(self, trained: SearchThenFinal, law: acc.RunLaw) -> acc.Event:
        """Return the joint event of the search and the final training, on the same records."""
        selection = acc.PrivateSelection(self._trial_event(trained.search), law)
        return acc.Composed((selection, trained.final.event))

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Run the sealed search, then train once with the hyperparameters of its best trial."""
        request_final = partial(NamedTraining, "final", plan.training)
        return (yield from select_then(trials, request_final))


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Searching):
    """Find the best learning rate at two small ε, follow the line through them to the final ε.

    Every trial of both searches is charged, with the final training, by composition.

    Args:
        trials: Trials of each of the two searches.
        fractions: What one trial of the first and of the second search may cost, as fractions of
            what the final training costs.
        steps: Steps of each search, as fractions, in (0, 1], of those of the final training. A trial
            of T' steps runs at T / T' times the rate drawn, for the paper extrapolates r = ηT.
        sampler: ``random``: candidates are drawn independently of earlier scores.
        pruner: Refused: it compares a trial with others.

    References:
        Panda et al. 2024, arXiv 2212.04486, Algorithm 1 and Section 3 (r = ηT).

    Example:
        >>> strategy = LinearScaling(trials=2, parameters={"max_grad_norm": 1.0})
        >>> plan = strategy.plan(study.spec.planning_context(), epsilon=4.0)
        >>> [part.type for part in plan.event.events], plan.final
        (['composed', 'repeated'], True)
    """

    name: ClassVar[str] = "linear-scaling"
    summary: ClassVar[str] = "two cheap searches at small ε, extrapolated to the final ε"
    needs: ClassVar[Needs] = Needs(
        score=True,
        independent=True,
        parameters={"learning_rate": None},
        alone=True,
    )

    arm: str = "linear-scaling"
    trials: int = 4
    fractions: tuple[float, float] = (0.1, 0.2)
    steps: tuple[float, float] = (1.0, 1.0)
    sampler: str = "random"
    pruner: str | None = None

    def _check_options(self, context: PlanningContext) -> None:
        """Refuse invalid options, and a space of anything but the learning rate to extrapolate."""
        require_independent(self.arm, sampler=self.sampler, pruner=self.pruner)
        self._check_parameters(context)
        if list(context.space) != ["learning_rate"]:
            remedy = "Write learning_rate alone into the space"
            if context.define_by_run:
                # A function's own range is unknown while an arm is planned.
                remedy += (
                    " (study.optimize(space={'learning_rate': {'type': 'float', 'low': 0.01, 'high': 10.0, "
                    "'log': True}}, ...)), as build suggests it"
                )
            raise StrategyError(
                f"Arm {self.arm!r} extrapolates the learning rate alone, but the space holds "
                f"{', '.join(context.space) or 'nothing'}. {remedy}, and "
                "give the others as parameters of the arm, in a study of its own if need be."
            )
        low, high = (float(fraction) for fraction in self.fractions)
        if not 0 < low < high < 1:
            raise InvalidInputError("fractions", self.fractions, "must be 0 < first < second < 1")
        if self.trials < 1:
            raise InvalidInputError("trials", self.trials, "must be a whole number of at least 1")
        are_shares = all(0 < float(share) <= 1 for share in self.steps)
        if not are_shares:
            raise InvalidInputError("steps", self.steps, "must be two fractions in (0, 1]")

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan both searches and the final training at ``epsilon`` together, without touching data."""
        self._check_options(context)
        # A first guess at half the target fixes the ratios of all noise; `meet` scales it as one.
        guess = epsilon / 2
        first, second = (
            self._training(context, guess * float(fraction), float(share))
            for fraction, share in zip(self.fractions, self.steps, strict=True)
        )
        final = self._training(context, guess, 1.0)
        search = SearchPlan((first, second), ({}, {}), 2 * self.trials)
        trained = SearchThenFinal(search, final)

        cost = partial(acc.Repeated, 2 * self.trials)
        trained, score, event = meet(trained, self._event, cost, context=context, epsilon=epsilon)
        epsilons = []
        for training in (*trained.search.trainings, trained.final):
            guarantee = account(training.event, context.delta, adjacency=context.adjacency)
            epsilons.append(guarantee.epsilon)
        law = context.space["learning_rate"]
        low = float(getattr(law, "low", 0.0))
        high = float(getattr(law, "high", math.inf))
        bounds = [low, high]
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=event,
            training=trained.final,
            params=dict(self.parameters),
            score=score,
            released=("every trial of both searches", "the final model", "its hyperparameters"),
            sealed=SEALED_STEPS,
            search=trained.search,
            details={"epsilons": epsilons, "bounds": bounds},
        )

    def _training(self, context: PlanningContext, epsilon: float, share: float) -> TrainingPlan:
        """Return a training at ``epsilon`` of a share of the steps, at least one."""
        steps = max(1, round(share * context.schedule.steps))
        schedule = replace(context.schedule, steps=steps)
        context = replace(context, schedule=schedule)
        method = budgeted(context, self.method, self.options, epsilon=epsilon)
        return TrainingPlan(context.schedule, method)

    def _event(self, trained: SearchThenFinal) -> acc.Event:
        """Return the joint event of the final training and both searches, whose trials are all released."""
        searches = []
        for training in trained.search.trainings:
            searches.append(acc.Repeated(self.trials, training.event))
        return acc.Composed((*searches, trained.final.event))

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Search at two small ε, extrapolate the best learning rate, and train once."""
        if plan.search is None:
            raise InvalidInputError("plan.search", None, "linear scaling needs two searches")
        results: list[TrialResult] = []
        best_rates: list[float] = []
        for position, training in enumerate(plan.search.trainings):
            # A shorter training goes as far at a higher rate: r = ηT stays.
            stretch = plan.training.schedule.steps / training.schedule.steps
            first = position * self.trials
            search_results: list[TrialResult] = []
            for number in range(first, first + self.trials):
                params = self._draw(plan, trials, number, stretch)
                name = f"trial-{number}"
                (result,) = yield NamedTraining(name, training, params, scored=True)
                search_results.append(result)
            results += search_results
            best = best_of(search_results, trials.streams)
            best_rate = float(best.params["learning_rate"])
            best_rates.append(best_rate / stretch)
        rate = extrapolate(plan.details["epsilons"], best_rates, plan.details["bounds"])
        params = {**plan.params, "learning_rate": rate}
        (final,) = yield NamedTraining("final", plan.training, params)
        return Outcome(final, trials=tuple(results))

    def _draw(self, plan: Plan, trials: Round, number: int, stretch: float) -> dict[str, Any]:
        """Draw a trial's hyperparameters, with the learning rate multiplied by ``stretch``."""
        suggestions = trials.space.draw(trials.streams, number)
        params: dict[str, Any] = {**plan.params, **suggestions}
        params["learning_rate"] *= stretch
        return params


def extrapolate(epsilons: list[float], best: list[float], bounds: list[float]) -> float:
    """Return the learning rate at ε₃ on the line through the best ones at ε₁ and ε₂, within bounds."""
    first, second, final = epsilons
    slope = 0.0
    if second > first:  # two searches of one ε have no line: the first one's rate is taken
        rise = best[1] - best[0]
        slope = rise / (second - first)
    rate = best[0] + slope * (final - first)
    low, high = bounds
    return min(max(rate, low), high)
