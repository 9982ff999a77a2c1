"""What a strategy is, and what it needs of a study: ``plan`` touches no data, ``run`` follows the plan."""

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
    from privtune.strategies.plan import Plan, TrainingPlan
    from privtune.strategies.release import Outcome, TrialResult
    from privtune.training.mechanism.streams import Streams


class StrategyError(PrivTuneError):
    """A strategy was asked for something that its guarantee does not cover."""


class Round(Protocol):
    """The trials of one arm, charged whole. The study provides it and keeps finished trials.

    Every trial derives from the round's secret and its index, so asking again returns the same
    results without a second charge.

    Example:
        >>> def selection(plan: Plan, trials: Round) -> TrialResult:
        ...     return best_of(trials.select(plan), trials.streams)
        >>> def one_training(plan: Plan, trials: Round) -> TrialResult:
        ...     return trials.train(plan, plan.training, plan.params, name="final")
        >>> def one_more(plan: Plan, trials: Round, number: int) -> None:
        ...     params = trials.ask(number, lambda space: optuna.samplers.TPESampler())
        ...     trials.tell(number, trials.train(plan, plan.training, params, name=str(number)))
        >>> def all_together(plan: Plan, trials: Round, drawn: dict) -> list[TrialResult]:
        ...     return list(trials.train_numbered(plan, drawn))
    """

    @property
    def space(self) -> SearchSpace:
        """What candidates are drawn from."""
        ...

    @property
    def streams(self) -> Streams:
        """Random streams of the round, derived from its secret."""
        ...

    def select(self, plan: Plan) -> Sequence[TrialResult]:
        """Run the sealed round: K i.i.d. candidates of the plan's search, K drawn once.

        Args:
            plan: The arm's plan; it has a law of runs.

        Returns:
            Results by index; with a threshold, at least those up to the first that reaches it.
        """
        ...

    def train(
        self,
        plan: Plan,
        training: TrainingPlan,
        params: Mapping[str, Any],
        *,
        name: str,
        scored: bool = False,
    ) -> TrialResult:
        """Train one candidate under a name of its own, and score it if asked.

        Args:
            plan: The arm's plan.
            training: What to run of it.
            params: The candidate.
            name: Any text. Streams derive from all arguments, so no two trainings share noise.
            scored: Whether to score it as the plan says.

        Returns:
            The result; the same call again returns the one that is there.

        Raises:
            StrategyError: If something else was asked for under the name.
        """
        ...

    @property
    def at_once(self) -> int:
        """How many candidates it pays to train together."""
        ...

    def train_numbered(
        self, plan: Plan, trials: Mapping[int, Mapping[str, Any]]
    ) -> Sequence[TrialResult]:
        """Train and score some trials of the plan's search together, as ``train`` does each.

        Args:
            plan: The arm's plan; it has a search and no law of runs.
            trials: Candidates by number, no more than the plan pays for.

        Returns:
            One result a trial, in their order.

        Raises:
            StrategyError: If the plan is a sealed selection, or another candidate had the number.
        """
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
        """Tell the sampler the score of trial ``number``, or that it was pruned: its ``result``."""
        ...


class Strategy(Protocol):
    """A way of choosing hyperparameters: a frozen dataclass of its options.

    Example:
        >>> from privtune.strategies import Fixed, TrialResult
        >>> strategy = Fixed(parameters={"learning_rate": 0.5, "max_grad_norm": 1.0})
        >>> plan = strategy.plan(study.spec.planning_context(), epsilon=2.0)  # touches no data
        >>> plan.event.type, plan.params
        ('repeated', {'learning_rate': 0.5, 'max_grad_norm': 1.0})
        >>> class Untrained:  # stands for the round of trials that the study provides
        ...     def train(self, plan, training, params, *, name):
        ...         return TrialResult(index=0, params=params, weights=None, score=None)
        >>> strategy.run(plan, Untrained()).result.params
        {'learning_rate': 0.5, 'max_grad_norm': 1.0}
    """

    name: ClassVar[str]
    """Name in specs and on the command line."""

    summary: ClassVar[str]
    """One line: how it chooses."""

    needs: ClassVar[Needs]
    """What it needs of the study that runs it; planners refuse by it."""

    @property
    def arm(self) -> str:
        """Name of the arm."""
        ...

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan the arm so that it costs at most ``epsilon`` at the context's δ. Touches no data.

        Args:
            context: Public facts.
            epsilon: Target of the whole arm, above 0.

        Returns:
            The plan.

        Raises:
            PrivTuneError: If an option does not fit, or no noise reaches the target.
        """
        ...

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Run the plan and return what is released.

        **Guarantee**: the plan's event covers everything about the data that reaches the return value.

        Args:
            plan: What :meth:`plan` returned, charged and started.
            trials: The arm's trials: all access to the data.

        Returns:
            What leaves the trust boundary, and nothing else.

        Raises:
            InvalidInputError: If the plan is not one of the strategy's.
        """
        ...


def best_of(results: Sequence[TrialResult], streams: Streams) -> TrialResult:
    """Return the result of the best score; ties are broken by independent uniform draws."""
    tie_break = streams.numpy("tie-break", 0).random(len(results))

    def rank(position: int) -> tuple[float, float]:
        score = results[position].score
        worst = score is None or math.isnan(score)
        return (-math.inf if worst or score is None else score, float(tie_break[position]))

    return results[max(range(len(results)), key=rank)]


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
        """What is needed, as people read it."""
        said = {
            "a task": self.task,
            "a validation split": self.score,
            "independent candidates": self.independent,
            f"one of the methods {', '.join(self.methods)}": self.methods,
            "--non-private": self.non_private,
        }
        named = (
            name if when is None else f"{name} (with {when[0]}: {when[1]})"
            for name, when in self.parameters.items()
        )
        return (*(word for word, needed in said.items() if needed), *named)
