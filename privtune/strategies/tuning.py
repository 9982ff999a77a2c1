"""Strategies that search cheaply and then train once: a subset, a share of ε, two small ε."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import privtune.accounting as acc
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.strategies._base import Needs, Round, StrategyError, best_of
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
from privtune.strategies.searching import (
    CHANGING,
    IndependentDrawing,
    Searching,
    search_event,
    select_then,
)
from privtune.training.methods import METHODS

_RULES = ("scale-learning-rate", "keep")
_FEW = 2000  # records: the best rate of fewer says little about that of all


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

    References:
        Koskela and Kulkarni 2023, arXiv 2301.11989.

    Example:
        >>> from privtune.strategies import SubsampledTuning
        >>> strategy = SubsampledTuning(variant=2, rate=0.1, mean_runs=20)
        >>> strategy.run_law().quantile(0.99), strategy.extrapolation
        (90, 'scale-learning-rate')
    """

    name: ClassVar[str] = "subsampled-tuning"
    summary: ClassVar[str] = "private selection on a random part of the data, then one training"
    needs: ClassVar[Needs] = Needs(
        score=True,
        independent=True,
        parameters={"learning_rate": ("extrapolation", "scale-learning-rate")},
    )

    arm: str = "subsampled-tuning"
    variant: int = 1
    rate: float = 0.1
    extrapolation: str = "auto"

    def __post_init__(self) -> None:
        if self.extrapolation == "auto":
            # What is divided by a root of its own square does not grow with the batch.
            free = getattr(METHODS.get(self.method), "scale_free", False)
            rule = "keep" if free else "scale-learning-rate"
            object.__setattr__(self, "extrapolation", rule)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan tuning and final training of at most ``epsilon`` together. Touches no data."""
        if self.variant not in (1, 2):
            raise InvalidInputError("variant", self.variant, "must be 1 or 2")
        if not 0.0 < self.rate < 1.0:
            raise InvalidInputError("rate", self.rate, "must lie strictly between 0 and 1")
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
        if self.extrapolation not in _RULES:
            allowed = f"must be one of auto, {', '.join(_RULES)}"
            raise InvalidInputError("extrapolation", self.extrapolation, allowed)
        law = self.run_law()
        self._check(context)
        records = context.schedule.records
        tuned = max(1, round(self.rate * records))
        kept = records if self.variant == 2 else max(1, records - tuned)
        subset = replace(context, schedule=replace(context.schedule, records=tuned))
        search = self._search(subset, epsilon=epsilon / 2, part="subset", final_records=kept)

        # A validation record is in no subset: it meets the selection's scores, nothing else.
        cost = partial(acc.PrivateSelection, runs=law)
        event_of = partial(self._event, law=law)
        search, score, event = meet(search, event_of, cost, context=context, epsilon=epsilon)
        final = _final(search.trainings[0], kept, self.variant)
        if self.extrapolation == "scale-learning-rate":
            search = search.each(lambda t: replace(t, rate_factor=tuned / kept))
        baseline = law.expected_runs * context.schedule.expected_gradient_evaluations
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
            details={
                "variant": self.variant,
                "extrapolation": self.extrapolation,
                "ratio": kept / tuned,
                "baseline_gradient_evaluations": baseline,
                **({"advice": _few_records(tuned)} if tuned < _FEW else {}),
            },
        )

    def _event(self, search: SearchPlan, law: acc.RunLaw) -> acc.Event:
        tuning = acc.PrivateSelection(self._trial_event(search), law)
        # With a grid, the final training is whichever point won: the worst is charged.
        training = search_event(search, weighted=False)
        return acc.SubsampledTuning(self.variant, self.rate, tuning, training)

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Select on the subset, train once with the winner's hyperparameters."""
        if plan.search is None:
            raise InvalidInputError("plan.search", None, "subsampled tuning needs a search")
        search = plan.search

        def final(found: Mapping[str, Any]) -> TrialResult:
            check_given(self, found)  # a function may suggest it to some candidates alone
            records = plan.training.schedule.records
            training = _final(search.training_of(found), records, self.variant)
            return trials.train(plan, training, found, name="final")

        return select_then(plan, trials, final)


def _few_records(tuned: int) -> str:
    return (
        f"About {tuned:,} records are tuned on, fewer than {_FEW:,}: the best learning rate of so few says "
        "little about that of all. Take a larger rate, or papernot-steinke."
    )


def _final(training: TrainingPlan, records: int, variant: int) -> TrainingPlan:
    """Return the final training of a candidate: its rate, steps and noise, on other records."""
    schedule = replace(training.schedule, records=records)
    return TrainingPlan(schedule, training.method, "rest" if variant == 1 else "all")


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
    summary: ClassVar[str] = "private selection at a share of ε, then one training at the rest"
    needs: ClassVar[Needs] = Needs(score=True, independent=True)

    arm: str = "dp-hyper"
    share: float = 0.15

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan the search and the training of at most ``epsilon`` together. Touches no data."""
        if not 0.0 < self.share < 1.0:
            raise InvalidInputError("share", self.share, "must lie strictly between 0 and 1")
        if self.law == "auto" or self.mean_runs == "auto":
            raise StrategyError(
                f"Arm {self.arm!r}: auto weighs the noise of a selection that is the whole arm, but "
                "most of this arm's cost is its final training. Give law and mean_runs."
            )
        if changing := [name for name in CHANGING if name in context.space]:
            raise StrategyError(
                f"Arm {self.arm!r} searches {', '.join(changing)}, which changes what a candidate "
                "costs, but its final training costs the same whatever wins. Leave it out."
            )
        law = self.run_law()
        self._check(context)
        search = self._search(context, epsilon=epsilon * self.share)
        selection = acc.PrivateSelection(self._trial_event(search), law)
        search = search.scaled(factor_for(selection, context, epsilon * self.share))
        final = self._search(context, epsilon=epsilon * (1.0 - self.share)).trainings[0]

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
        return acc.Composed(
            (acc.PrivateSelection(self._trial_event(trained.search), law), trained.final.event)
        )

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Select, then train once."""

        def final(found: Mapping[str, Any]) -> TrialResult:
            return trials.train(plan, plan.training, found, name="final")

        return select_then(plan, trials, final)


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
        score=True, independent=True, parameters={"learning_rate": None}, alone=True
    )

    arm: str = "linear-scaling"
    trials: int = 4
    fractions: tuple[float, float] = (0.1, 0.2)
    steps: tuple[float, float] = (1.0, 1.0)
    sampler: str = "random"
    pruner: str | None = None

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan both searches and the final training at ``epsilon`` together. Touches no data."""
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
        shares = tuple(float(share) for share in self.steps)
        if not all(0 < share <= 1 for share in shares):
            raise InvalidInputError("steps", self.steps, "must be two fractions in (0, 1]")
        guess = epsilon / 2
        trainings = tuple(
            self._training(context, guess * fraction, share)
            for fraction, share in zip((low, high, 1.0), (*shares, 1.0), strict=True)
        )
        search = SearchPlan(trainings[:2], ({}, {}), 2 * self.trials)
        trained = SearchThenFinal(search, trainings[2])

        cost = partial(acc.Repeated, 2 * self.trials)
        trained, score, event = meet(trained, self._event, cost, context=context, epsilon=epsilon)
        law = context.space["learning_rate"]
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
            details={
                "epsilons": [
                    account(t.event, context.delta, adjacency=context.adjacency).epsilon
                    for t in (*trained.search.trainings, trained.final)
                ],
                "bounds": [float(getattr(law, "low", 0.0)), float(getattr(law, "high", math.inf))],
            },
        )

    def _training(self, context: PlanningContext, epsilon: float, share: float) -> TrainingPlan:
        steps = max(1, round(share * context.schedule.steps))
        context = replace(context, schedule=replace(context.schedule, steps=steps))
        method = budgeted(context, self.method, self.options, epsilon=epsilon)
        return TrainingPlan(context.schedule, method)

    def _event(self, trained: SearchThenFinal) -> acc.Event:
        searches = [acc.Repeated(self.trials, t.event) for t in trained.search.trainings]
        return acc.Composed((*searches, trained.final.event))

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Search twice, extrapolate, train once."""
        if plan.search is None:
            raise InvalidInputError("plan.search", None, "linear scaling needs two searches")
        results = []
        best: list[float] = []
        for which, training in enumerate(plan.search.trainings):
            found, longer = [], plan.training.schedule.steps / training.schedule.steps
            for trial in range(self.trials):
                number = which * self.trials + trial
                drawn = trials.space.draw(trials.streams, number)
                params: dict[str, Any] = {**plan.params, **drawn}
                params["learning_rate"] *= longer
                found.append(
                    trials.train(plan, training, params, name=f"trial-{number}", scored=True)
                )
            results += found
            rate = float(best_of(found, trials.streams).params["learning_rate"])
            best.append(rate / longer)
        rate = extrapolate(plan.details["epsilons"], best, plan.details["bounds"])
        params = {**plan.params, "learning_rate": rate}
        result = trials.train(plan, plan.training, params, name="final")
        return Outcome(result, trials=tuple(results))


def extrapolate(epsilons: list[float], best: list[float], bounds: list[float]) -> float:
    """Follow the line through (ε₁, best₁) and (ε₂, best₂) to ε₃, inside the space's bounds."""
    first, second, final = epsilons
    slope = (best[1] - best[0]) / (second - first) if second > first else 0.0
    return min(max(best[0] + slope * (final - first), bounds[0]), bounds[1])
