"""AdaCliP against fixed clipping: the regression, Tables 1 and 2, Figure 3 and momentum.

python -m studies.adaclip.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import AdaCliP, FixedDPSGD, NormBound
from studies.adaclip import parts, shown
from studies.harness import Split, mnist
from studies.sheet import Again, Options, Sheet

DELTA, BATCH, EPOCHS = 1e-5, 600, 10
FIXED = [{"learning_rate": r, "max_grad_norm": 4.0} for r in (0.03, 0.1, 0.3, 1.0)]
BOUND = [{"learning_rate": r} for r in (0.01, 0.03, 0.1, 0.3)]
LITERAL = [
    {"learning_rate": r, "largest_variance": 1e-2} for r in (1e3, 1e4)
]  # of (5) as it stands
REGRESSION = ("fixed", "known deviations", "AdaCliP", "AdaCliP, σ = 0.03")
FALLING = "falling rate"
MOMENTS = "fixed, moments accountant"
BETAS = (0.0, 0.9, 0.99)
PCA = 4.0  # its noise multiplier over that of a step


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the cells: those of both ends first, the dear ones of the network in the middle."""
    if options.smoke:
        for part, at, arm in SMOKE:
            yield {"part": part, "at": at, "arm": arm}
        return
    for at, arm in itertools.product((1, 10, 100, 1000), REGRESSION):
        yield {"part": "regression", "at": at, "arm": arm}
    for at, arm in itertools.product((0.1, 0.25, 0.5, 1.0, 2.0), ("norm bound", "fixed")):
        yield {"part": "table 1", "at": at, "arm": arm}
    for at in (0.5, 2.0):
        yield {"part": "table 2", "at": at, "arm": "fixed"}
    for at in (0.1, 2.0):
        yield {"part": "table 1", "at": at, "arm": "AdaCliP"}
    yield {"part": "table 2", "at": 0.5, "arm": "AdaCliP"}
    yield {"part": "table 1", "at": 0.5, "arm": "AdaCliP"}
    yield {"part": "table 1", "at": 0.1, "arm": MOMENTS}
    yield {"part": "table 2", "at": 2.0, "arm": f"fixed, {FALLING}"}
    yield {"part": "table 2", "at": 2.0, "arm": "AdaCliP"}
    for beta in BETAS:
        yield {"part": "momentum", "at": 0.5, "arm": f"β = {beta:g}"}
    for at in (0.25, 1.0):
        yield {"part": "table 1", "at": at, "arm": "AdaCliP"}
    yield {"part": "table 2", "at": 2.0, "arm": f"AdaCliP, {FALLING}"}
    for at, arm in ((0.2, "fixed"), (4.0, f"fixed, {FALLING}"), (1.0, f"fixed, {FALLING}")):
        yield {"part": "table 2", "at": at, "arm": arm}
    for at in (0.5, 2.0, 0.25, 1.0):
        yield {"part": "table 1", "at": at, "arm": MOMENTS}
    yield {"part": "table 1", "at": 0.5, "arm": "AdaCliP, (5) to the letter"}
    yield {"part": "table 2", "at": 0.2, "arm": "AdaCliP"}


SMOKE = (
    ("regression", 10, "AdaCliP"),
    ("table 1", 2.0, "norm bound"),
    ("momentum", 2.0, "β = 0.9"),
    ("table 2", 2.0, "fixed"),
    ("table 2", 2.0, "AdaCliP"),
)


def _adaclip(epsilon: float) -> list[dict[str, float]]:
    """Return AdaCliP's candidates for logistic regression: about the best of twelve in trials."""
    pairs = [(0.1, 1e-3), (0.3, 1e-4), (0.1, 1e-2), (0.3, 1e-2)]
    if epsilon != 0.25:
        pairs = pairs[:2] if epsilon < 0.25 else pairs[2:]
    return [{"learning_rate": rate, "largest_variance": h2} for rate, h2 in pairs]


def _network(arm: str, epsilon: float) -> list[dict[str, Any]]:
    """Return the network's candidates.

    A norm of 4 for each of two layers is one of 4 sqrt(2) for the whole; AdaCliP's noise is about
    that at an h2 of 1e-3, and half of it at 1e-4.
    """
    small, falls = epsilon <= 0.5, {"schedule": "linear"} if arm.endswith(FALLING) else {}
    if arm.startswith("fixed"):
        rates = (0.05, 0.1, 0.25) if small else (0.5, 1.0) if falls else (0.1, 0.25, 0.5)
        own = {"max_grad_norm": 4.0 * 2**0.5, **falls}
        return [{"learning_rate": rate, **own} for rate in rates]
    pairs = ((0.1, 1e-3), (0.3, 1e-4)) if small else ((0.4, 1e-3), (1.0, 1e-4))
    if falls:
        pairs = ((0.5, 1e-3), (1.0, 1e-3))
    return [{"learning_rate": rate, "largest_variance": h2, **falls} for rate, h2 in pairs]


@lru_cache(maxsize=1)
def data(path: Path | None, smoke: bool) -> Split:
    """Load the records once."""
    return mnist(path, smoke=smoke)


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm at one ε or one number of dimensions."""
    part, at, arm = cell["part"], float(cell["at"]), str(cell["arm"])
    if part == "regression":
        return parts.regression(arm, int(at), epochs=0.1 if options.smoke else 2.0)
    split, seeds = data(options.data, options.smoke), 1 if options.smoke else 3
    epochs, batch = (0.1, 60) if options.smoke else (EPOCHS, BATCH)
    schedule = Schedule.from_epochs(records=len(split), expected_batch_size=batch, epochs=epochs)
    budget = {"epsilon": at, "delta": DELTA}
    if part == "table 2":
        pca, noise = parts.shared(schedule, at, PCA)
        split, seeds = parts.projected(split, pca), min(seeds, 2)
        layers = FixedDPSGD(noise, clipping="by-layer")
        method: Any = AdaCliP(noise) if arm.startswith("AdaCliP") else layers
        grid = _network(arm, at)
        return parts.chosen(method, schedule, parts.network, split, grid, seeds)
    if part == "momentum":
        beta = float(arm.removeprefix("β = "))
        method = FixedDPSGD.for_budget(schedule, **budget, momentum=beta)
        # The paper's average gives a new gradient the weight 1 - β; the sum here, all of it.
        rates = [
            {"learning_rate": round(r * (1.0 - beta), 6), "max_grad_norm": 28.0}
            for r in (0.03, 0.1)
        ]
        return parts.chosen(method, schedule, parts.logistic, split, rates, seeds)
    if arm == "norm bound":
        method, grid = NormBound.for_budget(schedule, **budget, gradient_bound=28.0), BOUND
    elif arm == "fixed":
        method, grid = FixedDPSGD.for_budget(schedule, **budget), FIXED
    elif arm == MOMENTS:
        method, grid = FixedDPSGD(parts.moments_noise(schedule, at, DELTA)), FIXED
    else:
        literal = arm != "AdaCliP"
        method = AdaCliP.for_budget(schedule, **budget, per_record=not literal)
        grid = LITERAL if literal else _adaclip(at)
    return parts.chosen(method, schedule, parts.logistic, split, grid, seeds)


SHEET = Sheet(
    name="adaclip",
    key=("part", "at", "arm"),
    values=("seed", "value", "rate", "h2", "clipped", "noise", "even", "own"),
    cells=cells,
    fill=fill,
    figures=shown.figures,
    tables=shown.tables,
    charts=shown.charts,
    again=Again({"part": "regression", "at": "10", "arm": "AdaCliP"}, "value"),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
