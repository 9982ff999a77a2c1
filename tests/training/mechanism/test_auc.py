"""The area under the ROC curve from noised bins: what ties lose, what it is charged, what it decides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.metrics import roc_auc_score

from privtune.accounting import Adjacency, Gaussian, calibrate
from privtune.training.mechanism import metrics
from privtune.training.mechanism.estimates import SumNoise, consistent
from privtune.training.mechanism.metrics import make_metric
from privtune.training.mechanism.scoring import _tally

Floats = np.ndarray[Any, np.dtype[np.float64]]


def noise_of(epsilon: float, metric: Any) -> SumNoise:
    terms: dict[str, Any] = {"delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}
    multiplier = calibrate(Gaussian(1.0), epsilon=epsilon, **terms).scale
    return SumNoise("gaussian", multiplier * metric.sensitivity)


def counts(metric: Any, margins: Floats, targets: Any) -> Floats:
    outputs = torch.tensor(np.stack([np.zeros_like(margins), margins], axis=1))
    parts = metric.parts(outputs, torch.tensor(targets), None)
    return _tally(torch.cat([parts, torch.ones_like(parts[:, :1])], dim=1))


def hospital(rng: np.random.Generator, apart: float, records: int = 1000) -> tuple[Floats, Any]:
    """7.7% positives, and margins of a model that has learnt the base rate first: all far from 0."""
    targets = (np.arange(records) < round(0.077 * records)).astype(int)
    margins = -2.5 + 0.3 * (rng.standard_normal(records) + apart * targets)
    return margins, targets


def estimates(metric: Any, sums: Floats, noise: SumNoise, *, runs: int, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(runs):
        released = metric.release(sums, noise, rng.standard_normal, records=1000)
        found.append(metric.estimate(released, noise))
    return found


@pytest.mark.statistical
def test_rare_positives_far_from_zero_are_measured_and_arms_keep_their_order() -> None:
    """A report that may cost 4 of an arm's ε of 8: two arms, 0.05 apart, on the same records.

    Bins equal in m/(1 + |m|) have all records in two of twenty. Here the mean is within 0.03 of the exact
    area, and the order right in nine of ten: of 200 pairs fewer than 180 are right with a probability of at
    most 1e-3 where 95% are.
    """
    metric = make_metric("auc")
    noise = noise_of(4.0, metric)
    rng = np.random.default_rng(5)
    margins, targets = hospital(rng, 0.9)
    better, _ = hospital(np.random.default_rng(5), 1.15)
    exact = [float(roc_auc_score(targets, m)) for m in (margins, better)]
    assert exact[1] - exact[0] == pytest.approx(0.05, abs=0.015)
    shown = [
        [
            each.value
            for each in estimates(metric, counts(metric, m, targets), noise, runs=200, seed=s)
        ]
        for s, m in enumerate((margins, better))
    ]
    for values, truth in zip(shown, exact, strict=True):
        assert np.mean(values) == pytest.approx(truth, abs=0.03)
    assert np.mean(np.array(shown[1]) > np.array(shown[0])) >= 0.9


def with_fixed_bins(margins: Floats, targets: Any, scale: float, rng: np.random.Generator) -> float:
    """Twenty bins equal in m/(1 + |m|), with all of the noise on their counts."""
    place = np.clip(np.floor(10.0 * (1.0 + margins / (1.0 + np.abs(margins)))), 0, 19).astype(int)
    both = [np.bincount(place[targets == c], minlength=20) for c in (1, 0)]
    positive, negative = (b + scale * rng.standard_normal(20) for b in both)
    pairs = positive @ (np.cumsum(negative) - negative / 2)
    return float(np.clip(pairs / (positive.sum() * negative.sum()), 0.0, 1.0))


@pytest.mark.statistical
@pytest.mark.parametrize(("records", "epsilon"), [(500, 0.5), (1000, 1.0), (1000, 5.0)])
def test_balanced_classes_around_zero_lose_nothing(records: int, epsilon: float) -> None:
    """Where fixed bins are at their best: the error is at most 5% larger (300 pairs; ± 4%)."""
    metric = make_metric("auc")
    noise = noise_of(epsilon, metric)
    rng = np.random.default_rng(0)
    truth = float(stats.norm.cdf(1.1 / math.sqrt(2.0)))
    ours, theirs = [], []
    for _ in range(300):
        targets = (rng.random(records) < 0.5).astype(int)
        margins = rng.standard_normal(records) + 1.1 * targets - 0.55
        released = metric.release(
            counts(metric, margins, targets), noise, rng.standard_normal, records=records
        )
        ours.append(metric.estimate(released, noise).value - truth)
        theirs.append(with_fixed_bins(margins, targets, noise.scale, rng) - truth)
    assert math.sqrt(np.mean(np.square(ours))) <= 1.05 * math.sqrt(np.mean(np.square(theirs)))


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_the_tree_and_the_histograms_cost_the_charge_together(mechanism: str) -> None:
    """One record more: how far the exact counts of each stage move, over the noise that each has."""
    metric = make_metric("auc", mechanism=mechanism)
    noise = SumNoise(mechanism, 2.0)
    rng = np.random.default_rng(1)
    margins, targets = hospital(rng, 1.0, records=200)
    more = counts(metric, margins, targets)
    fewer = counts(metric, margins[1:], targets[1:])
    drawn: list[int] = []

    def draw(size: int) -> Floats:
        drawn.append(size)
        return np.zeros(size)

    with_it = metric.release(more, noise, draw, records=200)
    without = metric.release(fewer, noise, draw, records=200)
    assert drawn[: metrics._HEIGHT] == [4**height for height in range(1, 9)]
    # A record is in one count of each level, and in one bin of one class.
    assert with_it.sum() - without.sum() == 1.0
    of_tree = metrics._HEIGHT if mechanism == "laplace" else math.sqrt(metrics._HEIGHT)
    costs = [of_tree / metric._of_tree(noise).scale, 1.0 / metric._of_histograms(noise).scale]
    together = sum(costs) if mechanism == "laplace" else math.hypot(*costs)
    assert together == pytest.approx(1.0 / noise.scale, rel=1e-12)


def of_one(epsilon: float, shift: float) -> float:
    """δ(ε) of a Laplace release of scale 1, moved by ``shift``."""
    if epsilon <= -shift:
        return 1.0 - math.exp(epsilon)
    return max(0.0, 1.0 - math.exp(0.5 * (epsilon - shift)))


def of_two(epsilon: float, first: float, second: float) -> float:
    """δ(ε) of two of them: the loss of the first is ± first, or between with density e^((l - first)/2)/4."""
    ends = 0.5 * of_one(epsilon - first, second)
    ends += 0.5 * math.exp(-first) * of_one(epsilon + first, second)

    def between(loss: float) -> float:
        return 0.25 * math.exp(0.5 * (loss - first)) * of_one(epsilon - loss, second)

    kinks = sorted({min(max(epsilon + s * second, -first), first) for s in (-1.0, 1.0)})
    inner, _ = integrate.quad(between, -first, first, points=kinks, limit=200)
    return ends + inner


@pytest.mark.parametrize("share", [0.05, metrics._FOR_BINS, 0.5, 0.9])
@pytest.mark.parametrize("shift", [0.01, 0.3, 1.0, 3.0, 8.0])
def test_two_laplace_releases_are_dominated_by_one_of_their_shifts_together(
    share: float, shift: float
) -> None:
    """Exact profiles at 81 values of ε, from -shift to shift."""
    for epsilon in np.linspace(-shift, shift, 81):
        two = of_two(float(epsilon), share * shift, (1.0 - share) * shift)
        assert two <= of_one(float(epsilon), shift) + 1e-9
    assert of_two(0.0, share * shift, (1.0 - share) * shift) > 0.0


def test_a_consistent_tree_is_the_least_squares_fit() -> None:
    """Against the normal equations, for a tree of two levels above its leaves."""
    rng = np.random.default_rng(2)
    levels = [rng.standard_normal(3**h) for h in (1, 2, 3)]
    sums = np.concatenate([np.kron(np.eye(3**h), np.ones((1, 27 // 3**h))) for h in (1, 2, 3)])
    fitted, *_ = np.linalg.lstsq(sums, np.concatenate(levels), rcond=None)
    assert consistent(levels) == pytest.approx(fitted, abs=1e-9)


def test_margins_that_are_no_numbers_help_nobody() -> None:
    metric = make_metric("auc")
    for value in (math.inf, -math.inf):
        margins, positive, negative = counts(metric, np.array([value, value]), np.array([1, 0]))
        assert margins.tolist() == [math.copysign(metrics._FARTHEST_MARGIN, value)]
        assert positive.tolist() == negative.tolist() == [1.0]
    margins, positive, _ = counts(metric, np.array([math.nan, math.nan]), np.array([1, 0]))
    assert positive.tolist() == [1.0, 0.0], "the positive stands lowest"


@pytest.mark.parametrize(("middle", "spread"), [(0.0, 3e4), (5.0, 1e-3), (-2.5, 5e-3), (1e12, 1e9)])
def test_on_a_public_split_it_is_exact_whatever_the_margins(middle: float, spread: float) -> None:
    metric = make_metric("auc")
    rng = np.random.default_rng(7)
    targets = (rng.random(500) < 0.3).astype(int)
    margins = middle + spread * (rng.standard_normal(500) + 0.9 * targets)
    noise = SumNoise("gaussian", 0.0)
    sums = metric.release(counts(metric, margins, targets), noise, rng.standard_normal, records=500)
    truth = roc_auc_score(targets, margins)
    assert metric.estimate(sums, noise).value == pytest.approx(truth, abs=1e-12)


def two_sided(rng: np.random.Generator, positive: Any) -> Floats:
    """Half of the positives far below all negatives, half far above."""
    far = np.where(rng.random(len(positive)) < 0.5, -3.0, 3.0)
    return rng.standard_normal(len(positive)) * 0.5 + far * positive


def uneven(rng: np.random.Generator, positive: Any) -> Floats:
    """Positives that vary sixteen times as much as negatives."""
    return (0.3 * positive + rng.standard_normal(len(positive))) * np.where(positive, 1.6, 0.1)


@pytest.mark.statistical
@pytest.mark.parametrize("population", [two_sided, uneven])
@pytest.mark.parametrize("share", [0.08, 0.5])
@pytest.mark.parametrize("epsilon", [5.0, math.inf])
def test_its_interval_holds_where_margins_are_not_alike(
    population: Any, share: float, epsilon: float
) -> None:
    """200 releases: fewer than 179 hold with a probability of 1e-4 at 95%, and of 0.96 at 85%."""
    metric = make_metric("auc")
    noise = SumNoise("gaussian", 0.0) if math.isinf(epsilon) else noise_of(epsilon, metric)
    rng = np.random.default_rng(8)
    many = (rng.random(200_000) < share).astype(int)
    truth = roc_auc_score(many, population(rng, many))
    held = 0
    for _ in range(200):
        targets = (rng.random(500) < share).astype(int)
        sums = counts(metric, population(rng, targets), targets)
        released = metric.release(sums, noise, rng.standard_normal, records=500)
        found = metric.estimate(released, noise)
        held += found.low <= truth <= found.high
    assert held >= 179
