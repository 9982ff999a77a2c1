"""Plan one arm whole: the strategy's plan, with the noise that runs and what it cannot reach."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from privtune.accounting import ApproximateDP, Composed, Parallel
from privtune.strategies._base import StrategyError
from privtune.strategies._check_needs import check_needs, needs_of

if TYPE_CHECKING:
    from privtune.accounting import Event
    from privtune.strategies._base import Strategy
    from privtune.strategies.context import PlanningContext
    from privtune.strategies.plan import Plan
    from privtune.strategies.score_plan import ScorePlan

_NEGLIGIBLE = 1e-3  # of δ
_TOO_MUCH = 0.1


def plan_arm(strategy: Strategy, context: PlanningContext, *, epsilon: float) -> Plan:
    """Plan an arm, and charge what its noise cannot reach.

    Noise in floating point ends somewhere (``accounting.reach``). What a record makes possible
    beyond is added to δ where it is more than a thousandth of it: the arm is planned at the rest of
    δ, and the mass is part of its event. Above a tenth of δ there is no plan.

    Args:
        strategy: How the arm chooses.
        context: Public facts.
        epsilon: Target of the whole arm.

    Returns:
        The plan, what is beyond the reach charged.

    Raises:
        StrategyError: If the study lacks what the strategy needs, or more than a tenth of δ lies
            beyond the reach.
        PrivTuneError: If the strategy cannot plan it.

    Example:
        >>> context = study.spec.planning_context()

        >>> from privtune.strategies import make_strategy
        >>> plan = plan_arm(make_strategy("dog", arm="dog", options={}), context, epsilon=2.0)
        >>> plan.training.method.name, plan.is_sealed, plan.beyond_reach < 1e-8
        ('dog', False, True)
    """
    report = context.plan_report(math.inf if needs_of(strategy).non_private else epsilon)
    plan = _with(report, strategy.plan(context, epsilon=epsilon).with_noise(context.noise))
    check_needs(strategy, context, plan)
    mass, delta = plan.beyond_reach, context.delta
    if not plan.is_private or mass <= _NEGLIGIBLE * delta:
        return plan
    if mass > _TOO_MUCH * delta:
        raise StrategyError(
            f"Arm {plan.arm!r}: with so little noise, outputs of mass {mass:.2g} lie beyond the reach "
            f"of any generator here, and δ is {delta:g}; ask for a smaller ε."
        )
    # At the rest of δ there is a little more noise, and so less mass than this.
    rest = replace(context, delta=delta - mass)
    plan = _with(report, strategy.plan(rest, epsilon=epsilon).with_noise(context.noise))
    return replace(
        plan,
        event=Composed((plan.event, ApproximateDP(0.0, mass))),
        details={**plan.details, "beyond_reach": mass},
    )


def with_report(
    plan: Plan, context: PlanningContext, *, share: float, epsilon: float
) -> Plan | None:
    """Return a plan whose report costs another share of the arm's ε, all else as it is.

    Args:
        plan: The arm's plan.
        context: Public facts.
        share: The share, in (0, 1].
        epsilon: What the arm costs.

    Returns:
        The plan; None where so little noise has outputs beyond the reach of the generator.
    """
    if context.report is None or plan.report is None or plan.report.event is None:
        return plan
    asked = replace(context, report=replace(context.report, epsilon_share=share))
    report = asked.plan_report(epsilon)
    if report is None or report.event is None or not plan.is_private:
        return plan
    old, new = plan.report.event, report.event

    def changed(event: Event) -> Event:
        if isinstance(event, Parallel) and event.events[1:] == (old,):
            return Parallel((event.events[0], new))
        return event.rebuild([changed(event.events[0]), *event.events[1:]])  # type: ignore[attr-defined]

    found = replace(
        plan,
        event=changed(plan.event),
        report=report,
        details={**plan.details, "report_epsilon_share": share},
    )
    within = plan.details.get("beyond_reach", _NEGLIGIBLE * context.delta)
    return found if found.beyond_reach <= within else None


def _with(report: ScorePlan | None, plan: Plan) -> Plan:
    """Add the final score to a plan: test records meet it and nothing else."""
    if report is None:
        return plan
    if report.event is None or not plan.is_private:
        return replace(plan, report=report)
    return replace(
        plan,
        event=Parallel((plan.event, report.event)),
        released=(*plan.released, f"its noised {report.metric} on the test split"),
        report=report,
    )
