"""What the cells of this study run: data, a private PCA, trainings with a choice of rates, noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from privtune.accounting import Adjacency, Composed, Gaussian, PoissonSampled, Repeated, calibrate
from privtune.accounting.curves import sampled_gaussian_curve
from privtune.stages.dp_pca import DpPca
from privtune.training.mechanism.kernel import load_params
from privtune.training.mechanism.metrics import moment_sensitivity, moments, noised
from privtune.training.mechanism.oracle import Oracle
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import AdaCliP, FixedDPSGD
from privtune.training.methods.adaclip import AdaCliPState
from studies.harness import Split, accuracies, cross_entropy, fit, secrets_for

Candidates = Sequence[Mapping[str, float]]
Model = Callable[[], nn.Module]


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


def chosen(
    method: Any, schedule: Schedule, model: Model, split: Split, grid: Candidates, seeds: int
) -> list[dict[str, Any]]:
    """Choose by test accuracy without paying, as the paper does; then train with fresh seeds.

    Seeds are the same for every method: their samples and their noise before it is scaled. The
    first line of the fresh seeds has what clipping and noise change.
    """

    def trained(own: Any, candidates: Candidates, seed: int) -> list[float]:
        secrets = secrets_for("adaclip", seed, len(candidates))
        result = fit(
            own, schedule, model=model, split=split, candidates=candidates, secrets=secrets
        )
        return accuracies(model, result.params, split)

    tuned = trained(method, grid, 0) if len(grid) > 1 else []
    best = grid[max(range(len(tuned)), key=tuned.__getitem__, default=0)]
    lines = [("grid", *pair) for pair in zip(grid, tuned, strict=False)]
    tenth = max(schedule.steps // 10, 1)
    at = range(tenth // 2, schedule.steps, tenth) if method.name in ("adaclip", "dpsgd") else ()
    watched = Watched(method, at)
    fresh = trained(watched, [best] * seeds, 1)
    lines += [(str(k + 1), best, value) for k, value in enumerate(fresh)]
    seen = noise_per_gradient(method, watched.states, model, split) if watched.states else {}
    return [
        {
            "seed": seed,
            "value": round(value, 2),
            "rate": candidate.get("learning_rate", ""),
            "h2": candidate.get("largest_variance", ""),
            **(seen if seed == "1" else {}),
        }
        for seed, candidate, value in lines
    ]


def noise_per_gradient(
    method: Any, states: Sequence[Any], model: Model, split: Split
) -> dict[str, float]:
    """Return what clipping and what noise change of a model's mean gradient over a batch.

    Both as the root of the mean square over some steps, on the first 600 records: the length of
    what clipping changes, and the root of the expected squared length of the noise. ``even`` is
    (Σs)² / (d Σs²) of AdaCliP's deviations at the last of them, and ``own`` that of the records'
    own: 1 where all are alike, and the smaller, the less noise Theorem 1 asks for.
    """
    x, y = split.x[:600], split.y[:600]
    clipped, noise, even = [], [], {}
    for state in states:
        parts = _gradients(model, state.params[0], x, y)
        gradients = torch.cat(parts, dim=1)
        if method.name == "adaclip":
            deviation = state.deviation[0]
            scale = deviation.sqrt() * deviation.sum().sqrt()
            moved = (gradients - state.mean[0]) / scale
            moved /= moved.norm(dim=1, keepdim=True).clamp_min(1.0)
            even = {"even": _even(deviation), "own": _even(gradients.std(dim=0))}
            after, length = state.mean[0] + scale * moved.mean(dim=0), float(scale.norm())
        else:
            bound = float(state.max_grad_norm[0])
            if method.clipping == "flat":
                parts = [gradients]
            share = bound / math.sqrt(len(parts))
            each = [
                part * (share / part.norm(dim=1, keepdim=True)).clamp(max=1.0) for part in parts
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


def _gradients(
    model: Model, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    """Return each record's gradient of each layer, shape ``[B, weights and biases]``."""
    module = model()
    load_params(module, params)
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def loss(own: Any, one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(module, own, (one[None],)), target[None])[0]

    of = [g.flatten(1) for g in vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y).values()]
    return [torch.cat(of[i : i + 2], dim=1) for i in range(0, len(of), 2)]


@dataclass(frozen=True)
class Told(AdaCliP):
    """AdaCliP that is told means and deviations, and learns none from releases: not private.

    ``known`` gives both before every step. A candidate's ``largest_variance`` is 1/γ of Theorem 1.
    """

    known: Callable[[AdaCliPState], tuple[torch.Tensor, torch.Tensor]] = field(kw_only=True)

    def update(self, state: AdaCliPState, oracle: Oracle) -> AdaCliPState:
        """Take one step with the mean and the deviations of now."""
        mean, deviation = self.known(state)
        deviation = deviation * state.largest_variance[:, None].sqrt()
        return super().update(replace(state, mean=mean, deviation=deviation), oracle)

    def report(self, state: AdaCliPState) -> Mapping[str, torch.Tensor]:
        """Return the squared length of the weights: in the example, of the next step's gradient."""
        return {"squares": state.params.square().sum(dim=1)}


def of_records(split: Split) -> Callable[[AdaCliPState], tuple[torch.Tensor, torch.Tensor]]:
    """Return what tells logistic regression the mean and deviation of 1,000 records' gradients."""
    x = torch.cat([split.x[:1000], torch.ones(len(split.x[:1000]), 1)], dim=1)
    targets = torch.nn.functional.one_hot(split.y[: len(x)], 10).float()

    def known(state: AdaCliPState) -> tuple[torch.Tensor, torch.Tensor]:
        means, deviations = [], []
        for params in state.params:
            rows = torch.cat([params[:-10].view(10, -1), params[-10:, None]], dim=1)
            off = (x @ rows.T).softmax(dim=1) - targets
            mean = off.T @ x / len(x)
            variance = off.square().T @ x.square() / len(x) - mean.square()
            for found, kept in ((mean, means), (variance.clamp_min(1e-12).sqrt(), deviations)):
                kept.append(torch.cat([found[:, :-1].flatten(), found[:, -1]]))
        return torch.stack(means), torch.stack(deviations)

    return known


def logit_noise(split: Split, noise: float, at: int, seeds: int) -> list[dict[str, Any]]:
    """Return the noise with told deviations (γ = 1/3) over that with a norm of 4, after some steps.

    The value is the ratio of the variances that they add to the logits of a record on average;
    ``noise`` is that of their squared lengths, which Theorem 1 makes least.
    """
    schedule = Schedule(records=len(split), sample_rate=600 / 60_000, steps=at)
    result = fit(
        FixedDPSGD(noise),
        schedule,
        model=logistic,
        split=split,
        candidates=[{"learning_rate": 1.0, "max_grad_norm": 4.0}] * seeds,
        secrets=secrets_for("adaclip", 1, seeds),
    )
    method = AdaCliP(noise)
    own = [{"learning_rate": 1.0, "largest_variance": 1.0}] * seeds
    _, deviation = of_records(split)(method.init(result.params, own))
    squares = 3.0 * deviation * deviation.sum(dim=1, keepdim=True)  # of b
    pixels = split.x[:1000].square().mean(dim=0)
    weights = squares[:, :-10].view(seeds, 10, -1)
    told = (weights @ pixels).sum(dim=1) + squares[:, -10:].sum(dim=1)
    one = 16.0 * 10 * (float(pixels.sum()) + 1.0)
    lengths = squares.sum(dim=1) / (16.0 * squares.shape[1])
    return [
        {"seed": k, "value": f"{a:.4g}", "noise": f"{b:.4g}"}
        for k, (a, b) in enumerate(zip((told / one).tolist(), lengths.tolist(), strict=True), 1)
    ]


@dataclass(frozen=True, eq=False)
class AveragedState(AdaCliPState):
    """AdaCliP's state, and the average of variances that are not cut yet."""

    variance: torch.Tensor


@dataclass(frozen=True)
class Started(AdaCliP):
    """AdaCliP whose variances start at h₂, and with ``late`` are cut after they are averaged.

    Equation (5) cuts each noisy variance at h₁ and averages what is left, which is above 0 even
    where there is noise alone: no memory averages that out.
    """

    late: bool = False

    def init(self, params: torch.Tensor, candidates: Any) -> AveragedState:
        """Start at h₂ in every coordinate."""
        state = super().init(params, candidates)
        variance = state.largest_variance[:, None].expand(params.shape).clone()
        return AveragedState(**{**vars(state), "deviation": variance.sqrt()}, variance=variance)

    def update(self, state: Any, oracle: Oracle) -> Any:
        """Take a step of AdaCliP; average what it saw, if it is to be cut later."""
        after = super().update(state, oracle)
        if not self.late:
            return after
        batch = oracle.schedule.expected_batch_size
        moved = (after.mean - state.mean) / (1.0 - self.mean_decay)
        noise = state.deviation * state.total * (self.noise_multiplier / batch) ** 2
        seen = batch * (moved.square() - noise)
        variance = state.variance.lerp(seen, 1.0 - self.deviation_decay)
        cut = torch.minimum(variance, state.largest_variance[:, None])
        deviation = cut.clamp_min(self.smallest_variance).sqrt()
        return replace(after, variance=variance, deviation=deviation)


RATE = 0.01  # of the example


def of_example(
    first: float, rest: float = 1e-6
) -> Callable[[AdaCliPState], tuple[torch.Tensor, torch.Tensor]]:
    """Return what tells the example's mean gradient, and deviations: the first, and the others'."""

    def known(state: AdaCliPState) -> tuple[torch.Tensor, torch.Tensor]:
        deviation = torch.full_like(state.deviation, rest)
        deviation[:, 0] = first
        return state.params, deviation  # the mean of the records is 0

    return known


def deviations(choice: str, dimensions: int) -> tuple[float, float]:
    """Return the deviations with which AdaCliP's b = √s √Σs is that of a choice in Section 4.3."""
    root = math.sqrt(dimensions)
    return {"optimal": (1.0, 1e-6), "whitened": (root, 1e-6), "one norm": (1 / root, 1 / root)}[
        choice
    ]


def regression(arm: str, dimensions: int, *, epochs: float) -> list[dict[str, Any]]:
    """Run the paper's example; the value is the squared distance from the best point, 0."""
    split, seeds, sigma = points(dimensions), 20, 0.03 if arm.endswith("0.03") else 0.1
    schedule = Schedule.from_epochs(records=1000, expected_batch_size=1, epochs=epochs)
    own, method = {"largest_variance": 1.0}, AdaCliP(sigma, start="paper")
    if arm == "fixed":
        own, method = {"max_grad_norm": 1.0}, FixedDPSGD(sigma)
    elif arm.startswith("told"):
        method = Told(sigma, known=of_example(*deviations(arm.removeprefix("told, "), dimensions)))
    result = fit(
        method,
        schedule,
        model=point(dimensions),
        split=split,
        candidates=[{"learning_rate": RATE, **own}] * seeds,
        secrets=secrets_for("adaclip-regression", 0, seeds),
        loss=half_square,
    )
    errors = result.params.square().sum(dim=1).tolist()
    own = {"rate": RATE, "h2": own.get("largest_variance", "")}
    return [{"seed": k, "value": f"{e:.4g}", **own} for k, e in enumerate(errors, 1)]


def bounded(arm: str, dimensions: int, *, smoke: bool) -> list[dict[str, Any]]:
    """Return the mean squared gradient of the example's iterates, and Theorem 2's bound on it.

    L and the records' variance are 1, the first loss is 1/2 above the least; G is 1 and the length of
    the longest iterate. γ is the one with which the bound's last two terms are least, with G = 2.
    """
    split, seeds, sigma, times = points(dimensions), 10, 0.1, (100, 300, 1000, 3000)
    choice, _, given = arm.partition(", γ = ")
    noise = RATE * sigma**2 * (1 if choice == "optimal" else dimensions)  # L η σ² |b|² at γ = 1
    gamma = float(given) if given else math.sqrt(noise / 24.0)
    times = times[:1] if smoke else times
    result = fit(
        Told(sigma, known=of_example(*deviations(choice, dimensions))),
        Schedule(records=1000, sample_rate=0.001, steps=times[-1]),
        model=point(dimensions),
        split=split,
        candidates=[{"learning_rate": RATE, "largest_variance": 1.0 / gamma}] * seeds,
        secrets=secrets_for("adaclip-regression", 1, seeds),
        loss=half_square,
    )
    squares = torch.cat([torch.ones(1, seeds), result.report["squares"][:-1].float()])
    lines = []
    for steps in times:
        longest = (1.0 + squares[:steps].max().sqrt().item()) ** 2
        bound = 1.0 / (RATE * steps) + 3.0 * RATE + 6.0 * longest * gamma + noise / gamma
        own = {"rate": RATE, "h2": f"{1 / gamma:.4g}", "steps": steps, "bound": f"{bound:.4g}"}
        means = squares[:steps].mean(dim=0).tolist()
        lines += [{"seed": k, "value": f"{v:.4g}", **own} for k, v in enumerate(means, 1)]
    return lines
