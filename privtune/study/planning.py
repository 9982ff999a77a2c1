"""Plan all arms of a study together, so that their composition meets one target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from privtune.accounting import Event, Guarantee, share_budget
from privtune.strategies import Plan, PlanningContext, Strategy
from privtune.study.spec import StudySpec

__all__ = ["StudyPlan", "plan_study"]


@dataclass(frozen=True)
class StudyPlan:
    """The plans of all arms, what each costs alone, and what they cost together.

    Args:
        plans: One an arm, in the spec's order.
        guarantees: What each arm costs alone, at the budget's δ.
        total: What they cost together: the composition, not the sum.
    """

    plans: tuple[Plan, ...]
    guarantees: tuple[Guarantee, ...]
    total: Guarantee


def plan_study(spec: StudySpec) -> StudyPlan:
    """Plan every arm at the largest common ε whose composition meets the study's target.

    Touches no data.

    Args:
        spec: The study.

    Returns:
        The plans; ``total.epsilon`` is at most the target.

    Raises:
        PrivTuneError: If an arm cannot be planned.
    """
    context = spec.planning_context()
    planners = [_planner(arm.to_strategy(), context) for arm in spec.arms]

    def event_of(planner: Callable[[float], Plan]) -> Callable[[float], Event]:
        return lambda epsilon: planner(epsilon).event

    shared = share_budget(
        [event_of(planner) for planner in planners],
        epsilon=spec.target_epsilon,
        delta=context.delta,
        adjacency=context.adjacency,
    )
    plans = tuple(
        planner(epsilon) for planner, epsilon in zip(planners, shared.arm_epsilons, strict=True)
    )
    return StudyPlan(plans, shared.guarantees, shared.total)


def _planner(strategy: Strategy, context: PlanningContext) -> Callable[[float], Plan]:
    # The solver asks again for the epsilon it settles on; a plan costs a calibration.
    @lru_cache(maxsize=64)
    def planner(epsilon: float) -> Plan:
        return strategy.plan(context, epsilon=epsilon)

    return planner
