"""One record adds at most the bound, from the smallest to the largest numbers there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from privtune import norms_of
from privtune.errors import InvalidInputError
from privtune.training.engine import rules
from privtune.training.engine.kernels import BatchedKernel, OneByOneKernel
from privtune.training.mechanism.clipping import Automatic, CoordinateTransform, EqualByLayer, Flat
from privtune.training.mechanism.kernel import LossOfOutputs
from tests.training.simple import rows_of, summed

CPU = torch.device("cpu")
SIZES = [1e-45, 1e-38, 1e-30, 1e-25, 1e-19, 1e-10, 1.0, 1e10, 1e18, 1.5e19, 1e25, 3e38]
FEW = [1e-45, 1e-25, 1e-10, 1.0, 1.5e19, 3e38]  # where records are taken one by one
BOUNDS = [1e-8, 1e-5, 1e-2, 1.0, 1e8]


class ByHand(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x * self.scale


class Positions(nn.Module):
    """A matrix at several places of a record: few of them for Gram matrices, many for gradients."""

    def __init__(self, width):
        super().__init__()
        self.matrix = nn.Linear(width, 3 if width < 10 else 40)

    def forward(self, x):
        return self.matrix(x)


class Again(nn.Module):
    """One matrix with and without its bias, so that its gradient is a sum of several uses."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(3, 3)

    def forward(self, x):
        return self.matrix(x) + nn.functional.linear(2.0 * x, self.matrix.weight)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x):
        return x @ self.matrix


class Scaled(ByHand):
    """A layer with a rule of its own."""


norms_of(Scaled)(lambda layer, inputs, grad: {"scale": inputs[0] * grad})

MODELS = {
    "outer": (lambda: nn.Linear(3, 4), (3,), (4,)),
    "outer without bias": (lambda: nn.Linear(3, 4, bias=False), (3,), (4,)),
    "formed": (lambda: Positions(3), (5, 3), (5, 3)),
    "direct": (lambda: Positions(40), (13, 40), (13, 40)),
    "ghost": (lambda: Positions(40), (2, 40), (2, 40)),
    "conv": (lambda: nn.Conv2d(1, 2, 2), (1, 3, 3), (2, 2, 2)),
    "copies": (ByHand, (3,), (3,)),
    "twice": (lambda: Positions(3), (5, 3), (5, 3)),
    "again": (Again, (4, 3), (4, 3)),
    "turned": (Turned, (5, 3), (5, 4)),
    "rule": (Scaled, (3,), (3,)),
    "two layers": (lambda: nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]), (3,), (8,)),
}


class Beside(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], dim=-1)


def build(name):
    make, inputs, outputs = MODELS[name]
    return (lambda: Beside(make()) if name == "two layers" else make()), inputs, outputs


@LossOfOutputs
def product(output, target):
    """A loss whose gradient with respect to the output is the target."""
    return (output * target).flatten(1).sum(dim=1)


def released(kernel, x, y, clipping):
    """Return how long what each record adds is, at parameters of zero: nothing is lost on the way."""
    params = torch.zeros(len(x), kernel.layout.size)
    sums = summed(kernel, params, rows_of(x[:, None], y[:, None]), clipping)
    return sums.double().norm(dim=1)


def records(inputs, outputs, sizes=SIZES):
    """Return every record as the only one of a candidate of its own."""
    found = []
    for one, other in itertools.product(sizes, sizes):
        x, y = torch.full(inputs, 52.0), torch.full(outputs, other)
        x.view(-1)[0] = one
        found += [(x, y), (torch.full(inputs, one), y)]
    return [torch.stack(each) for each in zip(*found, strict=True)]


def sweep(kernel, inputs, outputs, make, sizes=SIZES):
    x, y = records(inputs, outputs, sizes)
    for bound in BOUNDS:
        added = released(kernel, x, y, make(bound))
        assert float(added.max()) <= (1.0 + 1e-5) * bound, (x[added.argmax()], y[added.argmax()])


@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n in MODELS if n != "two layers"])
def test_batched(name, low, monkeypatch):
    if name == "twice":
        monkeypatch.setattr(rules, "_DIRECT_BYTES", 0)
    model, inputs, outputs = build(name)
    x, y = torch.zeros(1, *inputs), torch.zeros(1, *outputs)
    kernel = BatchedKernel(model, product, x=x, y=y, device=CPU, low=low)
    forms = {getattr(use, "form", name) for use in kernel.plan.uses}
    known = name in ("formed", "direct", "ghost", "twice")
    assert forms & ({name} if known else {"outer", "formed", name})
    sweep(kernel, inputs, outputs, Flat)


@pytest.mark.parametrize("name", ["outer", "conv"])
def test_one_by_one(name):
    model, inputs, outputs = build(name)
    x, y = torch.zeros(1, *inputs), torch.zeros(1, *outputs)
    kernel = OneByOneKernel(model, product, x=x, y=y, device=CPU)
    sweep(kernel, inputs, outputs, Flat, FEW)


@pytest.mark.parametrize("name", ["two layers", "outer"])
def test_other_clippings(name):
    model, inputs, outputs = build(name)
    x, y = torch.zeros(1, *inputs), torch.zeros(1, *outputs)
    kernel = BatchedKernel(model, product, x=x, y=y, device=CPU)
    sweep(kernel, inputs, outputs, EqualByLayer)
    size = kernel.layout.size
    x, y = records(inputs, outputs)
    center = torch.full((len(x), size), 0.1)
    scale = torch.linspace(1e-3, 3.0, size).expand(len(x), -1)
    assert float(released(kernel, x, y, Automatic()).max()) <= 1.0 + 1e-5
    sweep(kernel, inputs, outputs, lambda bound: CoordinateTransform(center, scale, bound))


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_tables(low):
    """Rows of a table that are looked up twice, once, and together with others."""
    index = torch.tensor([0, 1, 0, 2])
    kernel = BatchedKernel(
        lambda: nn.Embedding(4, 3),
        product,
        x=index[None],
        y=torch.zeros(1, 4, 3),
        device=CPU,
        low=low,
    )
    rows = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 0.5]])
    y = torch.cat([size * rows for size in SIZES]).unsqueeze(2).repeat(1, 1, 3)
    for bound in BOUNDS:
        added = released(kernel, index.repeat(len(y), 1), y, Flat(bound))
        assert float(added.max()) <= (1.0 + 1e-5) * bound


def test_a_bound_that_float32_does_not_see_is_refused():
    with pytest.raises(InvalidInputError, match="at least 1e-15"):
        Flat(1e-20).sensitivity(1)


@pytest.mark.parametrize("kind", [BatchedKernel, OneByOneKernel])
def test_a_long_gradient_of_equal_numbers(kind):
    """torch adds a million squares in a few numbers of float32, and its norm is 0.05% too short."""
    ones = torch.ones(2**20)
    assert float(torch.linalg.vector_norm(0.3 * ones)) < 0.3 * 2**10 * (1.0 - 1e-4)
    kernel = kind(lambda: ByHand(2**20), product, x=ones[None], y=ones[None], device=CPU)
    added = released(kernel, ones[None], 0.3 * ones[None], Flat(1.0))
    assert 1.0 - 1e-4 <= float(added) <= 1.0 + 1e-5


@pytest.mark.parametrize("places", [64, 2048])
def test_a_word_at_many_places(places):
    eps = torch.finfo(torch.float32).eps
    g = torch.full((1, 1, places, 1), 0.51 * eps)
    g[0, 0, 0] = 1.0 + 3.0 * places * eps
    use, index = rules.EmbeddingUse("table", rows=2), torch.zeros(1, 1, places, dtype=torch.long)
    squared, saved = use.squared_norms(index, g)
    bound, out = float(g.double().sum()), {"table": torch.zeros(1, 2)}
    use.accumulate((bound / squared.sqrt()).clamp(max=1.0), saved, out)
    assert float(out["table"].double().norm()) <= bound * (1.0 + 1e-5)
