"""Interfaces of a strategy and of its round, and the declaration of what it needs of a study."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from privtune.errors import PrivTuneError

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from privtune.spaces import SearchSpace
    from privtune.strategies.context import PlanningContext
    from privtune.strategies.plan import Plan
    from privtune.strategies.release import TrialResult
    from privtune.strategies.requests import StrategyRun
    from privtune.training.mechanism.streams import Streams


class StrategyError(PrivTuneError):
    """A strategy was asked for something that its guarantee does not cover."""


class Round(Protocol):
    """Interface to one arm's trials, which a study provides, charges as a whole and stores.

    It answers what the strategy's ``run`` yields (:mod:`privtune.strategies.requests`). Every trial derives
    from the round's secret and its index, so the same request has the same results, without a second
    charge: a run that goes on in another process yields again what it yielded before, and its first
    requests are answered from what is stored.

    Example:
        >>> def selection(plan: Plan, trials: Round) -> StrategyRun:
        ...     results = yield SealedRound()
        ...     return Outcome(best_of(results, trials.streams))
        >>> def one_training(plan: Plan, trials: Round) -> StrategyRun:
        ...     (result,) = yield NamedTraining("final", plan.training, plan.params)
        ...     return Outcome(result)
        >>> def one_after_the_other(plan: Plan, trials: Round) -> StrategyRun:
        ...     for number in range(plan.search.trials):
        ...         params = trials.ask(number, lambda space: optuna.samplers.TPESampler())
        ...         (result,) = yield NumberedTrials({number: params})
        ...         trials.tell(number, result)
        ...     return Outcome(result)
    """

    @property
    def space(self) -> SearchSpace:
        """The space from which candidates are drawn."""
        ...

    @property
    def streams(self) -> Streams:
        """Random streams of the round, derived from its secret."""
        ...

    @property
    def at_once(self) -> int:
        """Number of candidates that are most efficiently trained together."""
        ...

    def ask(self, number: int, make: Callable[[SearchSpace], BaseSampler]) -> Mapping[str, Any]:
        """Draw trial ``number`` with an Optuna sampler that sees earlier scores.

        Args:
            number: The trial, from 0.
            make: Makes the sampler for the space.

        Returns:
            The candidate.
        """
        ...

    def tell(self, number: int, result: TrialResult) -> None:
        """Tell the sampler the ``result`` of trial ``number``: its score, or that it was pruned."""
        ...


class Strategy(Protocol):
    """A way of choosing hyperparameters: a frozen dataclass of its options.

    Example:
        >>> from privtune.strategies import Fixed
        >>> strategy = Fixed(parameters={"learning_rate": 0.5, "max_grad_norm": 1.0})
        >>> plan = strategy.plan(study.spec.planning_context(), epsilon=2.0)  # touches no data
        >>> plan.event.type, plan.params
        ('repeated', {'learning_rate': 0.5, 'max_grad_norm': 1.0})
        >>> run = strategy.run(plan, trials=None)  # a study gives the trials, and answers
        >>> request = next(run)
        >>> request.name, request.params
        ('final', {'learning_rate': 0.5, 'max_grad_norm': 1.0})
    """

    name: ClassVar[str]
    """Name in specs and on the command line."""

    summary: ClassVar[str]
    """One line on how it chooses hyperparameters."""

    needs: ClassVar[Needs]
    """What it needs of a study, by which planners refuse unsuitable studies."""

    @property
    def arm(self) -> str:
        """Name of the arm."""
        ...

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan the arm to cost at most ``epsilon`` at the context's δ, without touching data.

        Args:
            context: Public facts.
            epsilon: Target of the whole arm, above 0.

        Returns:
            The plan.

        Raises:
            PrivTuneError: If an option does not fit, or no noise reaches the target.
        """
        ...

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Follow the plan: yield what shall be trained, and return what is released.

        It is a generator. ``results = yield request`` is all access to the data: the study trains what is
        requested, or reads what is stored, and sends the results. An error of a training ends the run; it
        is not raised here.

        **Guarantee**: the plan's event covers everything about the data that reaches the return value.

        Args:
            plan: What :meth:`plan` returned, charged and started.
            trials: The arm's trials: space, random streams, samplers.

        Yields:
            A :class:`SealedRound`, :class:`NumberedTrials` or :class:`NamedTraining`, each of which is
            answered by a sequence of results.

        Returns:
            What leaves the trust boundary, and nothing else.

        Raises:
            InvalidInputError: If the plan is not one of the strategy's.
        """
        ...


def best_of(results: Sequence[TrialResult], streams: Streams) -> TrialResult:
    """Return the result with the best score, ties broken uniformly at random."""
    generator = streams.numpy("tie-break", 0)
    tie_break = generator.random(len(results))

    def rank(position: int) -> tuple[float, float]:
        score = results[position].score
        if score is None or math.isnan(score):
            score = -math.inf
        return score, float(tie_break[position])

    positions = range(len(results))
    best = max(positions, key=rank)
    return results[best]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a strategy needs of the study that runs it.

    Args:
        task: A task, in place of a function of the user's own.
        score: A validation split.
        independent: Candidates drawn independently of each other and of their scores, as whatever
            seals its trials needs: no dependent sampler, no pruner.
        parameters: Hyperparameters of every candidate, by name: the option and its value with which
            they are needed, or None for always.
        alone: No other hyperparameters than these, but those that the arm fixes.
        draws: Whether it may draw from the study's space; without any such arm a space has no use.
        methods: The training methods that it can run; empty for all.
        non_private: The flag ``--non-private``: it has no guarantee and is no part of any budget.

    Example:
        >>> Needs(score=True).independent
        False
    """

    task: bool = False
    score: bool = False
    independent: bool = False
    parameters: Mapping[str, tuple[str, Any] | None] = field(default_factory=dict)
    alone: bool = False
    draws: bool = True
    methods: tuple[str, ...] = ()
    non_private: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Each need in words."""
        needs = {
            "a task": self.task,
            "a validation split": self.score,
            "independent candidates": self.independent,
            f"one of the methods {', '.join(self.methods)}": self.methods,
            "--non-private": self.non_private,
        }
        words = [word for word, is_needed in needs.items() if is_needed]
        for name, condition in self.parameters.items():
            if condition is None:
                words.append(name)
            else:
                option, value = condition
                words.append(f"{name} (with {option}: {value})")
        return tuple(words)
