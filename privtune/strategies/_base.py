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
    """The trials of one arm, charged whole. Provided by the study; keeps finished trials.

    Asking again for trials that are done returns the same results: a round survives interruption
    without a second charge, because every trial derives from the round's secret and its index.

    Example:
        What strategies ask of a round, each in its ``run``:

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
            Results in the order of their index. If the plan has a threshold, those up to the first
            that reaches it; some after it may be there or not.
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
            name: What the training is known by in its round: any text. Its streams derive from all
                that is given here, the whole name included: no two trainings share any noise.
            scored: Whether to score it as the plan says.

        Returns:
            The trial's result; the one that is there, if the same was asked for before.

        Raises:
            StrategyError: If another training, candidate or score was asked for under the name.
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
            trials: Candidates by number, of which no more are shown than the plan pays for.

        Returns:
            One result a trial, in their order.

        Raises:
            StrategyError: If the plan is a sealed selection, or another candidate had the number.
        """
        ...

    def ask(self, number: int, make: Callable[[SearchSpace], BaseSampler]) -> Mapping[str, Any]:
        """Draw trial ``number`` with an Optuna sampler made for the space; it sees earlier scores.

        Args:
            number: The trial, from 0.
            make: Makes the sampler.

        Returns:
            The candidate.
        """
        ...

    def tell(self, number: int, result: TrialResult) -> None:
        """Tell the sampler how trial ``number`` ended: its score, or that it was pruned.

        Args:
            number: The trial, from 0.
            result: What came of it.
        """
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
            The plan; its event's ε is at most ``epsilon``.

        Raises:
            PrivTuneError: If an option does not fit, or no noise reaches the target.
        """
        ...

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Run the plan and return what is released.

        **Guarantee**: everything about the data that reaches the return value is covered by the
        plan's event.

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
        task: A task that the engine trains; a function of the user's own cannot take its place.
        score: A validation split, because it chooses by a score.
        independent: Candidates that are drawn independently of each other and of their scores: no
            sampler that does not declare so, no pruner. Whatever seals its trials needs it.
        parameters: Hyperparameters that every candidate has to have, by name: the option and its
            value with which that is so, or None if it always is.
        methods: The training methods that it can run; empty for all.
        non_private: Somebody who says ``--non-private``: it has no guarantee and is no part of any
            budget.

    Example:
        >>> Needs(score=True).independent
        False
    """

    task: bool = False
    score: bool = False
    independent: bool = False
    parameters: Mapping[str, tuple[str, Any] | None] = field(default_factory=dict)
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
