"""PUR schedules against constant noise: Table 3 of the paper, logistic regression with λ = 0.1.

Features are scaled to zero mean and unit variance as in the paper: that looks at the data, so these
runs are reproductions and not private. The columns with public bounds scale by public constants.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_iris
from torch.nn import functional as F

from privtune.accounting.rdp import gaussian_epsilon
from privtune.errors import InvalidInputError
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.transcript import Transcript
from privtune.training.methods import PUR, PURConstant
from studies.harness import mnist, study

PAPER = {
    "synthetic": {"0.1": [0.5090, 0.5307], "20.0": [0.5087, 0.5087]},
    "mnist": {"0.1": [1.0058, 0.9449], "20.0": [0.6510, 0.5822]},
    "iris": {"0.1": [0.6465, 0.6809], "20.0": [0.2778, 0.2782]},
    "breast-cancer": {"0.1": [1.1656, 0.8651], "20.0": [0.2399, 0.2437]},
}
PUBLIC_SCALE = {"synthetic": 5.0, "iris": 10.0, "mnist": 28.0}  # bounds known without the data


class FullBatch:
    """The oracle of all records for logistic regression without bias, repetitions in a stack.

    A record's gradient is no longer than its features, so clipping to the bound changes nothing.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, steps: int, repetitions: int, seed: int):
        self.x, self.y = x, y
        self.schedule = Schedule(records=len(y), sample_rate=1.0, steps=steps)
        self.candidates, self.pace = repetitions, 1.0
        self._generator = torch.Generator().manual_seed(seed)
        self._transcripts = [Transcript() for _ in range(repetitions)]

    def everything(self) -> int:
        return {t.open_sample(1.0) for t in self._transcripts}.pop()

    def gradient(
        self, sample: int, params: torch.Tensor, *, clipping: Any, noise_multiplier: float
    ) -> torch.Tensor:
        for transcript in self._transcripts:
            transcript.record(sample, "gaussian", float(noise_multiplier))
        margins = self.y * (params @ self.x.T)
        total = (-self.y * torch.sigmoid(-margins)) @ self.x
        bound = clipping.sensitivity(self.candidates)[:, None].to(params)
        noise = torch.randn(params.shape, generator=self._generator, dtype=params.dtype)
        return (total + noise_multiplier * bound * noise) / len(self.y)

    def transcripts(self) -> list[Transcript]:
        return self._transcripts


def dataset(name: str, data: Path | None) -> tuple[np.ndarray, np.ndarray]:
    if name == "synthetic":
        rng = np.random.default_rng(0)
        x = rng.multivariate_normal([0, 0], [[2, 1], [1, 2]], size=10_000)
        flip = rng.random(len(x)) < 0.1
        y = np.where((x.sum(axis=1) > 0) ^ flip, 1.0, -1.0)
        return x, y
    if name == "iris":
        x, y = load_iris(return_X_y=True)
        return x, np.where(y == 0, 1.0, -1.0)
    if name == "breast-cancer":
        x, y = load_breast_cancer(return_X_y=True)
        return x, np.where(y == 0, 1.0, -1.0)  # scikit-learn's 0 is malignant
    split = mnist(data, smoke=False)
    return split.x.numpy().astype(float), np.where(split.y.numpy() == 0, 1.0, -1.0)


def standardised(x: np.ndarray) -> np.ndarray:
    deviation = x.std(axis=0)
    return (x - x.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)


def public(name: str, x: np.ndarray) -> np.ndarray:
    """Scale by a public constant and enforce norm 1: nothing looks at the data as a whole."""
    scaled = x / PUBLIC_SCALE[name]
    return scaled / np.maximum(1.0, np.linalg.norm(scaled, axis=1, keepdims=True))


def zcdp_budget(eps: float, delta: float) -> float:
    """Return ρ with ``ρ + 2 sqrt(ρ log 1/δ) = ε``, the conversion that the paper reports."""
    log = math.log(1.0 / delta)
    return (math.sqrt(log + eps) - math.sqrt(log)) ** 2


def zcdp_horizon(method: PUR, records: int, rho: float, largest: int) -> int:
    """Return how many steps of the schedule fit into ρ: the paper's composition, summed exactly."""
    sensitivity, spent = 2.0 * method.lipschitz / records, 0.0
    for step in range(largest):
        spent += sensitivity**2 / (2.0 * method.deviation(step) ** 2)
        if spent > rho:
            return step
    return largest


def stated_horizon(method: PUR, gap: float, records: int, rho: float) -> int:
    """Return T as Proposition 4 (c) states it, without the κ = M/μ that its proof drops."""
    mu, ratio = method.regularisation, 2.0 * method.smoothness / method.regularisation
    inside = rho * mu * gap * records**2 / (2.0 * method.dimension * method.lipschitz**2)
    if inside <= 1.0:
        return 0
    return int(math.log(inside) / math.log(ratio / (ratio - 1.0)))


def stated(
    method: PUR, gap: float, x: torch.Tensor, y: torch.Tensor, rho: float, reps: int
) -> dict[str, Any]:
    """The paper's own horizon: the risk that it reaches, and the ε that it really spends."""
    steps, delta = stated_horizon(method, gap, len(y), rho), 1.0 / len(y)
    if steps == 0:
        return {"horizon_stated": 0}
    sensitivity = 2.0 * method.lipschitz / len(y)
    mu = math.sqrt(sum((sensitivity / method.deviation(t)) ** 2 for t in range(steps)))
    spent = gaussian_epsilon(mu, delta) if mu < 1e3 else mu * mu / 2.0
    found = {"horizon_stated": steps, "epsilon_stated_really_spends": spent}
    if steps * x.numel() < 2e8:
        found["schedule_stated"] = statistics.mean(risk(method, x, y, steps, reps, 2))
    return found


def risk(
    method: Any, x: torch.Tensor, y: torch.Tensor, steps: int, reps: int, seed: int
) -> list[float]:
    theta = torch.zeros(reps, x.shape[1], dtype=x.dtype)
    if steps > 0:
        oracle = FullBatch(x, y, steps, reps, seed)
        state = method.init(theta, [{}] * reps)
        for _ in range(steps):
            state = method.update(state, oracle)
        oracle.transcripts()[0].check_within(method.event(oracle.schedule))
        theta = state.params
    loss = F.softplus(-y * (theta @ x.T)).mean(dim=1)
    return (loss + method.regularisation / 2 * theta.square().sum(dim=1)).tolist()


def cell(
    x: np.ndarray, y: np.ndarray, eps: float, settings: dict[str, Any], limits: tuple[int, int]
) -> dict[str, Any]:
    """One cell of the table: the paper's account, the exact account, the best constant noise."""
    largest, reps = limits
    kind = torch.float32 if x.size > 1e6 else torch.float64
    features, labels = torch.tensor(x, dtype=kind), torch.tensor(y, dtype=kind)
    bound, decay = float(np.linalg.norm(x, axis=1).max()), float(settings["regularisation"])
    # The loss at 0 is log 2 and none is below 0, so λ/2 |θ*|² <= log 2: the paper's R. Its L counts
    # the regulariser, λ R + Z; that one moves no difference of sums, so Z is enough (`exact`).
    gap = math.log(2.0)
    lipschitz = decay * math.sqrt(2.0 * gap / decay) + bound
    delta = 1.0 / len(y)
    shared = {
        "smoothness": decay + bound**2 / 4.0,
        "dimension": x.shape[1],
        "regularisation": decay,
    }
    own = {"strong_convexity": decay, "gap": gap}
    paper = PUR(lipschitz=lipschitz, **shared, **own)
    rho = zcdp_budget(eps, delta)
    horizon = zcdp_horizon(paper, len(y), rho, largest)
    schedule = Schedule(len(y), 1.0, largest)
    try:
        exact = PUR.for_budget(schedule, epsilon=eps, delta=delta, lipschitz=bound, **shared, **own)
    except InvalidInputError:
        exact = None

    def mean(method: Any, steps: int) -> float:
        return statistics.mean(risk(method, features, labels, steps, reps, settings["seed"]))

    best = {}
    for sigma in settings["constants"]:
        per_step = (2.0 * lipschitz / len(y)) ** 2 / (2.0 * sigma**2)
        steps = min(largest, int(rho / per_step))
        multiplier = sigma / (2.0 * lipschitz / len(y))
        constant = PURConstant(lipschitz=lipschitz, **shared, noise_multiplier=multiplier)
        best[str(sigma)] = [steps, mean(constant, steps)]
    found = exact.horizon if exact is not None else 0
    return {
        "feature_bound": bound,
        "horizon_zcdp": horizon,
        "schedule_zcdp": mean(paper, horizon),
        "horizon_exact": found,
        "schedule_exact": mean(exact or paper, found or 0),
        **stated(paper, gap, features, labels, rho, reps),
        "constants": best,
        "best_constant": min(value for _, value in best.values()),
    }


def run(settings: dict[str, Any], data: Path | None, *, smoke: bool) -> dict[str, Any]:  # noqa: ARG001
    table: dict[str, Any] = {}
    for name in settings["datasets"]:
        x, y = dataset(name, data)
        big = name == "mnist"
        limits = (
            settings["mnist_largest_horizon" if big else "largest_horizon"],
            settings["mnist_repetitions" if big else "repetitions"],
        )
        for eps in settings["epsilons"]:
            entry = {
                "paper": dict(zip(("ours", "best_constant"), PAPER[name][str(eps)], strict=True)),
                "as_in_the_paper_not_private": cell(standardised(x), y, eps, settings, limits),
            }
            if name in PUBLIC_SCALE:
                entry["public_bounds"] = cell(public(name, x), y, eps, settings, limits)
            table.setdefault(name, {})[str(eps)] = entry
    return {"risk": table}


def compare(results: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    problems = []
    for name, cells in expected["schedule_zcdp"].items():
        for eps, recorded in cells.items():
            value = results["risk"][name][eps]["as_in_the_paper_not_private"]["schedule_zcdp"]
            if abs(value - recorded) > expected["tolerance"]:
                problems.append(f"{name} at epsilon {eps}: risk {value:.4f}, recorded {recorded}")
    return problems


def main(argv: list[str] | None = None) -> int:
    return study("pur", run, compare, argv)


if __name__ == "__main__":
    sys.exit(main())
