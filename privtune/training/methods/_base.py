"""What a training method is: three functions over an explicit state.

``event`` says what the method costs, before anything runs and without torch; ``init`` makes the
state of a stack of candidates; ``update`` takes one step through the oracle. The state is a frozen
dataclass of tensors and numbers, so it can be checkpointed, compared and replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule

Candidate = Mapping[str, Any]
"""The hyperparameters of one candidate, by their field names (``learning_rate``, ...): numbers, but
for the type of a schedule."""


class MethodState(Protocol):
    """State of a stack of K candidates: a frozen dataclass of tensors whose first axis is K.

    Example:
        >>> import torch
        >>> from privtune.training.methods import FixedDPSGD
        >>> candidate = {"learning_rate": 0.1, "max_grad_norm": 1.0}
        >>> state = FixedDPSGD(1.0).init(torch.zeros(2, 5), [candidate, candidate])
        >>> state.params.shape, state.learning_rate
        (torch.Size([2, 5]), tensor([0.1000, 0.1000]))
    """

    @property
    def params(self) -> torch.Tensor:
        """The current parameters, shape ``[K, P]``."""
        ...


S = TypeVar("S", bound=MethodState)


class Method(Protocol[S]):
    """A DP training method with its noise fixed by a plan: a frozen dataclass.

    The fields are what the plan fixes for every candidate (noise multipliers, intervals, momentum).
    What differs between candidates is passed to ``init``. Nothing is kept in the method itself: one
    method trains several stacks, each in a thread of its own.

    Example:
        What a study does, without its oracle's noise and clipping:

        >>> from types import SimpleNamespace
        >>> import torch
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> from privtune.training.methods import FixedDPSGD
        >>> schedule = Schedule(records=1000, sample_rate=0.05, steps=20)
        >>> method = FixedDPSGD.for_budget(schedule, epsilon=2.0, delta=1e-5)
        >>> round(method.noise_multiplier, 2), method.event(schedule).count
        (1.0, 20)
        >>> method.gradient_evaluations(schedule)
        1000.0
        >>> state = method.init(torch.zeros(1, 2), [{"learning_rate": 0.5, "max_grad_norm": 1.0}])
        >>> gradient = torch.tensor([[1.0, -2.0]])
        >>> oracle = SimpleNamespace(
        ...     pace=1.0, sample=lambda: None, gradient=lambda *_, **__: gradient
        ... )
        >>> method.update(state, oracle).params
        tensor([[-0.5000,  1.0000]])
        >>> sorted(method.report(state))
        ['learning_rate', 'max_grad_norm']
    """

    name: ClassVar[str]
    """Name in specs and on the command line."""

    summary: ClassVar[str]
    """One line: what it does."""

    adapts: ClassVar[tuple[str, ...]]
    """Hyperparameters it sets by itself."""

    parameters: ClassVar[tuple[str, ...]]
    """Hyperparameters that a candidate must give."""

    releases: ClassVar[str]
    """What one step releases, in words."""

    @classmethod
    def for_budget(cls, *args: Any, **options: Any) -> Self:
        """Build the method with the least noise that keeps one training at a target.

        Called as ``for_budget(schedule, epsilon=..., delta=..., **options)``; the options are the
        method's own, which is why they are not typed here.

        Args:
            *args: The schedule, by position.
            schedule: Records, rate and number of steps.
            epsilon: Target, above 0.
            delta: Target, in (0, 1).
            **options: Fields of the method, but for those that this finds.

        Returns:
            The method; its event at this schedule costs (epsilon, delta) at most.

        Raises:
            PrivTuneError: If an option is not a field, or nothing meets the target.
        """
        ...

    def event(self, schedule: Schedule) -> Event:
        """Return the privacy event of one training with this schedule. Pure.

        Args:
            schedule: Records, rate and number of steps.

        Returns:
            What an accountant needs to know of it.
        """
        ...

    def gradient_evaluations(self, schedule: Schedule) -> float:
        """Return the expected per-sample gradients of one training with this schedule. Pure.

        Args:
            schedule: Records, rate and number of steps.

        Returns:
            Gradients of single records, in expectation over the samples.
        """
        ...

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> S:
        """Make the state of K candidates from their initial parameters, shape ``[K, P]``.

        Args:
            params: Initial parameters, shape ``[K, P]``.
            candidates: What each candidate chose for :attr:`parameters`, K of them.

        Returns:
            The state before the first step.

        Raises:
            InvalidInputError: If a candidate lacks a hyperparameter, or one is not above 0.
        """
        ...

    def update(self, state: S, oracle: Oracle) -> S:
        """Take one step: ask the oracle for releases, return the next state.

        Args:
            state: The state before the step.
            oracle: What all access to the data goes through: it samples, clips, adds noise, and
                writes the transcript.

        Returns:
            The state after the step; a new value.
        """
        ...

    def report(self, state: S) -> Mapping[str, torch.Tensor]:
        """Return what may be plotted by step (shape ``[K]`` each): functions of releases only.

        Args:
            state: Any state.

        Returns:
            Values by name, shape ``[K]`` each.
        """
        ...


M = TypeVar("M", bound="Method[Any]")


def scale_noise_of(method: M, factor: float) -> M:
    """Return the method with every one of its noise multipliers times ``factor``.

    Its event is then the old one scaled by the same factor (``accounting.scale_noise``).
    """
    noises = [f.name for f in fields(method) if f.name.endswith("noise_multiplier")]  # type: ignore[arg-type]
    scaled: M = replace(method, **{name: getattr(method, name) * factor for name in noises})  # type: ignore[type-var]
    return scaled
