"""Descents from many starts at once, what each step costs, and a table of one's own."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from privtune.training.methods import PUR
from studies.pur.run import dataset, standardised, zcdp_budget

CONSTANTS = (0.001, 0.01, 0.1, 1.0)
NORMAL = ("normal", "normal.", "0")  # the last column of a record that is no anomaly
LARGEST = 70_000  # the paper's subsample of KDD Cup '99
START_BOUND = math.log(2.0)  # the loss at 0, and none is below 0
STARTS: dict[str, tuple[str, Callable[[int], float]]] = {  # a law, and what its draws are times
    "0": ("one", lambda _: 0.0),
    "1": ("one", lambda _: 1.0),
    "N(0, 1)": ("normal", lambda _: 1.0),
    "N(0, 0.01)": ("normal", lambda _: 0.1),
    "N(0, 1/d)": ("normal", lambda d: d**-0.5),
    "N(0, 2/d), He": ("normal", lambda d: (2.0 / d) ** 0.5),
    "uniform, Glorot": ("uniform", lambda d: (6.0 / (d + 1)) ** 0.5),
    "uniform, torch's linear layer": ("uniform", lambda d: d**-0.5),
    "uniform on [-1, 1]": ("uniform", lambda _: 1.0),
    "uniform on [0, 1]": ("positive", lambda _: 1.0),
    "unit sphere": ("sphere", lambda _: 1.0),
}


@dataclass(frozen=True)
class Problem:
    """Regularised logistic regression, with the constants of its loss as the paper states them.

    Attributes:
        x: Features of zero mean and unit variance.
        y: Labels, -1 or 1.
        decay: The regularisation.
        distance: The bound R on the distance to the optimum.
    """

    x: torch.Tensor
    y: torch.Tensor
    decay: float
    distance: float

    @functools.cached_property
    def bound(self) -> float:
        """Return Z, the longest record."""
        return self.x.norm(dim=1).max().item()

    @functools.cached_property
    def signed(self) -> torch.Tensor:
        """Return the features times their labels, which is all that the loss sees."""
        return self.y[:, None] * self.x

    @property
    def lipschitz(self) -> float:
        """Return L = λR + Z."""
        return self.decay * self.distance + self.bound

    @property
    def smoothness(self) -> float:
        """Return M = λ + Z²/4."""
        return self.decay + self.bound**2 / 4.0

    @property
    def delta(self) -> float:
        """Return 1/N, as the paper has it."""
        return 1.0 / len(self.y)

    def risk(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the empirical risk of each row."""
        loss = F.softplus(-(theta @ self.signed.T)).mean(dim=1)
        return loss + self.decay / 2.0 * theta.square().sum(dim=1)

    def gradient(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the empirical risk at each row."""
        weights = torch.sigmoid((theta @ self.signed.T).neg_())
        return self.decay * theta - weights @ self.signed / len(self.y)

    def cost(self, deviation: torch.Tensor | float) -> Any:
        """Return the ρ of one step by replace-one adjacency: Δ = 2L/N."""
        return (2.0 * self.lipschitz / len(self.y)) ** 2 / (2.0 * deviation**2)

    def epsilon(self, rho: torch.Tensor) -> torch.Tensor:
        """Return ρ + 2 sqrt(ρ log 1/δ)."""
        return rho + 2.0 * (rho * math.log(1.0 / self.delta)).sqrt()

    def schedule(self, gap: float) -> Callable[[int], float]:
        """Return the product's σ of every step from 0, for a convex or a strongly convex loss."""
        method = PUR(
            lipschitz=self.lipschitz,
            smoothness=self.smoothness,
            dimension=self.x.shape[1],
            regularisation=self.decay,
            gap=gap,
            **(
                {"strong_convexity": self.decay}
                if self.decay
                else {"regime": "convex", "distance": self.distance}
            ),
        )
        return method.deviation


def problem(name: str, decay: float, data: Path | None, distance: float | None = None) -> Problem:
    """Return a data set's problem; without a distance, the one that a loss of log 2 at 0 leaves."""
    reach = math.sqrt(2.0 * START_BOUND / decay) if distance is None else distance
    return Problem(*records(name, data), decay, reach)


@functools.lru_cache(maxsize=1)
def records(name: str, data: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of zero mean and unit variance, and labels."""
    x, y = table(data) if name == "table" and data else dataset(name, data)
    kind = torch.float32 if x.size > 15_000 else torch.float64
    return torch.tensor(standardised(x)).to(kind), torch.tensor(y).to(kind)


def table(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read features and labels from a CSV file whose last column names what is normal.

    A column that is not of numbers is coded by the order of its values; a first line without any
    number is a head. More than 70,000 records are sampled, without replacement and with seed 0.
    """
    with path.open(encoding="utf-8", newline="") as file:
        lines = [[field.strip() for field in line] for line in csv.reader(file) if line]
    if len({len(line) for line in lines}) != 1 or len(lines[0]) < 2:
        raise ValueError("Every line must have the same columns, two at least.")
    if not any(_number(field) for field in lines[0]):
        lines = lines[1:]
    if len(lines) > LARGEST:
        chosen = np.random.default_rng(0).choice(len(lines), LARGEST, replace=False)
        lines = [lines[k] for k in chosen]
    columns = [_coded(list(column)) for column in list(zip(*lines, strict=True))[:-1]]
    labels = [-1.0 if line[-1].lower() in NORMAL else 1.0 for line in lines]
    return np.array(columns).T, np.array(labels)


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _coded(column: list[str]) -> list[float]:
    if all(map(_number, column)):
        return [float(text) for text in column]
    order = {text: float(k) for k, text in enumerate(sorted(set(column)))}
    return [order[text] for text in column]


def stand_in(path: Path) -> None:
    """Write a made-up table of the kind of KDD Cup '99: times, a service, bytes, what is normal."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8", newline="") as file:
        for _ in range(300):
            odd = rng.random() < 0.1
            size = rng.normal(2.0 if odd else 0.0)
            fields = (f"{rng.normal():.3f}", rng.choice(["http", "smtp", "ftp"]), f"{size:.3f}")
            csv.writer(file).writerow([*fields, "smurf." if odd else "normal."])


def starts(name: str, like: torch.Tensor, *, repetitions: int) -> torch.Tensor:
    """Return rows of first parameters by one law, the same draws whatever their scale."""
    law, scale = STARTS[name]
    random, shape = torch.Generator().manual_seed(0), (repetitions, like.shape[1])
    draw = torch.randn(shape, generator=random, dtype=like.dtype)
    flat = torch.rand(shape, generator=random, dtype=like.dtype)
    drawn = {
        "one": torch.ones_like(draw),
        "normal": draw,
        "uniform": 2.0 * flat - 1.0,
        "positive": flat,
        "sphere": draw / draw.norm(dim=1, keepdim=True),
    }
    return scale(shape[1]) * drawn[law]


def course(
    of: Problem, sigma: Callable[[int], float] | None, *, steps: int, repetitions: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Descend from 0, and return ε and the gradient's norm before every step, rows of repetitions.

    ``sigma`` None takes the gradient's norm itself: the schedule that nobody may know.
    """
    noise = torch.Generator().manual_seed(seed)
    theta = of.x.new_zeros(repetitions, of.x.shape[1])
    rho, spent, norms = torch.zeros(repetitions, dtype=torch.float64), [], []
    for step in range(steps):
        gradient = of.gradient(theta)
        norm = gradient.norm(dim=1)
        spent.append(of.epsilon(rho))
        norms.append(norm)
        if sigma is None:
            deviation = norm / math.sqrt(theta.shape[1])
        else:
            deviation = norm.new_full(norm.shape, sigma(step))
        rho = rho + of.cost(deviation.double())
        if of.epsilon(rho).min() > 20.0:
            break
        draw = torch.randn(theta.shape, generator=noise, dtype=theta.dtype)
        theta = theta - (gradient + deviation[:, None] * draw) / (2.0 * of.smoothness)
    return torch.stack(spent), torch.stack(norms)


def ends_at(
    of: Problem, sigma: Callable[[int], float], start: torch.Tensor, *, epsilon: float, steps: int
) -> torch.Tensor:
    """Return the risk of each row when the next step would cost more than ε."""
    noise, rho = torch.Generator().manual_seed(1), zcdp_budget(epsilon, of.delta)
    theta = start
    for step in range(steps):
        rho -= of.cost(sigma(step))
        if rho < 0.0:
            break
        draw = torch.randn(theta.shape, generator=noise, dtype=theta.dtype)
        theta = theta - (of.gradient(theta) + sigma(step) * draw) / (2.0 * of.smoothness)
    return of.risk(theta)
