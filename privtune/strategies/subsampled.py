"""Subsampled tuning: select on a Poisson subset, extrapolate, train once (Koskela, Kulkarni 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from privtune.accounting import Event, PrivateSelection, RunLaw, SubsampledTuning
from privtune.errors import InvalidInputError
from privtune.strategies._base import Outcome, Round, StrategyError, TrialResult
from privtune.strategies._calibrate import meet
from privtune.strategies._check_needs import check_given
from privtune.strategies.context import PlanningContext
from privtune.strategies.grid import search_event
from privtune.strategies.laws import OptionsOfLaw
from privtune.strategies.needs import Needs
from privtune.strategies.plan import Plan
from privtune.strategies.searching import IndependentDrawing, select_then
from privtune.strategies.trainings import SearchPlan, TrainingPlan
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
            records at η·m/n, since the gradient is averaged over a batch that is smaller by that
            much), ``keep`` (for Adam, whose steps do not depend on the gradient's scale), or
            ``auto`` (the one that goes with the method). The space is that of the final training.
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
        self.check(context)
        records = context.schedule.records
        tuned = max(1, round(self.rate * records))
        kept = records if self.variant == 2 else max(1, records - tuned)
        subset = replace(context, schedule=replace(context.schedule, records=tuned))
        search = self.search(subset, epsilon=epsilon / 2, part="subset", final_records=kept)

        def cost(event: Event) -> Event:
            # A validation record is in no subset: it meets the selection's scores, nothing else.
            return PrivateSelection(event, law)

        event_of = partial(self._event, law=law)
        search, score, event = meet(search, event_of, cost, context=context, epsilon=epsilon)
        final = _final(search.trainings[0], kept, self.variant)
        if self.extrapolation == "scale-learning-rate":
            search = search.with_rate_factor(tuned / kept)
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

    def _event(self, search: SearchPlan, law: RunLaw) -> Event:
        tuning = PrivateSelection(self.trial_event(search), law)
        # With a grid, the final training is whichever point won: the worst is charged.
        training = search_event(search, weighted=False)
        return SubsampledTuning(self.variant, self.rate, tuning, training)

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
