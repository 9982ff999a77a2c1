"""Planning of an arm: checks of its strategy's needs, noise for its target ε, and its final report."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from privtune.accounting import ApproximateDP, Composed, Event, Parallel, calibrate, scale_noise
from privtune.accounting.calibration import searches_learn, sketch
from privtune.errors import InvalidInputError
from privtune.names import refuse_name
from privtune.numbers import is_number
from privtune.spaces import DependentSamplerError, require_independent_sampler
from privtune.strategies.bands import plan_with_noise
from privtune.strategies.context import PlanningContext
from privtune.strategies.plan import Plan, SearchPlan, TrainingPlan
from privtune.strategies.score_plan import ScorePlan
from privtune.strategies.strategy import Needs, StrategyError

if TYPE_CHECKING:
    from privtune.strategies.strategy import Strategy


def needed_parameters(strategy: Strategy) -> tuple[str, ...]:
    """Return the names of the hyperparameters that a strategy needs, with the options it has."""
    names = []
    for name, condition in strategy.needs.parameters.items():
        if condition is None:
            names.append(name)
            continue
        option, value = condition
        if getattr(strategy, option) == value:
            names.append(name)
    return tuple(names)


def check_needs(strategy: Strategy, context: PlanningContext, plan: Plan) -> None:
    """Refuse an arm whose study lacks what its strategy needs, or whose plan contradicts these needs.

    Raises:
        InvalidInputError: If the strategy cannot run its method.
        StrategyError: If its ``run`` is no generator, its plan seals trials that may depend on each other, or
            candidates lack a number that it computes with.
    """
    needs = needs_of(strategy)
    if not inspect.isgeneratorfunction(strategy.run):
        raise StrategyError(
            f"Method run of {type(strategy).__name__} is no generator: it must yield what shall be "
            "trained, as in (result,) = yield NamedTraining(...), and return an Outcome."
        )
    method = getattr(strategy, "method", None)
    if needs.methods and method not in needs.methods:
        refuse_name(f"method of arm {strategy.arm!r}", method, needs.methods)
    if plan.is_sealed and not needs.independent:
        raise StrategyError(
            f"Strategy {strategy.name!r} seals its trials, which is valid for independent "
            "candidates alone, and does not declare that it needs them: needs = "
            "Needs(independent=True)."
        )
    if context.define_by_run:
        return  # what a function suggests is seen in its rehearsal
    candidate = {**dict.fromkeys(context.space, 1.0), **plan.params}
    for name in needed_parameters(strategy):
        choices = getattr(context.space.get(name), "choices", ())
        if not choices:
            check_given(strategy, candidate)
        for choice in choices:
            check_given(strategy, {**candidate, name: choice})


def check_given(strategy: Strategy, params: Mapping[str, object]) -> None:
    """Refuse a candidate whose hyperparameters are not those that its strategy computes with.

    Args:
        strategy: Whose arm it is.
        params: The candidate's hyperparameters by name.

    Raises:
        StrategyError: If one that is needed is no number, or there is one that the strategy does not search.
    """
    needed_names = needed_parameters(strategy)
    for name in needed_names:
        if not is_number(params.get(name)):
            raise _missing_number(strategy, name, params)
    if not strategy.needs.alone:
        return
    fixed = getattr(strategy, "parameters", {})
    others = sorted(set(params) - {*needed_names, *fixed})
    if others:
        # The last training would draw them anew: it would not be the candidate that was found.
        raise StrategyError(
            f"Arm {strategy.arm!r} searches {', '.join(needed_names)} alone, but its "
            f"candidates also have {', '.join(others)}. Fix them as parameters of the arm."
        )


def _missing_number(strategy: Strategy, name: str, params: Mapping[str, object]) -> StrategyError:
    """Return the error for a candidate with a missing or non-numeric hyperparameter."""
    if name in params:
        words = f"{name} = {params[name]!r}"
    else:
        words = ", ".join(sorted(params)) or "none"
    remedy = f"call it {name}"
    condition = strategy.needs.parameters[name]
    if condition is not None:
        option, value = condition
        remedy += f", or choose another {option} than {value}"
    return StrategyError(
        f"Arm {strategy.arm!r} computes with a number called {name}, but the hyperparameters of "
        f"its candidates are {words}: {remedy}."
    )


def check_objective(
    strategy: Strategy,
    *,
    scored: bool,
    sampler: object | None,
    pruner: object | None,
    others: Iterable[str],
) -> None:
    """Refuse a user's training function where the strategy needs a task, a score or independent trials."""
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
"""Examples of strategies that take a user's build, named in an error."""


def _own_work(strategy: Strategy, others: Iterable[str]) -> StrategyError:
    """Return the error of a strategy that trains a task's own model, where a build makes the models."""
    *some, last = others
    return StrategyError(
        f"Strategy {strategy.name!r} trains the model of a task and cannot call a build of yours. "
        f"Use {', '.join(some)} or {last}, or a task that has a model: a table, pictures, texts."
    )


def needs_of(strategy: Strategy) -> Needs:
    """Return the needs that a strategy declares, or refuse a strategy that declares none."""
    needs = getattr(strategy, "needs", None)
    if not isinstance(needs, Needs):
        raise StrategyError(
            f"{type(strategy).__name__} does not declare what it needs of a study; set needs = "
            "privtune.strategies.Needs(), with what that says, on the class."
        )
    return needs


OBJECT = "An object is given to study.optimize(..., {0}=...), beside the strategy."
"""The remedy in the error for an Optuna object in the place of a name."""


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
    """Plan of a search, and of one training with the hyperparameters that it finds."""

    search: SearchPlan
    final: TrainingPlan

    def scaled(self, factor: float) -> SearchThenFinal:
        """Return both plans with all noise times ``factor``."""
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
    """Return the factor by which an event's noise is scaled to meet ``epsilon`` at the context's δ.

    Args:
        event: What is charged, at some noise.
        context: Public facts: δ, adjacency, and whether the plan is thrown away.
        epsilon: Target.
        tolerance: Relative distance to the target that is near enough, where `calibrate` comes so near.
        about: Whether a rough factor will do, as another calibration follows.
    """
    if context.declared is not None and scale_noise(event, 2.0) == event:
        return 1.0  # a declared event that stays as it is, and scores that are free
    terms: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": context.delta,
        "adjacency": context.adjacency,
        "tolerance": tolerance,
    }
    if about or context.sketch:
        return sketch(event, **terms)
    return calibrate(event, **terms).scale


def meet(
    trained: T,
    event: Callable[[T], Event],
    cost: Callable[[Event], Event],
    *,
    context: PlanningContext,
    epsilon: float,
) -> tuple[T, ScorePlan, Event]:
    """Scale the noise of trainings and scores until the arm as a whole meets ``epsilon``.

    Training and validation records are disjoint, so both sides are charged in parallel, and each may cost
    all of the target.

    Args:
        trained: What runs on the training records.
        event: What that costs them.
        cost: What all of an arm's scores cost the validation records, from the cost of one.
        context: Public facts.
        epsilon: Target.

    Returns:
        The trainings, how one trial is scored, and the event of both together.
    """
    with searches_learn():
        # The accountant is asked about both sides together, so each alone may cost a little more.
        training_factor = factor_for(event(trained), context, epsilon, about=True)
        trained = trained.scaled(training_factor)
        score = context.plan_score(epsilon)
        if score.event is not None:
            score_factor = factor_for(cost(score.event), context, epsilon, about=True)
            score = score.scaled(score_factor)
        both = _with_scores(event(trained), score, cost)
        rest = factor_for(both, context, epsilon, _TOGETHER)
    trained = trained.scaled(rest)
    score = score.scaled(rest)
    return trained, score, _with_scores(event(trained), score, cost)


def _with_scores(training: Event, score: ScorePlan, cost: Callable[[Event], Event]) -> Event:
    """Return the joint event of trainings and scores, or of trainings alone if scores are free."""
    if score.event is None:
        return training
    return Parallel((training, cost(score.event)))


_NEGLIGIBLE = 1e-3  # of δ


_TOO_MUCH = 0.1
_OF_OTHERS = "of each further repetition its hyperparameters, score and test metrics"


def plan_arm(strategy: Strategy, context: PlanningContext, *, epsilon: float) -> Plan:
    """Return the plan of an arm, whose event also covers the mass that its noise cannot reach.

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
    report_epsilon = epsilon
    if needs_of(strategy).non_private:
        report_epsilon = math.inf
    report = context.plan_report(report_epsilon)
    plan = _plan_at(strategy, context, report, epsilon=epsilon)
    check_needs(strategy, context, plan)
    # Noise in floating point ends somewhere: what a record makes possible beyond would have no bound.
    delta = context.delta
    mass_of_run = plan.beyond_reach
    charged_runs = plan.repeats if plan.repeats_charged else 1
    mass = mass_of_run * charged_runs
    if not plan.is_private or mass <= _NEGLIGIBLE * delta:
        return plan
    if mass > _TOO_MUCH * delta:
        raise StrategyError(
            f"Arm {plan.arm!r}: with so little noise, outputs of mass {mass:.2g} lie beyond the reach "
            f"of any generator here, and δ is {delta:g}; ask for a smaller ε."
        )
    # At the rest of δ there is a little more noise, and so less mass than this.
    rest = replace(context, delta=delta - mass)
    plan = _plan_at(strategy, rest, report, epsilon=epsilon)
    return replace(
        plan,
        event=Composed((plan.event, ApproximateDP(0.0, mass_of_run))),
        details={**plan.details, "beyond_reach": mass_of_run},
    )


def _plan_at(
    strategy: Strategy,
    context: PlanningContext,
    report: ScorePlan | None,
    *,
    epsilon: float,
) -> Plan:
    """Return a strategy's plan at the context's δ, with the study's noise source, report and repetitions."""
    plan = plan_with_noise(strategy, context, epsilon=epsilon)
    plan = _with_report(report, _with_candidates(plan))
    released = plan.released
    if context.repeats > 1:
        released = (*released, _OF_OTHERS)
    return replace(
        plan,
        released=released,
        repeats=context.repeats,
        repeats_charged=not context.task.benchmark,
    )


def with_report(
    plan: Plan,
    context: PlanningContext,
    *,
    share: float,
    epsilon: float,
) -> Plan | None:
    """Return a plan whose report costs another share of the arm's ε, all else as it is.

    Args:
        plan: The plan of an arm.
        context: The public facts that it was planned with.
        share: The share of the arm's ε, in (0, 1].
        epsilon: Target of one run of the arm.

    Returns:
        The plan; the same one where its report is free; None where the mass that the report's noise cannot
        reach is more than what is charged for.
    """
    if context.report is None or plan.report is None or plan.report.event is None:
        return plan
    reporting = replace(context.report, epsilon_share=share)
    report = replace(context, report=reporting).plan_report(epsilon)
    if report is None or report.event is None or not plan.is_private:
        return plan
    other = replace(
        plan,
        event=_with_report_event(plan.event, plan.report.event, report.event),
        report=report,
        details={**plan.details, "report_epsilon_share": share},
    )
    limit = plan.details.get("beyond_reach", _NEGLIGIBLE * context.delta)
    return other if other.beyond_reach <= limit else None


def _with_report_event(event: Event, old: Event, new: Event) -> Event:
    """Return an arm's event with the event of its report replaced by another.

    What noise cannot reach is composed after it, so it lies in the first part of a composition.
    """
    if isinstance(event, Parallel) and event.events[1:] == (old,):
        return Parallel((event.events[0], new))
    first, *others = event.events  # type: ignore[attr-defined]
    changed_first = _with_report_event(first, old, new)
    return event.rebuild([changed_first, *others])


def with_metric(plan: Plan, report: ScorePlan) -> Plan:
    """Return a plan that reports another metric, at the same noise and cost."""
    if plan.report is None:
        return plan
    terms: dict[str, Any] = {
        "metric": report.metric,
        "options": report.options,
        "beside": report.beside,
    }
    before = _report_in_words(plan.report)
    after = _report_in_words(report)
    released: list[str] = []
    for line in plan.released:
        is_report = line == before
        released.append(after if is_report else line)
    other_report = replace(plan.report, **terms)
    return replace(plan, report=other_report, released=tuple(released))


TEMPERATURE = "a temperature of its probabilities, from noised sums of the test split"

_INDEPENDENT = ("random", "qmc", "grid")
"""Samplers of ``everything`` whose draws ignore all scores."""


def _with_candidates(plan: Plan) -> Plan:
    """Return the plan with its number of candidates, so that the interval holds for the chosen one.

    That needs candidates that are independent of earlier scores, and all draws of the arm: of an adaptive
    search, and of a release that is seen only if its score reached a threshold, nothing is claimed.
    """
    if plan.score is None or plan.details.get("threshold") is not None:
        return plan
    if plan.details.get("sampler") not in (None, *_INDEPENDENT):
        return plan
    candidates = 1.0
    if plan.runs is not None:
        candidates = plan.runs.expected_runs
    elif plan.search is not None:
        candidates = float(plan.search.trials or 1)
    score = replace(plan.score, candidates=candidates)
    return replace(plan, score=score)


def _with_report(report: ScorePlan | None, plan: Plan) -> Plan:
    """Return the plan with the final score added in parallel, since no other part reads test records."""
    if report is None:
        return plan
    if report.event is None or not plan.is_private:
        return replace(plan, report=report)
    released = [*plan.released, _report_in_words(report)]
    if report.calibrator is not None:
        released.append(TEMPERATURE)
    return replace(
        plan,
        event=Parallel((plan.event, report.event)),
        released=tuple(released),
        report=report,
    )


def _report_in_words(report: ScorePlan) -> str:
    """Return the line by which plans list the noised metric of a report."""
    return f"its noised {report.metric} on the test split"
