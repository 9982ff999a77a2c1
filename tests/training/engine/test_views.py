"""Augmented views of a record: averaged before clipping, at no other charge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import privtune
from privtune.errors import InvalidInputError
from privtune.strategies import TrainingPlan
from privtune.study.build import build_candidate
from privtune.tasks.own import own_task
from privtune.training.engine.train import LossOverViews, choose_kernel
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOf, flatten_params
from privtune.training.methods import FixedDPSGD
from tests.training.engine.test_candidates import (
    CPU,
    DATA,
    METHOD,
    SCHEDULE,
    loss_of,
    make,
    run,
    stacked,  # noqa: F401
)
from tests.training.simple import mlp, rows_of, summed

pytestmark = pytest.mark.quick

RECORDS, VIEWS = 12, 3


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * (0.5 + torch.rand_like(x))


def clipped(loss: LossOf, bound: float, records: int = RECORDS, scale: float = 1.0) -> Any:
    """Return the clipped sum of some records' gradients, with masks from a generator of seed 5."""
    torch.manual_seed(0)
    model = mlp()
    data = TensorData(scale * DATA.x[:records], DATA.y[:records])
    kernel = choose_kernel(model, loss, data, CPU)
    rows = rows_of(data.x[None], data.y[None])
    rows = replace(rows, dropout=[torch.Generator().manual_seed(5)])
    return summed(kernel, flatten_params(model)[None], rows, Flat(bound))[0]


def by_hand(bound: float) -> torch.Tensor:
    """Return the same sum from plain autograd: gradients of views, their mean, its length, then the sum."""
    torch.manual_seed(0)
    model, generator = mlp(), torch.Generator().manual_seed(5)
    drawn = [torch.empty(RECORDS, 1, 8).uniform_(generator=generator) for _ in range(VIEWS)]
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for b in range(RECORDS):
        gradients = []
        for mask in drawn:
            x = DATA.x[b : b + 1] * (0.5 + mask[b])
            loss = loss_of(model, x, DATA.y[b : b + 1]).sum()
            found = torch.autograd.grad(loss, [*model.parameters()])
            gradients.append(torch.cat([g.flatten() for g in found]))
        mean = torch.stack(gradients).mean(dim=0)
        total += mean * min(1.0, bound / float(mean.norm()))
    return total


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("bound", [0.1, 100.0])
def test_gradients_of_views_are_averaged_and_then_clipped(bound: float, together: bool) -> None:
    found = clipped(LossOverViews(loss_of, scaled, VIEWS, together), bound)
    torch.testing.assert_close(found, by_hand(bound), rtol=1e-4, atol=1e-5)


def test_a_record_of_many_views_is_no_longer_than_the_bound() -> None:
    """Sums of eight gradients, each clipped by itself, would be up to eight times as long."""
    found = clipped(LossOverViews(loss_of, scaled, 8, together=True), 0.3, records=1, scale=50.0)
    assert 0.29 < float(found.norm()) <= 0.3 * (1 + 1e-5)


def test_one_view_that_changes_nothing_is_no_augmentation_bit_for_bit() -> None:
    (plain,) = run([make(0)])
    (viewed,) = run([replace(make(0), augment=lambda x: x)])
    assert torch.equal(plain.params, viewed.params)


def test_the_transcript_is_that_of_a_training_without_augmentation() -> None:
    (plain,), (viewed,) = run([make(0)]), run([replace(make(0), augment=scaled, views=4)])
    assert not torch.equal(plain.params, viewed.params)
    assert plain.transcript.digest() == viewed.transcript.digest()
    viewed.transcript.check_whole(METHOD.event(SCHEDULE))


def test_candidates_of_as_many_views_share_a_stack(stacked: list[int]) -> None:  # noqa: F811
    views = [1, 4, 4]
    made = [replace(make(k), augment=scaled, views=n) for k, n in enumerate(views)]
    found = run(made)
    assert sorted(stacked) == [1, 2]
    for k, n in enumerate(views):
        (alone,) = run([replace(make(k), augment=scaled, views=n)])
        torch.testing.assert_close(alone.params, found[k].params, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("narrow", [16, 8])
def test_candidates_of_other_augmentations_are_trained_apart(narrow: int) -> None:
    """Functions that differ in a number alone, or in a tensor that they hold; also of a narrower net."""

    def made(k: int) -> Any:
        held = torch.full((8,), 0.5 + k)
        return replace(
            make(k, lambda: mlp(hidden=(16, narrow)[k])),
            augment=lambda x: held * x + (0.1 + k) * torch.randn_like(x),
            views=2,
        )

    for k, found in enumerate(run([made(0), made(1)])):
        (alone,) = run([made(k)])
        torch.testing.assert_close(found.params, alone.params, rtol=1e-4, atol=1e-5)


def test_an_augmentation_sees_what_the_loss_sees() -> None:
    """Of dicts it gets the inputs, of units their rows; what it returns is packed again."""
    seen = []

    def build(trial: Any) -> Any:
        return privtune.Candidate(mlp(), augment=noted, multiplicity=2, max_grad_norm=1.0)

    def noted(x: Any) -> Any:
        seen.append(x)
        return {**x, "b": -x["b"]} if isinstance(x, dict) else -x

    def augmented(data: Any) -> Any:
        task = own_task(build, loss=loss_of, train=data)
        plan = TrainingPlan(SCHEDULE, FixedDPSGD(1.0))
        built = build_candidate(task, plan, secret=bytes(32), fixed={"learning_rate": 1.0})
        assert built.made.views == 2
        assert built.made.augment is not None
        x = task.load().train.x[:1]
        return x, built.made.augment(x)

    dicts = {"a": torch.ones(9, 2), "b": torch.ones(9, 3), "labels": torch.zeros(9).long()}
    x, found = augmented(dicts)
    assert {name: part.shape for name, part in seen[0].items()} == {"a": (1, 2), "b": (1, 3)}
    assert found.tolist() == [[1.0, 1.0, -1.0, -1.0, -1.0]]
    rows = TensorData(torch.ones(9, 4, 8), torch.zeros(9, 4).long(), unit="person")
    x, found = augmented(rows)
    assert seen[1].shape == (4, 8)
    assert torch.equal(found, -x)


@pytest.mark.parametrize("views", [0, 2, 2.0])
def test_views_are_counted_where_there_are_any(views: Any) -> None:
    def build(trial: Any) -> Any:
        return privtune.Candidate(mlp(), multiplicity=views, max_grad_norm=1.0)

    task = own_task(build, loss=loss_of, train=(DATA.x, DATA.y))
    plan = TrainingPlan(SCHEDULE, FixedDPSGD(1.0))
    with pytest.raises(InvalidInputError, match="from 1 to 1024, and 1 without augment"):
        build_candidate(task, plan, secret=bytes(32), fixed={"learning_rate": 1.0})


def first_alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_of(model, x[:1], y[:1])


def mean_of_batch(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_of(model, x, y).mean()


@pytest.mark.parametrize(
    ("loss", "together"), [(loss_of, True), (first_alone, False), (mean_of_batch, False)]
)
def test_a_loss_of_one_record_is_given_one_view_at_a_time(loss: LossOf, together: bool) -> None:
    views = LossOverViews(loss, scaled, VIEWS).fastest(mlp(), DATA)
    assert views.together == together
    torch.testing.assert_close(clipped(views, 0.1), by_hand(0.1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("augment", [lambda x: x[:, 1:], lambda x: x.double(), lambda x: None])
def test_an_augmentation_keeps_shape_and_type(augment: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidInputError, match="must return inputs as it is given them"):
        run([replace(make(0), augment=augment, views=2)])
