"""What the cells of this study run: data, a private PCA, trainings with a choice of rates, noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from privtune.accounting import Adjacency, Composed, Gaussian, PoissonSampled, Repeated, calibrate
from privtune.accounting.curves import sampled_gaussian_curve
from privtune.tasks.stages import DpPca
from privtune.training.mechanism.metrics import moment_sensitivity, moments, noised
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import AdaCliP, FixedDPSGD
from privtune.training.methods.adaclip import AdaCliPState
from studies.harness import Split, accuracies, fit, secrets_for

Candidates = Sequence[Mapping[str, float]]


def logistic() -> nn.Module:
    """784-10 with bias."""
    return nn.Sequential(nn.Linear(784, 10))


def network() -> nn.Module:
    """60-1000-10, on projected records."""
    return nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))


def point(dimensions: int) -> Callable[[], nn.Module]:
    """Return what makes the vector (1, 0, ..., 0), which training starts from."""

    def make() -> nn.Module:
        layer = nn.Linear(1, dimensions, bias=False)
        nn.init.zeros_(layer.weight)
        nn.init.ones_(layer.weight[0])
        return nn.Sequential(layer)

    return make


def points(dimensions: int) -> Split:
    """The paper's 1,000 records (±1, 0, ..., 0), half of either sign."""
    y = torch.zeros(1000, dimensions)
    y[:500, 0], y[500:, 0] = 1.0, -1.0
    return Split(torch.ones(1000, 1), y, torch.ones(1, 1), y[:1])


def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Equation (1) of the paper: half of the squared distance."""
    return 0.5 * (outputs - targets).square().sum(dim=-1)


def shared(schedule: Schedule, epsilon: float, ratio: float) -> tuple[float, float]:
    """Return the noise multipliers of a PCA, ``ratio`` times a step's, and of a step, at one ε."""
    step = Repeated(schedule.steps, PoissonSampled(schedule.sample_rate, Gaussian(1.0)))
    whole = calibrate(Composed([Gaussian(ratio), step]), epsilon=epsilon, delta=1e-5)
    return ratio * whole.scale, whole.scale


def moments_noise(schedule: Schedule, epsilon: float, delta: float) -> float:
    """Return the noise that the paper's accountant asks for: whole moments, ε by Markov's bound."""
    orders = np.arange(2.0, 300.0)
    low, high = 0.3, 100.0
    for _ in range(40):
        sigma = math.sqrt(low * high)
        curve = schedule.steps * sampled_gaussian_curve(schedule.sample_rate, sigma, orders)
        found = float((curve - math.log(delta) / (orders - 1.0)).min())
        low, high = (sigma, high) if found > epsilon else (low, sigma)
    return high


def projected(split: Split, noise_multiplier: float) -> Split:
    """Project on 60 directions, released as the stage ``dp-pca`` releases them."""
    scale = noise_multiplier * moment_sensitivity(Adjacency.ADD_REMOVE)
    sums = moments(np.asarray(split.x, dtype=np.float64))
    streams = Streams(secrets_for("adaclip-pca", 0, 1)[0])
    found = noised(sums, scale=scale, streams=streams, noise=NoiseOptions())
    rows = DpPca(components=60).document({}, found, scale)["projection"]
    directions = torch.tensor(rows, dtype=torch.float32).T
    return Split(split.x @ directions, split.y, split.x_test @ directions, split.y_test)


class Watched:
    """A method whose states before some steps are kept. What was kept is for the study alone."""

    def __init__(self, method: Any, at: Sequence[int]) -> None:
        self.method, self.at, self.states, self.step = method, set(at), [], 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def update(self, state: Any, oracle: Any) -> Any:
        """Take one step as the method does."""
        if self.step in self.at:
            self.states.append(state)
        self.step += 1
        return self.method.update(state, oracle)


def scores(
    method: Any, schedule: Schedule, model: Any, split: Split, candidates: Candidates, seed: int
) -> list[float]:
    """Train candidates, each with a secret of its own, and return their test accuracy."""
    secrets = secrets_for("adaclip", seed, len(candidates))
    # AdaCliP's sums are in double precision: one at a time stays in the cache.
    size = 1 if method.name == "adaclip" else len(candidates)
    found = []
    for i in range(0, len(candidates), size):
        part = {"candidates": candidates[i : i + size], "secrets": secrets[i : i + size]}
        result = fit(method, schedule, model=model, split=split, **part)
        found += accuracies(model, result.params, split)
    return found


def chosen(
    method: Any, schedule: Schedule, model: Any, split: Split, grid: Candidates, seeds: int
) -> list[dict[str, Any]]:
    """Choose by test accuracy without paying, as the paper does; then train with fresh seeds.

    The first line of the network's fresh seeds has what clipping and noise change.
    """
    tuned = scores(method, schedule, model, split, grid, 0)
    best = grid[max(range(len(grid)), key=tuned.__getitem__)]
    lines = [("grid", *pair) for pair in zip(grid, tuned, strict=True)]
    tenth = max(schedule.steps // 10, 1)
    watched = Watched(method, range(tenth // 2, schedule.steps, tenth) if model is network else ())
    fresh = scores(watched, schedule, model, split, [best] * seeds, 1)
    lines += [(str(k + 1), best, value) for k, value in enumerate(fresh)]
    seen = noise_per_gradient(method, watched.states, split) if watched.states else {}
    return [
        {
            "seed": seed,
            "value": round(value, 2),
            "rate": candidate["learning_rate"],
            "h2": candidate.get("largest_variance", ""),
            **(seen if seed == "1" else {}),
        }
        for seed, candidate, value in lines
    ]


def noise_per_gradient(method: Any, states: Sequence[Any], split: Split) -> dict[str, float]:
    """Return what clipping and what noise change of the network's mean gradient over a batch.

    Both as the root of the mean square over some steps, on the first 600 records: the length of
    what clipping changes, and the root of the expected squared length of the noise. ``even`` is
    (Σs)² / (d Σs²) of AdaCliP's deviations at the last of them, and ``own`` that of the records'
    own: 1 where all are alike, and the smaller, the less noise Theorem 1 asks for.
    """
    x, y = split.x[:600], split.y[:600]
    clipped, noise, even = [], [], {}
    for state in states:
        gradients = _gradients(state.params[0], x, y)
        if method.name == "adaclip":
            deviation = state.deviation[0]
            scale = deviation.sqrt() * deviation.sum().sqrt()
            moved = (gradients - state.mean[0]) / scale
            moved /= moved.norm(dim=1, keepdim=True).clamp_min(1.0)
            even = {"even": _even(deviation), "own": _even(gradients.std(dim=0))}
            after, length = state.mean[0] + scale * moved.mean(dim=0), float(scale.norm())
        else:
            bound = float(state.max_grad_norm[0])
            each = [
                part * (bound / math.sqrt(2.0) / part.norm(dim=1, keepdim=True)).clamp(max=1.0)
                for part in (gradients[:, : 61 * 1000], gradients[:, 61 * 1000 :])
            ]
            after = torch.cat(each, dim=1).mean(dim=0)
            length = bound * math.sqrt(gradients.shape[1])
        clipped.append(float((after - gradients.mean(dim=0)).norm()))
        noise.append(method.noise_multiplier * length / 600)
    found = {"clipped": _root_mean_square(clipped), "noise": _root_mean_square(noise)}
    return {name: round(value, 4) for name, value in {**found, **even}.items()}


def _even(deviation: torch.Tensor) -> float:
    return float(deviation.mean() ** 2 / deviation.square().mean())


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _gradients(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return each record's gradient of the network, shape ``[B, P]``, in the order of its layers."""
    first, second = params[: 61 * 1000], params[61 * 1000 :]
    w1, b1 = first[: 60 * 1000].view(1000, 60), first[60 * 1000 :]
    w2, b2 = second[:10_000].view(10, 1000), second[10_000:]
    hidden = (x @ w1.T + b1).relu()
    out = (hidden @ w2.T + b2).softmax(dim=1)
    out[torch.arange(len(y)), y] -= 1.0
    back = (out @ w2) * (hidden > 0)
    parts = ((back, x), (back, None), (out, hidden), (out, None))
    return torch.cat(
        [g if a is None else (g[:, :, None] * a[:, None, :]).flatten(1) for g, a in parts], dim=1
    )


@dataclass(frozen=True)
class Known(AdaCliP):
    """AdaCliP that is told the example's deviations: 1 in the first coordinate, next to 0 else."""

    def init(self, params: torch.Tensor, candidates: Any) -> AdaCliPState:
        """Start with the deviations; a decay of next to 1 leaves them."""
        state = super().init(params, candidates)
        deviation = state.deviation.clone()
        deviation[:, 0] = 1.0
        return replace(state, deviation=deviation)


def regression(arm: str, dimensions: int, *, epochs: float) -> list[dict[str, Any]]:
    """Run the paper's example; the value is the squared distance from the best point, 0."""
    split, seeds, sigma = points(dimensions), 20, 0.03 if arm.endswith("0.03") else 0.1
    schedule = Schedule.from_epochs(records=1000, expected_batch_size=1, epochs=epochs)
    own, method = {"largest_variance": 1.0}, AdaCliP(sigma)
    if arm == "fixed":
        own, method = {"max_grad_norm": 1.0}, FixedDPSGD(sigma)
    elif arm == "known deviations":
        method = Known(sigma, deviation_decay=1.0 - 1e-9)
    result = fit(
        method,
        schedule,
        model=point(dimensions),
        split=split,
        candidates=[{"learning_rate": 0.01, **own}] * seeds,
        secrets=secrets_for("adaclip-regression", 0, seeds),
        loss=half_square,
    )
    errors = result.params.square().sum(dim=1).tolist()
    own = {"rate": 0.01, "h2": own.get("largest_variance", "")}
    return [{"seed": k, "value": f"{e:.4g}", **own} for k, e in enumerate(errors, 1)]
