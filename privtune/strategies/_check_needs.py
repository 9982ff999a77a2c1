"""Refusals by what a strategy declares that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.numbers import is_number
from privtune.spaces import DependentSamplerError, require_independent_sampler
from privtune.strategies._base import StrategyError
from privtune.strategies.needs import Needs

if TYPE_CHECKING:
    from privtune.strategies._base import Strategy
    from privtune.strategies.context import PlanningContext
    from privtune.strategies.plan import Plan


def needed_parameters(strategy: Strategy) -> tuple[str, ...]:
    """Return the names of the hyperparameters that a strategy needs, with the options it has."""
    return tuple(
        name
        for name, when in strategy.needs.parameters.items()
        if when is None or getattr(strategy, when[0]) == when[1]
    )


def check_needs(strategy: Strategy, context: PlanningContext, plan: Plan) -> None:
    """Refuse an arm whose study lacks what its strategy needs, or whose plan belies it.

    Raises:
        StrategyError: Naming what is missing.
        InvalidInputError: If the strategy cannot run the arm's method.
    """
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
    """Refuse a candidate without the hyperparameters that its strategy computes with.

    Raises:
        StrategyError: Naming what is missing, or is no finite number.
    """
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


def check_objective(
    strategy: Strategy,
    *,
    scored: bool,
    sampler: object | None,
    pruner: object | None,
    others: Iterable[str],
) -> None:
    """Refuse a function of the user's own where a strategy does not cover what comes with it.

    Args:
        strategy: The strategy.
        scored: Whether a validation split was declared.
        sampler: The sampler that was given with the function.
        pruner: The pruner, likewise.
        others: Strategies that can call a function, for the message.

    Raises:
        StrategyError: If it trains by itself, has no score to choose by, or must not prune.
        DependentSamplerError: If it needs independent candidates and the sampler gives none.
    """
    needs = needs_of(strategy)
    if needs.task:
        *some, last = others
        raise StrategyError(
            f"Strategy {strategy.name!r} trains by itself and cannot call a function of yours. "
            f"Declare a task, or use {', '.join(some)} or {last}."
        )
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


def needs_of(strategy: Strategy) -> Needs:
    """Return what a strategy declares; refuse one that declares nothing.

    Raises:
        StrategyError: If it does not.
    """
    needs = getattr(strategy, "needs", None)
    if not isinstance(needs, Needs):
        raise StrategyError(
            f"{type(strategy).__name__} does not declare what it needs of a study; set needs = "
            "privtune.strategies.Needs(), with what that says, on the class."
        )
    return needs


def require_independent(arm: str, *, sampler: str = "random", pruner: str | None) -> None:
    """Refuse a sampler whose draws are not independent, and a pruner, by their names in a spec."""
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
