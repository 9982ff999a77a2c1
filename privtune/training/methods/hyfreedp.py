"""HyFreeDP: learning rate and clipping without hyperparameters (Bu & Liu 2025, Algorithm 1).

What differs from the paper:

* The account. The paper composes the loss releases as if each had been sampled separately, but all
  of them see one batch; ``event`` charges one joint Gaussian release (``loss_batch="same"``), or
  the losses have a batch of their own (``loss_batch="separate"``).
* Guards. A noisy loss may be negative, and so may a fitted coefficient: the loss bound stays above
  its initial value, and the learning rate moves only by a fit whose coefficients are both positive.
* The fit, unless ``fit="paper"``. At the initial rate of 1e-4 the three losses of a small batch
  differ by less than their noise; Algorithm 1 then divides two noises, a half-Cauchy ratio of scale
  ``sqrt(2)/(2 sqrt(6)) = 0.29``, so the rate shrinks geometrically and training never starts.
  ``fit="tracked"`` uses what is public, the scale of that noise: slope and curvature are filtered
  over the updates (Kalman), a fit counts only where its curvature stands out from the noise, and
  the losses are probed at a reach of their own, which grows until the curvature is visible. Probing
  far moves no parameter; no step goes farther than was probed. Without noise it is Algorithm 1 once
  the reach has grown to the fitted rate. All of it is post-processing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from privtune.errors import InvalidInputError
from privtune.training.clipping import Automatic
from privtune.training.methods._common import (
    build,
    candidate_column,
    check_choice,
    check_nonnegative,
    check_positive,
    rows,
)
from privtune.training.methods._optimizers import SGD, AdamW, InnerOptimizer, Moments

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.methods._base import Candidate
    from privtune.training.oracle import Oracle, Sample
    from privtune.training.schedule import Schedule

__all__ = ["Fit", "HyFreeDP", "HyFreeDPState", "fit_paper", "fit_tracked"]

_LOSS_BATCHES = ("same", "separate")
_FITS = ("tracked", "paper")
_BOUND_CEILING = 1e6
_BOUND_SHRINK = 0.5  # the bound at most halves at an update: a noisy sum may be far too small
_SATURATED = 0.9  # losses above this part of their bound are flat because they were clipped
_GROWTH = 4.0  # of the reach, while no curvature is visible
_DRIFT = 0.3  # relative change of slope and curvature from one update to the next


@dataclass(frozen=True, eq=False)
class Fit:
    """What is known of the loss along the step direction; every field has shape ``[K]``.

    Args:
        learning_rate: The rate to step with.
        reach: How far along the direction the next losses are probed.
        slope: Estimate of the loss's decrease per unit of reach.
        slope_variance: Its variance; infinite before the first estimate.
        curvature: Estimate of the second derivative.
        curvature_variance: Its variance.
    """

    learning_rate: torch.Tensor
    reach: torch.Tensor
    slope: torch.Tensor
    slope_variance: torch.Tensor
    curvature: torch.Tensor
    curvature_variance: torch.Tensor


@dataclass(frozen=True, eq=False)
class HyFreeDPState:
    """State of K HyFreeDP trainings; ``loss`` is the last noisy loss at the iterate."""

    params: torch.Tensor
    fit: Fit
    loss_bound: torch.Tensor
    loss: torch.Tensor
    moments: Moments
    step: int


@dataclass(frozen=True)
class HyFreeDP:
    """Normalised noisy gradients, with the learning rate fitted to three noisy losses.

    Args:
        gradient_noise_multiplier: Noise standard deviation of the normalised gradient sum, >= 0.
        loss_noise_multiplier: Noise standard deviation of each loss sum over its bound, >= 0.
        interval: Steps K from one update of the learning rate to the next, >= 1.
        loss_batch: ``"same"`` asks for the losses about the gradient's batch, ``"separate"`` about
            an independent one.
        optimizer: ``"sgd"`` or ``"adamw"``: what the noisy gradient goes through.
        learning_rate: Initial learning rate, above 0.
        loss_bound: Initial bound on a record's loss, above 0; also its floor.
        fit: ``"tracked"``, or ``"paper"`` for Algorithm 1 to the letter.
        resolution: Standard deviations of its noise that a tracked curvature must exceed.
        stabilizer: Added to the gradient norm before dividing by it, above 0.
        momentum: Momentum of the optimizer ``"sgd"``.
        weight_decay: Weight decay of the optimizer; None takes 0 for SGD and 0.01 for AdamW.

    **Guarantee**: each step is one Poisson-sampled Gaussian release; with ``loss_batch="same"``
    a step that also releases losses is one joint release.

    References:
        Bu & Liu 2025, Algorithm 1 and 2; Bu et al. 2023, arXiv 2206.07136 (automatic clipping).
    """

    gradient_noise_multiplier: float
    loss_noise_multiplier: float
    interval: int = 5
    loss_batch: str = "same"
    optimizer: str = "sgd"
    learning_rate: float = 1e-4
    loss_bound: float = 1.0
    fit: str = "tracked"
    resolution: float = 1.0
    stabilizer: float = 0.01
    momentum: float = 0.0
    weight_decay: float | None = None

    name: ClassVar[str] = "hyfreedp"
    summary: ClassVar[str] = "Learning rate fitted to three noisy losses, normalised gradients"
    adapts: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    gradients_per_step: ClassVar[int] = 1
    open_ended: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = ()
    releases: ClassVar[str] = (
        "one normalised noisy gradient; every K-th step also three clipped noisy losses"
    )

    def __post_init__(self) -> None:
        check_nonnegative("gradient_noise_multiplier", self.gradient_noise_multiplier)
        check_nonnegative("loss_noise_multiplier", self.loss_noise_multiplier)
        if self.interval < 1:
            raise InvalidInputError("interval", self.interval, "must be a whole number >= 1")
        check_choice("loss_batch", self.loss_batch, _LOSS_BATCHES)
        check_choice("optimizer", self.optimizer, ("sgd", "adamw"))
        check_positive("learning_rate", self.learning_rate)
        check_positive("loss_bound", self.loss_bound)
        check_positive("stabilizer", self.stabilizer)
        check_choice("fit", self.fit, _FITS)
        check_nonnegative("resolution", self.resolution)
        self._inner()

    def _inner(self) -> InnerOptimizer:
        if self.optimizer == "adamw":
            decay = 0.01 if self.weight_decay is None else self.weight_decay
            return AdamW(weight_decay=decay)
        return SGD(momentum=self.momentum, weight_decay=self.weight_decay or 0.0)

    @classmethod
    def for_budget(
        cls, schedule: Schedule, *, epsilon: float, delta: float, **options: Any
    ) -> Self:
        """Build the method with a little more gradient noise than DP-SGD, and the rest for losses.

        Args:
            schedule: The public clockwork.
            epsilon: Target, above 0.
            delta: Target, in (0, 1).
            options: Other fields. ``loss_batch`` may be ``"auto"``, which is the default: the kind
                of batch that needs less noise on the losses. ``gradient_noise_factor``, above 1, is
                the gradient noise over that of DP-SGD: 1.01 in the paper; small batches do better
                with 1.05.

        Raises:
            PrivTuneError: If an option is not a field, or no noise meets the target.
        """
        from privtune.accounting import hyfreedp_noise

        defaults = {"interval": 5, "loss_batch": "auto", "gradient_noise_factor": 1.01}
        chosen: dict[str, Any] = defaults | options
        factor = chosen.pop("gradient_noise_factor")
        build(  # refuses what is no option before it takes time to solve for the noise
            cls,
            chosen | {"loss_batch": "same"},
            gradient_noise_multiplier=1.0,
            loss_noise_multiplier=1.0,
        )
        noise = hyfreedp_noise(
            schedule.sample_rate,
            schedule.steps,
            interval=chosen["interval"],
            epsilon=epsilon,
            delta=delta,
            loss_batch=chosen["loss_batch"],
            gradient_noise_factor=factor,
        )
        return build(
            cls,
            chosen | {"loss_batch": noise.loss_batch},
            gradient_noise_multiplier=noise.gradient_noise,
            loss_noise_multiplier=noise.loss_noise,
        )

    def event(self, schedule: Schedule) -> Event:
        """Return T gradient releases, every K-th of them with three losses beside it."""
        from privtune.accounting import NonPrivate, hyfreedp_event

        if self.gradient_noise_multiplier == 0.0 or self.loss_noise_multiplier == 0.0:
            return NonPrivate()
        return hyfreedp_event(
            schedule.sample_rate,
            schedule.steps,
            interval=self.interval,
            gradient_noise=self.gradient_noise_multiplier,
            loss_noise=self.loss_noise_multiplier,
            loss_batch=self.loss_batch,
        )

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> HyFreeDPState:
        """Make the state of K candidates; a candidate needs to give nothing."""
        rate = candidate_column(candidates, "learning_rate", params, default=self.learning_rate)
        unknown = rate.new_full(rate.shape, float("inf"))
        nothing = rate.new_zeros(rate.shape)
        return HyFreeDPState(
            params=params,
            fit=Fit(rate, rate, nothing, unknown, nothing, unknown),
            loss_bound=candidate_column(candidates, "loss_bound", params, default=self.loss_bound),
            loss=rate.new_full(rate.shape, float("nan")),
            moments=self._inner().init(params),
            step=0,
        )

    def update(self, state: HyFreeDPState, oracle: Oracle) -> HyFreeDPState:
        """Take one step; on every K-th, fit the learning rate first."""
        sample = oracle.sample()
        gradient = oracle.gradient(
            sample,
            state.params,
            clipping=Automatic(self.stabilizer),
            noise_multiplier=self.gradient_noise_multiplier,
        )
        direction, moments = self._inner().direction(state.moments, gradient, state.params)
        if state.step % self.interval == 0:
            probe = sample if self.loss_batch == "same" else oracle.sample()
            state = self._refit(state, oracle, probe, direction)
        return replace(
            state,
            params=state.params - rows(state.fit.learning_rate) * direction,
            moments=moments,
            step=state.step + 1,
        )

    def _refit(
        self, state: HyFreeDPState, oracle: Oracle, sample: Sample, direction: torch.Tensor
    ) -> HyFreeDPState:
        """Ask for the three losses and learn from them."""
        step = rows(state.fit.reach) * direction
        losses = oracle.losses(
            sample,
            (state.params + step, state.params, state.params - step),
            bound=state.loss_bound,
            noise_multiplier=self.loss_noise_multiplier,
        )
        if self.fit == "paper":
            fit = fit_paper(state.fit, losses)
        else:
            batch = oracle.schedule.expected_batch_size
            fit = fit_tracked(
                state.fit,
                losses,
                deviation=self.loss_noise_multiplier * state.loss_bound / batch,
                bound=state.loss_bound,
                resolution=self.resolution,
            )
        return replace(
            state,
            fit=fit,
            loss_bound=_next_bound(state.loss_bound, losses, self.loss_bound),
            loss=losses[1],
        )

    def report(self, state: HyFreeDPState) -> Mapping[str, torch.Tensor]:
        """Return the learning rate, the loss bound and the last noisy loss."""
        return {
            "learning_rate": state.fit.learning_rate,
            "loss_bound": state.loss_bound,
            "loss": state.loss,
        }


def fit_paper(fit: Fit, losses: torch.Tensor) -> Fit:
    """Return the minimiser of the parabola through three losses (equation 6, Algorithm 1).

    Args:
        fit: What is known; the losses were probed at its reach.
        losses: Shape ``[3, K]``: a step backward, here, a step forward.

    Returns:
        The fit with a new rate where both coefficients are positive and the rate is finite.
    """
    import torch

    slope, curvature = _coefficients(losses, fit.reach)
    rate = slope / curvature
    good = (slope > 0) & (curvature > 0) & torch.isfinite(rate) & (rate > 0)
    rate = torch.where(good, rate, fit.learning_rate)
    return replace(fit, learning_rate=rate, reach=rate, slope=slope, curvature=curvature)


def fit_tracked(
    fit: Fit,
    losses: torch.Tensor,
    *,
    deviation: torch.Tensor,
    bound: torch.Tensor,
    resolution: float,
) -> Fit:
    """Update slope, curvature, rate and reach from three losses whose noise is known.

    Args:
        fit: What is known; the losses were probed at its reach.
        losses: Shape ``[3, K]``: a step backward, here, a step forward.
        deviation: Shape ``[K]``: standard deviation of each loss's noise, which is public.
        bound: Shape ``[K]``: what the losses were clipped to.
        resolution: Standard deviations that make a curvature visible.

    Returns:
        The updated fit; unchanged where the losses are clipped or not finite.
    """
    import torch

    reach = fit.reach
    slope_seen, curvature_seen = _coefficients(losses, reach)
    # A first difference of two noises has variance 2 deviation^2, a second one 1 + 1 + 4 = 6.
    slope, slope_variance = _filter(
        fit.slope, fit.slope_variance, slope_seen, deviation**2 / (2.0 * reach**2)
    )
    curvature, curvature_variance = _filter(
        fit.curvature, fit.curvature_variance, curvature_seen, 6.0 * deviation**2 / reach**4
    )
    visible = (curvature > resolution * curvature_variance.sqrt()) & (curvature > 0)
    best = slope / curvature
    good = visible & torch.isfinite(best) & (best > 0)
    best = torch.where(good, best, fit.learning_rate)
    # The reach at which one probe by itself would show this curvature; never below the best rate.
    needed = (resolution * 6.0**0.5 * deviation / curvature).sqrt()
    aim = torch.where(visible, torch.maximum(best, needed), _GROWTH * reach)
    updated = Fit(
        # Never farther than was probed: beyond, the parabola is a guess.
        learning_rate=torch.minimum(best, torch.maximum(reach, fit.learning_rate)),
        reach=torch.minimum(aim, _GROWTH * reach),
        slope=slope,
        slope_variance=slope_variance,
        curvature=curvature,
        curvature_variance=curvature_variance,
    )
    seen = torch.isfinite(losses).all(dim=0) & (losses[1] < _SATURATED * bound)
    return Fit(
        *(
            torch.where(seen, getattr(updated, field.name), getattr(fit, field.name))
            for field in fields(fit)
        )
    )


def _coefficients(losses: torch.Tensor, reach: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slope and curvature of the parabola through three losses."""
    backward, here, forward = losses
    slope = (backward - forward) / (2.0 * reach)
    return slope, (backward + forward - 2.0 * here) / reach**2


def _filter(
    mean: torch.Tensor, variance: torch.Tensor, seen: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take one step of a scalar Kalman filter whose state drifts in proportion to itself."""
    import torch

    prior = variance + (_DRIFT * mean) ** 2
    # No prior, or no noise: take what was seen.
    gain = torch.where(torch.isinf(prior) | (noise == 0.0), 1.0, prior / (prior + noise))
    return mean + gain * (seen - mean), gain * noise


def _next_bound(bound: torch.Tensor, losses: torch.Tensor, floor: float) -> torch.Tensor:
    """Return the paper's conservative bound, the sum of the three losses, kept above a floor.

    Without the floor it may feed on itself: losses clipped to a bound that is too small sum to a
    smaller bound, and in the end the losses say nothing.
    """
    import torch

    total = losses.sum(dim=0)
    least = (_BOUND_SHRINK * bound).clamp_min(floor)
    updated = torch.maximum(total, least).clamp_max(_BOUND_CEILING)
    return torch.where(torch.isfinite(total), updated, bound)
