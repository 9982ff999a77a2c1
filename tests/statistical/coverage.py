"""How often 95% intervals of scores hold the truth: many releases of one population, for each metric.

    python -m tests.statistical.coverage > coverage.md     # the whole grid, 400 releases a cell

A release draws the records anew (their number, too), adds the noise, and asks for the interval. The truth is
the metric of the population. No model is trained: margins and targets are drawn.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from privtune.accounting import Adjacency, Gaussian, calibrate
from privtune.training.mechanism.estimates import SumNoise
from privtune.training.mechanism.metrics import Metric, make_metric
from privtune.training.mechanism.scoring import _tally

METRICS: dict[str, dict[str, Any]] = {
    "accuracy": {},
    "top_k": {"k": 1},
    "balanced_accuracy": {},
    "f1": {},
    "macro_f1": {},
    "auc": {},
    "loss": {"bound": 4.0},
    "perplexity": {"bound": 4.0},
    "value": {"bound": 4.0},
    "mae": {"target_range": (0.0, 1.0)},
    "mse": {"target_range": (0.0, 1.0)},
    "r2": {"target_range": (0.0, 1.0)},
    "cost": {"bound": 4.0},
}
"""Every registered metric, with its options. A place here seeds the draws, so a new one comes last."""

WIDER = {
    "auc": "it holds the most that ties within bins may lose",
    "balanced_accuracy": "a class whose events are few beside the noise may have any share",
    "f1": "a class whose events are few beside the noise may have any share",
    "macro_f1": "likewise, and an error counts in the variance of two classes",
    "loss": "rare records far off may be missing in the sample",
    "perplexity": "rare records far off may be missing in the sample",
    "value": "rare records far off may be missing in the sample",
    "cost": "rare records far off may be missing in the sample",
    "mae": "rare records far off may be missing in the sample",
    "mse": "rare records far off may be missing in the sample",
    "r2": "the spread of squared errors is bounded by their mean alone",
}
"""Metrics whose intervals may hold the truth more often than 99 times of 100, and why."""

SIZES = (60, 500, 5000)
EPSILONS = (0.05, 0.5, 5.0)
SHARES = (0.01, 0.08, 0.5)
OFFSETS = (-2.0, 0.2)
"""Margins of negatives in the mean: far from 0, where all are taken for negatives, and near it."""
DECLARED = (0.7, 1.0, 1.3)

_POPULATION = 400_000
_DELTA = 1e-5


@dataclass(frozen=True)
class Cell:
    """One population, its size, and the ε of a score."""

    metric: str
    records: int
    epsilon: float
    share: float
    offset: float = 0.2
    declared: float = 1.0
    mechanism: str = "gaussian"
    adjacency: Adjacency = Adjacency.ADD_REMOVE

    def make(self) -> Metric:
        """Return the metric."""
        terms: dict[str, Any] = {"mechanism": self.mechanism, "adjacency": self.adjacency}
        return make_metric(self.metric, **terms, **METRICS[self.metric])


@dataclass(frozen=True)
class Coverage:
    """What releases of a cell did.

    Args:
        held: Share of the releases whose interval holds the truth.
        width: Mean width, as a share of what the metric can be.
        nothing: Share of the releases that hold no information.
        bias: Mean value less the truth.
        error: Root of the mean squared error of the value.
    """

    held: float
    width: float
    nothing: float
    bias: float
    error: float


def records_of(cell: Cell, size: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Draw outputs and targets of so many records."""
    if cell.metric in ("mae", "mse", "r2"):
        targets = rng.beta(2.0, 5.0, size)
        rare = rng.random(size) < cell.share  # which are far off
        outputs = targets + 0.1 * (1.0 + 3.0 * rare) * rng.standard_normal(size)
        return torch.tensor(outputs)[:, None], torch.tensor(targets)
    positive = (rng.random(size) < cell.share).astype(int)
    margins = cell.offset + 0.5 * rng.standard_normal(size) + 0.7 * positive
    return torch.tensor(np.stack([np.zeros(size), margins], axis=1)), torch.tensor(positive)


def sums_of(metric: Metric, outputs: Any, targets: Any) -> Any:
    """Return what the records add together."""

    def loss(outputs: Any, targets: Any) -> Any:
        if metric.reads == "function":
            return outputs[:, 1]
        return cross_entropy(outputs, targets, reduction="none")

    parts = metric.parts(outputs, targets, loss)
    if metric.is_tally:
        weighed = torch.cat([parts, torch.ones_like(parts[:, :1])], dim=1)
        return _tally(weighed)
    return parts.sum(dim=0).numpy()


@cache
def noise_multiplier(epsilon: float, mechanism: str, adjacency: Adjacency) -> float:
    """Return the noise of one score of an ε."""
    if mechanism == "laplace":
        return 1.0 / epsilon
    return calibrate(Gaussian(1.0), epsilon=epsilon, delta=_DELTA, adjacency=adjacency).scale


@cache
def truth_of(metric: str, share: float, offset: float) -> float:
    """Return the metric of the population, by very many records."""
    cell = Cell(metric, _POPULATION, math.inf, share, offset)
    if metric == "auc":  # of two normal laws
        return 0.5 * (1.0 + math.erf(0.7 / 0.5 / 2.0))
    sums = sums_of(cell.make(), *records_of(cell, _POPULATION, np.random.default_rng(99)))
    return cell.make().estimate(sums, SumNoise("gaussian", 0.0)).value


def coverage(cell: Cell, *, releases: int, seed: int = 0) -> Coverage:
    """Release a score of a cell so many times; return how often its interval holds the truth."""
    metric = cell.make()
    multiplier = noise_multiplier(cell.epsilon, cell.mechanism, cell.adjacency)
    noise = SumNoise(cell.mechanism, multiplier * metric.sensitivity)
    truth = truth_of(cell.metric, cell.share, cell.offset)
    place = list(METRICS).index(cell.metric)
    key = [
        seed,
        place,
        cell.records,
        *(round(1000 * v) for v in (cell.epsilon, cell.share, cell.declared)),
    ]
    rng = np.random.default_rng(key)

    def draw(size: int) -> Any:
        gaussian = cell.mechanism == "gaussian"
        return rng.standard_normal(size) if gaussian else rng.laplace(size=size)

    rows = []
    for _ in range(releases):
        size = int(rng.poisson(cell.records))
        sums = sums_of(metric, *records_of(cell, size, rng))
        declared = round(cell.declared * cell.records)
        found = metric.estimate(metric.release(sums, noise, draw, records=declared), noise)
        held = found.low - 1e-9 <= truth <= found.high + 1e-9
        rows.append((held, found.share_of_range, not found.is_informative, found.value - truth))
    held, width, nothing, off = np.array(rows, dtype=float).T
    return Coverage(
        held=float(held.mean()),
        width=float(width.mean()),
        nothing=float(nothing.mean()),
        bias=float(off.mean()),
        error=math.sqrt(float(np.square(off).mean())),
    )


def grid(metric: str) -> Iterator[Cell]:
    """Give the cells of a metric; a declared size matters to bins of an area alone."""
    declared = DECLARED if metric == "auc" else (1.0,)
    offsets = (0.2,) if metric in ("mae", "mse", "r2") else OFFSETS
    for records, share, offset, size, epsilon in itertools.product(
        SIZES, SHARES, offsets, declared, EPSILONS
    ):
        yield Cell(metric, records, epsilon, share, offset, size)


def write(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print the whole grid as a table of Markdown, a metric, size and share a line, a column an ε."""
    titles = [f"ε = {epsilon:g}" for epsilon in EPSILONS]
    write(f"| metric | records | rare | margins | declared | {' | '.join(titles)} |")
    write(f"| --- | --- | --- | --- | --- | {' | '.join('---' for _ in titles)} |")
    low = wide = total = 0
    for metric in METRICS:
        cells = list(grid(metric))
        for start in range(0, len(cells), len(EPSILONS)):
            row = cells[start : start + len(EPSILONS)]
            shown = []
            for cell in row:
                found = coverage(cell, releases=400)
                total += 1
                low += found.held < 0.93
                wide += found.held > 0.99
                shown.append(f"{found.held:.1%}, {found.width:.2f}")
            first = row[0]
            facts = f"{first.records:,} | {first.share:g} | {first.offset:g} | {first.declared:g}"
            write(f"| {metric} | {facts} | {' | '.join(shown)} |")
    write(f"\n{total} cells: {low} below 93%, {wide} above 99%.")


if __name__ == "__main__":
    main()
