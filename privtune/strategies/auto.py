"""One arm that picks how it chooses, from public facts alone and by what public studies found.

The rule is the second one. The first (subsampled tuning with 25,000 records; else ADADP for networks and a
selection for small models) missed its target on unseen tasks, as ``studies/auto`` records. On the development
tasks there HyFreeDP was the best single training but for few records at small ε: its losses are noise then,
and given hyperparameters are better. Where public weights are fine-tuned it was HyFreeDP, too
(``studies/transfer``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from privtune.numbers import show_epsilon
from privtune.strategies._base import Needs, Round, Strategy
from privtune.strategies.arms import check_needs
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import Fixed, InRun
from privtune.strategies.plan import Plan
from privtune.strategies.release import Outcome
from privtune.training.methods import METHODS

_FEW = 500.0  # records times ε: up to 360 HyFreeDP was up to 13 points behind, from 1,000 on ahead
_PRIOR = {"learning_rate": 0.5, "max_grad_norm": 1.0}  # the studies' defaults


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Choose between given and adapted hyperparameters from public facts, before anything is charged.

    ====================================================  ==========================================
    the study                                             the arm
    ====================================================  ==========================================
    trains from scratch, with records times ε below 500   ``fixed``: 0.5 and 1, or as given
    else                                                  ``hyfreedp``
    ====================================================  ==========================================

    The plan names what was chosen and why, and costs and runs as that would: one training.

    Args:
        arm: Name of the arm.
        parameters: Hyperparameters of whatever is chosen; what it does not take is left out.

    Example:
        >>> plan = Auto().plan(study.spec.planning_context(), epsilon=2.0)
        >>> plan.details["chosen"], plan.details["why"]
        ('fixed', '90 records at ε = 2.00 are too few to adapt on')
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "fixed or HyFreeDP, chosen by public facts; the plan says why"
    needs: ClassVar[Needs] = Needs(task=True)

    arm: str = "auto"
    parameters: Mapping[str, float] = field(default_factory=dict)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Choose, and plan what was chosen at ``epsilon``. Touches no data."""
        chosen, why = self.choose(context, epsilon)
        strategy = self._made(chosen)
        plan = strategy.plan(context, epsilon=epsilon)
        check_needs(strategy, context, plan)
        details = {**plan.details, "chosen": chosen, "why": why}
        return replace(plan, strategy=f"{self.name}: {chosen}", details=details)

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Run what was chosen."""
        return self._made(str(plan.details["chosen"])).run(plan, trials)

    def choose(self, context: PlanningContext, epsilon: float) -> tuple[str, str]:
        """Return the name of what is chosen, and why. Touches no data.

        Args:
            context: Public facts: weights, records.
            epsilon: Target of the arm.

        Example:
            >>> Auto().choose(study.spec.planning_context(), 1.0)
            ('fixed', '90 records at ε = 1.00 are too few to adapt on')
        """
        if context.task.pretrained is not None:
            return "hyfreedp", "public weights are fine-tuned"
        records = context.schedule.records
        found = f"{records:,} records at ε = {show_epsilon(epsilon, 2)}"
        if records * epsilon < _FEW:
            return "fixed", f"{found} are too few to adapt on"
        return "hyfreedp", f"{found} are enough to adapt the learning rate in one training"

    def _made(self, chosen: str) -> Strategy:
        """Return the strategy of a name."""
        given = {**_PRIOR, **self.parameters}
        if chosen == "fixed":
            return Fixed(arm=self.arm, parameters=given)
        taken = {k: v for k, v in given.items() if k in METHODS[chosen].parameters}
        return InRun(arm=self.arm, method=chosen, parameters=taken)
