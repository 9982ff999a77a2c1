"""What strategies may look at when they plan, and how an arm meets its target as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.spaces import SearchSpace
from privtune.strategies.scoring import Reporting, ScorePlan, Scoring
from privtune.tasks import Task
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.methods.declared import Declared

if TYPE_CHECKING:
    from privtune.strategies.scoring import ScorePlan


SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
"""Shares of an arm's ε that its report may take, where none is given: the first that costs nothing."""


@dataclass(frozen=True, kw_only=True)
class PlanningContext:
    """What a strategy may look at when it plans: public facts only.

    Args:
        task: The task; only its public facts are read.
        schedule: Records, rate and steps of one training.
        space: Distributions of the hyperparameters.
        delta: The budget's δ, in (0, 1).
        adjacency: The budget's neighbouring relation.
        scoring: How trials are scored.
        report: How released models are scored on the test split; None where it is not asked.
        define_by_run: Whether the user's own training loop defines the space.
        noise: Where the noise of trainings comes from, and how it is treated.
        declared: The mechanism that each training runs, where another library trains.
        repeats: How often each arm runs.
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
    define_by_run: bool = False
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    declared: Declared | None = None
    repeats: int = 1
    sketch: bool = False

    def plan_score(self, epsilon: float) -> ScorePlan:
        """Return how a trial is scored at ``epsilon``, above 0; exactly on a public validation split."""
        task = self.task
        self.scoring.check_noise(public=task.public_validation)
        self._check_moves(public=task.public_validation)
        return self._score(public=task.public_validation, epsilon=epsilon)

    def plan_report(self, epsilon: float) -> ScorePlan | None:
        """Return how an arm of ``epsilon`` is scored on the test split in the end; None if unasked."""
        task, report = self.task, self.report
        if report is None:
            return None
        _check_there("test", task.test_records)
        report.check_noise(public=task.public_test)
        self._check_moves(public=task.public_test)
        report.check(classes=task.classes, target_range=task.target_range, rows=task.rows)
        share = SHARES[-1] if report.epsilon_share is None else report.epsilon_share
        return report.plan(
            records=task.test_records,
            public=task.public_test or not math.isfinite(epsilon),
            epsilon=epsilon * share,
            delta=self.delta,
            adjacency=self.adjacency,
            target_range=task.target_range,
        )

    def _check_moves(self, *, public: bool) -> None:
        task = self.task
        # A replaced record could leave one split and join another: two charges, of which one is counted.
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
        """Return the plan of one score without noise, for an arm without any guarantee."""
        return self._score(public=True, epsilon=math.inf)

    def _score(self, *, public: bool, epsilon: float) -> ScorePlan:
        task = self.task
        _check_there("validation", task.validation_records)
        self.scoring.check(classes=task.classes, target_range=task.target_range, rows=task.rows)
        return self.scoring.plan(
            records=task.validation_records,
            public=public,
            epsilon=epsilon,
            delta=self.delta,
            adjacency=self.adjacency,
            target_range=task.target_range,
        )


def _check_there(split: str, records: int) -> None:
    if records < 1:
        raise InvalidInputError(
            f"split.{split}",
            None,
            "must be given, since scores are computed on it",
            f'Give its expected size in split=, or public={{"{split}": records}}.',
        )
