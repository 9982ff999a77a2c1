"""Limit cases, the paths against each other, fallbacks and refusals."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from privtune.errors import InvalidInputError
from privtune.training.engine import train as engine
from privtune.training.engine.kernels import BatchedKernel, NotBatchableError, OneByOneKernel
from privtune.training.engine.stacks import divide, memory_model
from privtune.training.engine.train import initialisation
from privtune.training.mechanism import kernel as kernels
from privtune.training.mechanism.clipping import (
    Automatic,
    AutomaticByLayer,
    CoordinateTransform,
    EqualByLayer,
    Flat,
)
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import FallbackWarning, LossOfOutputs, Rows, flatten_params
from privtune.training.mechanism.oracle import Oracle
from privtune.training.mechanism.sampling import PoissonSampler
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from tests.tiers import campaign
from tests.training.simple import (
    OneByOne,
    SimpleDPSGD,
    blobs,
    clipped_sum,
    cross_entropy,
    fit,
    mlp,
    per_sample_gradients,
    rows_of,
    secrets,
    summed,
)

CPU = torch.device("cpu")


def initial(secret, model=mlp):
    with initialisation(Streams(secret)):
        return model()


def test_without_noise_and_clipping_it_is_plain_training():
    """σ = 0 and C = ∞ on the same Poisson batches: torch gives the same parameters."""
    x, y = blobs()
    [secret] = secrets(1)
    model = initial(secret)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = PoissonSampler(records=200, rate=0.1, rngs=[Streams(secret).numpy("sampling")])
    for _ in range(8):
        index, sizes = sampler()
        own = torch.from_numpy(index[0, : sizes[0]])
        plain.zero_grad()
        (cross_entropy(model(x[own]), y[own]).sum() / 20.0).backward()
        plain.step()
    found = fit(SimpleDPSGD(0.0), [{"learning_rate": 0.5, "max_grad_norm": 1e30}], steps=8)
    torch.testing.assert_close(found.params[0], flatten_params(model), rtol=1e-4, atol=1e-6)


def test_the_same_as_opacus_own_optimizer():
    """On the same batch, without noise, Opacus' DPOptimizer takes the same step."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    x, y = blobs(records=32)
    model = mlp()
    before = flatten_params(model)
    private = GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(private.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        expected_batch_size=32,
        loss_reduction="sum",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.cross_entropy(private(x), y, reduction="sum").backward()
    optimizer.step()
    kernel = BatchedKernel(mlp, LossOfOutputs(cross_entropy), x=x, y=y, device=CPU)
    out = summed(kernel, before.unsqueeze(0), rows_of(x[None], y[None]), Flat(0.5))
    torch.testing.assert_close(before - out[0], flatten_params(model), rtol=1e-4, atol=1e-5)


def test_paths_count_clip_and_drop_alike():
    x, y = blobs(records=24)
    x = x.view(2, 12, -1).clone()
    x[1, 3] = float("nan")
    rows = rows_of(x, y.view(2, 12), [10, 12])
    first, second = (
        made(mlp, LossOfOutputs(cross_entropy), x=x[0], y=y, device=CPU)
        for made in (BatchedKernel, OneByOneKernel)
    )
    params = torch.randn(2, first.layout.size) * 0.3
    size = first.layout.size
    clippings = [
        Flat(torch.tensor([0.5, 2.0])),
        Automatic(),
        EqualByLayer(torch.tensor([0.2, 0.4])),
        AutomaticByLayer(),
        CoordinateTransform(torch.zeros(2, size) + 0.01, torch.full((2, size), 2.0)),
    ]
    for clipping in clippings:
        sums, halves, bad = [], [], []
        for kernel in (first, second):
            out, half = torch.zeros_like(params), torch.zeros(2)
            bad.append(kernel.accumulate(params, rows, clipping, out=out, halves=half))
            sums.append(out)
            halves.append(half)
        torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-5)
        assert torch.equal(halves[0], halves[1])
        assert bad[0].tolist() == bad[1].tolist() == [0, 1]


def test_pieces_of_a_batch_change_nothing():
    x, y = blobs()
    kernel = BatchedKernel(mlp, LossOfOutputs(cross_entropy), x=x, y=y, device=CPU)
    answers = []
    for rows in (8, 400):
        oracle = Oracle(
            Schedule(200, 0.3, 4),
            data=TensorData(x, y),
            kernel=kernel,
            streams=[Streams(s) for s in secrets(2)],
            device=CPU,
            physical_rows=rows,
        )
        params = flatten_params(initial(bytes(32))).expand(2, -1)
        gradient, fraction = oracle.gradient_and_fraction(
            oracle.everything(),
            params,
            clipping=Flat(0.5),
            noise_multiplier=1.0,
            count_noise_multiplier=2.0,
        )
        losses = oracle.losses(
            oracle.sample(),
            [params, params * 2],
            bound=torch.tensor([1.0, 2.0]),
            noise_multiplier=1.0,
        )
        answers.append((gradient, fraction, losses))
        looks = oracle.transcripts()[1].looks()
        assert looks == {
            (1.0, (("gaussian", 1.0), ("gaussian", 2.0))): 1,
            (0.3, (("gaussian", 1.0), ("gaussian", 1.0))): 1,
        }
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poisoned_data_touches_no_bit_of_another_candidate(poison):
    x, y = (t.view(3, 64, *t.shape[1:]) for t in blobs(records=192))
    kernel = BatchedKernel(mlp, LossOfOutputs(cross_entropy), x=x[0], y=y[0], device=CPU)
    params = torch.randn(3, kernel.layout.size) * 0.3
    clean, dirty = summed(kernel, params, rows_of(x, y), Flat(0.5)), torch.zeros_like(params)
    bad = x.clone()
    bad[1, ::3] = poison
    counts = kernel.accumulate(params, rows_of(bad, y), Flat(0.5), out=dirty)
    assert counts.tolist() == [0, 22, 0]
    assert torch.equal(clean[[0, 2]], dirty[[0, 2]])
    good = torch.arange(64) % 3 != 0
    own = per_sample_gradients(mlp(), params[1], x[1][good], y[1][good], cross_entropy)
    torch.testing.assert_close(dirty[1], clipped_sum(own, 0.5), rtol=1e-4, atol=1e-5)
    lost = params.clone()
    lost[1] = float("nan")
    away = summed(kernel, lost, rows_of(x, y), Flat(0.5))
    assert torch.equal(clean[[0, 2]], away[[0, 2]])
    assert not away[1].any()


def test_dropout_keeps_what_it_should():
    """The mean clipped sum over masks of a linear model is that of the model without dropout."""
    torch.manual_seed(0)
    x, y = torch.ones(1, 8, 4), torch.zeros(1, 8)

    def build():
        return nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 1, bias=False), nn.Flatten(0))

    kernel = BatchedKernel(build, LossOfOutputs(lambda o, t: o - t), x=x[0], y=y[0], device=CPU)
    rows = dataclasses.replace(rows_of(x, y), dropout=[torch.Generator().manual_seed(3)])
    out = torch.zeros(1, 4)
    for _ in range(800):
        out += summed(kernel, torch.ones(1, 4), rows, Flat(1e9))
    torch.testing.assert_close(out[0] / 800, torch.full((4,), 8.0), rtol=0.02, atol=0.0)


def test_a_wrong_path_does_not_pass_its_check(monkeypatch):
    """Copies for every record stand in for a use that is wrong; nothing stands in for them."""
    from privtune.training.engine.rules import DirectUse, ProductUse

    def made():
        return BatchedKernel(
            mlp, LossOfOutputs(cross_entropy), x=blobs()[0], y=blobs()[1], device=CPU
        )

    for use in (ProductUse, DirectUse):
        right = use.squared_norms

        def wrong(self, *parts, right=right):
            squared, saved = right(self, *parts)
            return squared * 1.1, saved

        monkeypatch.setattr(use, "squared_norms", wrong)
        if use is ProductUse:
            assert set(made().plan.copied) == set(made().layout.shapes)
    with pytest.raises(NotBatchableError, match="taken one by one"):
        made()


def test_a_model_that_cannot_be_stacked_falls_back_and_says_so_once():
    kernels._said.clear()
    with pytest.warns(
        FallbackWarning, match=r"OneByOne cannot be trained in stacks.*a pass of its own"
    ):
        result = fit(SimpleDPSGD(0.5), count=2, model=OneByOne)
    assert result.params.isfinite().all()
    fit(SimpleDPSGD(0.5), count=1, model=OneByOne)  # silent: warnings are errors here


def test_losses_that_couple_records_are_refused():
    for loss in (
        F.cross_entropy,
        lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 2.0, 30.0])),
    ):
        with pytest.raises(InvalidInputError, match="one number a record"):
            fit(SimpleDPSGD(1.0), loss=loss)


def test_stacks_follow_the_memory_model():
    x, y = blobs()
    small = BatchedKernel(mlp, LossOfOutputs(cross_entropy), x=x, y=y, device=CPU)
    memory = memory_model(small, longest=96)
    assert memory.rows == 96
    assert divide(small, memory, 10).sizes == [10]
    assert divide(small, memory, 10, stack=4).sizes == [4, 3, 3]
    wide = BatchedKernel(
        lambda: nn.Linear(8, 400_000), LossOfOutputs(lambda o, t: o.mean(1)), x=x, y=y, device=CPU
    )
    heavy = memory_model(wide, longest=512)
    assert heavy.row_bytes > 4 * 400_000
    assert heavy.rows < 512
    assert divide(wide, heavy, 4).sizes == [1] * 4
    convolutional = BatchedKernel(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()),
        LossOfOutputs(lambda o, t: o.mean(1)),
        x=torch.randn(1, 1, 5, 5),
        y=y,
        device=CPU,
    )
    cheap = memory_model(convolutional, longest=64)
    assert divide(convolutional, cheap, 3).sizes == [1, 1, 1]


_MEASURE = """
import sys
import torch
from torch import nn
from privtune.training.engine.kernels import BatchedKernel
from privtune.training.mechanism.data import TensorData
from privtune.training.engine.train import TrainableCandidate
from privtune.training.engine.train import Training
from privtune.training.mechanism.kernel import LossOfOutputs
from privtune.training.methods import FixedDPSGD
from privtune.training.mechanism.schedule import Schedule
from privtune.training.engine.stacks import longest_sample, divide, memory_model

kind, candidates, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)

def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

def conv():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(576, 10)
    )

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")

model, shape = (mlp, (64,)) if kind == "mlp" else (conv, (1, 14, 14))
x, y = torch.randn(2000, *shape), torch.randint(10, (2000,))
schedule = Schedule(2000, 0.064, 40)
kernel = BatchedKernel(model, LossOfOutputs(loss), x=x[:1], y=y[:1], device=torch.device("cpu"))
memory = memory_model(kernel, longest=longest_sample(schedule))
division = divide(kernel, memory, candidates, cores=threads)
assert division.threads == threads
bound = memory.peak_bytes(candidates if threads == 1 else division.at_once)

def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

before = peak()
training = Training(
    FixedDPSGD(1.0),
    schedule,
    LossOfOutputs(loss),
    TensorData(x, y),
    device="cpu",
    stack=candidates if threads == 1 else "auto",
)
given = {"learning_rate": 0.1, "max_grad_norm": 1.0}
training.alike(TrainableCandidate(model(), bytes([k]) * 32, given) for k in range(candidates))
print(bound, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("kind", "candidates", "threads"),
    [("mlp", 24, 1), pytest.param("conv", 8, 1, marks=campaign), ("conv", 16, 4)],
)
def test_measured_memory_stays_below_the_model(kind, candidates, threads):
    """The peak of a process of its own, whose allocator gives large pieces back at once."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, kind, str(candidates), str(threads)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)},
    )
    bound, grown = map(int, done.stdout.split())
    # Stacks side by side are captured in turns; the bound counts a capture for each.
    assert bound / (4 if threads == 1 else 12) < grown <= bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_cpu():
    data = TensorData(*blobs())
    kernels = [
        BatchedKernel(mlp, LossOfOutputs(cross_entropy), x=data.x, y=data.y, device=torch.device(d))
        for d in ("cpu", "cuda")
    ]
    params = torch.randn(2, kernels[0].layout.size) * 0.3
    rows = rows_of(data.x.view(2, 100, -1), data.y.view(2, 100))
    out = summed(kernels[0], params, rows, Flat(0.5))
    there = Rows(rows.x.cuda(), rows.y.cuda(), rows.sizes, rows.mask.cuda(), rows.dropout)
    far = summed(kernels[1], params.cuda(), there, Flat(0.5))
    torch.testing.assert_close(far.cpu(), out, rtol=1e-4, atol=1e-4)


_FACTOR = {"loss": 1.0, "model": 1.0}


class _Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _FACTOR["model"] * super().forward(x)


def _scaled_loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _FACTOR["loss"] * cross_entropy(outputs, y)


def test_a_captured_pass_is_kept_while_what_it_refers_to_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = TensorData(torch.randn(6, 4), torch.arange(6) % 3)

    def kernel() -> object:
        found = engine.choose_kernel(
            _Scaled(4, 3), LossOfOutputs(_scaled_loss), data, torch.device("cpu")
        )
        rows = rows_of(data.x[None], data.y[None])
        for _ in range(6):  # a pass is captured after four steps of one shape
            sums = summed(found, torch.ones(1, 15), rows, Flat(1e9))
        norms.append(float(sums.norm()))
        return found

    norms: list[float] = []
    first = kernel()
    assert kernel() is first
    for name in _FACTOR:
        monkeypatch.setitem(_FACTOR, name, 3.0)
        assert kernel() is not first
        assert norms.pop() > 2.0 * norms[0]
        monkeypatch.setitem(_FACTOR, name, 1.0)
    assert kernel() is first
