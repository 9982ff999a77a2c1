"""Private selection: run a secret number of i.i.d. candidates, release the best alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from privtune.accounting import (
    Gaussian,
    Parallel,
    PrivateSelection,
    RunLaw,
    calibrate,
    run_law_from_dict,
)
from privtune.errors import InvalidInputError
from privtune.strategies._base import Round, TrialResult
from privtune.strategies.in_run import method_class, require_parameters
from privtune.strategies.plan import Plan, PlanningContext, ScorePlan, TrainingPlan
from privtune.training.methods._base import scale_noise_of

__all__ = ["PapernotSteinke", "best_of"]


@dataclass(frozen=True, kw_only=True)
class PapernotSteinke:
    """Release the best of K i.i.d. candidates, with K drawn from a law and never shown.

    Args:
        arm: Name of the arm.
        law: ``geometric`` (the default: it gives the most for its price), ``logarithmic``,
            ``truncated_negative_binomial`` (with ``shape``), ``poisson`` or ``binomial``.
        mean_runs: Mean number of runs, at least 1.
        shape: Shape of the truncated negative binomial law, above -1; only with that law.
        maximum: Hard cap on the number of runs; part of the law, and so of the price.
        method: The training method whose hyperparameters are searched.
        parameters: Hyperparameters held fixed; the study's space gives the others.
        options: Further options of the method.

    References:
        Papernot and Steinke 2022, arXiv 2110.03620; Liu and Talwar 2019, arXiv 1811.07971.
    """

    name: ClassVar[str] = "papernot-steinke"
    summary: ClassVar[str] = "private selection: the best of a secret number of random candidates"

    arm: str
    law: str = "geometric"
    mean_runs: float = 10.0
    shape: float | None = None
    maximum: int | None = None
    method: str = "dpsgd"
    parameters: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def run_law(self) -> RunLaw:
        """Return the law of the number of runs."""
        fields: dict[str, Any] = {"law": self.law, "mean": self.mean_runs}
        if self.shape is not None:
            fields["shape"] = self.shape
        if self.maximum is not None:
            fields["maximum"] = self.maximum
        return run_law_from_dict(fields)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan a selection of at most ``epsilon`` as a whole. Touches no data."""
        law = self.run_law()
        method = method_class(self.method)
        if overlap := sorted(set(self.parameters) & set(context.space)):
            raise InvalidInputError(
                f"parameters of arm {self.arm!r}", overlap, "are searched by the space as well"
            )
        require_parameters(
            self.arm, method, {**self.parameters, **dict.fromkeys(context.space, 0.0)}
        )
        # A first guess for one run at half the target fixes the ratio of training to score noise;
        # the whole is then scaled by one factor until the selection meets the target.
        guess = epsilon / 2
        base = TrainingPlan(
            context.schedule,
            method.for_budget(context.schedule, epsilon=guess, delta=context.delta, **self.options),
        )
        score = _score_plan(context, guess)
        scale = calibrate(
            _selection_event(base, score, law),
            epsilon=epsilon,
            delta=context.delta,
            adjacency=context.adjacency,
        ).scale
        training = replace(base, method=scale_noise_of(base.method, scale))
        if score.noise_multiplier is not None:
            score = replace(score, noise_multiplier=score.noise_multiplier * scale)
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=_selection_event(training, score, law),
            training=training,
            params=dict(self.parameters),
            runs=law,
            score=score,
            released=("the best model", "its hyperparameters", "its noised validation score"),
            sealed=(
                "every other candidate: hyperparameters, score, model",
                "the number of runs",
                "times and progress of the round",
            ),
        )

    def run(self, plan: Plan, trials: Round) -> TrialResult:
        """Draw K, train K candidates, release the best."""
        if plan.runs is None:
            raise InvalidInputError("plan.runs", None, "a selection needs a law of runs")
        count = plan.runs.sample(trials.streams.numpy("runs", 0))
        return best_of(trials.train(plan, count), trials)


def best_of(results: Any, trials: Round) -> TrialResult:
    """Return the result of the best score; ties are broken by independent uniform draws.

    A NaN score counts as the worst: dropping the trial would make the choice depend on it.
    """
    tie_break = trials.streams.numpy("tie-break", 0).random(len(results))

    def rank(result: TrialResult) -> tuple[float, float]:
        score = -math.inf if result.score is None or math.isnan(result.score) else result.score
        return (score, float(tie_break[result.index]))

    best: TrialResult = max(results, key=rank)
    return best


def _score_plan(context: PlanningContext, epsilon: float) -> ScorePlan:
    if context.task.public_validation:
        return ScorePlan(context.task.validation_records, None)
    noise = calibrate(
        Gaussian(1.0), epsilon=epsilon, delta=context.delta, adjacency=context.adjacency
    ).scale
    return ScorePlan(context.task.validation_records, noise)


def _selection_event(training: TrainingPlan, score: ScorePlan, law: RunLaw) -> PrivateSelection:
    if score.noise_multiplier is None:
        return PrivateSelection(training.event, law)
    # Training and validation records are disjoint: a person is in one of the two.
    return PrivateSelection(Parallel((training.event, Gaussian(score.noise_multiplier))), law)
