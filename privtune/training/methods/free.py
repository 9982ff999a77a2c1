"""Methods without a learning rate to choose: DoG, DoWG, D-Adaptation, Prodigy, and a public rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from privtune.errors import InvalidInputError
from privtune.training.methods._base import (
    AdamW,
    check_fraction,
    check_hyperparameter,
    check_nonnegative,
    check_positive,
    descend,
    expect_nothing,
    first_size,
    rows,
)
from privtune.training.methods._by_layer import LayerClipping
from privtune.training.methods._sampled import SampledGradient
from privtune.training.methods.dpsgd import LearningRateState

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.clipping import Clipping
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate


_FARTHEST = 1e12
"""Largest distance over the first: far beyond what any training needs, and squares of it are numbers."""


def farther(
    distance: torch.Tensor, seen: torch.Tensor, first: torch.Tensor | float
) -> torch.Tensor:
    """Return the larger of two distances, no more than 1e12 times the first; what is no number is 0.

    Args:
        distance: So far, shape ``[K]``.
        seen: The new ones.
        first: With which a training begins.
    """
    import torch

    return torch.fmax(distance, seen).clamp(
        max=_FARTHEST * first
    )  # fmax takes the one that is a number


class _WithDistance(Protocol):
    @property
    def distance(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class FreeGradient(LayerClipping, SampledGradient):
    """A method with nothing left to set: its gradients are normalised, or clipped to a fixed norm.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient (automatic clipping).
    """

    max_grad_norm: float | None = None

    adapts: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    parameters: ClassVar[tuple[str, ...]] = ()
    releases: ClassVar[str] = "one normalised noisy gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_grad_norm is not None:
            check_hyperparameter("max_grad_norm", "max_grad_norm", self.max_grad_norm)

    def _clipping(self) -> Clipping:
        return self.normalise() if self.max_grad_norm is None else self.clip(self.max_grad_norm)


@dataclass(frozen=True)
class DistanceAdam(FreeGradient):
    """Adam whose rate is an estimate of the distance to the solution.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        learning_rate: Factor on the estimated rate; 1 is the authors' advice.
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1).
        stability: Added to the root of the second moment, above 0.
        weight_decay: Decoupled, at least 0.
        initial_distance: d_0, above 0.
    """

    learning_rate: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    stability: float = 1e-8
    weight_decay: float = 0.0
    initial_distance: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learning_rate", "stability", "initial_distance"):
            check_positive(name, getattr(self, name))
        check_fraction("beta1", self.beta1)
        check_fraction("beta2", self.beta2)
        check_nonnegative("weight_decay", self.weight_decay)

    def report(self, state: _WithDistance) -> Mapping[str, torch.Tensor]:
        """Return the learning rate, which lies in ``learning_rate * [1, 1e12] * initial_distance``."""
        return {"learning_rate": self.learning_rate * state.distance}


@dataclass(frozen=True, eq=False)
class DoGState:
    """State of K DoG trainings: ``params`` is the average that is released, if one is kept."""

    params: torch.Tensor
    iterate: torch.Tensor
    origin: torch.Tensor
    distance: torch.Tensor
    squares: torch.Tensor
    learning_rate: torch.Tensor
    step: int


@dataclass(frozen=True)
class DoG(FreeGradient):
    """SGD with the rate ``max distance from the start / root of the sum of squared gradients``.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        initial_distance: r_ε relative to ``1 + |x_0|``, above 0; 1e-6 is the paper's advice.
        averaging: γ of the polynomial-decay average that is released (8 in the paper); None
            releases the last iterate.

    Raises:
        InvalidInputError: If a field is out of its range.

    **Interval**: the distance r stays within 1 and 1e12 times its first value, ``initial_distance * (1 +
    |x_0|)``, and the rate within 0 and 1e4 times it. A release that is no number makes the rate 0; the
    weights it moves are no numbers, which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier. The norms are of noisy gradients, which
    hold about ``sqrt(P) * noise`` however small the true ones are.

    Example:
        >>> DoG(1.1).adapts, DoG(1.1, max_grad_norm=0.5).parameters  # nothing is left to tune
        (('learning_rate', 'max_grad_norm'), ())
    """

    initial_distance: float = 1e-6
    averaging: float | None = 8.0

    name: ClassVar[str] = "dog"
    summary: ClassVar[str] = "SGD with the distance travelled over the gradients seen as rate"
    reported: ClassVar[tuple[str, ...]] = ("learning_rate", "distance")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("initial_distance", self.initial_distance)
        if self.averaging is not None and not self.averaging >= 0.0:
            raise InvalidInputError("averaging", self.averaging, "must be at least 0, or None")

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> DoGState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        nothing = params.new_zeros(params.shape[0])
        return DoGState(
            params=params,
            iterate=params,
            origin=params,
            distance=self.initial_distance * (1.0 + params.norm(dim=1)),
            squares=nothing,
            learning_rate=nothing,
            step=0,
        )

    def update(self, state: DoGState, oracle: Oracle) -> DoGState:
        """Take one step at the rate that distance and gradients give."""
        gradient = self._gradient(oracle, state.iterate, self._clipping())
        first = self.initial_distance * (1.0 + state.origin.norm(dim=1))
        seen = (state.iterate - state.origin).norm(dim=1)
        distance = farther(state.distance, seen, first)
        squares = state.squares + gradient.square().sum(dim=1)
        rate = oracle.pace * (distance / (squares + 1e-8).sqrt()).nan_to_num(0.0)
        iterate = state.iterate - rows(rate) * gradient
        step = state.step + 1
        return replace(
            state,
            params=iterate if self.averaging is None else self._average(state, iterate, step),
            iterate=iterate,
            distance=distance,
            squares=squares,
            learning_rate=rate,
            step=step,
        )

    def _average(self, state: DoGState, iterate: torch.Tensor, step: int) -> torch.Tensor:
        gamma = self.averaging or 0.0
        weight = (gamma + 1.0) / (step + gamma)
        return state.params + weight * (iterate - state.params)


@dataclass(frozen=True, eq=False)
class DoWGState:
    """State of K DoWG trainings."""

    params: torch.Tensor
    origin: torch.Tensor
    distance: torch.Tensor
    weighted_squares: torch.Tensor
    learning_rate: torch.Tensor


@dataclass(frozen=True)
class DoWG(FreeGradient):
    """SGD with the rate ``r² / sqrt(sum of r² |g|²)``, r the largest distance from the start.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        initial_distance: r_ε, above 0; 1e-4 is the default of the authors' code.

    **Interval**: the distance r stays within 1 and 1e12 times ``initial_distance``, and the rate within 0
    and ``1e20 r²``. A release that is no number makes the rate 0; the weights it moves are no numbers,
    which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    Example:
        >>> DoWG(1.1).initial_distance, DoWG(1.1, max_grad_norm=0.5).parameters
        (0.0001, ())
    """

    initial_distance: float = 1e-4

    name: ClassVar[str] = "dowg"
    summary: ClassVar[str] = "SGD with distance over distance-weighted gradients as rate"
    reported: ClassVar[tuple[str, ...]] = ("learning_rate", "distance")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("initial_distance", self.initial_distance)

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> DoWGState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        nothing = params.new_zeros(params.shape[0])
        return DoWGState(
            params=params,
            origin=params,
            distance=nothing + self.initial_distance,
            weighted_squares=nothing,
            learning_rate=nothing,
        )

    def update(self, state: DoWGState, oracle: Oracle) -> DoWGState:
        """Take one step at the rate that distance and weighted gradients give."""
        gradient = self._gradient(oracle, state.params, self._clipping())
        seen = (state.params - state.origin).norm(dim=1)
        distance = farther(state.distance, seen, self.initial_distance)
        weighted = state.weighted_squares + distance.square() * gradient.square().sum(dim=1)
        rate = (distance.square() / weighted.sqrt().clamp_min(1e-20)).nan_to_num(0.0)
        rate = oracle.pace * rate
        return replace(
            state,
            params=state.params - rows(rate) * gradient,
            distance=distance,
            weighted_squares=weighted,
            learning_rate=rate,
        )


@dataclass(frozen=True, eq=False)
class DAdaptationState:
    """State of K D-Adaptation trainings; scalars have shape ``[K]``, in float64."""

    params: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    weighted: torch.Tensor
    distance: torch.Tensor
    numerator: torch.Tensor


@dataclass(frozen=True)
class DAdaptation(DistanceAdam):
    """Adam on noisy gradients whose rate is a growing lower bound on the distance.

    The update of ``dadaptation.DAdaptAdam`` with its defaults, for K candidates at once on an
    explicit state (tests compare the two).

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        learning_rate: Factor on the estimated rate; 1 is the authors' advice.
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1).
        stability: Added to the root of the second moment, above 0.
        weight_decay: Decoupled, at least 0.
        initial_distance: d_0, above 0.

    **Interval**: the distance stays within 1 and 1e12 times ``initial_distance``, and the rate is
    ``learning_rate`` times it. A release that is no number moves neither; the weights it moves are
    no numbers, which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    Example:
        >>> DAdaptation(1.1).adapts
        ('learning_rate', 'max_grad_norm')
    """

    name: ClassVar[str] = "d-adaptation"
    summary: ClassVar[str] = "Adam whose rate is a growing lower bound on the distance"

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> DAdaptationState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        zeros = params.new_zeros(params.shape)
        scalar = params.new_zeros(params.shape[0]).double()
        return DAdaptationState(
            params=params,
            first=zeros,
            second=zeros,
            weighted=zeros,
            distance=scalar + self.initial_distance,
            numerator=scalar,
        )

    def update(self, state: DAdaptationState, oracle: Oracle) -> DAdaptationState:
        """Take one step and raise the estimate of the distance if the gradients say so."""
        import torch

        gradient = self._gradient(oracle, state.params, self._clipping())
        root = self.beta2**0.5
        rate = state.distance * self.learning_rate
        by_row = rows(rate).to(gradient)
        scaled = state.weighted / (state.second.sqrt() + self.stability)
        inner = rate * (gradient * scaled).sum(dim=1).double()
        first = self.beta1 * state.first + by_row * (1.0 - self.beta1) * gradient
        second = self.beta2 * state.second + (1.0 - self.beta2) * gradient.square()
        weighted = root * state.weighted + by_row * (1.0 - root) * gradient
        numerator = root * state.numerator + (1.0 - root) * inner
        total = weighted.abs().sum(dim=1).double()
        known = total > 0
        estimate = torch.where(known, numerator / ((1.0 - root) * total), state.distance)
        # The average holds the rates of earlier steps, so a schedule scales the step as a whole.
        step = first / (second.sqrt() + self.stability)
        step = step + self.weight_decay * by_row * state.params
        params = state.params - torch.as_tensor(oracle.pace).to(step).reshape(-1, 1) * step
        return replace(
            state,
            params=torch.where(rows(known), params, state.params),
            first=first,
            second=second,
            weighted=weighted,
            distance=farther(state.distance, estimate, self.initial_distance),
            numerator=torch.where(known, numerator, state.numerator),
        )


@dataclass(frozen=True, eq=False)
class ProdigyState:
    """State of K Prodigy trainings; scalars have shape ``[K]``, in float64."""

    params: torch.Tensor
    origin: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    weighted: torch.Tensor
    distance: torch.Tensor
    largest: torch.Tensor
    numerator: torch.Tensor


@dataclass(frozen=True)
class Prodigy(DistanceAdam):
    """Adam on noisy gradients whose rate is a running estimate of the distance to the solution.

    The update of ``prodigyopt.Prodigy`` with its defaults, for K candidates at once on an explicit
    state (tests compare the two).

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        learning_rate: Factor on the estimated rate; 1 is the authors' advice.
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1); its root weighs the estimate.
        stability: Added to the root of the second moment, above 0.
        weight_decay: Decoupled, at least 0.
        initial_distance: d_0, above 0.

    **Interval**: the distance stays within 1 and 1e12 times ``initial_distance``, and the rate is
    ``learning_rate`` times it. A release that is no number moves neither; the weights it moves are
    no numbers, which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    Example:
        >>> Prodigy(1.1).learning_rate, Prodigy.adapts
        (1.0, ('learning_rate', 'max_grad_norm'))
    """

    name: ClassVar[str] = "prodigy"
    summary: ClassVar[str] = "Adam whose rate is an estimate of the distance to the solution"

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> ProdigyState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        zeros = params.new_zeros(params.shape)
        scalar = params.new_zeros(params.shape[0]).double()
        return ProdigyState(
            params=params,
            origin=params,
            first=zeros,
            second=zeros,
            weighted=zeros,
            distance=scalar + self.initial_distance,
            largest=scalar + self.initial_distance,
            numerator=scalar,
        )

    def update(self, state: ProdigyState, oracle: Oracle) -> ProdigyState:
        """Take one step and update the estimate of the distance."""
        import torch

        gradient = self._gradient(oracle, state.params, self._clipping())
        beta3 = self.beta2**0.5
        distance = state.distance
        rate = distance * self.learning_rate * oracle.pace
        # Relative to d_0, as the authors do it, to stay clear of numbers that are too small.
        weight = distance / self.initial_distance * rate
        moved = (gradient * (state.origin - state.params)).sum(dim=1).double()
        numerator = beta3 * state.numerator + weight * moved

        def by_row(scalars: torch.Tensor) -> torch.Tensor:
            return rows(scalars).to(gradient)

        weighted = beta3 * state.weighted + by_row(weight) * gradient
        first = self.beta1 * state.first + by_row(distance * (1 - self.beta1)) * gradient
        second = self.beta2 * state.second
        second = second + by_row(distance**2 * (1 - self.beta2)) * gradient.square()
        total = weighted.abs().sum(dim=1).double()
        estimate = numerator / total
        known = total > 0
        estimate = torch.where(known, estimate, distance)
        started = torch.where(
            distance == self.initial_distance,
            farther(distance, estimate, self.initial_distance),
            distance,
        )
        largest = farther(state.largest, estimate, self.initial_distance)
        params = state.params * (1.0 - self.weight_decay * by_row(rate))
        step = (
            by_row(rate)
            * first
            / (second.sqrt() + by_row(torch.where(known, largest, started) * self.stability))
        )
        return replace(
            state,
            params=torch.where(rows(known), params - step, state.params),
            first=first,
            second=second,
            weighted=weighted,
            distance=torch.where(known, largest, distance),
            largest=torch.where(known, largest, state.largest),
            numerator=torch.where(known, numerator, state.numerator),
        )


@dataclass(frozen=True)
class PublicRate(FreeGradient):
    """AdamW on noisy gradients at a constant rate of 0.2 times the size of the first weights.

    A weight then moves by a fifth of its first size a step at most. Nothing is adapted to the data:
    a method that pays for its rate has to do better than this.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        share: The rate over the size of the first weights, above 0.
        weight_decay: Decoupled, at least 0; 0.01 as in HyFreeDP.

    **Interval**: the rate is a constant: ``share`` times the root mean square of the first weights, or
    times ``1 / sqrt(3 fan_in)`` where they are all 0. A ``schedule`` scales it as its factors say.

    **Guarantee**: as DP-SGD with the same noise multiplier. First weights hold nothing of the data.

    Example:
        >>> PublicRate(1.1).share, PublicRate.parameters  # nothing is left to tune
        (0.2, ())
    """

    share: float = 0.2
    weight_decay: float = 0.01

    name: ClassVar[str] = "public-rate"
    summary: ClassVar[str] = "AdamW at a constant rate, a fifth of the size of the first weights"
    adapts: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("share", self.share)
        self._optimizer()

    def _optimizer(self) -> AdamW:
        return AdamW(weight_decay=self.weight_decay)

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> LearningRateState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        return LearningRateState(
            params=params,
            learning_rate=params.new_zeros(params.shape[0]),  # known at the first step
            moments=self._optimizer().init(params),
        )

    def update(self, state: LearningRateState, oracle: Oracle) -> LearningRateState:
        """Take one step along the noisy mean gradient."""
        rate = state.learning_rate
        if state.moments.step == 0:
            rate = self.share * first_size(state.params, oracle)[0]
        gradient = self._gradient(oracle, state.params, self._clipping())
        direction, moments = self._optimizer().direction(state.moments, gradient, state.params)
        params = descend(state.params, rate * oracle.pace, direction)
        return replace(state, params=params, learning_rate=rate, moments=moments)
