"""One arm that picks how it chooses, from public facts alone and by what public studies found.

The rule is the fifth; ``studies/auto`` has all of them, each tried on tasks that it never saw. HyFreeDP is
the best single training there but for few records at small ε, where its losses are noise. Its own interval
of rates suits networks of some thousand weights in some hundred steps. In fewer steps a smaller network has
to go farther in each, and so have weights of small features; over more steps noise adds up for longer than
HyFreeDP's losses look back. Fine-tuned public weights suit it as it comes (``studies/transfer``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from privtune.accounting._checks import check_number
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
_FALLING = {"type": "linear", "start": 0.7}  # as HyFreeDP's own rate falls
_REACH = 2_500.0  # the best spread times the features' scale and the root of steps times weights
_SPREADS = (3.0, 25.0)  # beyond either, generated networks gained no more


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Choose between given and adapted hyperparameters from public facts, before anything is charged.

    ======================================  ================================================================
    the study                               the arm
    ======================================  ================================================================
    from scratch, records times ε < 500     ``fixed``: 0.5 and 1, or as given; a network's rate falls at the
                                            end, linearly from 0.7 of the steps on
    a network from scratch                  ``hyfreedp``, ``spread`` 2,500 over ``feature_scale`` times the
                                            root of steps times weights, from 3 to 25
    else                                    ``hyfreedp``
    ======================================  ================================================================

    A network's first weights are not all 0. The plan says what and why, and costs one training.

    Args:
        arm: Name of the arm.
        parameters: Hyperparameters of whatever is chosen; what it does not take is left out.
        feature_scale: Root mean square of an input's features, above 0, as far as it is known without the
            data: about 0.5 of bounds scaled to [-1, 1], 1 of standardised features, ``1 / sqrt(d)`` of
            vectors of length 1 with d features, as text encoders give them.

    Raises:
        InvalidInputError: If ``feature_scale`` is not a finite number above 0.

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
    feature_scale: float = 0.5

    def __post_init__(self) -> None:
        check_number("feature_scale", self.feature_scale, above=0.0)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Choose, and plan what was chosen at ``epsilon``. Touches no data."""
        chosen, options, why = self._choose(context, epsilon)
        strategy = self._made(chosen, options)
        plan = strategy.plan(context, epsilon=epsilon)
        check_needs(strategy, context, plan)
        details = {**plan.details, "chosen": chosen, "why": why}
        return replace(plan, strategy=f"{self.name}: {chosen}", details=details)

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Run what was chosen."""
        return self._made(str(plan.details["chosen"]), {}).run(plan, trials)

    def _choose(self, context: PlanningContext, epsilon: float) -> tuple[str, dict[str, Any], str]:
        """Return the name of what is chosen, its method's options, and why."""
        if context.task.pretrained is not None:
            return "hyfreedp", {}, "public weights are fine-tuned"
        records, weights = context.schedule.records, _weights_of_network(context)
        found = f"{records:,} records at ε = {show_epsilon(epsilon, 2)} are"
        if records * epsilon < _FEW:
            return (
                "fixed",
                {"schedule": _FALLING} if weights else {},
                f"{found} too few to adapt on",
            )
        why = f"{found} enough to adapt the learning rate in one training"
        if not weights:
            return "hyfreedp", {}, why
        reach = self.feature_scale * math.sqrt(context.schedule.steps * weights)
        spread = min(_SPREADS[1], max(_SPREADS[0], _REACH / reach))
        return "hyfreedp", {"spread": spread}, f"{why}, within a factor of {spread:.3g}"

    def _made(self, chosen: str, options: Mapping[str, Any]) -> Strategy:
        """Return the strategy of a name, with options of its method."""
        given = {**_PRIOR, **self.parameters}
        if chosen == "fixed":
            return Fixed(arm=self.arm, parameters=given, options=options)
        taken = {k: v for k, v in given.items() if k in METHODS[chosen].parameters}
        return InRun(arm=self.arm, method=chosen, parameters=taken, options=options)


def _weights_of_network(context: PlanningContext) -> int:
    """Return how many weights are trained; 0 where all begin at 0, as a linear model's may."""
    trained = [p for p in context.task.model().parameters() if p.requires_grad]
    return sum(p.numel() for p in trained) if any(p.any() for p in trained) else 0
