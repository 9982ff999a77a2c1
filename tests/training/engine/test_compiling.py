"""Compiled passes against records taken one by one; without a compiler, one sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from privtune.training.engine import compiling
from privtune.training.engine.batched import BatchedKernel
from privtune.training.engine.compiling import CompiledSums
from privtune.training.engine.compute import CompileError, require_compiler
from privtune.training.engine.train import train
from privtune.training.mechanism.clipping import Automatic, EqualByLayer, Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import FallbackWarning, OfOutputs, Rows
from privtune.training.mechanism.schedule import Schedule
from tests.tiers import FULL
from tests.training.simple import (
    SimpleDPSGD,
    blobs,
    clipped_sum,
    cross_entropy,
    mlp,
    per_sample_gradients,
    secrets,
)

CPU = torch.device("cpu")


def compiler() -> bool:
    try:
        require_compiler()
    except CompileError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not compiler(), reason="needs a C++ compiler")


def at_once(monkeypatch):
    """Compile every shape when it is first seen."""
    monkeypatch.setattr(CompiledSums, "settle", lambda self: None)


def close(found, expected):
    scale = expected.abs().max().clamp(min=1e-12)
    torch.testing.assert_close(found / scale, expected / scale, rtol=1e-5, atol=1e-5)


def conv():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("build", "shape"), [(mlp, (8,)), (conv, (1, 6, 6))])
def test_compiled_clipped_sums_equal_records_taken_one_by_one(build, shape, monkeypatch):
    at_once(monkeypatch)
    torch.manual_seed(3)
    sizes, width = [5, 0, 8], 8
    x, y = torch.randn(3, width, *shape), torch.randint(3, (3, width))
    model = build()
    kernel = BatchedKernel(
        lambda: model, OfOutputs(cross_entropy), x=x[0], y=y[0], device=CPU, compiled=True
    )
    params = 0.5 * torch.randn(3, kernel.layout.size)
    mask = (torch.arange(width) < torch.tensor(sizes)[:, None]).float()
    rows = Rows(x, y, sizes, mask, [torch.Generator() for _ in sizes])
    gradients = [
        per_sample_gradients(model, params[k], x[k, :n], y[k, :n], cross_entropy)
        for k, n in enumerate(sizes)
    ]
    bound = float(torch.cat([g.norm(dim=1) for g in gradients]).median())
    out = torch.ones_like(params)
    assert kernel.accumulate(params, rows, Flat(bound), out=out) is None
    for k, own in enumerate(gradients):
        close(out[k] - 1.0, clipped_sum(own, bound))
    if build is conv:  # each clipping is a program of its own, and takes seconds
        return
    if FULL:
        out = torch.zeros_like(params)
        kernel.accumulate(params, rows, Automatic(0.1), out=out)
        for k, own in enumerate(gradients):
            close(out[k], (own / (own.norm(dim=1, keepdim=True) + 0.1)).sum(0))
    layers = kernel.layout.layers.values()
    spans = [(kernel.layout.spans[n[0]][0], kernel.layout.spans[n[-1]][1]) for n in layers]
    out = torch.zeros_like(params)
    kernel.accumulate(params, rows, EqualByLayer(0.3), out=out)
    for k, own in enumerate(gradients):
        parts = [clipped_sum(own[:, s:e], 0.3 / len(spans) ** 0.5) for s, e in spans]
        close(out[k], torch.cat(parts))


@needs_compiler
@pytest.mark.slow
def test_poison_adds_nothing_and_touches_no_bit_of_another_candidate(monkeypatch):
    at_once(monkeypatch)
    x, y = (t.view(3, 64, *t.shape[1:]) for t in blobs(records=192))
    kernel = BatchedKernel(mlp, OfOutputs(cross_entropy), x=x[0], y=y[0], device=CPU, compiled=True)
    params = torch.randn(3, kernel.layout.size) * 0.3
    clean, halves = torch.zeros_like(params), torch.zeros(3)

    def rows(inputs):
        return Rows(inputs, y, [64] * 3, torch.ones(3, 64), [torch.Generator() for _ in range(3)])

    kernel.accumulate(params, rows(x), Flat(0.5), out=clean, halves=halves)
    good = torch.arange(64) % 3 != 0
    own = per_sample_gradients(mlp(), params[1], x[1][good], y[1][good], cross_entropy)
    for poison in (float("nan"), float("inf"), 1e38):
        bad = x.clone()
        bad[1, ::3] = poison
        dirty, dirty_halves = torch.zeros_like(params), torch.zeros(3)
        counts = kernel.accumulate(params, rows(bad), Flat(0.5), out=dirty, halves=dirty_halves)
        assert counts.tolist() == [0, 22, 0]
        assert torch.equal(clean[[0, 2]], dirty[[0, 2]])
        assert torch.equal(halves[[0, 2]], dirty_halves[[0, 2]])
        torch.testing.assert_close(dirty[1], clipped_sum(own, 0.5), rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.slow
def test_dropout_and_whole_trainings_come_out_alike(monkeypatch):
    at_once(monkeypatch)

    def model():
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))

    x, y = blobs()
    results = [
        train(
            SimpleDPSGD(1.0),
            Schedule(200, 1.0, 3),
            model=model,
            loss=cross_entropy,
            data=TensorData(x, y),
            candidates=[{"learning_rate": 0.5, "max_grad_norm": 0.8}] * 2,
            secrets=secrets(2),
            device="cpu",
            compiled=compiled,
        )
        for compiled in (False, True)
    ]
    torch.testing.assert_close(results[0].params, results[1].params, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.slow
def test_a_graph_that_was_compiled_before_is_taken_from_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters = torch._dynamo.utils.counters

    def program(x):
        return ((x @ x.T).relu().sum(dim=1),)

    example = torch.randn(5, 7)
    outputs = []
    for hits in (0, 1):
        counters.clear()
        outputs.append(compiling._compile(program, (example,))(example)[0])
        found = counters["inductor"]  # anew: what compiles may have emptied all counters
        assert found["fxgraph_cache_hit"] == hits
        assert found["fxgraph_cache_bypass"] == 0
    assert torch.equal(*outputs)
    torch.testing.assert_close(outputs[0], program(example)[0])


@needs_compiler
def test_a_wrong_program_does_not_pass(monkeypatch):
    """At the start it is an error; later on the stack is trained as it is, and that is said."""
    monkeypatch.setattr(
        compiling, "_compile", lambda program, _: lambda *args: [1.1 * t for t in program(*args)]
    )
    x, y = blobs()
    with pytest.raises(CompileError, match="leave compile off"):
        BatchedKernel(mlp, OfOutputs(cross_entropy), x=x, y=y, device=CPU, compiled=True)
    monkeypatch.setattr(compiling, "_COMMON", 1)
    kernel = BatchedKernel(mlp, OfOutputs(cross_entropy), x=x, y=y, device=CPU)
    late = CompiledSums(
        kernel.module,
        OfOutputs(cross_entropy),
        layout=kernel.layout,
        plan=kernel.plan,
        x=x[:1],
        y=y[:1],
    )
    late.settle()
    rows = Rows(x.view(2, 100, -1), y.view(2, 100), [100, 100], torch.ones(2, 100), [])
    params = torch.zeros(2, kernel.layout.size)
    assert late(params, rows, (), Flat(1.0)) is None
    with pytest.warns(FallbackWarning, match="trained as they are"):
        assert late(params, rows, (), Flat(1.0)) is None
    assert late(params, rows, (), Flat(1.0)) is None


def test_without_a_compiler_it_is_one_sentence(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="needs a C\\+\\+ compiler and there is no no-such-comp"):
        train(
            SimpleDPSGD(1.0),
            Schedule(200, 0.1, 3),
            model=mlp,
            loss=cross_entropy,
            data=TensorData(*blobs()),
            candidates=[{"learning_rate": 0.5, "max_grad_norm": 0.8}],
            secrets=secrets(1),
            device="cpu",
            compiled=True,
        )
