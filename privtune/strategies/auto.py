"""The arm ``auto``, which chooses between given hyperparameters and HyFreeDP by public facts.

The rule is the fifth; ``studies/auto`` has all of them, each tried on tasks that it never saw. HyFreeDP's own
interval of rates suits networks of some thousand weights in some hundred steps. In fewer steps a smaller
network has to go farther in each, and so have weights of small features; over more steps noise adds up for
longer than HyFreeDP's losses look back. Fine-tuned public weights suit it as it comes (``studies/transfer``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from privtune.accounting.checks import check_number
from privtune.numbers import show_epsilon
from privtune.strategies.arms import check_needs
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import InRun, require_parameters
from privtune.strategies.plan import Plan
from privtune.strategies.requests import StrategyRun
from privtune.strategies.strategy import Needs, Round
from privtune.tasks.pretrained import PART
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
    summary: ClassVar[str] = (
        "fixed or hyfreedp, chosen from public facts; the plan gives the reason"
    )
    needs: ClassVar[Needs] = Needs(task=True, draws=False)

    arm: str = "auto"
    parameters: Mapping[str, float] = field(default_factory=dict)
    feature_scale: float = 0.5

    def __post_init__(self) -> None:
        check_number("feature_scale", self.feature_scale, above=0.0)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan the training that the rule chooses, at ``epsilon``, without touching data."""
        parameters = {**_PRIOR, **self.parameters}
        # Whichever arm is chosen: a mistyped hyperparameter is refused on a large task, too.
        require_parameters(self.arm, METHODS["dpsgd"], parameters)
        choice = self._choose(context, epsilon)
        method = choice.arm
        if choice.arm == "fixed":
            method = "dpsgd"
        else:
            # The method finds these by itself, and refuses to be told them.
            for name in _PRIOR:
                del parameters[name]
        strategy = InRun(arm=self.arm, method=method, parameters=parameters, options=choice.options)
        plan = strategy.plan(context, epsilon=epsilon)
        check_needs(strategy, context, plan)
        details = {**plan.details, "chosen": choice.arm, "why": choice.reason}
        return replace(plan, strategy=f"{self.name}: {choice.arm}", details=details)

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Run the planned training, with the method that the rule chose."""
        chosen_arm = InRun(arm=self.arm, method=plan.training.method.name)
        return (yield from chosen_arm.run(plan, trials))

    def _choose(self, context: PlanningContext, epsilon: float) -> _ArmChoice:
        """Return the arm that the rule chooses by public facts, with its options and the reason."""
        if context.task.pretrained is not None:
            return _ArmChoice("hyfreedp", {}, "public weights are fine-tuned")
        records = context.schedule.records
        weights = _weights_of_network(context, self.parameters.get(PART))
        size = f"{records:,} records at ε = {show_epsilon(epsilon, 2)} are"
        if records * epsilon < _FEW:
            options = {"schedule": _FALLING} if weights else {}
            return _ArmChoice("fixed", options, f"{size} too few to adapt on")
        reason = f"{size} enough to adapt the learning rate in one training"
        if not weights:
            return _ArmChoice("hyfreedp", {}, reason)
        spread = self._spread(context.schedule.steps, weights)
        reason += f", within a factor of {spread:.3g}"
        return _ArmChoice("hyfreedp", {"spread": spread}, reason)

    def _spread(self, steps: int, weights: int) -> float:
        """Return the factor over which HyFreeDP's interval of learning rates reaches, from 3 to 25."""
        reach = self.feature_scale * math.sqrt(steps * weights)
        least, most = _SPREADS
        return min(most, max(least, _REACH / reach))


class _ArmChoice(NamedTuple):
    """What the rule chooses: an arm, the options of its method, and the reason in words."""

    arm: str
    options: dict[str, Any]
    reason: str


def _weights_of_network(context: PlanningContext, part: object) -> int:
    """Return the number of trained weights of a network, or 0 for a model of another kind.

    0 is what the rule reads as no network: where a part of the model is trained alone, and where all weights
    begin at 0, as those of a linear model. The first weights are drawn on a copy of torch's random state, so
    that planning moves no stream of a training.
    """
    import torch

    if (part or context.task.trainable) != "all":
        return 0
    with torch.random.fork_rng(devices=[]):
        model = context.task.model()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not any(parameter.any() for parameter in weights):
        return 0
    return sum(parameter.numel() for parameter in weights)
