"""What candidates reach at one total ε: all of them, the best alone, linear scaling, a given rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

from privtune import accounting as dp
from studies.sheet import releases_of, seed_of

__all__ = ["COUNTS", "DELTA", "OPTIMIZERS", "RATE", "STEPS", "accuracies"]

DELTA, RATE = 1e-5, 64 / 1077
STEPS = math.ceil(20 / RATE)
COUNTS, SEEDS = (1, 5, 20), 10
SCALE = {"max_grad_norm": 1.0}
# The method, where its rates are drawn from, and the rate that it is usually given.
OPTIMIZERS: dict[str, tuple[str, tuple[float, float], float]] = {
    "SGD": ("dpsgd", (0.01, 10.0), 0.5),
    "Adam": ("dp-adam", (1e-4, 0.1), 1e-3),
}


@cache
def by_theorem(epsilon: float, count: int) -> float:
    """Return today's ε of the selection of which Liu and Talwar's theorem says this ε."""
    step = dp.PoissonSampled(RATE, dp.Gaussian(1.0))
    whole = dp.PrivateSelection(dp.Repeated(STEPS, step), dp.Geometric(count))
    low, high = 0.05 * epsilon, epsilon
    for _ in range(10):
        middle = math.sqrt(low * high)
        told = dp.calibrate(whole, epsilon=middle, delta=DELTA).guarantee.bounds["liu-talwar"]
        low, high = (middle, high) if told <= epsilon else (low, middle)
    return low


def arms_of(
    optimizer: str, count: int, epsilon: float
) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield the arms' names, what a spec has of them, and the ε that each may cost today."""
    method, _, rate = OPTIMIZERS[optimizer]
    given = {"method": method, "parameters": SCALE}
    if count == 1:
        fixed = {**given, "strategy": "fixed", "parameters": {**SCALE, "learning_rate": rate}}
        yield "a given rate", fixed, epsilon
    yield "all", {**given, "strategy": "everything", "trials": count, "sampler": "random"}, epsilon
    if count > 1:
        best = {**given, "mean_runs": count}
        yield "best, Liu–Talwar", {**best, "strategy": "liu-talwar"}, by_theorem(epsilon, count)
        yield "best, ours", {**best, "strategy": "papernot-steinke"}, epsilon
        linear = {**given, "strategy": "linear-scaling", "trials": count // 2}
        yield "linear scaling, ours", linear, epsilon


def accuracies(optimizer: str, epsilon: float, count: int, *, smoke: bool) -> list[dict[str, Any]]:
    """Run every arm with every seed: a study with a budget of its own each."""
    low, high = OPTIMIZERS[optimizer][1]
    space = {"learning_rate": {"type": "float", "low": low, "high": high, "log": True}}
    terms: dict[str, Any] = {
        "task": "digits-mlp",
        "epochs": 1 if smoke else 20,
        "expected_batch_size": 64,
        "repeats": 1 if smoke else SEEDS,
        "seed": seed_of(optimizer, epsilon, count),  # its arms share it
    }
    lines = []
    for name, arm, cost in arms_of(optimizer, count, epsilon):
        more = {} if arm["strategy"] == "fixed" else {"space": space}
        found = releases_of(arm, epsilon=cost, delta=DELTA, **terms, **more)
        lines += [
            {"account": name, "value": 100.0 * each["accuracy"], "seed": each["seed"]}
            for each in found
        ]
    return lines
