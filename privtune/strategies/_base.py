"""What a strategy is: ``plan`` touches no data, ``run`` follows the plan to the letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from privtune.strategies.plan import Plan, PlanningContext
    from privtune.training.streams import Streams

__all__ = ["Round", "Strategy", "TrialResult"]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What one trial produced. Sealed: it stays inside the trust boundary unless it is released.

    Args:
        index: Position in its round.
        params: Hyperparameters of the candidate.
        weights: Trained parameters, flat, shape ``[P]``.
        score: Noised (or public) score; ``-inf`` for a training that failed; ``None`` unscored.
        curves: By name, one value a step.
        transcript_digest: Digest of what the training released.
    """

    index: int
    params: Mapping[str, float]
    weights: torch.Tensor
    score: float | None
    curves: Mapping[str, Sequence[float]]
    transcript_digest: str


class Round(Protocol):
    """The trials of one arm, charged whole. Provided by the study; keeps finished trials.

    Asking again for trials that are done returns the same results: a round survives interruption
    without a second charge, because every trial derives from the round's secret and its index.
    """

    streams: Streams
    """Random streams of the round, derived from its secret."""

    def train(self, plan: Plan, count: int) -> Sequence[TrialResult]:
        """Train ``count`` candidates: the plan's own parameters, or draws from the space."""
        ...


class Strategy(Protocol):
    """A way of choosing hyperparameters: a frozen dataclass of its options."""

    name: ClassVar[str]
    """Name in specs and on the command line."""

    summary: ClassVar[str]
    """One line: how it chooses."""

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

    def run(self, plan: Plan, trials: Round) -> TrialResult:
        """Run the plan and return the one result that is released.

        **Guarantee**: everything about the data that reaches the return value is covered by the
        plan's event.
        """
        ...


def reject_unknown_options(
    strategy: str, options: Mapping[str, Any], allowed: Sequence[str]
) -> None:
    """Refuse options that a strategy does not take, naming those that it takes."""
    from privtune.errors import InvalidInputError

    if unknown := sorted(set(options) - set(allowed)):
        raise InvalidInputError(
            f"options of strategy {strategy!r}",
            unknown,
            f"are not known; it takes {', '.join(sorted(allowed)) or 'none'}",
        )
