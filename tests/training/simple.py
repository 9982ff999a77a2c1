"""A minimal DP-SGD and reference computations, independent of the package's methods."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from privtune.accounting import Gaussian, NonPrivate, PoissonSampled, Repeated
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import Rows
from privtune.training.mechanism.schedule import Schedule
from studies.harness import train


@dataclass(frozen=True)
class State:
    params: torch.Tensor
    learning_rate: torch.Tensor
    max_grad_norm: torch.Tensor


@dataclass(frozen=True)
class SimpleDPSGD:
    noise_multiplier: float = 1.0
    extra_releases: int = 0
    steps_by_weight = False

    def event(self, schedule):
        if self.noise_multiplier == 0.0:
            return NonPrivate()
        step = PoissonSampled(schedule.sample_rate, Gaussian(self.noise_multiplier))
        return Repeated(schedule.steps, step)

    def init(self, params, candidates):
        def column(name):
            return torch.tensor([c[name] for c in candidates])

        return State(params, column("learning_rate"), column("max_grad_norm"))

    def update(self, state, oracle):
        sample = oracle.sample()
        clipping = Flat(state.max_grad_norm)
        for _ in range(1 + self.extra_releases):
            gradient = oracle.gradient(
                sample, state.params, clipping=clipping, noise_multiplier=self.noise_multiplier
            )
        return replace(state, params=state.params - state.learning_rate[:, None] * gradient)

    def report(self, state):
        return {"learning_rate": state.learning_rate}


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def gathered(outputs, y):
    """A cross-entropy that hides its classes: what a label is looked up in cannot be watched."""
    return -outputs.log_softmax(dim=-1).gather(-1, (y + 0).unsqueeze(-1)).squeeze(-1)


def mlp(inputs=8, hidden=16, classes=3):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def dropping(p=0.3):
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(p), nn.Tanh(), nn.Linear(16, 3))


class OneByOne(nn.Module):
    """A model that no stack takes: how it computes hangs on values."""

    def __init__(self):
        super().__init__()
        self.inner = dropping()

    def forward(self, x):
        return self.inner(x) if float(x.detach().abs().sum()) >= 0 else x


def secrets(count, tag=0):
    return [bytes([tag]) * 30 + count_.to_bytes(2, "big") for count_ in range(count)]


def blobs(records=200, inputs=8, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (records,), generator=g)
    centers = torch.randn(classes, inputs, generator=g) * 2
    return centers[y] + torch.randn(records, inputs, generator=g), y


def fit(method, candidates=None, *, count=1, steps=5, rate=0.1, bands=1, data=None, **options):
    """Train candidates on blobs on the CPU, unless it is said otherwise."""
    data = data or TensorData(*blobs())
    candidates = candidates or [{"learning_rate": 0.5, "max_grad_norm": 1.0}] * count
    usual = {"model": mlp, "loss": cross_entropy, "device": "cpu"}
    given = {"secrets": secrets(len(candidates)), "candidates": candidates, **usual, **options}
    return train(method, Schedule(len(data), rate, steps, bands), data=data, **given)


def rows_of(x, y, sizes=None):
    """Return samples of records ``[K, B]``, of which a number each counts."""
    sizes = sizes or [x.shape[1]] * x.shape[0]
    mask = (torch.arange(x.shape[1]) < torch.tensor(sizes)[:, None]).float()
    return Rows(x, y, sizes, mask, [torch.Generator() for _ in sizes])


def summed(kernel, params, rows, clipping):
    """Return the sums of clipped gradients."""
    out = torch.zeros_like(params)
    kernel.accumulate(params, rows, clipping, out=out)
    return out


def per_sample_gradients(model, params, x, y, loss):
    """Gradients of each record by itself: micro-batches of one through plain autograd. [B, P]"""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    at = 0
    with torch.no_grad():
        for _, p in named:
            p.copy_(params[at : at + p.numel()].view_as(p))
            at += p.numel()
    rows = []
    for i in range(len(x)):
        value = loss(model(x[i : i + 1]), y[i : i + 1]).sum()
        grads = torch.autograd.grad(
            value, [p for _, p in named], allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows) if rows else params.new_zeros(0, len(params))


def clipped_sum(gradients, bound):
    norms = gradients.norm(dim=1)
    coefficients = (bound / norms).clamp(max=1.0)
    return (coefficients[:, None] * gradients).sum(dim=0)
