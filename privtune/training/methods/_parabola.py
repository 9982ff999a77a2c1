"""The parabola through three noisy losses along the step direction: HyFreeDP's learning rate.

``fit_paper`` is equation 6 of Bu & Liu 2025, ``fit_tracked`` weighs what was seen by the public
scale of its noise. All of it is post-processing of releases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

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

    # Some forty operations on single numbers: each costs a library of arrays several times what it
    # costs plain Python, also for a stack.
    stacked = torch.stack([getattr(fit, name) for name in _NAMES])
    known = zip(*stacked.tolist(), strict=True)
    given = zip(known, losses.T.tolist(), deviation.tolist(), bound.tolist(), strict=True)
    found = [_tracked(*own, rules) for own in given]
    return Fit(*stacked.new_tensor(list(zip(*found, strict=True))).unbind())


def _tracked(
    known: Sequence[float],
    losses: Sequence[float],
    deviation: float,
    bound: float,
    rules: Rules,
) -> Sequence[float]:
    """Do the arithmetic of ``fit_tracked`` for one candidate, on the fields of its fit in their order."""
    rate, reach, slope, slope_variance, curvature, curvature_variance, fits, step_rate = known
    farthest = rules.growth * reach
    if not all(map(math.isfinite, losses)):
        return known
    if not losses[1] < _SATURATED * bound:
        blind = rules.blind and math.isinf(curvature_variance)
        return (rate, farthest if blind else reach, *known[2:])
    try:
        # A first difference of two noises has variance 2 deviation^2, a second one 1 + 1 + 4 = 6.
        seen, noise = _coefficients(losses, reach), (deviation / reach) ** 2
        slope, slope_variance = _filter(slope, slope_variance, seen[0], noise / 2.0)
        curvature, curvature_variance = _filter(
            curvature, curvature_variance, seen[1], 6.0 * noise / reach**2
        )
    except ArithmeticError:  # a reach beyond all numbers: nothing can be seen there
        return known
    best, aim, good = rate, farthest, False
    if curvature > 0.0 and curvature > rules.resolution * math.sqrt(curvature_variance):
        doubt = rules.clear * math.sqrt(slope_variance)
        # The first fit goes where it points; the others no farther than there is evidence for.
        if fits > 0.0 and math.isfinite(rules.change):
            near = min(max(rate, (slope - doubt) / curvature), (slope + doubt) / curvature)
            best, good = min(max(near, rate / rules.change), rate * rules.change), True
        elif slope > doubt and math.isfinite(slope / curvature):
            best, good = slope / curvature, True
        # The reach at which one probe by itself would show this curvature; never below the best rate.
        aim = max(best, math.sqrt(rules.resolution * 6.0**0.5 * deviation / curvature))
    # Never farther than was probed: beyond, the parabola is a guess.
    rate = min(best, max(reach, rate))
    fits += good or fits > 0.0
    if not (rules.average and fits > 0.0):
        step_rate = rate
    elif step_rate > 0.0:
        step_rate *= (rate / step_rate) ** (1.0 / fits)
    reach = min(aim, farthest)
    return rate, reach, slope, slope_variance, curvature, curvature_variance, fits, step_rate


def _coefficients(losses: Any, reach: Any) -> tuple[Any, Any]:
    """Return slope and curvature of the parabola through three losses."""
    backward, here, forward = losses
    slope = (backward - forward) / (2.0 * reach)
    return slope, (backward + forward - 2.0 * here) / reach**2


def _filter(mean: float, variance: float, seen: float, noise: float) -> tuple[float, float]:
    """Take one step of a scalar Kalman filter whose state drifts in proportion to itself."""
    prior = variance + (_DRIFT * mean) ** 2
    # No prior, or no noise: take what was seen.
    gain = 1.0 if math.isinf(prior) or noise == 0.0 else prior / (prior + noise)
    return mean + gain * (seen - mean), gain * noise


def next_bound(bound: torch.Tensor, losses: torch.Tensor, floor: float) -> torch.Tensor:
    """Return the paper's conservative bound, the sum of the three losses, kept above a floor.

    Without the floor it may feed on itself: losses clipped to a bound that is too small sum to a
    smaller bound, and in the end the losses say nothing.
    """
    found = []
    for own, seen in zip(bound.tolist(), losses.T.tolist(), strict=True):
        total = sum(seen)
        least = max(_BOUND_SHRINK * own, floor)
        found.append(min(max(total, least), _BOUND_CEILING) if math.isfinite(total) else own)
    return bound.new_tensor(found)


def paper_bound(bound: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """Return Algorithm 1's bound, the noisy loss at the iterate; kept where that is no bound."""
    import torch

    here = losses[1]
    return torch.where(torch.isfinite(here) & (here > 0), here, bound)
