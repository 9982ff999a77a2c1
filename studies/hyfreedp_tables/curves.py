"""Losses along a step: how many points fit it (Figure 2), what clipping takes from them (Figure 7).

The paper draws five points and fits three. ``FivePoints`` trains with five.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from scipy.stats import norm
from torch import nn

from privtune.accounting import Event
from privtune.accounting import events as ev
from privtune.training.mechanism.kernel import load_params
from privtune.training.mechanism.oracle import Oracle, Sample
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import HyFreeDP
from privtune.training.methods.hyfreedp import HyFreeDPState
from privtune.training.methods.hyfreedp_account import hyfreedp_loss_steps
from studies.harness import Split, cross_entropy
from studies.sheet import Row, by, markdown, mean

THREE, FIVE, WIDE = "three points", "five points", "three points, as far as five"
POINTS = {THREE: (-1.0, 0.0, 1.0), FIVE: (-2.0, -1.0, 0.0, 1.0, 2.0), WIDE: (-2.0, 0.0, 2.0)}
AT = (20, 130)
LOOKED_AT = sorted({step + back for step in AT for back in (-1, 0)})
ALPHAS = (0.0, 1.0, 2.0, 3.0)
BOUNDS = {"mean loss": 1.0, "1.5 mean losses": 1.5, "sum of three losses": 3.0}
KINDS = ("batches", "clipped", "clipped and noised")
DRAWS = 500


def design(points: Sequence[float]) -> torch.Tensor:
    """Return what takes losses at these distances to level, slope and curvature: least squares."""
    x = torch.tensor(points, dtype=torch.float64)
    return torch.linalg.pinv(torch.stack([torch.ones_like(x), -x, x.square() / 2.0], dim=1))


def deviations(points: Sequence[float]) -> tuple[float, float]:
    """Return the deviations of slope and curvature at the price of three losses of deviation 1.

    Gaussian releases about one sample cost the sum of ``1 / σ²``: n of them at the price of three
    have ``sqrt(n / 3)`` times the noise.
    """
    _, slope, curvature = (design(points) * (len(points) / 3.0) ** 0.5).norm(dim=1).tolist()
    return slope, curvature


@dataclass(frozen=True)
class _Five:
    """An oracle whose three losses lie on the parabola through five noisy ones."""

    oracle: Oracle
    reach: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.oracle, name)

    def losses(
        self, sample: Sample, params: Sequence[torch.Tensor], **options: Any
    ) -> torch.Tensor:
        """Release five losses, from ``reach`` steps back to as many ahead."""
        back, here, _ = params
        x = [point * self.reach / 2.0 for point in POINTS[FIVE]]
        found = self.oracle.losses(sample, [here - at * (back - here) for at in x], **options)
        level, slope, curvature = design(x).to(found) @ found
        return torch.stack([level + d * slope + d * d * curvature / 2.0 for d in (1.0, 0.0, -1.0)])


@dataclass(frozen=True, eq=False)
class FivePoints(HyFreeDP):
    """HyFreeDP at the same price with five losses, each with ``sqrt(5 / 3)`` times the noise.

    Args:
        reach: How many steps away the farthest losses are: 1 as far as the three of the method.
    """

    reach: float = 1.0

    @classmethod
    def for_budget(
        cls, schedule: Schedule, /, *, epsilon: float, delta: float, **options: Any
    ) -> Self:
        """Build the method with the gradient noise of three losses."""
        three = super().for_budget(schedule, epsilon=epsilon, delta=delta, **options)
        return replace(three, loss_noise_multiplier=three.loss_noise_multiplier * (5 / 3) ** 0.5)

    def event(self, schedule: Schedule) -> Event:
        """Return the event of five losses beside every K-th gradient, or on a batch of their own."""
        due, rate = hyfreedp_loss_steps(schedule.steps, self.interval), schedule.sample_rate
        gradient: ev.Event = ev.Gaussian(self.gradient_noise_multiplier)
        losses: list[Any] = [ev.Gaussian(self.loss_noise_multiplier)] * 5
        same = self.loss_batch == "same"
        alone = ev.Repeated(schedule.steps - due * same, ev.PoissonSampled(rate, gradient))
        joint = ev.Joint([gradient, *losses] if same else losses)
        return ev.Composed([alone, ev.Repeated(due, ev.PoissonSampled(rate, joint))])

    def update(self, state: HyFreeDPState, oracle: Oracle) -> HyFreeDPState:
        """Take one step, with five losses on every K-th."""
        five: Any = _Five(oracle, self.reach)
        return super().update(state, five)


@torch.no_grad()
def losses_at(model: nn.Module, params: torch.Tensor, split: Split) -> torch.Tensor:
    """Return every record's loss."""
    load_params(model, params)
    return cross_entropy(model(split.x), split.y)


def fits(
    model: nn.Module,
    split: Split,
    here: torch.Tensor,
    step: torch.Tensor,
    points: Sequence[float],
    noise: float,
    batch: int,
    seed: int,
) -> Iterator[tuple[str, float]]:
    """Yield the fitted step over the one that was taken: with all records, with batches, with noise.

    Of the draws: the share in which no minimum lies ahead, and of the others the logarithm of the
    fitted step, its median and half the range of its middle half.
    The bound on a loss is the sum of three mean losses, which the paper takes in practice.
    """
    clean = torch.stack([losses_at(model, here - x * step, split) for x in points])
    solve, draw = design(points).to(clean), torch.Generator().manual_seed(seed)
    bound = 3.0 * clean[points.index(0.0)].mean()
    scale = noise * (len(points) / 3.0) ** 0.5 * bound / batch
    _, slope, curvature = solve @ clean.mean(dim=1)
    yield "all records", (slope / curvature).item()
    own = torch.stack(
        [clean[:, torch.randint(len(split), (batch,), generator=draw)] for _ in range(DRAWS)]
    )
    noise_of_it = scale * torch.randn((DRAWS, len(points)), generator=draw)
    cut = own.clamp_max(bound).mean(2)
    for name, values in zip(KINDS, (own.mean(2), cut, cut + noise_of_it), strict=True):
        slopes, curvatures = solve[1:] @ values.T
        good = (slopes > 0) & (curvatures > 0)
        yield f"{name}: hidden", 100.0 * (~good).double().mean().item()
        factors = (slopes / curvatures)[good].log10()
        low, middle, high = factors.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        yield f"{name}: middle", middle
        yield f"{name}: spread", (high - low) / 2.0


def gaussian_bias(alpha: float) -> float:
    """Return Corollary 1's clipping bias over the deviation of the losses."""
    return float(norm.pdf(alpha) - alpha * norm.sf(alpha))


def biases(losses: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Yield what clipping takes from the mean loss, by the bound: over the deviation, or the mean."""
    middle, deviation = losses.mean(), losses.std()

    def taken(bound: torch.Tensor) -> torch.Tensor:
        return (losses - bound).clamp_min(0.0).mean()

    yield "deviation over mean", (deviation / middle).item()
    for alpha in ALPHAS:
        yield f"α = {alpha:g}", (taken(middle + alpha * deviation) / deviation).item()
    for name, times in BOUNDS.items():
        yield f"R = {name}", 100.0 * (taken(times * middle) / middle).item()


def means(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """Return what was measured about curves, by part and step: the mean of the seeds."""
    return {
        case: {name: mean(lines, "value") for (name,), lines in by(of, "line").items()}
        for case, of in by(rows, "part", "at").items()
    }


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return how often noise hides the minimum, and what clipping takes."""
    found = {f"bias over deviation, Corollary 1, α = {a:g}": gaussian_bias(a) for a in ALPHAS}
    for (part, at), named in means(rows).items():
        where = f"{part}, step {at}"
        found |= {
            f"{where}, {points}, {kind}: no minimum ahead, %": named[f"{points}, {kind}: hidden"]
            for points in (THREE, FIVE)
            for kind in KINDS
        }
        found |= {f"bias over deviation, {where}, α = {a:g}": named[f"α = {a:g}"] for a in ALPHAS}
        found |= {f"bias over mean, %, {where}, R = {n}": named[f"R = {n}"] for n in BOUNDS}
    return found if rows else {}


def tables(rows: Sequence[Row]) -> list[str]:
    """Return fitted steps with three and five losses, their arithmetic, and what clipping takes."""
    steps, taken = [], []
    plain = (f"{gaussian_bias(alpha):.5f}" for alpha in ALPHAS)
    taken.append(("Corollary 1", "", "", *plain, *("" for _ in BOUNDS)))
    for (part, at), named in means(rows).items():
        for points in (THREE, FIVE):
            shown = [
                f"{10 ** named[f'{points}, {kind}: middle']:.2g} "
                f"(÷× {10 ** named[f'{points}, {kind}: spread']:.1f}); "
                f"{named[f'{points}, {kind}: hidden']:.0f} %"
                for kind in KINDS
            ]
            steps.append((part, at, points, f"{named[f'{points}, all records']:.2g}", *shown))
        shown = [f"{named[f'α = {alpha:g}']:.5f}" for alpha in ALPHAS]
        shown += [f"{named[f'R = {name}']:.1f} %" for name in BOUNDS]
        taken.append((part, at, f"{named['deviation over mean']:.2f}", *shown))
    near = {f"{FIVE}, as far as three": tuple(x / 2.0 for x in POINTS[FIVE])}
    lines = [
        (name, *(f"{value:.3f}" for value in deviations(points)))
        for name, points in {**POINTS, **near}.items()
    ]
    first = ("fitted step over the one taken", "step", "losses", "all records", *KINDS)
    last = ("clipping bias", "step", "deviation over mean", *(f"α = {a:g}" for a in ALPHAS))
    price = ("losses at one price", "deviation of the slope", "of the curvature")
    found = [markdown(first, steps), markdown(price, lines)]
    return [*found, markdown((*last, *(f"R = {n}" for n in BOUNDS)), taken)] if rows else []
