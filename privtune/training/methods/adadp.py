"""ADADP: the learning rate from one full step against two half steps (arXiv 1809.03832, Alg. 2).

What differs from the paper:

* The tolerance is ``min(1, sqrt(d / 2T))``. Section 4.2 derives ``sqrt(d / 2T)``, and its networks
  are trained with τ = 1: there d/2T is of order one. Where it is far above (a wide net in a short
  training), the rule asks for a rate that grows as 1/σ, far past the best one.
* The rate is fixed after the first third of the steps, and then decays by (5.1). The paper fixes it
  after half of its 100 epochs; while it adapts, only every second gradient moves the parameters.
* Poisson samples, and an expected batch size, in the place of batches of a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.errors import InvalidInputError
from privtune.training.methods import method as base
from privtune.training.methods.rate_schedule import epoch_decay

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule

_FAR = 10.0  # d/2T beyond this, or below its inverse, is far from what the rule is meant for
_WIDEST = 1e12  # largest rate over the first one: beyond, float32 has no squares of steps


@dataclass(frozen=True, eq=False)
class ADADPState:
    """The state of K ADADP trainings, with the start of the present iteration and its last error."""

    params: torch.Tensor
    origin: torch.Tensor
    learning_rate: torch.Tensor
    first_rate: torch.Tensor
    max_grad_norm: torch.Tensor
    error: torch.Tensor
    step: int


@dataclass(frozen=True)
class ADADP(base.Method):
    """SGD whose learning rate keeps the local error of a step near a tolerance.

    One iteration of Algorithm 2 is two steps of the schedule, each on a Poisson sample of its own:
    the first takes the full step, the second compares it with two half steps, accepts or discards
    it and adapts the rate. So T steps cost what T steps of DP-SGD cost.

    Args:
        tolerance: Error τ that is aimed at, above 0; None takes ``sqrt(d / 2T)`` of Section 4.2,
            with d parameters and T iterations, or ``largest_tolerance`` if that is less.
        largest_tolerance: Most that the rule may give, above 0: the papers' experiments take 1.
        smallest_factor: α_min in (0, 1], the least change of the rate in one iteration.
        largest_factor: α_max >= 1, the largest.
        acceptance: Whether a step with an error above τ is discarded; the paper omits it for
            neural networks.
        adapt_epochs: Epochs after which the rate is fixed and decays by (5.1), with one step of
            DP-SGD for each sample from there on; None leaves it to ``adapt_share``.
        adapt_share: The same as a share of the steps, above 0; 1 adapts to the end.
        decay: Factor of the decay (5.1) for each epoch after that, at least 0.
        learning_rate: Initial rate η₀, above 0, for candidates that give none.

    Raises:
        InvalidInputError: If a field is out of its range.

    **Interval**: after n iterations of adapting, the rate is within η₀ ``smallest_factor ** n`` and η₀
    ``largest_factor ** n``, and always within 1e-12 and 1e12 times η₀.

    **Guarantee**: T Poisson-sampled Gaussian releases (Theorem 9: two for each iteration). Both
    steps, the error, accepting and the rate are post-processing.

    References:
        Koskela & Honkela 2020, Algorithm 2, Theorem 9 and Section 4.2.

    Example:
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> schedule = Schedule(records=1000, sample_rate=0.05, steps=20)  # ten iterations
        >>> ADADP(1.1).event(schedule)  # what DP-SGD costs
        Repeated(count=20, event=PoissonSampled(rate=0.05, event=Gaussian(noise_multiplier=1.1)))
        >>> ADADP(1.1).advice(schedule, lambda: 50_000)[:53]
        'The rule for the tolerance is meant for d/2T of about'
    """

    noise_multiplier: float
    tolerance: float | None = base.positive(None)
    largest_tolerance: float = 1.0
    smallest_factor: float = 0.9
    largest_factor: float = 1.1
    acceptance: bool = False
    adapt_epochs: float | None = base.positive(None)
    adapt_share: float = base.positive(1.0 / 3.0)
    decay: float = base.nonnegative(0.1)
    learning_rate: float = base.positive(0.1)
    clipping: str = base.by_layer_option()

    name: ClassVar[str] = "adadp"
    summary: ClassVar[str] = "Learning rate adapted by comparing one full step with two half steps"
    reported: ClassVar[tuple[str, ...]] = ("learning_rate", "error")
    adapts: ClassVar[tuple[str, ...]] = ("learning_rate",)
    parameters: ClassVar[tuple[str, ...]] = ("max_grad_norm",)
    releases: ClassVar[str] = "one clipped noisy gradient; an iteration takes two steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.largest_tolerance > 0.0:
            raise InvalidInputError(
                "largest_tolerance",
                self.largest_tolerance,
                "must be a number above 0",
            )
        if not 0.0 < self.smallest_factor <= 1.0 <= self.largest_factor < math.inf:
            raise InvalidInputError(
                "smallest_factor, largest_factor",
                (self.smallest_factor, self.largest_factor),
                "must lie on the two sides of 1, above 0",
            )

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> ADADPState:
        """Make the state of K candidates; each gives max_grad_norm, and may give learning_rate."""
        rate = base.candidate_column(
            candidates,
            "learning_rate",
            params,
            default=self.learning_rate,
        )
        return ADADPState(
            params=params,
            origin=params,
            learning_rate=rate,
            first_rate=rate,
            max_grad_norm=base.candidate_column(candidates, "max_grad_norm", params),
            error=rate.new_full(rate.shape, float("nan")),
            step=0,
        )

    def update(self, state: ADADPState, oracle: Oracle) -> ADADPState:
        """Take one step: a full step, a comparison with two half steps, or a step at the fixed rate."""
        rate = oracle.schedule.sample_rate
        odd = state.step % 2 == 1
        adapted = self.adapt_epochs
        if adapted is None:
            adapted = self.adapt_share * oracle.schedule.steps * rate
        if (state.step - odd) * rate >= adapted - 1e-9:
            factor = epoch_decay(state.step * rate - adapted, self.decay)
            params = self._full_step(state, oracle, state.learning_rate * factor)
            return replace(state, params=params, step=state.step + 1)
        if not odd:
            params = self._full_step(state, oracle, state.learning_rate)
            return replace(state, params=params, origin=state.params, step=state.step + 1)
        return self._compare(state, oracle)

    def _full_step(self, state: ADADPState, oracle: Oracle, rate: torch.Tensor) -> torch.Tensor:
        gradient = self.gradient(oracle, state.params, self.clip(state.max_grad_norm))
        return base.descend(state.params, rate * oracle.pace, gradient)

    def _compare(self, state: ADADPState, oracle: Oracle) -> ADADPState:
        """Compare the full step with two half steps and adapt the learning rate."""
        import torch

        middle = state.origin.lerp(state.params, 0.5)
        gradient = self.gradient(oracle, middle, self.clip(state.max_grad_norm))
        halves = base.descend(middle, state.learning_rate * oracle.pace / 2, gradient)
        # Equation (4.1): relative where a parameter is above 1, absolute below.
        error = (state.params - halves).div_(state.params.abs().clamp_min_(1.0)).norm(dim=1)
        tolerance = self._tolerance(state.params.shape[1], oracle.schedule.steps)
        # An error that is no number is a large one.
        factor = (
            (tolerance / error).nan_to_num(0.0).clamp(self.smallest_factor, self.largest_factor)
        )
        adapted = torch.minimum(state.learning_rate * factor, _WIDEST * state.first_rate)
        params = state.params
        if self.acceptance:
            params = torch.where(base.rows(error > tolerance), state.origin, params)
        return replace(
            state,
            params=params,
            learning_rate=torch.maximum(adapted, state.first_rate / _WIDEST),
            error=error,
            step=state.step + 1,
        )

    def _tolerance(self, dimension: int, steps: int) -> float:
        if self.tolerance is not None:
            return self.tolerance
        rule = default_tolerance(dimension, max(1, steps // 2))
        return min(self.largest_tolerance, rule)

    def advice(self, schedule: Schedule, dimension: Callable[[], int]) -> str:
        """Return a warning if the training is too short, or its size unfit for the rule of the tolerance."""
        return " ".join(filter(None, (self._far(schedule, dimension()), self._short(schedule))))

    def _short(self, schedule: Schedule) -> str:
        """Return a warning if a short training allows the learning rate only small changes."""
        steps = self.adapt_share * schedule.steps
        if self.adapt_epochs is not None:
            steps = self.adapt_epochs / schedule.sample_rate
        iterations = int(min(steps, schedule.steps)) // 2
        reach = self.largest_factor ** min(iterations, 1000)
        if reach >= _FAR:
            return ""
        return (
            f"The learning rate starts at {self.learning_rate:g} and changes by at most a factor of "
            f"{reach:.2g} in {iterations} iterations. On a training this short, fixed hyperparameters are "
            "often better. Otherwise set learning_rate, or use more epochs."
        )

    def _far(self, schedule: Schedule, dimension: int) -> str:
        """Return a warning if the rule of the tolerance is not meant for this training's size."""
        ratio = default_tolerance(dimension, max(1, schedule.steps // 2)) ** 2
        if self.tolerance is not None or 1.0 / _FAR <= ratio <= _FAR:
            return ""
        tolerance = self._tolerance(dimension, schedule.steps)
        return (
            f"The rule for the tolerance is meant for d/2T of about 1, and here it is {ratio:.3g} (d = "
            f"{dimension:,} parameters, T = {max(1, schedule.steps // 2):,} iterations). So the tolerance is "
            f"{tolerance:.3g}; set tolerance to change it."
        )


def default_tolerance(dimension: int, iterations: int) -> float:
    """Return the tolerance ``sqrt(d / 2T)`` of Section 4.2, for d parameters and T iterations."""
    return math.sqrt(dimension / (2.0 * iterations))
