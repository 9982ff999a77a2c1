"""The parabola through three noisy losses along the way travelled: HyFreeDP's rate for small trained parts.

The rate that lowers the next loss most is far below the one that gets farthest in many steps: one
step's direction has the stiff coordinates, where training swings to and fro, while what remains of
the way of many steps is progress. All of it is post-processing of releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from privtune.training.methods._parabola import _BOUND_CEILING, _SATURATED, Fit

if TYPE_CHECKING:
    import torch

__all__ = ["RELATIVE", "first_rate", "fit_travelled", "of_a_part", "places", "robust_bound"]

_STEPS = 20  # that a way goes back
_FIFTH = 5  # steps between fits that may change the rate by the whole of these factors
_GROWTH, _FALL = 4.0, 2.0
RELATIVE = 0.1
"""First rate over the size of a first weight, where no rate is given."""
_ROOM = 1.5  # bound on a record's loss over the mean loss


def places(interval: int) -> int:
    """Return how many earlier parameters are kept, one a fit."""
    return -(-_STEPS // interval)


def of_a_part(part: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return HyFreeDP's options for a task that trains a part of its model; those of a spec come first.

    Args:
        part: ``all``, ``head``, ``biases`` or ``lora:R``.
        options: Those of the spec.

    Returns:
        Fields by name; none where the defaults are right.

    Example:
        >>> of_a_part("head", {}), of_a_part("lora:4", {}), of_a_part("all", {})
        ({'fit': 'travelled'}, {'relative_rate': 0.1}, {})
    """
    if part in ("head", "biases"):
        return {"fit": "travelled"}
    relative = part.startswith("lora") and "learning_rate" not in options
    return {"relative_rate": RELATIVE} if relative else {}


def first_rate(params: torch.Tensor, least: torch.Tensor, share: float) -> torch.Tensor:
    """Return a part of the root mean square of the first weights that are trained, shape ``[K]``.

    Args:
        params: First parameters, shape ``[K, P]``: public, or drawn without the data.
        least: Shape ``[K]``: the rate where that is more.
        share: Which part.
    """
    import torch

    return torch.maximum(least, share * params.square().mean(dim=1).sqrt())


def fit_travelled(
    fit: Fit,
    losses: torch.Tensor,
    *,
    deviation: torch.Tensor,
    bound: torch.Tensor,
    interval: int,
    moved: bool,
) -> Fit:
    """Change the rate by how much farther, or less far, the way travelled should have gone.

    Args:
        fit: What is known.
        losses: Shape ``[3, K]``: at the way's beginning, here, and as far ahead.
        deviation: Shape ``[K]``: standard deviation of each loss's noise, which is public.
        bound: Shape ``[K]``: what the losses were clipped to.
        interval: Steps between fits.
        moved: Whether anything was travelled: the rates before are of no mean.

    Returns:
        The fit with a new rate; as it was where the losses are clipped or not finite.
    """
    import torch

    behind, here, ahead = losses
    slope, curvature = (behind - ahead) / 2.0, behind + ahead - 2.0 * here
    # Differences of two noises and of four: their variances are 1/2 and 6 times the deviation's square.
    slope_noise, curvature_noise = 0.5**0.5 * deviation, 6.0**0.5 * deviation
    share = min(1.0, interval / _FIFTH)
    largest, smallest = _GROWTH**share, _FALL**-share
    sure = slope.sign() * (slope.abs() - slope_noise).clamp_min(0.0)
    blind = torch.where(slope.abs() > 2.0 * slope_noise, slope.sign(), torch.zeros_like(slope))
    # Where no curvature shows, a slope that does says in which direction to go, and no more.
    factor = torch.where(
        curvature > curvature_noise, 1.0 + sure / curvature, 1.0 + blind * largest
    ).clamp(smallest, largest)
    rate = fit.learning_rate * factor
    fits = fit.fits
    if moved:  # the mean begins where the rate first stops growing
        fits = torch.where((fits > 0) | (factor <= 1.0), fits + 1, fits)
    mean = fit.step_rate * (rate / fit.step_rate) ** (1.0 / fits.clamp_min(1.0))
    seen = torch.isfinite(losses).all(dim=0) & (here <= _SATURATED * bound)
    return replace(
        fit,
        learning_rate=torch.where(seen, rate, fit.learning_rate),
        slope=torch.where(seen, slope, fit.slope),
        curvature=torch.where(seen, curvature, fit.curvature),
        fits=torch.where(seen, fits, fit.fits),
        step_rate=torch.where(seen, mean, fit.step_rate),
    )


def robust_bound(bound: torch.Tensor, losses: torch.Tensor, floor: float) -> torch.Tensor:
    """Return 1.5 times the mean loss, no less than a floor, and than half the bound before.

    Normalised gradients weigh records alike, so that the few with large losses, which may grow while
    accuracy does, must not decide what is progress; and a lower bound has less noise.
    """
    import torch

    here = losses[1]
    updated = torch.maximum(_ROOM * here, (0.5 * bound).clamp_min(floor))
    updated = updated.clamp_max(_BOUND_CEILING)  # loud losses feed on themselves
    return torch.where(torch.isfinite(here), updated, bound)
