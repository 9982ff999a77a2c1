"""Made-up records have numbers that the loss accepts, found without a look at real ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from privtune.training.engine.train import TrainableCandidate, Training, choose_kernel
from privtune.training.mechanism.data import (
    TensorData,
    find_domain,
    find_domain_of,
    find_facts,
)
from privtune.training.mechanism.kernel import REACHED_RECORDS, LossOf, Rows, flatten_params
from privtune.training.mechanism.made_up import NORMAL, UNIT, Domain, Law
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD

T = torch.Tensor
CPU = torch.device("cpu")
WHOLE = Law("whole")
FROM_ONE = Law("whole", 1.0, 2.0)


def raising(allowed: Callable[[T], T]) -> Callable[[T], None]:
    """Return what raises at numbers that are not allowed."""

    def check(numbers: T) -> None:
        if not bool(allowed(numbers).all()):
            raise ValueError("outside")

    return check


ANY = raising(lambda t: t == t)
SHARE = raising(lambda t: (t >= 0) & (t <= 1))
BIT = raising(lambda t: (t == 0) | (t == 1))
COUNT = raising(lambda t: (t >= 0) & (t == t.floor()))
NATURAL = raising(lambda t: (t >= 1) & (t == t.floor()))
ABOVE = raising(lambda t: t > 0)
SUM = raising(lambda t: (t.sum(dim=-1) - 1).abs() < 1e-5)
HOT = raising(lambda t: (t.sum(dim=-1) == 1) & (t == t.round()).all(dim=-1))


@pytest.mark.parametrize(
    ("inputs", "targets", "shape", "expected"),
    [
        (ANY, ANY, (), Domain()),
        (SHARE, ANY, (), Domain(inputs=UNIT)),
        (ABOVE, ABOVE, (), Domain(inputs=UNIT)),
        (COUNT, ANY, (), Domain(inputs=WHOLE)),
        (NATURAL, BIT, (), Domain(inputs=FROM_ONE, targets=WHOLE)),
        (ANY, COUNT, (), Domain(targets=WHOLE)),
        (SHARE, NATURAL, (), Domain(inputs=UNIT, targets=FROM_ONE)),
        (ANY, SUM, (4,), Domain(targets=Law("shares"))),
        (ANY, HOT, (4,), Domain(targets=Law("one of several"))),
        (SUM, ANY, (), Domain(inputs=Law("shares"))),
        (HOT, NATURAL, (), Domain(inputs=Law("one of several"), targets=FROM_ONE)),
    ],
)
def test_the_numbers_that_a_loss_accepts_are_found(
    inputs: Callable[[T], None],
    targets: Callable[[T], None],
    shape: tuple[int, ...],
    expected: Domain,
) -> None:
    def run(x: T, y: T) -> T:
        inputs(x)
        targets(y)
        return x.sum(dim=1)

    data = TensorData(torch.zeros(3, 5), torch.zeros(3, *shape))
    domain = find_domain(run, data)
    assert domain == expected
    for seed in range(20):
        x, y = domain.draw(*data.like, (2, 3), CPU, seed=seed)
        assert x.shape == (2, 3, 5)
        assert y.shape == (2, 3, *shape)
        run(x[0], y[0])


@pytest.mark.parametrize("allowed", [NATURAL, raising(lambda t: t == 0)])
def test_whole_numbers_are_tried_as_well(allowed: Callable[[T], None]) -> None:
    data = TensorData(torch.zeros(3, 5), torch.zeros(3, dtype=torch.long))

    def run(x: T, y: T) -> T:
        allowed(y)
        return x.sum(dim=1)

    x, y = find_domain(run, data).draw(*data.like, (2, 3), CPU)
    assert y.dtype == torch.long
    run(x[0], y[0])


@pytest.mark.parametrize(
    ("declared", "allowed"),
    [
        ((10.0, 100.0), raising(lambda t: (t >= 10) & (t <= 100))),
        ((1.0, 5.0), NATURAL),
        ((-1.0, 1.0), raising(lambda t: t.abs() == 1)),
        ((0.2, 0.7), raising(lambda t: (t > 0) & (t < 1))),
    ],
)
def test_targets_are_in_the_declared_range(
    declared: tuple[float, float], allowed: Callable[[T], None]
) -> None:
    data = TensorData(torch.zeros(3, 5), torch.zeros(3), domain=Domain.of_targets(declared))

    def run(x: T, y: T) -> T:
        allowed(y)
        return x.sum(dim=1)

    domain = find_domain(run, data)
    for seed in range(20):
        y = domain.draw(*data.like, (2, 30), CPU, seed=seed)[1]
        assert declared[0] <= float(y.min()) <= float(y.max()) <= declared[1]
        allowed(y)


def test_finite_losses_are_preferred_to_others() -> None:
    data = TensorData(torch.zeros(3, 5), torch.zeros(3))
    assert find_domain(lambda x, y: x.log().sum(dim=1), data).inputs == UNIT
    assert find_domain(lambda x, y: x.sum(dim=1) * math.nan, data) == Domain()
    assert find_domain(lambda x, y: 1 / 0, data) == Domain()

    def either(x: T, y: T) -> T:
        if bool((x < 0).any()):
            raise ValueError
        return x.sum(dim=1) * math.nan

    assert find_domain(either, data).inputs == UNIT


def test_no_real_record_is_looked_at() -> None:
    """The same numbers are found, and shown to the loss, whatever the data hold."""
    shown: list[list[T]] = []
    for values in (0.0, 77.0, math.nan):
        calls: list[T] = []

        def run(x: T, y: T, calls: list[T] = calls) -> T:
            calls.extend((x.clone(), y.clone()))
            SHARE(x)
            return x.sum(dim=1)

        data = TensorData(torch.full((3, 5), values), torch.full((3,), values))
        find_domain(run, data)
        shown.append(calls)
    assert len(shown[0]) > 2
    for calls in shown[1:]:
        assert all(torch.equal(a, b) for a, b in zip(shown[0], calls, strict=True))
    assert not any(bool((t == 77.0).any() | t.isnan().any()) for t in shown[1])


def test_the_ends_of_a_law_are_tried_at_every_place() -> None:
    """A code of -1 or a target of 1.0 that only some draws have is found at once."""
    data = TensorData(torch.zeros(3, 5), torch.zeros(3))
    tried = [x for x, _ in Domain().tried(*data.like, CPU)]
    ends = torch.cat(tried[:2])
    assert torch.equal(ends.amin(dim=0), torch.full((5,), -3.0))
    assert torch.equal(ends.amax(dim=0), torch.full((5,), 3.0))
    x, _ = Domain().draw(*data.like, (1, 2000), CPU)
    assert float(x.abs().max()) <= 3.0


def test_laws_say_what_they_are() -> None:
    kinds = ("normal", "shares", "one of several")
    laws = [UNIT, WHOLE, Law("whole", 1.0, 1.0), *(Law(kind) for kind in kinds)]
    assert [str(law) for law in laws] == [
        "numbers in [0, 1]",
        "0 and 1",
        "whole numbers like 1",
        "numbers around 0",
        "shares of 1",
        "a 1 among zeros",
    ]
    assert str(NORMAL) == "numbers around 0"


def bce(model: nn.Module, x: T, y: T) -> T:
    return functional.binary_cross_entropy(model(x).squeeze(1).sigmoid(), y, reduction="none")


def rebuilt(model: nn.Module, x: T, y: T) -> T:
    return functional.binary_cross_entropy(model(x).sigmoid(), x, reduction="none").mean(dim=1)


def test_what_stands_for_a_record_that_raises_is_accepted() -> None:
    """A number that the loss refuses: the record contributes nothing, and others all they have."""
    x = torch.tensor([[0.1], [0.5], [9.0], [0.7]])

    def moved(rows: list[int]) -> tuple[T, int]:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        before = flatten_params(model).clone()
        optimizer = torch.optim.SGD(model.parameters(), float(len(rows)))
        made = TrainableCandidate(model, bytes(32), {"max_grad_norm": 0.5}, optimizer)
        data = TensorData(x[rows], torch.zeros(len(rows)))
        training = Training(FixedDPSGD(0.0), Schedule(len(rows), 1.0, 1), rebuilt, data)
        (outcome,) = training.of([made])
        return outcome.params - before, outcome.unusable

    with_it, unusable = moved([0, 1, 2, 3])
    without, none = moved([0, 1, 3])
    assert (unusable, none) == (1, 0)
    assert torch.allclose(with_it, without, atol=1e-6)


@pytest.mark.parametrize(
    ("loss_of", "width"), [(bce, 1), (rebuilt, 4)], ids=["BCELoss", "BCE autoencoder"]
)
def test_the_kernel_stays_within_what_the_loss_accepts(loss_of: LossOf, width: int) -> None:
    """The pass is batched and captured, since every made-up record of it has numbers of the domain."""
    model = nn.Linear(4, width)
    data = TensorData(torch.rand(9, 4), torch.rand(9))
    domain = find_domain_of(model, loss_of, data)
    found = TensorData(data.x, data.y, domain=domain)
    kernel = choose_kernel(model, loss_of, found, CPU)
    params = flatten_params(model)[None]
    rows = Rows(data.x[None], data.y[None], [9], params.new_ones(1, 9), [torch.Generator()])
    losses = kernel.losses(params, rows)
    expected = loss_of(model, data.x, data.y)
    assert torch.allclose(losses[0], expected, atol=1e-6)
    assert type(kernel).__name__ == "BatchedKernel"
    assert [type(program).__name__ for program in kernel._loss_programs.values()] == ["Captured"]


@pytest.mark.filterwarnings("ignore::privtune.training.mechanism.kernel.FallbackWarning")
def test_a_kernel_says_what_made_up_losses_reach() -> None:
    """Reached is a part of the graph, whether its gradient is 0 or not."""
    model = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2), "c": nn.Linear(4, 2)})

    def loss_of(model: nn.Module, x: T, y: T) -> T:
        outputs = model["a"](x) + 0.0 * model["b"](x)
        return functional.cross_entropy(outputs, y, reduction="none")

    def by_value(model: nn.Module, x: T, y: T) -> T:
        return loss_of(model, x, y) * (2.0 if float(x.sum()) > 0 else 1.0)

    data = TensorData(torch.rand(9, 4), torch.zeros(9, dtype=torch.long))
    kinds = []
    largest: list[float] = []
    for loss in (loss_of, by_value):
        kernel = choose_kernel(model, loss, data, CPU)
        kinds.append(type(kernel).__name__)
        reach = kernel.reach(flatten_params(model))
        reached = {name: size > 0.0 for name, size in reach.items()}
        assert reached == {"a.weight": True, "a.bias": True, "b.weight": False, "b.bias": False}
        largest.append(reach["a.bias"])
    assert kinds == ["BatchedKernel", "OneByOneKernel"]
    # The gradient in the biases of the classes is that of the outputs: shares less what is right.
    x, y = data.domain.draw(*data.like, (1, REACHED_RECORDS), CPU)
    outputs = model["a"](x[0]).detach()
    slopes = outputs.softmax(dim=1) - functional.one_hot(y[0], 2)
    assert largest[0] == pytest.approx(float(slopes.norm(dim=1).max()), rel=1e-5)
    assert largest[1] >= largest[0]


def test_ranges_are_found_where_zeros_are_not_accepted() -> None:
    """A loss of logarithms, or one that takes gradients, still holds labels to the classes."""
    head = nn.Linear(4, 3)

    def logarithm(x: T, y: T) -> T:
        ABOVE(x)
        return functional.cross_entropy(head(x.log()), y, reduction="none")

    def penalised(x: T, y: T) -> T:
        inputs = x.clone().requires_grad_()
        loss = functional.cross_entropy(head(inputs), y, reduction="none")
        (slope,) = torch.autograd.grad(loss.sum(), inputs, create_graph=True)
        return loss + slope.square().sum(dim=1)

    y = torch.tensor([0, 3])
    for run in (logarithm, penalised):
        facts = find_facts(run, torch.ones(2, 4), y, domain=Domain(inputs=UNIT))
        unusable = facts.unusable(torch.ones(2, 4), y)
        assert unusable is not None
        assert unusable.tolist() == [False, True]
