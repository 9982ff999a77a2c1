"""The oracle of the papers: a grid without noise. An upper bound on utility, with no guarantee."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from privtune.accounting import NonPrivate
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.strategies._base import Outcome, Round, StrategyError, best_of
from privtune.strategies.context import PlanningContext
from privtune.strategies.everything import grid_of
from privtune.strategies.in_run import budgeted
from privtune.strategies.needs import Needs
from privtune.strategies.plan import Plan
from privtune.strategies.searching import Searching
from privtune.strategies.trainings import SearchPlan, TrainingPlan
from privtune.training.methods._base import scale_noise_of


class NonPrivateError(PrivTuneError):
    """A study holds an arm without any guarantee and was not told to run it."""


@dataclass(frozen=True, kw_only=True)
class NonPrivateGrid(Searching):
    """Train every point of a grid without noise, score without noise, keep the best.

    Its event is ``non_private`` (ε = ∞). It is no part of any budget, and runs only where somebody
    says ``--non-private``: on public data, or to see how far the private arms are from the best.

    Args:
        points: Points of each hyperparameter that is not categorical.

    Example:
        >>> context = study.spec.planning_context()

        >>> plan = NonPrivateGrid(points=5, parameters={"max_grad_norm": 1.0}).plan(context, epsilon=2.0)
        >>> plan.is_private, plan.search.trials
        (False, 5)
    """

    name: ClassVar[str] = "non-private-grid"
    summary: ClassVar[str] = "NOT PRIVATE: a grid without noise, the papers' upper bound on utility"
    needs: ClassVar[Needs] = Needs(task=True, score=True, non_private=True)

    arm: str = "non-private-grid"
    points: int = 5

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan the grid. Touches no data; no ε is met, and none is asked of a budget."""
        if self.points < 1:
            raise InvalidInputError("points", self.points, "must be a whole number of at least 1")
        self.check_parameters(context)
        method = budgeted(context, self.method, self.options, epsilon=1.0)
        training = TrainingPlan(context.schedule, scale_noise_of(method, 0.0))
        if not isinstance(training.event, NonPrivate):
            raise StrategyError(
                f"Arm {self.arm!r}: method {self.method!r} has no form without noise. Use dpsgd."
            )
        count = 1
        for values in grid_of(context.space, self.points).values():
            count *= len(values)
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=NonPrivate(),
            training=training,
            params=dict(self.parameters),
            runs=None,
            score=context.exact_score(),
            released=("every trial, without any protection",),
            sealed=(),
            search=SearchPlan((training,), trials=count),
            final=False,
        )

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Walk the grid in order; keep the best."""
        grid = grid_of(trials.space, self.points)
        results = []
        for number, values in enumerate(itertools.product(*grid.values())):
            params = {**plan.params, **dict(zip(grid, values, strict=True))}
            results.append(
                trials.train(plan, plan.training, params, name=f"trial-{number}", scored=True)
            )
        return Outcome(best_of(results, trials.streams), trials=tuple(results))
