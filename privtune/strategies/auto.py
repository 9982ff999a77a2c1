"""One arm that picks how it chooses, from public facts alone and by what public studies found.

The rule is read off an earlier study of four tasks, and ``studies/transfer``: the
best arm that is paid for was subsampled tuning where a tenth of the records is thousands; where it is
not, ADADP for networks that are trained from scratch, and a selection of learning rates for small models,
which learn in few steps and for which ADADP's tolerance, made for d/2T of order one, is too strict. Where
public weights are fine-tuned it was HyFreeDP, but for all weights at small ε; from ε = 3 on the rate that
subsampled tuning extrapolates ruined three of ten such trainings, so it is not taken there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from privtune.accounting._checks import check_number
from privtune.numbers import show_epsilon
from privtune.strategies._base import Needs, Round, Strategy
from privtune.strategies.arms import check_needs
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import Fixed, InRun, trained_parameters
from privtune.strategies.plan import Plan
from privtune.strategies.release import Outcome
from privtune.strategies.selection import PapernotSteinke
from privtune.strategies.tuning import SubsampledTuningStrategy
from privtune.training.methods import METHODS

_SMALL = 0.25  # of d/2T: ADADP would aim at an error below half of what it may
_MANY = 25_000  # records: a tenth of 27,000 was enough, of 4,000 it was not
_ENOUGH = 1.0  # of ε from scratch; of public weights the most at which extrapolated rates hold
_RUNS = 10.0
_SEARCHED = "learning_rate"
_PRIOR = {"learning_rate": 0.5, "max_grad_norm": 1.0}  # the studies' defaults


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Choose among fixed, in-run and selection from public facts, before anything is charged.

    ====================================================  ==========================================
    the study                                             the arm
    ====================================================  ==========================================
    25,000 records, a space with a learning rate, a       ``subsampled-tuning`` on a tenth,
    limit of two trainings or more; from scratch at       10 runs in the mean
    ε of 1 or more, all public weights at 1 or less
    else, fine-tunes public weights                       ``hyfreedp``
    trains d parameters in T steps, d/2T at least 1/4     ``adadp``
    a smaller model, a space with a learning rate         ``papernot-steinke``, 10 runs in the mean
    the same, and no more than so many trainings' cost    ``subsampled-tuning``
    the same, and no more than one's, or no such space    ``fixed``: 0.5 and 1, or as given
    ====================================================  ==========================================

    The plan names what was chosen and why, and costs and runs as that would.

    Args:
        arm: Name of the arm.
        parameters: Hyperparameters of whatever is chosen; what it does not take is left out.
        cost_limit: Expected gradient evaluations of the arm, in those of one training, at least 1.

    Example:
        >>> plan = Auto().plan(study.spec.planning_context(), epsilon=2.0)
        >>> plan.details["chosen"], plan.details["why"]
        ('adadp', 'no public weights, and d/2T = 2.5 is at least 0.25')
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "fixed, in-run or selection, chosen by public facts; the plan says why"
    needs: ClassVar[Needs] = Needs(task=True, independent=True)

    arm: str = "auto"
    parameters: Mapping[str, float] = field(default_factory=dict)
    cost_limit: float | None = None

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Choose, and plan what was chosen at ``epsilon``. Touches no data."""
        chosen, why = self._choose(context, epsilon)
        strategy = self._made(chosen, context)
        plan = strategy.plan(context, epsilon=epsilon)
        check_needs(strategy, context, plan)
        details = {**plan.details, "chosen": chosen, "why": why}
        return replace(plan, strategy=f"{self.name}: {chosen}", details=details)

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Run what was chosen."""
        return self._made(str(plan.details["chosen"])).run(plan, trials)

    def _choose(self, context: PlanningContext, epsilon: float) -> tuple[str, str]:
        """Return the name of what is chosen, and why."""
        limit = math.inf
        if self.cost_limit is not None:
            limit = check_number("cost_limit", self.cost_limit, at_least=1.0)
        records = context.schedule.records
        searched = _SEARCHED in context.space and limit >= 2.0
        tuned = context.task.pretrained is not None
        whole = epsilon <= _ENOUGH and context.task.trainable == "all"
        if records >= _MANY and searched and (whole if tuned else epsilon >= _ENOUGH):
            why = f"a tenth of {records:,} records are enough to tune on at ε = {show_epsilon(epsilon, 2)}"
            return "subsampled-tuning", why
        if tuned:
            return "hyfreedp", "public weights are fine-tuned"
        ratio = trained_parameters(context, self.parameters) / (2.0 * context.schedule.steps)
        if ratio >= _SMALL:
            return "adadp", f"no public weights, and d/2T = {ratio:.2g} is at least {_SMALL:g}"
        small = f"d/2T = {ratio:.2g} is below {_SMALL:g}"
        if _SEARCHED not in context.space:
            return "fixed", f"{small}, and the space has no {_SEARCHED} to select"
        if limit >= _RUNS:
            return "papernot-steinke", f"{small}, and {_RUNS:g} trainings are within the limit"
        if limit >= 2.0:
            return "subsampled-tuning", f"{small}, and {limit:g} trainings are the limit"
        return "fixed", f"{small}, and one training is the limit"

    def _made(self, chosen: str, context: PlanningContext | None = None) -> Strategy:
        """Return the strategy of a name; without a context for running a plan, which has the rest."""
        searched = () if context is None else tuple(context.space)
        given = {**_PRIOR, **self.parameters}
        if chosen == "fixed":
            return Fixed(arm=self.arm, parameters=given)
        if chosen in METHODS:
            taken = {k: v for k, v in given.items() if k in METHODS[chosen].parameters}
            return InRun(arm=self.arm, method=chosen, parameters=taken)
        taken = {k: v for k, v in given.items() if k not in searched and k != _SEARCHED}
        if chosen == "papernot-steinke":
            return PapernotSteinke(arm=self.arm, parameters=taken, mean_runs=_RUNS)
        return SubsampledTuningStrategy(arm=self.arm, parameters=taken, variant=1, mean_runs=_RUNS)
