"""The arm ``auto``: given hyperparameters or HyFreeDP, by a rule on public facts that public studies found.

The rule is the fifth; ``studies/auto`` has all of them, each tried on tasks that it never saw. HyFreeDP's own
interval of rates suits networks of some thousand weights in some hundred steps. In fewer steps a smaller
network has to go farther in each, and so have weights of small features; over more steps noise adds up for
longer than HyFreeDP's losses look back. Fine-tuned public weights suit it as it comes (``studies/transfer``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from privtune.accounting._checks import check_number
from privtune.numbers import show_epsilon
from privtune.strategies._base import Needs, Round
from privtune.strategies.arms import check_needs
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import InRun, require_parameters
from privtune.strategies.plan import Plan
from privtune.strategies.release import Outcome
from privtune.tasks._fine_tuning import PART
from privtune.training.methods import METHODS

_FEW = 500.0  # records times ε: below, HyFreeDP was up to 22 points behind what is given
_PRIOR = {"learning_rate": 0.5, "max_grad_norm": 1.0}  # the studies' defaults
_FALLING = {"type": "linear", "start": 0.7}  # as HyFreeDP's own rate falls
_REACH = 2_500.0  # the best spread times the features' scale and the root of steps times weights
_SPREADS = (3.0, 25.0)  # no less was tried; with 100 the smallest networks alone gained more


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
        parameters: Hyperparameters of DP-SGD; a learning rate and a norm are for ``fixed`` alone.
        feature_scale: Root mean square of a feature as far as it is known without the data: about 0.5
            within [-1, 1], 1 if standardised, ``1 / sqrt(d)`` in vectors of length 1 with d features.

    Raises:
        InvalidInputError: If ``feature_scale`` is no finite number above 0; in a plan, for ``parameters``.

    Example:
        >>> plan = Auto().plan(study.spec.planning_context(), epsilon=2.0)
        >>> plan.details["chosen"], plan.details["why"]
        ('fixed', '90 records at ε = 2.00 are too few to adapt on')
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "fixed or HyFreeDP, chosen by public facts; the plan says why"
    needs: ClassVar[Needs] = Needs(task=True, draws=False)

    arm: str = "auto"
    parameters: Mapping[str, float] = field(default_factory=dict)
    feature_scale: float = 0.5

    def __post_init__(self) -> None:
        check_number("feature_scale", self.feature_scale, above=0.0)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan the training that the rule chooses, at ``epsilon``. Touches no data."""
        given = {**_PRIOR, **self.parameters}
        require_parameters(self.arm, METHODS["dpsgd"], given)  # whatever is chosen
        chosen, options, why = self._choose(context, epsilon)
        method = "dpsgd" if chosen == "fixed" else chosen
        taken = {k: v for k, v in given.items() if chosen == "fixed" or k not in _PRIOR}
        strategy = InRun(arm=self.arm, method=method, parameters=taken, options=options)
        plan = strategy.plan(context, epsilon=epsilon)
        check_needs(strategy, context, plan)
        details = {**plan.details, "chosen": chosen, "why": why}
        return replace(plan, strategy=f"{self.name}: {chosen}", details=details)

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Run the planned training."""
        return InRun(arm=self.arm, method=plan.training.method.name).run(plan, trials)

    def _choose(self, context: PlanningContext, epsilon: float) -> tuple[str, dict[str, Any], str]:
        """Return the name of the arm that the rule chooses, its method's options, and the reason."""
        if context.task.pretrained is not None:
            return "hyfreedp", {}, "public weights are fine-tuned"
        records = context.schedule.records
        weights = _weights_of_network(context, self.parameters.get(PART))
        found = f"{records:,} records at ε = {show_epsilon(epsilon, 2)} are"
        if records * epsilon < _FEW:
            falling = {"schedule": _FALLING} if weights else {}
            return "fixed", falling, f"{found} too few to adapt on"
        why = f"{found} enough to adapt the learning rate in one training"
        if not weights:
            return "hyfreedp", {}, why
        reach = self.feature_scale * math.sqrt(context.schedule.steps * weights)
        spread = min(_SPREADS[1], max(_SPREADS[0], _REACH / reach))
        return "hyfreedp", {"spread": spread}, f"{why}, within a factor of {spread:.3g}"


def _weights_of_network(context: PlanningContext, part: object) -> int:
    """Return how many weights are trained; 0 of a part of the model, and where all of them begin at 0."""
    import torch

    if (part or context.task.trainable) != "all":
        return 0
    with torch.random.fork_rng(devices=[]):
        trained = [p for p in context.task.model().parameters() if p.requires_grad]
    return sum(p.numel() for p in trained) if any(p.any() for p in trained) else 0
