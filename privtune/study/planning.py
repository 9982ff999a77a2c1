"""Plan all arms of a study together, so that their composition meets one target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from privtune.accounting import (
    Adjacency,
    CalibrationError,
    Composed,
    Event,
    Guarantee,
    share_budget,
)
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.ledger import RECORD, refuse_other_unit
from privtune.strategies import (
    NoRunFitsError,
    Plan,
    PlanningContext,
    Strategy,
    plan_arm,
)
from privtune.strategies.arms import with_report
from privtune.strategies.context import SHARES
from privtune.strategies.plan import StagePlan, plan_stage
from privtune.strategies.searching import parts_of
from privtune.study.spec import StudySpec
from privtune.tasks import TRAINED

if TYPE_CHECKING:
    from privtune.accounting.costs import Sensitivity

_LEFT, _LEFT_REPLACED = 1e-3, 2e-2  # of a study's ε, to reports whose share is not given


@dataclass(frozen=True)
class StudyPlan:
    """The plans of all arms, what each costs alone, and what they cost together.

    Args:
        plans: One an arm, in the spec's order.
        guarantees: What each arm costs alone, at the budget's δ.
        total: What they cost together, and with the stages: the composition, not the sum.
        stages: The plans of what is released before the arms, once for all of them.
        stage_guarantees: What each of these costs alone.

    Example:
        >>> planned = plan_study(study.spec)
        >>> [plan.arm for plan in planned.plans], planned.total.epsilon <= 6.0
        (['defaults', 'selection'], True)
        >>> sum(alone.epsilon for alone in planned.guarantees) > planned.total.epsilon
        True
    """

    plans: tuple[Plan, ...]
    guarantees: tuple[Guarantee, ...]
    total: Guarantee
    stages: tuple[StagePlan, ...] = ()
    stage_guarantees: tuple[Guarantee, ...] = ()


def plan_study(spec: StudySpec) -> StudyPlan:
    """Plan every arm at the largest common ε, times its weight, whose composition meets the target.

    Touches no data. Arms without any guarantee are no part of the budget.

    Args:
        spec: The study.

    Returns:
        The plans; ``total.epsilon`` is at most the target.

    Raises:
        PrivTuneError: If an arm cannot be planned.
        UnitMismatchError: If the task counts another unit than the budget protects.
        TaskDataError: If what holds the data is here, and its header is not as declared.

    Example:
        >>> plan = plan_study(study.spec).plans[1]
        >>> plan.is_sealed, round(plan.runs.expected_runs)
        (True, 4)
    """
    return _check_scored(spec, _plan(spec))


def _plan(spec: StudySpec) -> StudyPlan:
    context = spec.planning_context()
    unit = context.task.unit or RECORD
    task = f"Task {context.task.name!r}"
    refuse_other_unit(unit, spec.budget.unit, task, spec.budget.name)
    context.task.look()
    strategies = [arm.to_strategy() for arm in spec.arms]
    _check_weights(spec, strategies)
    return plan_arms(
        strategies,
        context,
        epsilon=spec.target_epsilon,
        weights=[arm.weight for arm in spec.arms],
        stages=_stages(spec, context),
    )


def plan_arms(
    strategies: Sequence[Strategy],
    context: PlanningContext,
    *,
    epsilon: float,
    weights: Sequence[float] = (1.0,),
    stages: tuple[StagePlan, ...] = (),
) -> StudyPlan:
    """Plan arms at the largest common ε, times their weights, whose composition meets a target."""
    planners = [_planner(strategy, context, stages) for strategy in strategies]
    about = replace(context, sketch=True)
    sketches = [
        _planner(strategy, about, stages)
        for strategy in strategies
        if not strategy.needs.non_private
    ]

    refusals: list[NoRunFitsError] = []

    def event_of(planner: Callable[[float], Plan]) -> Callable[[float], Event]:
        def event(epsilon: float) -> Event:
            try:
                return planner(epsilon).event
            except NoRunFitsError as refusal:
                # The solver may look below its answer: an arm of given runs gets no smaller there.
                refusals.append(refusal)
                return refusal.smallest

        return event

    private = [
        planner
        for planner, strategy in zip(planners, strategies, strict=True)
        if not strategy.needs.non_private
    ]
    weights = [
        weight
        for weight, strategy in zip(weights, strategies, strict=True)
        if not strategy.needs.non_private
    ]
    alone = tuple(
        account(stage.event, context.delta, adjacency=context.adjacency) for stage in stages
    )
    if not private:
        plans = tuple(planner(epsilon) for planner in planners)
        guarantees = tuple(_infinite(context) for _ in plans)
        event = Composed([stage.event for stage in stages])
        total = account(event, context.delta, adjacency=context.adjacency)
        return StudyPlan(plans, guarantees, total, stages, alone)
    open_share = _share_is_open(context)
    try:
        shared = share_budget(
            [*(event_of(planner) for planner in private), *(_always(s.event) for s in stages)],
            epsilon=epsilon * (1.0 - _left_for_reports(context)) if open_share else epsilon,
            delta=context.delta,
            adjacency=context.adjacency,
            weights=[*weights, *(1.0 for _ in stages)],
            sketches=[*map(event_of, sketches), *(_always(s.event) for s in stages)],
        )
    except CalibrationError as error:
        if refusals:
            raise max(refusals, key=lambda refusal: refusal.target) from error
        raise
    met = iter(zip(shared.arm_epsilons, shared.guarantees, strict=True))  # the arms', then stages'
    found = [
        next(met) if planner in private else (math.inf, _infinite(context)) for planner in planners
    ]
    plans = tuple(planner(each) for planner, (each, _) in zip(planners, found, strict=True))
    own = tuple(guarantee for _, guarantee in found)
    planned = StudyPlan(plans, own, shared.total, stages, alone)
    if not open_share:
        return planned
    return _with_reports(planned, context, tuple(each for each, _ in found), epsilon)


def _share_is_open(context: PlanningContext) -> bool:
    """Return whether planning chooses the reports' share of ε: they are noised and no share is given."""
    report = context.report
    return report is not None and report.epsilon_share is None and not context.task.public_test


def _left_for_reports(context: PlanningContext) -> float:
    """Return the part of a study's ε that its trainings leave to the reports."""
    return _LEFT if context.adjacency is Adjacency.ADD_REMOVE else _LEFT_REPLACED


def _with_reports(
    planned: StudyPlan, context: PlanningContext, arm_epsilons: tuple[float, ...], target: float
) -> StudyPlan:
    """Give every report the largest share of its arm's ε with which the study keeps to its target."""

    def with_share(share: float) -> tuple[tuple[Plan, ...], Guarantee] | None:
        plans = []
        for plan, each in zip(planned.plans, arm_epsilons, strict=True):
            changed = with_report(plan, context, share=share, epsilon=each)
            if changed is None:
                return None
            plans.append(changed)
        event = Composed(
            [*(p.event for p in plans if p.is_private), *(s.event for s in planned.stages)]
        )
        total = account(event, context.delta, adjacency=context.adjacency)
        return (tuple(plans), total) if total.epsilon <= target else None

    best, low, high = None, 0, len(SHARES)  # the first that fits is in [low, high)
    while low < high:
        middle = (low + high) // 2
        found = with_share(SHARES[middle])
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    if best is None:
        return planned
    plans, total = best
    own = tuple(
        account(plan.event, context.delta, adjacency=context.adjacency)
        if plan.is_private
        else known
        for plan, known in zip(plans, planned.guarantees, strict=True)
    )
    return replace(planned, plans=plans, guarantees=own, total=total)


def _check_weights(spec: StudySpec, strategies: Sequence[Strategy]) -> None:
    for arm, strategy in zip(spec.arms, strategies, strict=True):
        if strategy.needs.non_private and arm.weight != 1.0:
            raise InvalidInputError(
                f"weight of arm {arm.name!r}",
                arm.weight,
                "divides the budget, of which an arm without a guarantee is no part",
                "Leave it out.",
            )


def _check_scored(spec: StudySpec, planned: StudyPlan) -> StudyPlan:
    """Refuse a scoring that no arm of a study uses."""
    if spec.scoring and all(plan.score is None for plan in planned.plans):
        raise InvalidInputError(
            "scoring",
            dict(spec.scoring),
            "is how a search scores its trials, and no arm of the study searches",
            "Leave it out; report: {metric: ...} scores what is released.",
        )
    return planned


def _always(event: Event) -> Callable[[float], Event]:
    """Return what a stage costs, whatever arms are given: its noise does not hang on theirs."""
    return lambda _: event


def _stages(spec: StudySpec, context: PlanningContext) -> tuple[StagePlan, ...]:
    found = []
    task: Any = spec.task  # a table, where there is a stage
    for stage in spec.make_stages():
        found.append(
            plan_stage(
                stage,
                task,
                epsilon=spec.target_epsilon,
                delta=context.delta,
                adjacency=context.adjacency,
                noise=context.noise,
                public_facts=context.task.facts.to_dict(),
            )
        )
        task = stage.planned(task)
    return tuple(found)


def advice(planned: StudyPlan) -> Sensitivity:
    """Return what would cost or save ε in a study: noise on scores, runs, caps, δ."""
    plans = [
        plan
        for plan, guarantee in zip(planned.plans, planned.guarantees, strict=True)
        if math.isfinite(guarantee.epsilon)
    ]
    names: dict[Event, str] = {}
    for plan in plans:
        score = None if plan.score is None else plan.score.event
        if score is not None:
            names[score] = " and ".join(
                filter(None, (names.get(score), f"the score of {plan.arm}"))
            )
    total = planned.total
    names |= {stage.event: f"stage {stage.arm}" for stage in planned.stages}
    event = Composed([*(p.event for p in plans), *(s.event for s in planned.stages)])
    from privtune.accounting.costs import sensitivity

    return sensitivity(event, total.delta, adjacency=total.adjacency, names=names)


def _infinite(context: PlanningContext) -> Guarantee:
    return Guarantee(math.inf, context.delta, "non_private", context.adjacency)


def _planner(
    strategy: Strategy, context: PlanningContext, stages: tuple[StagePlan, ...]
) -> Callable[[float], Plan]:
    # The solver asks again for the epsilon it settles on; a plan costs a calibration.
    @lru_cache(maxsize=64)
    def planner(epsilon: float) -> Plan:
        plan = plan_arm(strategy, context, epsilon=epsilon)
        # Part of the plan, so that its digest, and with it the charge, holds them fast.
        public = context.task.facts.to_dict()
        if parts := parts_of(strategy, context.space, plan):
            public[TRAINED] = " or ".join(parts)
        more: dict[str, Any] = {"unit": context.task.unit} if context.task.unit else {}
        if stages:
            more["stages"] = {stage.arm: stage.digest() for stage in stages}
        return replace(plan, details={**plan.details, "public": public, **more})

    return planner
