"""Plan one arm whole: what its strategy needs, one target for both splits, what noise cannot reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from privtune.accounting import ApproximateDP, Composed, Event, Parallel, calibrate, scale_noise
from privtune.accounting.calibration import searches_learn, sketch
from privtune.errors import InvalidInputError
from privtune.numbers import is_number
from privtune.spaces import DependentSamplerError, require_independent_sampler
from privtune.strategies._base import Needs, StrategyError
from privtune.strategies.context import PlanningContext
from privtune.strategies.plan import Plan, SearchPlan, TrainingPlan
from privtune.strategies.scoring import ScorePlan

if TYPE_CHECKING:
    from privtune.strategies._base import Strategy


def needed_parameters(strategy: Strategy) -> tuple[str, ...]:
    """Return the names of the hyperparameters that a strategy needs, with the options it has."""
    return tuple(
        name
        for name, when in strategy.needs.parameters.items()
        if when is None or getattr(strategy, when[0]) == when[1]
    )


def check_needs(strategy: Strategy, context: PlanningContext, plan: Plan) -> None:
    """Refuse an arm whose study lacks what its strategy needs, or whose plan belies it."""
    needs, arm = needs_of(strategy), strategy.arm
    method = getattr(strategy, "method", None)
    if needs.methods and method not in needs.methods:
        allowed = f"must be one of {', '.join(needs.methods)}"
        raise InvalidInputError(f"method of arm {arm!r}", method, allowed)
    if plan.is_sealed and not needs.independent:
        raise StrategyError(
            f"Strategy {strategy.name!r} seals its trials, which is valid for independent "
            "candidates alone, and does not declare that it needs them: needs = "
            "Needs(independent=True)."
        )
    if context.define_by_run:
        return  # what a function suggests is seen in its rehearsal
    given = {**dict.fromkeys(context.space, 1.0), **plan.params}
    for name in needed_parameters(strategy):
        choices = getattr(context.space.get(name), "choices", ())
        for drawn in [{name: choice} for choice in choices] or [{}]:
            check_given(strategy, {**given, **drawn})


def check_given(strategy: Strategy, given: Mapping[str, Any]) -> None:
    """Refuse a candidate without the hyperparameters that its strategy computes with."""
    for name in needed_parameters(strategy):
        value = given.get(name)
        if is_number(value):
            continue
        has = f"{name} = {value!r}" if name in given else ", ".join(sorted(given)) or "none"
        when = strategy.needs.parameters[name]
        option = "" if when is None else f", or choose another {when[0]} than {when[1]}"
        raise StrategyError(
            f"Arm {strategy.arm!r} computes with a number called {name}, but the hyperparameters of "
            f"its candidates are {has}: call it {name}{option}."
        )
    fixed = getattr(strategy, "parameters", {})
    known = {*needed_parameters(strategy), *fixed}
    if strategy.needs.alone and (others := sorted(set(given) - known)):
        # The last training would draw them anew: it would not be the candidate that was found.
        raise StrategyError(
            f"Arm {strategy.arm!r} searches {', '.join(needed_parameters(strategy))} alone, but its "
            f"candidates also have {', '.join(others)}. Fix them as parameters of the arm."
        )


def check_objective(
    strategy: Strategy,
    *,
    scored: bool,
    sampler: object | None,
    pruner: object | None,
    others: Iterable[str],
) -> None:
    """Refuse a function of the user's own where a strategy does not cover what comes with it."""
    needs = needs_of(strategy)
    if needs.task:
        raise _own_work(strategy, others)
    if needs.score and not scored:
        raise StrategyError(
            f"Strategy {strategy.name!r} chooses by a score, but no validation split was declared. "
            'Pass validation=(x, y), or split={"train": ..., "validation": ...} of data.'
        )
    if needs.independent:
        if sampler is not None:
            require_independent_sampler(sampler)
        name = None if pruner is None else type(pruner).__name__
        require_independent(strategy.arm, pruner=name)


_FOR_BUILDS = ("fixed", "hyfreedp", "papernot-steinke", "everything")
"""Some strategies that take a build."""


def _own_work(strategy: Strategy, others: Iterable[str]) -> StrategyError:
    """Return the error of a strategy that trains a task's own model, where a build makes the models."""
    *some, last = others
    return StrategyError(
        f"Strategy {strategy.name!r} trains the model of a task and cannot call a build of yours. "
        f"Use {', '.join(some)} or {last}, or a task that has a model: a table, pictures, texts."
    )


def needs_of(strategy: Strategy) -> Needs:
    """Return what a strategy declares; refuse one that declares nothing."""
    needs = getattr(strategy, "needs", None)
    if not isinstance(needs, Needs):
        raise StrategyError(
            f"{type(strategy).__name__} does not declare what it needs of a study; set needs = "
            "privtune.strategies.Needs(), with what that says, on the class."
        )
    return needs


OBJECT = "An object is given to study.optimize(..., {0}=...), beside the strategy."
"""The remedy of a strategy that was given Optuna's object in the place of a name."""


def require_independent(arm: str, *, sampler: str = "random", pruner: str | None) -> None:
    """Refuse a sampler whose draws are not independent, and a pruner, by their names in a spec."""
    if not isinstance(sampler, str):
        allowed = "must be random, the only one whose draws are independent"
        raise InvalidInputError("sampler", sampler, allowed, OBJECT.format("sampler"))
    if sampler != "random":
        raise DependentSamplerError(
            f"Arm {arm!r} asks for sampler {sampler!r}, whose draws are not independent of each "
            "other and of their scores, which private selection needs. Use sampler: random (a grid: "
            "categorical choices, drawn with replacement), or the strategy 'everything', which pays "
            "for every trial."
        )
    if pruner not in (None, "none"):
        raise StrategyError(
            f"Arm {arm!r} asks for pruner {pruner!r}, which compares a trial with the "
            "others: private selection does not cover that. Leave the pruner out, stop a trial "
            "on its own noisy releases, or use the strategy 'everything'."
        )


@dataclass(frozen=True)
class SearchThenFinal:
    """A search, and one training with what it found."""

    search: SearchPlan
    final: TrainingPlan

    def scaled(self, factor: float) -> SearchThenFinal:
        """Return both with all noise times ``factor``."""
        return SearchThenFinal(self.search.scaled(factor), self.final.scaled(factor))


_TOGETHER = 5e-4  # what stands in a maximum is known on its lattice, which moves with the noise


T = TypeVar("T", SearchPlan, SearchThenFinal)


def factor_for(
    event: Event,
    context: PlanningContext,
    epsilon: float,
    tolerance: float = 1e-4,
    *,
    about: bool = False,
) -> float:
    """Return the factor on all noise with which the event meets (epsilon, the context's δ)."""
    if context.declared is not None and scale_noise(event, 2.0) == event:
        return 1.0  # a declared event that stays as it is, and scores that are free
    terms: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": context.delta,
        "adjacency": context.adjacency,
        "tolerance": tolerance,
    }
    return sketch(event, **terms) if about or context.sketch else calibrate(event, **terms).scale


def meet(
    trained: T,
    event: Callable[[T], Event],
    cost: Callable[[Event], Event],
    *,
    context: PlanningContext,
    epsilon: float,
) -> tuple[T, ScorePlan, Event]:
    """Scale what is trained and how it is scored until the arm as a whole meets ``epsilon``."""
    with searches_learn():
        # The accountant is asked about both sides together, so each alone may cost a little more.
        trained = trained.scaled(factor_for(event(trained), context, epsilon, about=True))
        score = context.plan_score(epsilon)
        if score.event is not None:
            score = score.scaled(factor_for(cost(score.event), context, epsilon, about=True))
        rest = factor_for(_both(event(trained), score, cost), context, epsilon, _TOGETHER)
    trained, score = trained.scaled(rest), score.scaled(rest)
    return trained, score, _both(event(trained), score, cost)


def _both(training: Event, score: ScorePlan, cost: Callable[[Event], Event]) -> Event:
    return training if score.event is None else Parallel((training, cost(score.event)))


_NEGLIGIBLE = 1e-3  # of δ


_TOO_MUCH = 0.1
_OF_OTHERS = "of each further repetition its hyperparameters, score and test metrics"


def plan_arm(strategy: Strategy, context: PlanningContext, *, epsilon: float) -> Plan:
    """Return the plan of an arm, in which the mass that its noise cannot reach is charged.

    Where that mass, of all runs that are charged, exceeds a thousandth of δ, it is part of the event, and
    the arm is planned at the rest of δ; above a tenth of δ there is no plan.

    Args:
        strategy: How the arm chooses.
        context: Public facts.
        epsilon: Target of one run of the arm.

    Raises:
        StrategyError: If the study lacks what the strategy needs, or too much is beyond the reach.

    Example:
        >>> from privtune.strategies import make_strategy
        >>> dog = make_strategy("dog", arm="dog", options={})
        >>> plan = plan_arm(dog, study.spec.planning_context(), epsilon=2.0)
        >>> plan.training.method.name, plan.is_sealed, plan.beyond_reach < 1e-8
        ('dog', False, True)
    """
    if context.define_by_run and needs_of(strategy).task:
        raise _own_work(strategy, _FOR_BUILDS)
    report = context.plan_report(math.inf if needs_of(strategy).non_private else epsilon)
    repeated = {"repeats": context.repeats, "repeats_charged": not context.task.benchmark}

    def planned(context: PlanningContext) -> Plan:
        alone = strategy.plan(context, epsilon=epsilon).with_noise(context.noise)
        plan = _with(report, _with_candidates(alone))
        others = (_OF_OTHERS,) if context.repeats > 1 else ()
        return replace(plan, released=(*plan.released, *others), **repeated)  # type: ignore[arg-type]

    plan = planned(context)
    check_needs(strategy, context, plan)
    # Noise in floating point ends somewhere: what a record makes possible beyond would have no bound.
    each, delta = plan.beyond_reach, context.delta
    mass = each * (plan.repeats if plan.repeats_charged else 1)
    if not plan.is_private or mass <= _NEGLIGIBLE * delta:
        return plan
    if mass > _TOO_MUCH * delta:
        raise StrategyError(
            f"Arm {plan.arm!r}: with so little noise, outputs of mass {mass:.2g} lie beyond the reach "
            f"of any generator here, and δ is {delta:g}; ask for a smaller ε."
        )
    # At the rest of δ there is a little more noise, and so less mass than this.
    rest = replace(context, delta=delta - mass)
    plan = planned(rest)
    return replace(
        plan,
        event=Composed((plan.event, ApproximateDP(0.0, each))),
        details={**plan.details, "beyond_reach": each},
    )


def with_report(
    plan: Plan, context: PlanningContext, *, share: float, epsilon: float
) -> Plan | None:
    """Return a plan whose report costs another share of the arm's ε, all else as it is."""
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


_INDEPENDENT = ("random", "qmc", "grid")
"""Samplers of ``everything`` that look at no score."""


def _with_candidates(plan: Plan) -> Plan:
    """Note how many candidates the scored one is chosen from: its interval holds for the chosen one.

    That needs candidates that are independent of earlier scores, and all draws of the arm: of an adaptive
    search, and of a release that is seen only if its score reached a threshold, nothing is claimed.
    """
    if plan.score is None or plan.details.get("threshold") is not None:
        return plan
    if plan.details.get("sampler") not in (None, *_INDEPENDENT):
        return plan
    trials = plan.search.trials if plan.search is not None else None
    candidates = plan.runs.expected_runs if plan.runs is not None else float(trials or 1)
    return replace(plan, score=replace(plan.score, candidates=candidates))


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
