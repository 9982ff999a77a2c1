"""The parabola through three noisy losses along the step direction: HyFreeDP's learning rate.

``fit_paper`` is equation 6 of Bu & Liu 2025, ``fit_tracked`` weighs what was seen by the public
scale of its noise. All of it is post-processing of releases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = [
    "EAGER",
    "STEADY",
    "TRACKED",
    "Fit",
    "Rules",
    "fit_paper",
    "fit_tracked",
    "next_bound",
    "paper_bound",
]

_BOUND_CEILING = 1e6
_BOUND_SHRINK = 0.5  # the bound at most halves at an update: a noisy sum may be far too small
_SATURATED = 0.9  # losses above this part of their bound are flat because they were clipped
Floats = npt.NDArray[np.floating]
_DRIFT = 0.3  # relative change of slope and curvature from one update to the next


@dataclass(frozen=True, eq=False)
class Fit:
    """What is known of the loss along the step direction; every field has shape ``[K]``.

    Args:
        learning_rate: The rate that was fitted last.
        reach: How far along the direction the next losses are probed.
        slope: Estimate of the loss's decrease per unit of reach.
        slope_variance: Its variance; infinite before the first estimate.
        curvature: Estimate of the second derivative.
        curvature_variance: Its variance.
        fits: Updates since a fit first moved the rate, that one included.
        step_rate: The rate to step with.
    """

    learning_rate: torch.Tensor
    reach: torch.Tensor
    slope: torch.Tensor
    slope_variance: torch.Tensor
    curvature: torch.Tensor
    curvature_variance: torch.Tensor
    fits: torch.Tensor
    step_rate: torch.Tensor


_NAMES = tuple(field.name for field in fields(Fit))


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
    return replace(
        fit, learning_rate=rate, step_rate=rate, reach=rate, slope=slope, curvature=curvature
    )


@dataclass(frozen=True)
class Rules:
    """How a tracked fit moves the rate and the reach.

    Args:
        growth: Factor on the reach while no curvature is visible.
        resolution: Standard deviations of its noise that a curvature must exceed to be visible.
        clear: Standard deviations of the slope's noise within which a rate is as good as another.
        change: Most that the rate changes by in one fit, once it was fitted: a factor.
        average: Whether steps take the geometric mean of all rates since the first fit. A single fit
            lowers the next loss most, and under noise that is less than gets farthest.
        blind: Whether the reach also grows while the losses are clipped and nothing is known.
    """

    growth: float
    resolution: float
    clear: float
    change: float
    average: bool
    blind: bool


TRACKED = Rules(growth=4.0, resolution=1.0, clear=0.0, change=math.inf, average=False, blind=False)
EAGER = Rules(growth=16.0, resolution=1.0, clear=0.0, change=math.inf, average=True, blind=False)
STEADY = Rules(growth=16.0, resolution=3.0, clear=2.0, change=2.0, average=True, blind=True)


def fit_tracked(
    fit: Fit, losses: torch.Tensor, *, deviation: torch.Tensor, bound: torch.Tensor, rules: Rules
) -> Fit:
    """Update slope, curvature, rate and reach from three losses whose noise is known.

    Args:
        fit: What is known; the losses were probed at its reach.
        losses: Shape ``[3, K]``: a step backward, here, a step forward.
        deviation: Shape ``[K]``: standard deviation of each loss's noise, which is public.
        bound: Shape ``[K]``: what the losses were clipped to.
        rules: How the rate and the reach move.

    Returns:
        The updated fit; where the losses are clipped or not finite, at most the reach has grown.
    """
    import torch

    # Many operations on a few numbers: each costs torch several times what it costs NumPy.
    own = SimpleNamespace(**{name: getattr(fit, name).cpu().numpy() for name in _NAMES})
    seen, noise, limit = (values.cpu().numpy() for values in (losses, deviation, bound))
    with np.errstate(all="ignore"):
        found = _tracked(own, seen, noise, limit, rules)
    return Fit(*(torch.from_numpy(values).to(losses) for values in found))


def _tracked(
    fit: SimpleNamespace, losses: Floats, deviation: Floats, bound: Floats, rules: Rules
) -> list[Floats]:
    """Do the arithmetic of ``fit_tracked``, with a fit of arrays; return the updated fields."""
    reach, rate = fit.reach, fit.learning_rate
    unknown = np.isinf(fit.curvature_variance)
    # A first difference of two noises has variance 2 deviation^2, a second one 1 + 1 + 4 = 6.
    noise = (deviation / reach) ** 2
    (slope, curvature), (slope_variance, curvature_variance) = _filter(
        np.stack([fit.slope, fit.curvature]),
        np.stack([fit.slope_variance, fit.curvature_variance]),
        np.stack(_coefficients(losses, reach)),
        np.stack([noise / 2.0, 6.0 * noise / reach**2]),
    )
    visible = (curvature > rules.resolution * np.sqrt(curvature_variance)) & (curvature > 0)
    doubt = rules.clear * np.sqrt(slope_variance)
    steady = (fit.fits > 0) & math.isfinite(rules.change)
    # The first fit goes where it points; the others no farther than there is evidence for.
    best = np.where(
        steady,
        np.clip(
            np.clip(rate, (slope - doubt) / curvature, (slope + doubt) / curvature),
            rate / rules.change,
            rate * rules.change,
        ),
        slope / curvature,
    )
    good = visible & np.isfinite(best) & (steady | (slope > doubt))
    best = np.where(good, best, rate)
    # The reach at which one probe by itself would show this curvature; never below the best rate.
    needed = np.sqrt(rules.resolution * 6.0**0.5 * deviation / curvature)
    aim = np.where(visible, np.maximum(best, needed), rules.growth * reach)
    # Never farther than was probed: beyond, the parabola is a guess.
    rate = np.minimum(best, np.maximum(reach, rate))
    fits = np.where(good | (fit.fits > 0), fit.fits + 1, fit.fits)
    step_rate = rate
    if rules.average:
        mean = fit.step_rate * (rate / fit.step_rate) ** (1.0 / np.maximum(fits, 1.0))
        step_rate = np.where(fits > 0, mean, rate)
    updated = (
        rate,
        np.minimum(aim, rules.growth * reach),
        slope,
        slope_variance,
        curvature,
        curvature_variance,
        fits,
        step_rate,
    )
    finite = np.isfinite(losses).all(axis=0)
    seen = finite & (losses[1] < _SATURATED * bound)
    kept = [
        np.where(seen, new, getattr(fit, name)) for name, new in zip(_NAMES, updated, strict=True)
    ]
    if rules.blind:
        kept[1] = np.where(finite & ~seen & unknown, rules.growth * reach, kept[1])
    return kept


def _coefficients(losses: Any, reach: Any) -> tuple[Any, Any]:
    """Return slope and curvature of the parabola through three losses."""
    backward, here, forward = losses
    slope = (backward - forward) / (2.0 * reach)
    return slope, (backward + forward - 2.0 * here) / reach**2


def _filter(mean: Floats, variance: Floats, seen: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Take one step of a scalar Kalman filter whose state drifts in proportion to itself."""
    prior = variance + (_DRIFT * mean) ** 2
    # No prior, or no noise: take what was seen.
    gain = np.where(np.isinf(prior) | (noise == 0.0), 1.0, prior / (prior + noise))
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


def paper_bound(bound: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """Return Algorithm 1's bound, the noisy loss at the iterate; kept where that is no bound."""
    import torch

    here = losses[1]
    return torch.where(torch.isfinite(here) & (here > 0), here, bound)
