"""Plan all arms of a study together, so that their composition meets one target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import privtune.accounting as acc
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.ledger import RECORD
from privtune.ledger.values import refuse_other_unit
from privtune.strategies import NoRunFitsError, Plan, PlanningContext, Strategy, plan_arm
from privtune.strategies.arms import needs_of, with_report
from privtune.strategies.context import SHARES
from privtune.strategies.plan import StagePlan, plan_stage
from privtune.strategies.searching import parts_of
from privtune.study.delta import check_delta_of
from privtune.study.spec import StudySpec
from privtune.tasks import TRAINED
from privtune.tasks._facts import UNCHARGED

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
    guarantees: tuple[acc.Guarantee, ...]
    total: acc.Guarantee
    stages: tuple[StagePlan, ...] = ()
    stage_guarantees: tuple[acc.Guarantee, ...] = ()


def plan_study(spec: StudySpec, *, look: bool = True, anyway: bool = False) -> StudyPlan:
    """Plan every arm at the largest common ε, times its weight, whose composition meets the target.

    Touches no data. Arms without any guarantee are no part of the budget.

    Args:
        spec: The study.
        look: Whether the header of what holds the data is checked, where it is here.
        anyway: Whether to plan although δ is above one over the number of protected records.

    Returns:
        The plans; ``total.epsilon`` is at most the target.

    Raises:
        PrivTuneError: If an arm cannot be planned.
        InvalidInputError: If δ is too large for the number of protected records.
        UnitMismatchError: If the task counts another unit than the budget protects.
        TaskDataError: If what holds the data is here, and its header is not as declared.

    Example:
        >>> plan = plan_study(study.spec).plans[1]
        >>> plan.is_sealed, round(plan.runs.expected_runs)
        (True, 4)
    """
    context = spec.planning_context()
    task, unit = f"Task {context.task.name!r}", context.task.unit or RECORD
    refuse_other_unit(unit, spec.budget.unit, task, spec.budget.name)
    if look:
        context.task.look()
    strategies = [arm.to_strategy() for arm in spec.arms]
    if not all(strategy.needs.non_private for strategy in strategies):
        check_delta_of(context.task, context.delta, anyway=anyway)
    for arm, strategy in zip(spec.arms, strategies, strict=True):
        if strategy.needs.non_private and arm.weight != 1.0:
            raise InvalidInputError(
                f"weight of arm {arm.name!r}",
                arm.weight,
                "divides the budget, of which an arm without a guarantee is no part",
                "Leave it out.",
            )
    planned = plan_arms(
        strategies,
        context,
        epsilon=spec.target_epsilon,
        weights=[arm.weight for arm in spec.arms],
        stages=_stages(spec, context),
    )
    _check_space(spec, strategies)
    if spec.scoring and all(plan.score is None for plan in planned.plans):
        raise InvalidInputError(
            "scoring",
            dict(spec.scoring),
            "is how a search scores its trials, and no arm of the study searches",
            "Leave it out; report: {metric: ...} scores what is released.",
        )
    return planned


def _check_space(spec: StudySpec, strategies: Sequence[Strategy]) -> None:
    """Refuse a space that no arm draws from, which would be shown and have no effect."""
    if spec.space and not any(needs_of(strategy).draws for strategy in strategies):
        raise InvalidInputError(
            "space",
            sorted(spec.space),
            "is what a search draws from, and no arm of the study searches",
            "Leave it out, or add an arm like {name: selection, strategy: papernot-steinke}.",
        )


def plan_arms(
    strategies: Sequence[Strategy],
    context: PlanningContext,
    *,
    epsilon: float,
    weights: Sequence[float] = (1.0,),
    stages: tuple[StagePlan, ...] = (),
) -> StudyPlan:
    """Plan arms at the largest common ε a run, times their weights, whose composition meets a target."""
    planners = [_planner(strategy, context, stages) for strategy in strategies]
    private = [n for n, strategy in enumerate(strategies) if not strategy.needs.non_private]
    infinite = acc.Guarantee(math.inf, context.delta, "non_private", context.adjacency)
    alone = tuple(_cost(stage.event, context) for stage in stages)
    if not private:
        plans = tuple(planner(epsilon) for planner in planners)
        total = _cost(acc.Composed([stage.event for stage in stages]), context)
        return StudyPlan(plans, (infinite,) * len(plans), total, stages, alone)
    refusals: list[NoRunFitsError] = []

    def event_of(planner: Callable[[float], Plan]) -> Callable[[float], acc.Event]:
        def event(epsilon: float) -> acc.Event:
            try:
                return planner(epsilon).charged
            except NoRunFitsError as refusal:
                # The solver may look below its answer: an arm of given runs gets no smaller there.
                refusals.append(refusal)
                charged = 1 if context.task.benchmark else context.repeats
                return acc.Repeated(charged, refusal.smallest)

        return event

    about = replace(context, sketch=True)
    sketches = [_planner(strategies[n], about, stages) for n in private]
    # A stage costs the same whatever arms are given: its noise does not hang on theirs.
    fixed: list[Callable[[float], acc.Event]] = [lambda _, e=stage.event: e for stage in stages]  # type: ignore[misc]
    report = context.report
    # The reports are noised, and planning chooses their share of ε.
    open_share = (
        report is not None and report.epsilon_share is None and not context.task.public_test
    )
    left = 0.0
    if open_share:
        # No test record meets a training, so a report takes little. Under replace-one a record may leave
        # one split and another join the other, and both are charged.
        left = _LEFT if context.adjacency is acc.Adjacency.ADD_REMOVE else _LEFT_REPLACED
    try:
        shared = acc.share_budget(
            [*(event_of(planners[n]) for n in private), *fixed],
            epsilon=epsilon * (1.0 - left),
            delta=context.delta,
            adjacency=context.adjacency,
            weights=[*(weights[n] for n in private), *(1.0 for _ in stages)],
            sketches=[*map(event_of, sketches), *fixed],
        )
    except acc.CalibrationError as error:
        if refusals:
            raise max(refusals, key=lambda refusal: refusal.target) from error
        raise
    arm_epsilons, guarantees = [math.inf] * len(planners), [infinite] * len(planners)
    for place, n in enumerate(private):
        arm_epsilons[n], guarantees[n] = shared.arm_epsilons[place], shared.guarantees[place]
    plans = tuple(planner(each) for planner, each in zip(planners, arm_epsilons, strict=True))
    planned = StudyPlan(plans, tuple(guarantees), shared.total, stages, alone)
    return _with_reports(planned, context, arm_epsilons, epsilon) if open_share else planned


def _cost(event: acc.Event, context: PlanningContext) -> acc.Guarantee:
    return account(event, context.delta, adjacency=context.adjacency)


def _with_reports(
    planned: StudyPlan, context: PlanningContext, arm_epsilons: Sequence[float], target: float
) -> StudyPlan:
    """Give every report the largest share of its arm's ε with which the study keeps to its target."""
    best, low, high = planned, 0, len(SHARES)  # the first that fits is in [low, high)
    while low < high:
        middle = (low + high) // 2
        plans = [
            with_report(plan, context, share=SHARES[middle], epsilon=each)
            for plan, each in zip(planned.plans, arm_epsilons, strict=True)
        ]
        found = tuple(plan for plan in plans if plan is not None)
        private = [plan.charged for plan in found if plan.is_private]
        total = _cost(acc.Composed([*private, *(s.event for s in planned.stages)]), context)
        if len(found) < len(plans) or total.epsilon > target:
            low = middle + 1
        else:
            best, high = replace(planned, plans=found, total=total), middle
    own = tuple(
        _cost(plan.charged, context) if plan.is_private else known
        for plan, known in zip(best.plans, planned.guarantees, strict=True)
    )
    return best if best is planned else replace(best, guarantees=own)


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
        if plan.repeats > 1:
            how = "each charged" if plan.repeats_charged else "of public records: one is charged"
            public["repetitions"] = f"{plan.repeats}, {how}"
        if found := _uncharged(context):
            public[UNCHARGED] = found
        more: dict[str, Any] = {"unit": context.task.unit} if context.task.unit else {}
        if stages:
            more["stages"] = {stage.arm: stage.digest() for stage in stages}
        return replace(plan, details={**plan.details, "public": public, **more})

    return planner


def _uncharged(context: PlanningContext) -> str:
    """Return what an arm releases of records that a task declares public, and no charge covers."""
    task = context.task
    exact = context.report is None and not task.public_test and task.test_records > 0
    said = {
        "repetitions beyond the first": context.repeats > 1,
        "exact scores on the test split": exact,
    }
    what = " and ".join(name for name, there in said.items() if there)
    if not task.benchmark or not what:
        return ""
    return f"{what}, since all records are declared public (a benchmark)"


def advice(planned: StudyPlan) -> Sensitivity:
    """Return how ε changes with the noise on scores, the runs, caps and δ of a planned study."""
    from privtune.accounting.costs import sensitivity

    names: dict[acc.Event, str] = {}
    events = []
    for plan, guarantee in zip(planned.plans, planned.guarantees, strict=True):
        if not math.isfinite(guarantee.epsilon):
            continue
        events.append(plan.charged)
        if plan.score is not None and (score := plan.score.event) is not None:
            said = filter(None, (names.get(score), f"the score of {plan.arm}"))
            names[score] = " and ".join(said)
    names |= {stage.event: f"stage {stage.arm}" for stage in planned.stages}
    event, total = acc.Composed([*events, *(s.event for s in planned.stages)]), planned.total
    return sensitivity(event, total.delta, adjacency=total.adjacency, names=names)
