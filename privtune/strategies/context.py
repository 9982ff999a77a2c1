"""Public facts that strategies plan with, and the plans of an arm's scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.spaces import SearchSpace
from privtune.strategies.score_plan import Reporting, ScorePlan, Scoring
from privtune.tasks import Task
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.methods.declared_mechanism import DeclaredMethod

if TYPE_CHECKING:
    from privtune.strategies.score_plan import ScorePlan


SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
"""Shares of an arm's ε that its report may take where none is given, tried from the largest down."""


@dataclass(frozen=True, kw_only=True)
class PlanningContext:
    """Public facts that a strategy plans with.

    Args:
        task: The task; only its public facts are read.
        schedule: Records, rate and steps of one training.
        space: Distributions of the hyperparameters.
        delta: The budget's δ, in (0, 1).
        adjacency: The budget's neighbouring relation.
        scoring: How trials are scored.
        report: How released models are scored on the test split; None where it is not asked.
        report_choices: Reports that planning may choose from, the preferred one first; none where the user
            says what is reported.
        define_by_run: Whether the user's own training loop defines the space.
        noise: Where the noise of trainings comes from, and how it is treated.
        declared: The mechanism that each training runs, where another library trains.
        repeats: How often each arm runs.
        chosen_schedule: Which epochs and batch the rule chose, and why; None for numbers of the user's own.
        sketch: Whether a search throws the plan away: its noise is approximate then.

    Example:
        >>> context = study.spec.planning_context()
        >>> context.schedule.records, context.delta, list(context.space)
        (90, 1e-05, ['learning_rate'])
        >>> round(context.plan_score(epsilon=1.0).noise_multiplier, 2)
        3.73
        >>> context.plan_report(2.0) is None, context.exact_score().noise_multiplier is None
        (True, True)
    """

    task: Task
    schedule: Schedule
    space: SearchSpace
    delta: float
    adjacency: Adjacency
    scoring: Scoring = field(default_factory=Scoring)
    report: Reporting | None = None
    report_choices: tuple[Reporting, ...] = ()
    define_by_run: bool = False
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    declared: DeclaredMethod | None = None
    repeats: int = 1
    chosen_schedule: Mapping[str, object] | None = None
    sketch: bool = False

    def plan_score(self, epsilon: float) -> ScorePlan:
        """Return the plan of a trial's score at ``epsilon`` above 0, exact on a public validation split."""
        task = self.task
        self.scoring.check_noise(public=task.public_validation)
        self._check_moves(public=task.public_validation)
        return self._score(public=task.public_validation, epsilon=epsilon)

    def plan_report(self, epsilon: float) -> ScorePlan | None:
        """Return the plan of an arm's score at ``epsilon`` on the test split, or None if unasked."""
        task = self.task
        report = self.report
        if report is None:
            return None
        _check_split("test", task.test_records)
        report.check_noise(public=task.public_test)
        self._check_moves(public=task.public_test)
        report.check(classes=task.classes, target_range=task.target_range, rows=task.rows)
        share = report.epsilon_share
        if share is None:
            share = SHARES[-1]
        score = report.plan(
            records=task.test_records,
            public=task.public_test or not math.isfinite(epsilon),
            epsilon=epsilon * share,
            delta=self.delta,
            adjacency=self.adjacency,
            target_range=task.target_range,
        )
        return report.with_temperature(score, classes=task.classes)

    def _check_moves(self, *, public: bool) -> None:
        """Refuse noised scores where a replaced record may leave one split and join another.

        It would meet the charges of both, and one alone is counted.
        """
        task = self.task
        moves = task.partition == "content" and self.adjacency is Adjacency.REPLACE_ONE
        if moves and not public:
            raise InvalidInputError(
                "budget.adjacency",
                str(self.adjacency),
                f"does not go with noised scores on task {task.name!r}: its splits follow the content "
                "of records, so one that is replaced may change its split and meet both charges",
                "Use add-remove, or a table whose records have an id.",
            )

    def exact_score(self) -> ScorePlan:
        """Return the plan of one exact score, for an arm without any guarantee."""
        return self._score(public=True, epsilon=math.inf)

    def _score(self, *, public: bool, epsilon: float) -> ScorePlan:
        """Return the plan of a trial's score on the validation split, by a metric that suits the task."""
        task = self.task
        _check_split("validation", task.validation_records)
        self.scoring.check(classes=task.classes, target_range=task.target_range, rows=task.rows)
        return self.scoring.plan(
            records=task.validation_records,
            public=public,
            epsilon=epsilon,
            delta=self.delta,
            adjacency=self.adjacency,
            target_range=task.target_range,
        )


def _check_split(split: str, records: int) -> None:
    """Refuse to score on a split without a declared size, on which the effect of noise depends."""
    if records < 1:
        raise InvalidInputError(
            f"split.{split}",
            None,
            "must be given, since scores are computed on it",
            f'Give its expected size in split=, or public={{"{split}": records}}.',
        )
