"""The parabola through three noisy losses along the step direction: HyFreeDP's learning rate.

``fit_paper`` is equation 6 of Bu & Liu 2025, ``fit_tracked`` weighs what was seen by the public
scale of its noise. All of it is post-processing of releases.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Fit", "fit_paper", "fit_tracked", "next_bound"]

_BOUND_CEILING = 1e6
_BOUND_SHRINK = 0.5  # the bound at most halves at an update: a noisy sum may be far too small
_SATURATED = 0.9  # losses above this part of their bound are flat because they were clipped
_GROWTH = 4.0  # factor on the reach while no curvature is visible
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
    # A first difference of two noises has variance 2 deviation^2, a second one 1 + 1 + 4 = 6.
    noise = (deviation / reach) ** 2
    (slope, curvature), (slope_variance, curvature_variance) = _filter(
        torch.stack([fit.slope, fit.curvature]),
        torch.stack([fit.slope_variance, fit.curvature_variance]),
        torch.stack(_coefficients(losses, reach)),
        torch.stack([noise / 2.0, 6.0 * noise / reach**2]),
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


def next_bound(bound: torch.Tensor, losses: torch.Tensor, floor: float) -> torch.Tensor:
    """Return the paper's conservative bound, the sum of the three losses, kept above a floor.

    Without the floor it may feed on itself: losses clipped to a bound that is too small sum to a
    smaller bound, and in the end the losses say nothing.
    """
    import torch

    total = losses.sum(dim=0)
    least = (_BOUND_SHRINK * bound).clamp_min(floor)
    updated = torch.maximum(total, least).clamp_max(_BOUND_CEILING)
    return torch.where(torch.isfinite(total), updated, bound)
