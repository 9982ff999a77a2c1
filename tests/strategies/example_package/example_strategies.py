"""A strategy in a package of its own: no search at all, the middle of the space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from privtune.accounting import Composed
from privtune.strategies import (
    NamedTraining,
    Needs,
    Outcome,
    Plan,
    PlanningContext,
    Round,
    SearchPlan,
    StrategyRun,
    TrainingPlan,
)
from privtune.training.methods import METHODS


@dataclass(frozen=True, kw_only=True)
class MiddleOfSpace:
    """Train a few models in the middle of the space, release them all.

    The hyperparameters are chosen without the data. Each model is a training of its own, so the
    arm's event is their composition: they look at the same records.

    Args:
        arm: Name of the arm.
        method: The training method.
        models: How many models, at least 1.
        options: Further options of the method.
    """

    name: ClassVar[str] = "middle-of-space"
    summary: ClassVar[str] = "models in the middle of the space, chosen without the data"
    needs: ClassVar[Needs] = Needs(task=True)

    arm: str = "middle-of-space"
    method: str = "dpsgd"
    models: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan all models together at no more than ``epsilon``: each at its part. No data."""
        # Every part at ε/n and δ/n composes to at most (ε, δ): the simplest theorem there is.
        method = METHODS[self.method].for_budget(
            context.schedule,
            epsilon=epsilon / self.models,
            delta=context.delta / self.models,
            **self.options,
        )
        training = TrainingPlan(context.schedule, method)
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=Composed((training.event,) * self.models),
            training=training,
            params={name: _middle(law) for name, law in context.space.items()},
            runs=None,
            score=None,
            released=("every model", "its hyperparameters"),
            sealed=("samples and their sizes", "un-noised gradients and losses"),
            search=SearchPlan((training,), trials=self.models),
            final=False,
        )

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Train what was planned; the first model is the one that is shown."""
        results = []
        for number in range(self.models):
            (result,) = yield NamedTraining(f"trial-{number}", plan.training, plan.params)
            results.append(result)
        return Outcome(results[0], trials=tuple(results))


def _middle(law: Any) -> float:
    between = math.sqrt(law.low * law.high) if law.log else (law.low + law.high) / 2
    return float(between)
