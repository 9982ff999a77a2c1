"""No step waits for a device that computes far away: see ``far_device``, and the test on a GPU."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import (
    ADADP,
    AdaCliP,
    DPAdam,
    FixedDPSGD,
    HyFreeDP,
    Prodigy,
    PublicRate,
    QuantileClipping,
)
from studies.harness import train
from tests.training.engine.far_device import far_device
from tests.training.simple import SimpleDPSGD, blobs, cross_entropy, mlp, secrets

WARM, STEPS = 20, 30  # by then what is common was captured
GIVEN = {"learning_rate": 0.3, "max_grad_norm": 1.0, "largest_variance": 10.0}
METHODS = {
    "dpsgd": FixedDPSGD(1.0),
    "dpsgd by layer": FixedDPSGD(1.0, clipping="by-layer"),
    "dpsgd, cosine": FixedDPSGD(1.0, momentum=0.9, schedule="cosine"),
    "dp-adam": DPAdam(1.0),
    "quantile-clipping": QuantileClipping(1.0, 10.0),
    "adadp": ADADP(1.0, adapt_share=1.0),
    "adaclip": AdaCliP(1.0),
    "prodigy": Prodigy(1.0),
    "public-rate": PublicRate(1.0),
}


def convolving():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 2)), nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)
    )


def dropping():
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.norm(self.table(x.long().clamp(-3, 3) + 3)).mean(dim=-2))


def poisoned():
    x, y = blobs()
    x[3], x[7, 2], x[90] = math.nan, math.inf, 3e38
    return TensorData(x, y, unusable=torch.arange(200) == 11)


def run(method, *, model=mlp, data=None, device="cpu", on_step=None, steps=STEPS):
    given = (
        {name: GIVEN[name] for name in method.parameters}
        if hasattr(method, "parameters")
        else GIVEN
    )
    return train(
        method,
        Schedule(200, 0.3, steps),
        model=model,
        loss=cross_entropy,
        data=data or TensorData(*blobs()),
        candidates=[given] * 3,
        secrets=secrets(3),
        device=device,
        on_step=on_step,
    )


def waits(monkeypatch, method, **how):
    """Train far away; return what later steps waited for, by step, and the result."""
    found: dict[int, list[str]] = {}
    with far_device(monkeypatch) as watch:

        def on_step(step, report):
            if watch.waits:
                found[step] = list(watch.waits)
                watch.waits.clear()
            watch.strict = WARM <= step < STEPS - 1

        return run(method, on_step=on_step, **how), found


@pytest.mark.parametrize("name", METHODS)
def test_no_step_of_a_method_waits(name, monkeypatch):
    assert waits(monkeypatch, METHODS[name])[1] == {}


@pytest.mark.parametrize(
    "how",
    [
        {"model": convolving},
        {"model": dropping},
        {"model": Embedded},
        {"data": poisoned()},
        {"data": poisoned(), "model": convolving},
    ],
    ids=["convolution", "dropout", "embedding, LayerNorm", "poisoned", "poisoned convolution"],
)
def test_no_step_of_a_model_waits(how, monkeypatch):
    assert waits(monkeypatch, FixedDPSGD(1.0), **how)[1] == {}


def test_hyfreedp_waits_for_its_losses_alone(monkeypatch):
    """Its fit is of plain numbers: every fifth step."""
    steps = sorted(waits(monkeypatch, HyFreeDP(1.0, 8.0))[1])
    assert steps
    assert all(b - a == 5 for a, b in pairwise(steps))


class Looking(SimpleDPSGD):
    """Every way to wait that the watch has to know."""

    ways = (
        lambda t: t.tolist(), lambda t: bool(t.any()), lambda t: float(t[0, 0]), lambda t: t.cpu(),
        lambda t: t.to("cpu"), lambda t: t.nonzero(), lambda t: t[t > 0.0], lambda t: t[[0, 1]],
        lambda t: t.numpy(), lambda t: t.sum().item(), lambda t: torch.ones(3).to(t),
        lambda t: t.new_tensor([1.0]), lambda t: t[:, torch.arange(2)], lambda t: t.unique(),
        lambda t: t.clone().copy_(torch.zeros(t.shape)), lambda t: torch.equal(t, t),
    )  # fmt: skip

    def update(self, state, oracle):
        state = super().update(state, oracle)
        for way in self.ways:
            way(state.params)
        return state


def test_the_watch_sees_who_waits(monkeypatch):
    _, found = waits(monkeypatch, Looking())
    assert sorted(found) == list(range(WARM + 1, STEPS))
    for seen in found.values():
        assert len(seen) == len(Looking.ways), seen


@pytest.mark.parametrize("model", [mlp, convolving, Embedded])
@pytest.mark.parametrize("data", [lambda: TensorData(*blobs()), poisoned])
def test_what_is_not_looked_at_comes_out_the_same(model, data, monkeypatch):
    """Without noise, whose tails are placed otherwise: also records that count as zero."""
    method = SimpleDPSGD(0.0)
    near = run(method, model=model, data=data())
    far, _ = waits(monkeypatch, method, model=model, data=data())
    assert far.unusable == near.unusable
    assert bool(near.params.isfinite().all())
    torch.testing.assert_close(far.params, near.params, rtol=0.0, atol=0.0)


def test_noise_far_away_is_as_loud(monkeypatch):
    """Inputs of zero leave the first layer's 128 weights to the noise: 0.25 is four deviations."""
    data = TensorData(torch.zeros(200, 8), blobs()[1])
    first = run(SimpleDPSGD(0.0), data=data)
    far, _ = waits(monkeypatch, SimpleDPSGD(1.0), data=data)
    spread = (far.params - first.params)[:, :128].std(dim=1).tolist()
    expected = GIVEN["learning_rate"] * GIVEN["max_grad_norm"] * math.sqrt(STEPS) / (0.3 * 200)
    assert spread == pytest.approx([expected] * 3, rel=0.25)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, 1e-20, math.inf])
def test_a_bound_that_is_none_is_no_number_where_nobody_looks(bad, monkeypatch):
    """It must not become a bound without noise, or noise without a bound."""

    class Losing(SimpleDPSGD):
        def update(self, state, oracle):
            state = super().update(state, oracle)
            state.max_grad_norm[1] = bad
            return state

    far, _ = waits(monkeypatch, Losing(1.0))
    assert far.diverged == (False, True, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", METHODS)
def test_no_step_waits_for_a_gpu(name):
    """torch itself says where it would synchronise."""

    def on_step(step, report):
        strict = WARM * 5 <= step < STEPS * 5 - 1
        torch.cuda.set_sync_debug_mode("error" if strict else "default")

    try:
        found = run(METHODS[name], device="cuda", on_step=on_step, steps=STEPS * 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(found.params.isfinite().all())
