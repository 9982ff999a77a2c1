"""What strategies that search have in common: a method whose hyperparameters are searched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from privtune.accounting import Event
from privtune.errors import InvalidInputError
from privtune.strategies._base import Outcome, Round, TrialResult, best_of
from privtune.strategies._check_needs import require_independent
from privtune.strategies.context import PlanningContext
from privtune.strategies.grid import CHANGING, search_event, search_plan
from privtune.strategies.in_run import method_class, require_parameters
from privtune.strategies.laws import NOTHING
from privtune.strategies.plan import Plan
from privtune.strategies.trainings import SearchPlan
from privtune.tasks._fine_tuning import PART, check_part
from privtune.training.methods._rate_schedule import SEARCHED, check_searched


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
    if best.failed or best.score == -math.inf:
        return Outcome(best, note="No candidate reached a finite score; nothing more was trained.")
    return Outcome(replace(train(best.params), score=best.score))
