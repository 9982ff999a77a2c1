"""Passes in bfloat16: norms, sums and noise stay in float32, and a record adds at most the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from privtune.errors import InvalidInputError
from privtune.study.planning import plan_study
from privtune.study.spec import StudySpec
from privtune.tasks import PRECISION, get_task
from privtune.training.engine.fine_tuning import set_trainable
from privtune.training.engine.kernels import BatchedKernel
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOfOutputs
from tests.training.simple import SimpleDPSGD, fit, rows_of, summed

CPU, LOW = torch.device("cpu"), torch.bfloat16


def losses(outputs, targets):
    assert outputs.dtype == torch.float32
    return F.cross_entropy(outputs, targets, reduction="none")


class Encoder(nn.Module):
    """Tokens, attention, norms, a buffer, dropout, and a weight that is used by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.mix, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("places", torch.randn(5, 8))

    def forward(self, x):
        h = self.norm(self.words(x) + self.places)
        h = F.scaled_dot_product_attention(h, self.mix(h), h) * self.scale
        return self.head(self.drop(h).mean(1))


def kernel_of(low, kind="all"):
    torch.manual_seed(1)
    x, y = torch.randint(9, (40, 5)), torch.randint(3, (40,))
    kernel = BatchedKernel(
        lambda: set_trainable(Encoder(), kind, rank=2),
        LossOfOutputs(losses),
        x=x,
        y=y,
        device=CPU,
        low=low,
    )
    params = 0.3 * torch.randn(2, kernel.layout.size, generator=torch.Generator().manual_seed(2))
    return kernel, params, x, y


def sums(kernel, params, x, y, mask, bound):
    streams = [torch.Generator().manual_seed(k) for k in range(2)]
    rows = rows_of(*(t.expand(2, *t.shape).contiguous() for t in (x, y)))
    rows = replace(rows, mask=mask.expand(2, -1).contiguous(), dropout=streams)
    return summed(kernel, params, rows, Flat(bound))


@pytest.mark.parametrize("kind", ["all", "head", "biases", "lora"])
def test_each_record_adds_at_most_the_bound_and_the_same_whoever_is_beside_it(kind):
    kernel, params, x, y = kernel_of(LOW, kind)
    every = torch.ones(len(x))
    for bound in (1e-3, 0.1):
        whole = sums(kernel, params, x, y, every, bound)
        assert whole.dtype == torch.float32
        for record in (0, 17, 39):
            alone = torch.zeros(len(x))
            alone[record] = 1.0
            added = sums(kernel, params, x, y, alone, bound)
            assert float(added.norm(dim=1).max()) <= (1.0 + 1e-5) * bound
            # Other records in the places of the others: what this one adds keeps every bit.
            others, classes = (x + 1) % 9, (y + 1) % 3
            others[record], classes[record] = x[record], y[record]
            assert torch.equal(sums(kernel, params, others, classes, alone, bound), added)
            torch.testing.assert_close(
                sums(kernel, params, x, y, every - alone, bound) + added, whole, rtol=0, atol=1e-6
            )


@pytest.mark.parametrize("kind", ["all", "lora"])
def test_gradients_are_close_to_those_of_float32_and_not_the_same(kind):
    mask = torch.ones(40)
    low, high = (
        sums(*kernel_of(dtype, kind)[:1], *kernel_of(dtype, kind)[1:], mask, 0.1)
        for dtype in (LOW, None)
    )
    assert not torch.equal(low, high)
    assert float((low - high).norm() / high.norm()) < 0.03


def test_it_is_a_public_fact_of_the_plan():
    arms = [{"name": "a", "strategy": "dog"}]
    budget = {"name": "b", "epsilon": 4.0, "delta": 1e-5}
    plans = {}
    for precision in ("float32", "bfloat16"):
        task = {"type": "fine-tuning", "task": "digits-mlp", "precision": precision}
        spec = StudySpec(
            name="s", task=task, budget=budget, arms=arms, epochs=1, expected_batch_size=64
        )
        plans[precision] = plan_study(spec).plans[0]
    said = plans["bfloat16"].public_facts[PRECISION]
    assert said == "bfloat16 passes; norms, sums and noise in float32"
    assert PRECISION not in plans["float32"].public_facts
    assert plans["bfloat16"].digest() != plans["float32"].digest()
    assert plans["bfloat16"].event == plans["float32"].event


class Typed(nn.Linear):
    """Computes in a type of its own."""

    def forward(self, x):
        return F.linear(x + torch.ones(64), self.weight, self.bias)


def test_what_is_not_safe_is_one_sentence():
    for wrong in ("float16", "half", 16, ["bfloat16"]):
        with pytest.raises(InvalidInputError, match="must be float32 or bfloat16"):
            get_task({"type": "fine-tuning", "task": "digits-mlp", "precision": wrong})
    data = TensorData(torch.rand(20, 64), torch.randint(10, (20,)))
    with pytest.raises(InvalidInputError, match="does not suit Typed"):
        fit(SimpleDPSGD(), count=1, data=data, model=lambda: Typed(64, 10), precision="bfloat16")
