"""Noisy gradient descent on all records, at a rate that the loss's constants give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from privtune.errors import InvalidInputError
from privtune.training.mechanism.clipping import Clipping, Flat
from privtune.training.methods._common import (
    check_choice,
    check_nonnegative,
    check_positive,
    descend,
    expect_nothing,
)
from privtune.training.methods._rate_schedule import Scheduled

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule
    from privtune.training.methods._base import Candidate

_ADJACENCIES = ("replace-one", "add-remove")


@dataclass(frozen=True, eq=False)
class _WholeRecord(Clipping):
    """Flat clipping whose sensitivity is that of the adjacency: twice the norm for replacement."""

    max_grad_norm: float
    adjacency: str

    def sensitivity(self, candidates: int) -> torch.Tensor:
        factor = 2.0 if self.adjacency == "replace-one" else 1.0
        return factor * Flat(self.max_grad_norm).sensitivity(candidates)

    def limits(self, norms: torch.Tensor) -> torch.Tensor:
        return Flat(self.max_grad_norm).limits(norms)

    @staticmethod
    def rule(norms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        return Flat.rule(norms, limits)


@dataclass(frozen=True, eq=False)
class PURState:
    """State of K trainings; ``step`` counts the updates."""

    params: torch.Tensor
    noise: torch.Tensor
    step: int


@dataclass(frozen=True)
class FullBatchDescent(Scheduled, ABC):
    """Noisy gradient descent ``θ - (∇F(θ) + noise) / 2M`` on all records, for a horizon.

    A study gives what a spec leaves out and its task knows: ``lipschitz``, ``smoothness``, ``gap`` of a
    linear model on features of public bounds, ``dimension``, and the budget's ``adjacency``.

    Args:
        lipschitz: L, what a record's gradient is clipped to, above 0: of the loss on data alone.
        smoothness: M, above 0, with the regularisation's; the rate is ``1 / 2M``.
        dimension: d, the number of parameters.
        horizon: Updates that release anything; None for every step of the schedule.
        regularisation: λ, added to the gradient as ``λ θ``; it touches no data.
        adjacency: ``"replace-one"`` (the paper's, sensitivity 2L) or ``"add-remove"`` (L, with a
            public number of records).
    """

    lipschitz: float
    smoothness: float
    dimension: int
    horizon: int | None = None
    regularisation: float = 0.0
    adjacency: str = "replace-one"

    proven: ClassVar[tuple[str, ...]] = ("lipschitz", "smoothness")
    """What an arm gives, or its task declares: bounds of the loss for every possible record."""
    clips_whole: ClassVar[str] = (
        "lipschitz bounds the whole gradient, and the noise follows from it"
    )
    parameters: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("lipschitz", self.lipschitz)
        check_positive("smoothness", self.smoothness)
        check_nonnegative("regularisation", self.regularisation)
        check_choice("adjacency", self.adjacency, _ADJACENCIES)
        for name in ("dimension", "horizon"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(name, value, "must be a whole number of at least 1")

    @classmethod
    def complete(
        cls,
        options: Mapping[str, Any],
        *,
        constants: Mapping[str, float],
        dimension: int,
        adjacency: str,
    ) -> dict[str, Any]:
        """Return the options with what a study knows of those that are not given. Pure.

        Args:
            options: As a spec has them.
            constants: Of the task's loss: ``lipschitz``, ``smoothness``, ``gap``, or none of them.
            dimension: Number of trained parameters.
            adjacency: The budget's.

        Returns:
            The options, for ``for_budget``.

        Example:
            >>> from privtune.training.methods import PUR
            >>> proven = {"lipschitz": 2.0, "smoothness": 1.0, "gap": 0.69}
            >>> told = PUR.complete(
            ...     {"regularisation": 0.1}, constants=proven, dimension=4, adjacency="add-remove"
            ... )
            >>> told["regime"], told["strong_convexity"], told["smoothness"]
            ('strongly-convex', 0.1, 1.1)
        """
        known: dict[str, Any] = dict(constants)
        penalty = options.get("regularisation", 0.0)
        if "smoothness" in known and isinstance(penalty, int | float):
            known["smoothness"] += penalty
        known |= {"dimension": dimension, "adjacency": adjacency}
        own = {field.name for field in fields(cls)}
        return {**{name: value for name, value in known.items() if name in own}, **options}

    @property
    def learning_rate(self) -> float:
        """``1 / 2M``."""
        return 1.0 / (2.0 * self.smoothness)

    def _sensitivity(self, records: int) -> float:
        """Sensitivity of the mean gradient."""
        factor = 2.0 if self.adjacency == "replace-one" else 1.0
        return factor * self.lipschitz / records

    def _updates(self, schedule: Schedule) -> int:
        return schedule.steps if self.horizon is None else min(schedule.steps, self.horizon)

    def gradient_evaluations(self, schedule: Schedule) -> float:
        """Return N per-sample gradients for each update of the horizon, whatever the rate."""
        return float(schedule.records * self._updates(schedule))

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> PURState:
        """Make the state of K candidates; a candidate gives nothing.

        Raises:
            InvalidInputError: If the model has another number of parameters, or a candidate gives
                anything.
        """
        if params.shape[1] != self.dimension:
            raise InvalidInputError(
                "dimension", self.dimension, f"must be the model's, {params.shape[1]}"
            )
        expect_nothing(candidates)
        return PURState(
            params=params, noise=params.new_full((params.shape[0],), float("nan")), step=0
        )

    @abstractmethod
    def _multiplier(self, step: int, records: int) -> float:
        """Return the noise of one update over the sensitivity of the mean."""

    def update(self, state: PURState, oracle: Oracle) -> PURState:
        """Take one step along the noisy mean gradient; past the horizon, release nothing."""
        if state.step >= self._updates(oracle.schedule):
            return replace(state, step=state.step + 1)
        records = oracle.schedule.records
        noise_multiplier = self._multiplier(state.step, records)
        gradient = oracle.gradient(
            oracle.everything(),
            state.params,
            clipping=_WholeRecord(self.lipschitz, self.adjacency),
            noise_multiplier=noise_multiplier,
        )
        gradient = gradient + self.regularisation * state.params
        rate = state.noise.new_full(state.noise.shape, self.learning_rate)
        return replace(
            state,
            params=descend(state.params, rate * oracle.pace, gradient),
            noise=state.noise.new_full(
                state.noise.shape, noise_multiplier * self._sensitivity(records)
            ),
            step=state.step + 1,
        )

    def report(self, state: PURState) -> Mapping[str, torch.Tensor]:
        """Return the standard deviation of the last noise."""
        return {"noise": state.noise}
