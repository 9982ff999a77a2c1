"""A device at which nobody looks gives the same; torch says on a GPU whether a step waits."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

from privtune.training.engine import replay, train
from privtune.training.engine.compute import full_float32
from privtune.training.engine.kernels import BatchedKernel
from privtune.training.engine.replay import MemoryPool, Replay
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOfOutputs
from privtune.training.methods import (
    ADADP,
    AdaCliP,
    DPAdam,
    FixedDPSGD,
    Prodigy,
    PublicRate,
    QuantileClipping,
)
from tests.training.simple import SimpleDPSGD, blobs, cross_entropy, dropping, fit, mlp

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


def run(method, **options):
    given = {name: GIVEN[name] for name in getattr(method, "parameters", GIVEN)}
    return fit(method, [given] * 3, **{"steps": STEPS, "rate": 0.3, **options})


@pytest.fixture
def far(monkeypatch):
    """Train where a look would wait."""

    def unseen(*args, **options):
        with monkeypatch.context() as patch:
            for name, module in list(sys.modules.items()):
                if name.startswith("privtune.") and hasattr(module, "looks_freely"):
                    patch.setattr(module, "looks_freely", lambda device: False)
            return run(*args, **options)

    return unseen


@pytest.mark.parametrize("model", [mlp, convolving, Embedded])
@pytest.mark.parametrize("data", [lambda: TensorData(*blobs()), poisoned])
def test_what_is_not_looked_at_comes_out_the_same(model, data, far):
    """Without noise, whose tails are placed otherwise: also records that count as zero."""
    method = SimpleDPSGD(0.0)
    near = run(method, model=model, data=data())
    unseen = far(method, model=model, data=data())
    assert unseen.unusable == near.unusable
    assert bool(near.params.isfinite().all())
    torch.testing.assert_close(unseen.params, near.params, rtol=0.0, atol=0.0)


def test_noise_far_away_is_as_loud(far):
    """Inputs of zero leave the first layer's 128 weights to the noise: 0.25 is four deviations."""
    data = TensorData(torch.zeros(200, 8), blobs()[1])
    first = run(SimpleDPSGD(0.0), data=data)
    found = far(SimpleDPSGD(1.0), data=data)
    spread = (found.params - first.params)[:, :128].std(dim=1).tolist()
    expected = GIVEN["learning_rate"] * GIVEN["max_grad_norm"] * math.sqrt(STEPS) / (0.3 * 200)
    assert spread == pytest.approx([expected] * 3, rel=0.25)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, 1e-20, math.inf])
def test_a_bound_that_is_none_is_no_number_where_nobody_looks(bad, far):
    """It must not become a bound without noise, or noise without a bound."""

    class Losing(SimpleDPSGD):
        def update(self, state, oracle):
            state = super().update(state, oracle)
            state.max_grad_norm[1] = bad
            return state

    assert far(Losing(1.0)).diverged == (False, True, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, {}) for name in METHODS),
        *(("dpsgd", {"model": model}) for model in (convolving, dropping, Embedded)),
        *(("dpsgd", {"model": model, "data": poisoned()}) for model in (mlp, convolving)),
    ],
)
def test_no_step_waits_for_a_gpu(name, how):

    def on_step(step, report):
        # The last new shape of a sample, which is captured, comes at step 138.
        strict = WARM * 10 <= step < STEPS * 10 - 1
        torch.cuda.set_sync_debug_mode("error" if strict else "default")

    try:
        found = run(METHODS[name], device="cuda", on_step=on_step, steps=STEPS * 10, **how)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(found.params.isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", [mlp, convolving, dropping])
def test_a_replayed_pass_gives_the_same_bits(model, monkeypatch):
    recorded = []
    record = Replay._record

    def counted(self, inputs):
        record(self, inputs)
        recorded.append(self._graph is not None)

    monkeypatch.setattr(Replay, "_record", counted)
    train._kernels.clear()
    replayed = run(METHODS["dpsgd"], model=model, device="cuda")
    assert recorded
    assert all(recorded)
    monkeypatch.setattr(replay, "_lie_on_gpu", lambda tensors: False)
    train._kernels.clear()
    plain = run(METHODS["dpsgd"], model=model, device="cuda")
    assert torch.equal(replayed.params, plain.params)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_convolutions_and_cells_are_not_trained_record_by_record():
    """cuDNN's short products of TF32 would differ from the rules', and the kernel would be refused."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.LSTM(2, 16, batch_first=True)
            self.last = nn.Linear(16, 3)

        def forward(self, x):
            return self.last(self.cells(x.view(-1, 4, 2))[0][:, -1])

    data = TensorData(*blobs()).to(torch.device("cuda"))
    loss_of = LossOfOutputs(cross_entropy)
    for model in (convolving(), Recurrent()):
        with full_float32():
            kernel = train.choose_kernel(model, loss_of, data, torch.device("cuda"))
        assert isinstance(kernel, BatchedKernel)


def test_what_lies_on_no_gpu_runs_as_it_is():
    replayed = Replay(lambda x: (x + 1.0, x * 2.0), MemoryPool())
    for number in range(5):
        x = torch.full((3,), float(number))
        plus, times = replayed(x)
        assert torch.equal(plus, x + 1.0)
        assert torch.equal(times, x * 2.0)


def test_cudnn_uses_all_digits_while_trainings_run():
    cudnn = torch.backends.cudnn
    precisions = [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
    within = []

    def on_step(step, report):
        within.append((cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision))

    run(METHODS["dpsgd"], on_step=on_step)
    assert set(within) == {("ieee", "ieee")}
    assert [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision] == precisions


class Flattening(nn.LSTM):
    """Reads the addresses of its weights, as torch's layers do on a GPU alone."""

    def flatten_parameters(self):
        for weight in self._flat_weights:
            weight.data_ptr()


def test_a_layer_that_lays_out_its_weights_is_trained_in_one_pass():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = Flattening(2, 4, batch_first=True)
            self.last = nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.cells(x.view(-1, 4, 2))[0][:, -1])

    data = TensorData(*blobs())
    train._kernels.clear()
    kernel = train.choose_kernel(Model(), LossOfOutputs(cross_entropy), data, torch.device("cpu"))
    assert isinstance(kernel, BatchedKernel)
