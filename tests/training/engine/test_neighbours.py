"""Whatever a model does with its records, one more moves a clipped sum by its bound at most.

What couples them here shows on no record that is made up: a threshold that none of those crosses.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.strategies.score_plan import ScorePlan
from privtune.training.engine.fine_tuning import part_of_model, set_trainable
from privtune.training.engine.kernels import OneByOneKernel
from privtune.training.engine.train import choose_kernel
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOfOutputs, fresh
from privtune.training.mechanism.scoring import released_sums, score
from tests.training.simple import cross_entropy, rows_of
from tests.training.simple import summed as sums_of

CPU = torch.device("cpu")
BOUND = 0.3

pytestmark = pytest.mark.filterwarnings(
    "ignore::privtune.training.mechanism.kernel.FallbackWarning"
)


class Two(nn.Module):
    """Two layers, and something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 5), nn.Linear(5, 3)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.a(self.before(x))))


class ScalesABatch(Two):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x / 255.0 if x.max() > 10.0 else x


class RemembersTheLargest(Two):
    largest = 0.0

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, float(x.abs().max()) - 10.0)
        return x / (1.0 + self.largest)


class RemembersBesideALock(Two):
    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Any] = {"in": [{"lock": threading.Lock(), "largest": 0.0}]}

    def before(self, x: torch.Tensor) -> torch.Tensor:
        own = self.held["in"][0]
        own["largest"] = max(own["largest"], float(x.abs().max()) - 10.0)
        return x / (1.0 + own["largest"])


class RemembersInABuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(8))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax(0) - 10.0))
        return x / (1.0 + self.largest)


def shortened(g: torch.Tensor) -> torch.Tensor:
    return torch.where(g.norm() > 2.0, torch.zeros_like(g), g)


class Shortens(torch.autograd.Function):
    """A function without a rule for ``vmap``."""

    @staticmethod
    def forward(h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return shortened(g)


class ShortensAll(Shortens):
    """A function with a rule for ``vmap`` that hands all records on at once."""

    @staticmethod
    def vmap(info: Any, dims: Any, h: torch.Tensor) -> Any:
        return ShortensAll.apply(h), dims[0]


class ByFunction(Two):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return Shortens.apply(h)


class ByFunctionOfAll(Two):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return ShortensAll.apply(h)


class ByHook(Two):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        if h.requires_grad:
            h.register_hook(shortened)
        return h


class ByModuleHook(Two):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(lambda module, into, out: (shortened(into[0]),))


class Scales(Shortens):
    """A function whose rule for ``vmap`` sees all records on the way forward."""

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g

    @staticmethod
    def vmap(info: Any, dims: Any, h: torch.Tensor) -> Any:
        return scaled(h), dims[0]


def scaled(h: torch.Tensor) -> torch.Tensor:
    return torch.where(h.abs().max() > 100.0, h / h.abs().max(), h)


@torch.library.custom_op("neighbours::kept", mutates_args=())
def kept(h: torch.Tensor) -> torch.Tensor:
    return h.clone()


kept.register_vmap(lambda info, dims, h: (scaled(h), dims[0]))
kept.register_autograd(lambda ctx, g: g)


class ByRule(Two):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return Scales.apply(x)


class ByRuleOfAnOperator(Two):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return kept(x)


class BySaved(Two):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(scaled, lambda held: held):
            return h.pow(3)


class ByNode(Two):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(h)
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda given: tuple(map(shortened, given)))
        return h


MODELS: list[Callable[[], nn.Module]] = [
    ScalesABatch, RemembersTheLargest, RemembersInABuffer, ByFunction, ByFunctionOfAll, ByHook,
    ByModuleHook, ByRule, ByRuleOfAnOperator, BySaved, ByNode,
    RemembersBesideALock,
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_one_record_more_moves_a_sum_by_its_bound(model: Callable[[], nn.Module]) -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(9, 8, generator=generator), torch.arange(9) % 3
    kernel = choose_kernel(model(), LossOfOutputs(cross_entropy), TensorData(x, y), CPU)
    params = 2.0 * torch.randn(1, kernel.layout.size, generator=generator)

    def summed(x: torch.Tensor, bound: float) -> torch.Tensor:
        return sums_of(kernel, params, rows_of(x[None], y[None, : len(x)]), Flat(bound))[0]

    without = summed(x[:8], BOUND)
    for value in (200.0, 1e30, float("nan"), float("inf")):
        one_more = torch.cat([x[:8], torch.full((1, 8), value)])
        assert float((summed(one_more, BOUND) - without).norm()) <= BOUND * (1 + 1e-5), value
        assert torch.equal(summed(x[:8], BOUND), without), "nothing is remembered"

    alone = torch.zeros_like(without)
    for record in range(8):
        plain = model()
        for name, value in kernel.layout.unflatten(params[0]).items():
            dict(plain.named_parameters())[name].data = value.clone()
        cross_entropy(plain(x[record : record + 1]), y[record : record + 1]).sum().backward()
        alone += torch.cat([p.grad.flatten() for p in plain.parameters()])
    torch.testing.assert_close(summed(x[:8], 1e9), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, torch.rand])
def test_numbers_from_elsewhere_than_torch_are_drawn_for_each_record(draw: Any) -> None:
    """Under vmap there would be one for all, and none that is new in a captured pass."""

    class Scales(Two):
        def between(self, h: torch.Tensor) -> torch.Tensor:
            return h * draw(1) if draw is torch.rand else h * float(draw())

    x, y = torch.ones(40, 8), torch.zeros(40, dtype=torch.int64)
    kernel = choose_kernel(Scales(), LossOfOutputs(cross_entropy), TensorData(x, y), CPU)
    assert isinstance(kernel, OneByOneKernel) == (draw is not torch.rand)
    params = torch.randn(1, kernel.layout.size, generator=torch.Generator().manual_seed(3))
    found = set()
    for _ in range(10):  # a pass is captured after 4 of one shape
        rows = rows_of(x[None, :1], y[None, :1])
        found.add(float(sums_of(kernel, params, rows, Flat(1e9)).norm()))
    if draw is not torch.rand:  # whose stream begins anew in each of these passes
        assert len(found) == 10


def test_draws_that_nothing_catches_come_from_a_candidates_own_stream() -> None:
    class Recurrent(nn.Module):
        """Dropout within a call of cuDNN's kind: no draw of it is seen."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.GRU(4, 6, 2, dropout=0.5, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(x.view(-1, 2, 4))[0][:, -1])

    x, y = torch.randn(4, 8), torch.arange(4) % 3
    kernel = OneByOneKernel(Recurrent, LossOfOutputs(cross_entropy), x=x, y=y, device=CPU)
    params = torch.randn(1, kernel.layout.size)

    def drawn(seed: int) -> torch.Tensor:
        rows = replace(rows_of(x[None], y[None]), dropout=[torch.Generator().manual_seed(seed)])
        return sums_of(kernel, params, rows, Flat(1.0))

    before = torch.get_rng_state()
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert torch.equal(torch.get_rng_state(), before)


class Writes(Two):
    """Writes to what copies share, where a record is large."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = nn.Parameter(torch.zeros(()), requires_grad=False)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.abs().max() > 10.0):
            self.write(x.abs().max())
        return x / (1.0 + self.largest)

    def write(self, top: torch.Tensor) -> None:
        with torch.no_grad():
            self.largest.copy_(top)


class WritesToAWeight(Writes):
    def write(self, top: torch.Tensor) -> None:
        self.a.weight.data.mul_(0.5)


class PutsAnotherWeight(Writes):
    def write(self, top: torch.Tensor) -> None:
        self.a.weight.data = self.a.weight.data * 0.5


class Compiled(nn.Module):
    """What TorchScript compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.abs().max() > 10.0):
            self.largest.copy_(x.abs().max())
        return self.inner(x / (1.0 + self.largest))


def compiled() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return nn.Sequential(torch.jit.script(Compiled()))


@pytest.mark.parametrize("model", [Writes, WritesToAWeight, PutsAnotherWeight, compiled])
def test_a_pass_that_writes_to_what_records_share_is_refused(
    model: Callable[[], nn.Module],
) -> None:
    """One record would reach the next by it; what was written is put back."""
    made, y = model(), torch.arange(9) % 3
    x = torch.cat([torch.full((1, 8), 200.0), torch.randn(8, 8)])
    stood = {name: value.clone() for name, value in made.state_dict().items()}
    kernel = choose_kernel(made, LossOfOutputs(cross_entropy), TensorData(x, y), CPU)
    params = torch.cat([p.flatten() for p in made.parameters() if p.requires_grad]).detach()[None]
    rows, out = rows_of(x[None], y[None]), torch.zeros_like(params)
    refused = pytest.raises(InvalidInputError, match="must not write to its parameters")
    with refused:
        kernel.accumulate(params, rows, Flat(BOUND), out=out)
    assert not out.any()
    terms = ScorePlan(9, None, metric="loss", options={"bound": 2.0})
    with refused:
        score(terms, made, TensorData(x, y), rng=np.random.default_rng(0))
    if model is not compiled:
        part = part_of_model(set_trainable(made, "head"), x[1:4])
        assert part is not None
        with refused:
            part.features(x)
    assert all(torch.equal(value, stood[name]) for name, value in made.state_dict().items())


@pytest.mark.parametrize(
    "model", [RemembersTheLargest, RemembersInABuffer, ScalesABatch, ByRule, ByRuleOfAnOperator]
)
def test_one_other_record_changes_a_score_by_one_record(model: Callable[[], nn.Module]) -> None:
    x, made = torch.randn(40, 8), model()
    y = made(x).argmax(dim=1)
    terms = ScorePlan(40, None, metric="loss", options={"bound": 2.0})
    (metric,) = terms.make_metrics()
    released = []
    for value in (1.0, 1e9):
        other = torch.cat([x[:1] * value, x[1:]])
        rng = np.random.default_rng(0)
        released += released_sums(terms, made, TensorData(other, y), rng) or []
    # One record less, and another one more.
    assert np.linalg.norm(released[0] - released[1]) <= 2.0 * metric.sensitivity + 1e-4


@pytest.mark.parametrize(
    "model",
    [RemembersTheLargest, RemembersInABuffer, ScalesABatch, ByRule, ByRuleOfAnOperator, Two],
)
def test_features_of_a_frozen_part_hang_on_their_own_record(model: Callable[[], nn.Module]) -> None:
    part = part_of_model(set_trainable(model(), "head"), torch.randn(3, 8))
    assert part is not None
    assert part.together == (model is Two)
    x = torch.randn(9, 8)
    other = torch.cat([x[:1] * 1e9, x[1:]])
    assert torch.equal(part.features(x)[1:], part.features(other)[1:])
    plain = model()
    plain.load_state_dict(part.whole.state_dict())
    torch.testing.assert_close(part.features(x), plain.a(plain.before(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("records", [1, 2, 257, 258])
def test_features_of_a_frozen_part_are_the_same_among_more_records(records: int) -> None:
    body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128))
    model = nn.Sequential(OrderedDict(body=body, head=nn.Linear(128, 3)))
    part = part_of_model(set_trainable(model, "head"), torch.randn(3, 64))
    assert part is not None
    assert part.together
    x = torch.randn(600, 64)
    assert torch.equal(part.features(x[:records]), part.features(x)[:records])


class Padded(nn.Module):
    """Attention among places, of which those are padding whose first number is above 5."""

    def __init__(self, *, barred: bool) -> None:
        super().__init__()
        self.inner, self.head, self.barred = nn.Linear(4, 4), nn.Linear(12, 3), barred

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, there = self.inner(x), x[..., 0] <= 5.0
        mask = there.unsqueeze(1) & there.unsqueeze(2)
        if not self.barred:
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        seen = nn.functional.scaled_dot_product_attention(h, h, h, attn_mask=mask)
        return self.head(seen.flatten(1))


@pytest.mark.parametrize("barred", [True, False])
def test_a_padded_place_that_sees_none_costs_its_record_nothing(*, barred: bool) -> None:
    """torch gives it zeros; NaN in their place made every padded record count as none."""
    x, y = torch.randn(6, 3, 4), torch.arange(6) % 3
    x[:, 2, 0] = 9.0
    made = Padded(barred=barred)
    kernel = choose_kernel(made, LossOfOutputs(cross_entropy), TensorData(x, y), CPU)
    cross_entropy(made(x), y).sum().backward()
    flat = torch.cat([p.flatten() for p in made.parameters()]).detach()[None]
    out = sums_of(kernel, flat, rows_of(x[None], y[None]), Flat(1e9))
    expected = torch.cat([p.grad.flatten() for p in made.parameters()])
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "changed",
    [
        nn.utils.parametrizations.weight_norm,
        torch.jit.script,
        lambda layer: nn.Sequential(layer, layer),
    ],
)
def test_a_copy_that_has_met_no_record_computes_the_same_with_the_same_weights(
    changed: Any,
) -> None:
    model, x = changed(nn.Linear(4, 4)), torch.randn(3, 4)
    copied, _ = fresh(model)
    assert torch.equal(copied(x), model(x))
    assert list(map(id, copied.parameters())) == list(map(id, model.parameters()))
