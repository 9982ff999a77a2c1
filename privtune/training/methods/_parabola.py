"""The parabola through three noisy losses: HyFreeDP's learning rate, and its bound on the losses.

``fit_paper`` and ``paper_bound`` are Bu & Liu 2025, equation 6 and Algorithm 1; ``fit_robust`` and
``robust_bound`` use the public scale of the losses' noise. All of it is post-processing of releases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WINDOW = 20
"""Steps that the robust fit looks back. The rate grows 16-fold at most in as many: what it sees lags
behind by them, and a faster rate is beyond the best one before the losses say so."""
_BOUND_CEILING = 1e6
_SATURATED = 0.9  # losses above this part of their bound are flat because they were clipped
_ROOM = 1.5  # bound on a record's loss over the mean loss


@dataclass(frozen=True, eq=False)
class Fit:
    """The learning rate and where it may move; every field has shape ``[K]``.

    Args:
        learning_rate: The rate that was fitted last.
        lowest: The least rate: public.
        highest: The largest rate: public.
        fits: Number of fits in the mean of ``step_rate``.
        step_rate: The rate to step with: the geometric mean of the fitted rates, if robust.
    """

    learning_rate: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    fits: torch.Tensor
    step_rate: torch.Tensor


def places(interval: int) -> int:
    """Return how many earlier parameters the robust fit keeps, one a fit."""
    return -(-WINDOW // interval)


def fit_paper(fit: Fit, losses: torch.Tensor) -> Fit:
    """Return the minimiser of the parabola through three losses (equation 6, Algorithm 1).

    Args:
        fit: What is known; the losses were probed one step away.
        losses: Shape ``[3, K]``: a step backward, here, a step forward.

    Returns:
        The fit with a new rate where both coefficients are positive and the rate is finite.
    """
    import torch

    backward, here, forward = losses
    probed = fit.learning_rate
    slope = (backward - forward) / (2.0 * probed)
    curvature = (backward + forward - 2.0 * here) / probed**2
    rate = slope / curvature
    good = (slope > 0) & (curvature > 0) & torch.isfinite(rate) & (rate > 0)
    rate = torch.where(good, rate, probed).clamp(fit.lowest, fit.highest)
    return replace(fit, learning_rate=rate, step_rate=rate)


def fit_robust(
    fit: Fit,
    losses: torch.Tensor,
    *,
    deviation: torch.Tensor,
    bound: torch.Tensor,
    interval: int,
    moved: bool,
) -> Fit:
    """Change the rate by how much farther, or less far, the way of the last steps should have gone.

    Args:
        fit: What is known.
        losses: Shape ``[3, K]``: at the way's beginning, here, and as far ahead.
        deviation: Shape ``[K]``: standard deviation of each loss's noise, which is public.
        bound: Shape ``[K]``: what the losses were clipped to.
        interval: Steps between fits.
        moved: Whether any step was taken: rates before the first step are in no mean.

    Returns:
        The fit with a new rate, inside its interval; as it was where the losses are clipped or not
        finite.
    """
    import torch

    behind, here, ahead = losses
    slope, curvature = (behind - ahead) / 2.0, behind + ahead - 2.0 * here
    # The difference of two noises has variance 2 deviation^2, the second difference 1 + 1 + 4 = 6.
    slope_noise, curvature_noise = 0.5**0.5 * deviation, 6.0**0.5 * deviation
    # A fit grows the rate 4-fold at most, and 16-fold in all fits of a window; it halves it at most.
    share = min(1.0, 2.0 * interval / WINDOW)
    largest, smallest = 4.0**share, 0.5**share
    sure = slope.sign() * (slope.abs() - slope_noise).clamp_min(0.0)
    # Where no curvature shows, a slope that does says in which direction to go, and no more.
    direction = torch.where(slope.abs() > 2.0 * slope_noise, slope.sign(), torch.zeros_like(slope))
    factor = torch.where(
        curvature > curvature_noise, 1.0 + sure / curvature, 1.0 + direction * largest
    )
    factor = factor.nan_to_num(1.0).clamp(smallest, largest)
    rate = (fit.learning_rate * factor).clamp(fit.lowest, fit.highest)
    fits = fit.fits
    if moved:  # the mean begins where the rate first stops growing
        fits = torch.where((fits > 0) | (factor <= 1.0), fits + 1, fits)
    mean = fit.step_rate * (rate / fit.step_rate) ** (1.0 / fits.clamp_min(1.0))
    seen = torch.isfinite(losses).all(dim=0) & (here <= _SATURATED * bound)
    return replace(
        fit,
        learning_rate=torch.where(seen, rate, fit.learning_rate),
        fits=torch.where(seen, fits, fit.fits),
        step_rate=torch.where(seen, mean, fit.step_rate).clamp(fit.lowest, fit.highest),
    )


def paper_bound(bound: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """Return Algorithm 1's bound, the noisy loss at the iterate; kept where that is no bound."""
    import torch

    here = losses[1]
    known = torch.isfinite(here) & (here > 0)
    return torch.where(known, here, bound).clamp(1.0 / _BOUND_CEILING, _BOUND_CEILING)


def robust_bound(bound: torch.Tensor, losses: torch.Tensor, floor: float) -> torch.Tensor:
    """Return 1.5 times the mean loss here, no less than a floor, and than half the bound before.

    Losses elsewhere do not count: far from the iterate they are large, and so would the noise be.
    Normalised gradients weigh records alike, so the few records with large losses, which may grow
    while accuracy does, must not decide what is progress.
    """
    import torch

    here = losses[1]
    updated = torch.maximum(_ROOM * here, (0.5 * bound).clamp_min(floor))
    # Noise of several times the bound would feed on itself.
    return torch.where(torch.isfinite(here), updated, bound).clamp_max(_BOUND_CEILING)
