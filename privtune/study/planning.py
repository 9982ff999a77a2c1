"""Plan all arms of a study together, so that their composition meets one target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any

import privtune.accounting as acc
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.facts import EXACT, UNCHARGED
from privtune.ledger import RECORD
from privtune.ledger.values import refuse_other_unit
from privtune.stages.stage_plan import StagePlan, plan_stage
from privtune.strategies import NoRunFitsError, Plan, PlanningContext, Strategy, plan_arm
from privtune.strategies.arms import needs_of, with_report
from privtune.strategies.context import SHARES
from privtune.strategies.searching import parts_of
from privtune.study.delta import check_delta_of
from privtune.study.reports import choose_report, without_report, words_of_none
from privtune.study.schedules import DETAIL
from privtune.study.spec import StudySpec
from privtune.tasks import TRAINED

if TYPE_CHECKING:
    from privtune.accounting.costs import Sensitivity

# Of a study's ε, to reports whose share is not given: under add-remove and under replace-one.
_REPORT_SHARE = 1e-3
_REPORT_SHARE_REPLACED = 2e-2

_Planner = Callable[[float], Plan]
"""From an arm's ε to the plan that costs it."""


@dataclass(frozen=True)
class _PlanningTerms:
    """The target ε that the arms of a study share, their weights, and the stages before them.

    Attributes:
        epsilon: What all arms and stages together may cost.
        weights: One an arm: its part of ε in proportion to the others'.
        stages: The plans of what is released before the arms.
    """

    epsilon: float
    weights: Sequence[float]
    stages: tuple[StagePlan, ...]


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
        >>> both = plan_study(study.spec)
        >>> [plan.arm for plan in both.plans], both.total.epsilon <= 6.0
        (['defaults', 'selection'], True)
        >>> sum(guarantee.epsilon for guarantee in both.guarantees) > both.total.epsilon
        True
    """

    plans: tuple[Plan, ...]
    guarantees: tuple[acc.Guarantee, ...]
    total: acc.Guarantee
    stages: tuple[StagePlan, ...] = ()
    stage_guarantees: tuple[acc.Guarantee, ...] = ()


def plan_study(spec: StudySpec, *, check_header: bool = True, force: bool = False) -> StudyPlan:
    """Plan every arm at the largest common ε, times its weight, whose composition meets the target.

    Touches no data. Arms without any guarantee are no part of the budget.

    Args:
        spec: The study.
        check_header: Whether the header of what holds the data is checked, where it is here.
        force: Whether to plan although δ is above one over the number of protected records.

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
    task = context.task
    refuse_other_unit(
        task.unit or RECORD,
        spec.budget.unit,
        f"Task {task.name!r}",
        spec.budget.name,
    )
    if check_header:
        task.check_header()
    strategies = [arm.to_strategy() for arm in spec.arms]
    if not all(strategy.needs.non_private for strategy in strategies):
        check_delta_of(task, context.delta, force=force)
    _check_weights(spec, strategies)
    study_plan = plan_arms(
        strategies,
        context,
        epsilon=spec.target_epsilon,
        weights=[arm.weight for arm in spec.arms],
        stages=_plan_stages(spec, context),
    )
    _check_space(spec, strategies)
    _check_scoring(spec, study_plan)
    has_weights = isinstance(spec.task, Mapping) and spec.task.get("class_weights") is not None
    if not has_weights:
        return study_plan
    plans = tuple(_with_word_on_weights(plan) for plan in study_plan.plans)
    return replace(study_plan, plans=plans)


def _with_word_on_weights(plan: Plan) -> Plan:
    """Return the plan of an arm with advice, if class weights change nothing in it."""
    method = plan.training.method
    clips = getattr(method, "max_grad_norm", None) is not None
    if not method.normalises or clips:
        return plan
    sentences = []
    if "advice" in plan.details:
        sentences.append(str(plan.details["advice"]))
    sentences.append(
        f"class_weights change nothing in this arm: {method.name} makes the gradients of all records "
        "equally long. An arm that clips them, as fixed does, takes the weights."
    )
    return replace(plan, details={**plan.details, "advice": " ".join(sentences)})


def _check_weights(spec: StudySpec, strategies: Sequence[Strategy]) -> None:
    """Refuse the weight of an arm without a guarantee: a weight is a share of the budget."""
    for arm, strategy in zip(spec.arms, strategies, strict=True):
        if strategy.needs.non_private and arm.weight != 1.0:
            raise InvalidInputError(
                f"weight of arm {arm.name!r}",
                arm.weight,
                "divides the budget, of which an arm without a guarantee is no part",
                "Leave it out.",
            )


def _check_space(spec: StudySpec, strategies: Sequence[Strategy]) -> None:
    """Refuse a space that no arm draws from: it would be shown as if it had an effect."""
    if not spec.space:
        return
    if any(needs_of(strategy).draws for strategy in strategies):
        return
    raise InvalidInputError(
        "space",
        sorted(spec.space),
        "is what a search draws from, and no arm of the study searches",
        "Leave it out, or add an arm like {name: selection, strategy: papernot-steinke}.",
    )


def _check_scoring(spec: StudySpec, study_plan: StudyPlan) -> None:
    """Refuse a scoring in a study without an arm that scores trials."""
    if not spec.scoring:
        return
    if any(plan.score is not None for plan in study_plan.plans):
        return
    raise InvalidInputError(
        "scoring",
        dict(spec.scoring),
        "is how a search scores its trials, and no arm of the study searches",
        "Leave it out; report: {metric: ...} scores what is released.",
    )


def plan_arms(
    strategies: Sequence[Strategy],
    context: PlanningContext,
    *,
    epsilon: float,
    weights: Sequence[float] = (1.0,),
    stages: tuple[StagePlan, ...] = (),
) -> StudyPlan:
    """Plan arms at the largest common ε a run, times their weights, whose composition meets a target.

    Where the user says nothing of a report, planning chooses one that is worth its charge, or none.

    Args:
        strategies: One an arm, in the study's order.
        context: The public facts that all arms are planned with.
        epsilon: What all arms and stages together may cost.
        weights: One an arm: its part of ε in proportion to the others'.
        stages: The plans of what is released before the arms; they are charged to the same ε.

    Returns:
        The plans. Those of a study without a report say in their details why there is none.

    Raises:
        NoRunFitsError: If an arm of a fixed number of runs costs more than ε.
        CalibrationError: If no noise meets ε.
    """
    terms = _PlanningTerms(epsilon, weights, stages)
    choices = context.report_choices
    study_plan = _plan_arms(strategies, context, terms)
    if not choices:
        return study_plan
    reported_plans = choose_report(study_plan.plans, choices, context.task)
    if reported_plans is not None:
        return replace(study_plan, plans=reported_plans)
    why = words_of_none(study_plan.plans, choices, context.task)
    # Planned anew: what no report takes goes to the trainings.
    without_reports = replace(context, report=None, report_choices=())
    study_plan = _plan_arms(strategies, without_reports, terms)
    plans = tuple(without_report(plan, why) for plan in study_plan.plans)
    return replace(study_plan, plans=plans)


def _plan_arms(
    strategies: Sequence[Strategy], context: PlanningContext, terms: _PlanningTerms
) -> StudyPlan:
    """Plan arms with the report of the context, if the context has one."""
    stages = terms.stages
    planners = [_planner(strategy, context, stages) for strategy in strategies]
    stage_guarantees = tuple(_cost(stage.event, context) for stage in stages)
    infinite = acc.Guarantee(math.inf, context.delta, "non_private", context.adjacency)
    are_private = [not strategy.needs.non_private for strategy in strategies]
    if not any(are_private):
        plans = tuple(planner(terms.epsilon) for planner in planners)
        stage_events = [stage.event for stage in stages]
        total = _cost(acc.Composed(stage_events), context)
        return StudyPlan(plans, (infinite,) * len(plans), total, stages, stage_guarantees)
    report_share = _report_share(context)
    sketch_context = replace(context, sketch=True)
    private_strategies = compress(strategies, are_private)
    sketches = [_planner(strategy, sketch_context, stages) for strategy in private_strategies]
    shared = _share_budget(
        list(compress(planners, are_private)),
        sketches,
        context,
        _PlanningTerms(
            epsilon=terms.epsilon * (1.0 - report_share),
            weights=list(compress(terms.weights, are_private)),
            stages=stages,
        ),
    )
    # The budget's shares are those of the private arms in order, and then the stages'.
    private_epsilons = iter(shared.arm_epsilons)
    private_guarantees = iter(shared.guarantees)
    arm_epsilons = []
    guarantees = []
    for is_private in are_private:
        arm_epsilons.append(next(private_epsilons) if is_private else math.inf)
        guarantees.append(next(private_guarantees) if is_private else infinite)
    plans = tuple(
        planner(arm_epsilon) for planner, arm_epsilon in zip(planners, arm_epsilons, strict=True)
    )
    study_plan = StudyPlan(plans, tuple(guarantees), shared.total, stages, stage_guarantees)
    if not report_share:
        return study_plan
    return _with_reports(study_plan, context, arm_epsilons, terms.epsilon)


def _report_share(context: PlanningContext) -> float:
    """Return the share of a study's ε set aside for reports whose share is left open; 0 if none is.

    No test record meets a training, so a report takes little. Under replace-one a record may leave one split
    and another join the other, and both are charged.
    """
    report = context.report
    if report is None or report.epsilon_share is not None or context.task.public_test:
        return 0.0
    if context.adjacency is acc.Adjacency.ADD_REMOVE:
        return _REPORT_SHARE
    return _REPORT_SHARE_REPLACED


def _share_budget(
    planners: Sequence[_Planner],
    sketches: Sequence[_Planner],
    context: PlanningContext,
    terms: _PlanningTerms,
) -> acc.SharedBudget:
    """Return the ε of each arm at which all of them and the stages compose to the target.

    Args:
        planners: Of the arms with a guarantee.
        sketches: Theirs, of plans that cost about the same and are planned faster.
        context: The public facts.
        terms: With one weight a planner.

    Raises:
        NoRunFitsError: In place of the solver's error where an arm's own runs are why nothing fits.
        CalibrationError: If no noise meets ε.
    """
    refusals: list[NoRunFitsError] = []

    def event_of(planner: _Planner) -> Callable[[float], acc.Event]:
        def event(epsilon: float) -> acc.Event:
            try:
                return planner(epsilon).charged
            except NoRunFitsError as refusal:
                # The solver may look below its answer: an arm of given runs gets no smaller there.
                refusals.append(refusal)
                charges = 1 if context.task.benchmark else context.repeats
                return acc.Repeated(charges, refusal.smallest)

        return event

    def constant(event: acc.Event) -> Callable[[float], acc.Event]:
        # A stage costs the same whatever arms are given: its noise does not hang on theirs.
        return lambda _: event

    stage_events = [constant(stage.event) for stage in terms.stages]
    arm_events = [event_of(planner) for planner in planners]
    arm_sketches = [event_of(sketch) for sketch in sketches]
    stage_weights = [1.0] * len(stage_events)
    try:
        return acc.share_budget(
            [*arm_events, *stage_events],
            epsilon=terms.epsilon,
            delta=context.delta,
            adjacency=context.adjacency,
            weights=[*terms.weights, *stage_weights],
            sketches=[*arm_sketches, *stage_events],
        )
    except acc.CalibrationError as error:
        if refusals:
            raise max(refusals, key=lambda refusal: refusal.target) from error
        raise


def _cost(event: acc.Event, context: PlanningContext) -> acc.Guarantee:
    return account(event, context.delta, adjacency=context.adjacency)


def _with_reports(
    study_plan: StudyPlan, context: PlanningContext, arm_epsilons: Sequence[float], target: float
) -> StudyPlan:
    """Give every report the largest share of its arm's ε with which the study keeps to its target.

    Args:
        study_plan: The study without reports: what it stays where no share fits.
        context: The public facts, with the report.
        arm_epsilons: The ε of each arm; infinite for an arm without a guarantee.
        target: ε of the whole study.
    """
    best = study_plan
    # SHARES fall: the first that fits is at low or after it, and before high or at it.
    low = 0
    high = len(SHARES)
    while low < high:
        middle = (low + high) // 2
        candidate = _with_share(study_plan, context, arm_epsilons, SHARES[middle])
        if candidate is None or candidate.total.epsilon > target:
            low = middle + 1
        else:
            best = candidate
            high = middle
    if best is study_plan:
        return study_plan
    guarantees = tuple(
        _cost(plan.charged, context) if plan.is_private else guarantee
        for plan, guarantee in zip(best.plans, study_plan.guarantees, strict=True)
    )
    return replace(best, guarantees=guarantees)


def _with_share(
    study_plan: StudyPlan, context: PlanningContext, arm_epsilons: Sequence[float], share: float
) -> StudyPlan | None:
    """Return the study with reports of a share of each arm's ε; None where one cannot be planned."""
    plans = []
    for plan, arm_epsilon in zip(study_plan.plans, arm_epsilons, strict=True):
        reported = with_report(plan, context, share=share, epsilon=arm_epsilon)
        if reported is None:
            return None
        plans.append(reported)
    events = [plan.charged for plan in plans if plan.is_private]
    events += [stage.event for stage in study_plan.stages]
    total = _cost(acc.Composed(events), context)
    return replace(study_plan, plans=tuple(plans), total=total)


def _plan_stages(spec: StudySpec, context: PlanningContext) -> tuple[StagePlan, ...]:
    """Return the plans of a table's stages, each on the task that the previous stages produce."""
    dataset = context.task.dataset
    plans = []
    task: Any = spec.task  # a table, where there is a stage
    for stage in spec.make_stages():
        plan = plan_stage(
            stage,
            task,
            epsilon=spec.target_epsilon,
            delta=context.delta,
            adjacency=context.adjacency,
            noise=context.noise,
            public_facts=context.task.facts.to_dict(),
            dataset=None if dataset is None else dataset.to_dict(),
        )
        plans.append(plan)
        task = stage.planned(task)
    return tuple(plans)


def _planner(
    strategy: Strategy, context: PlanningContext, stages: tuple[StagePlan, ...]
) -> _Planner:
    """Return a cached function from an arm's ε to its plan with public facts, unit, dataset and stages."""

    # The solver asks again for the epsilon it settles on; a plan costs a calibration.
    @lru_cache(maxsize=64)
    def planner(epsilon: float) -> Plan:
        plan = plan_arm(strategy, context, epsilon=epsilon)
        # Part of the plan, so that its digest, and with it the charge, holds them fast.
        details = {**plan.details, "public": _public_facts(strategy, context, plan)}
        task = context.task
        if task.unit:
            details["unit"] = task.unit
        if task.dataset is not None:
            details["dataset"] = task.dataset.to_dict()
        if context.chosen_schedule is not None:
            details[DETAIL] = dict(context.chosen_schedule)
        if stages:
            details["stages"] = {stage.arm: stage.digest() for stage in stages}
        return replace(plan, details=details)

    return planner


def _public_facts(strategy: Strategy, context: PlanningContext, plan: Plan) -> dict[str, Any]:
    """Return the facts that a plan treats as public, by name, as certificates list them."""
    facts = context.task.facts.to_dict()
    parts = parts_of(strategy, context.space, plan)
    if parts:
        facts[TRAINED] = " or ".join(parts)
    if plan.repeats > 1:
        how = "each charged" if plan.repeats_charged else "of public records: one is charged"
        facts["repetitions"] = f"{plan.repeats}, {how}"
    uncharged = _uncharged(context)
    if uncharged:
        facts[UNCHARGED] = uncharged
    return facts


def _uncharged(context: PlanningContext) -> str:
    """Return in words what an arm releases of a benchmark's public records at no charge; else empty."""
    task = context.task
    if not task.benchmark:
        return ""
    releases = []
    if context.repeats > 1:
        releases.append("repetitions beyond the first")
    if context.report is None and not task.public_test and task.test_records > 0:
        releases.append(EXACT)
    if not releases:
        return ""
    return f"{' and '.join(releases)}, since all records are declared public (a benchmark)"


def twins(plans: Sequence[Plan]) -> list[tuple[str, ...]]:
    """Return groups of names of arms that run the same training at the same noise.

    Args:
        plans: The plans of the arms.
    """
    names_by_content: dict[str, list[str]] = {}
    for plan in plans:
        content = _content_but_names(plan)
        names_by_content.setdefault(content, []).append(plan.arm)
    return [tuple(names) for names in names_by_content.values() if len(names) > 1]


def _content_but_names(plan: Plan) -> str:
    """Return a plan as JSON text without its names and the reasons for its choice."""
    document = plan.to_dict()
    document["arm"] = ""
    if plan.search is None:
        document["strategy"] = ""  # its name tells nothing more than the training
    details = dict(document["details"])
    details.pop("chosen", None)
    details.pop("why", None)
    document["details"] = details
    return json.dumps(document, sort_keys=True)


def twins_words(plans: Sequence[Plan]) -> list[str]:
    """Return a sentence for each group of arms that run the same training, advising to keep one."""
    rest = "the other gets" if len(plans) == 2 else "the others get"
    sentences = []
    for *names, last in twins(plans):
        surplus = "one" if len(names) == 1 else "all but one"
        sentences.append(
            f"Arms {', '.join(names)} and {last} run the same training: leave {surplus} out, and "
            f"{rest} more of ε."
        )
    return sentences


def advice(study_plan: StudyPlan) -> Sensitivity:
    """Return how ε changes with the noise on scores, the runs, caps and δ of a study."""
    from privtune.accounting.costs import sensitivity

    names: dict[acc.Event, str] = {}
    events = []
    for plan, guarantee in zip(study_plan.plans, study_plan.guarantees, strict=True):
        if not math.isfinite(guarantee.epsilon):
            continue
        events.append(plan.charged)
        if plan.score is None or plan.score.event is None:
            continue
        score = plan.score.event
        name = f"the score of {plan.arm}"
        # Arms whose scores are noised alike share one event, and so one name.
        names[score] = f"{names[score]} and {name}" if score in names else name
    for stage in study_plan.stages:
        events.append(stage.event)
        names[stage.event] = f"stage {stage.arm}"
    total = study_plan.total
    return sensitivity(acc.Composed(events), total.delta, adjacency=total.adjacency, names=names)
