from __future__ import annotations

import pytest
import torch

from privtune.errors import InvalidInputError
from privtune.training.engine.kernels import BatchedKernel
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import flatten_params, load_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods.hyfreedp import HyFreeDP
from studies.harness import train
from tests.training.simple import SimpleDPSGD, blobs, cross_entropy, fit, mlp, secrets

pytestmark = pytest.mark.quick
GIVEN = {"learning_rate": 0.5, "max_grad_norm": 1.0}


def test_training_learns_and_reports():
    result = fit(SimpleDPSGD(0.5), count=2, steps=60)
    assert result.params.shape == (2, flatten_params(mlp()).numel())
    assert result.report["learning_rate"].shape == (60, 2)
    (x, y), model = blobs(), mlp()
    for params in result.params:
        load_params(model, params)
        assert float((model(x).argmax(1) == y).float().mean()) > 0.9
    assert not torch.equal(result.params[0], result.params[1])
    assert result.diverged == (False, False)


def test_a_table_that_a_model_was_made_from_is_left_as_it_is():
    """Weights of a trial are loaded in new memory: the next trial begins with the same table."""
    table = torch.ones(5, 2)
    model = torch.nn.Embedding.from_pretrained(table, freeze=False)
    assert model.weight.data_ptr() == table.data_ptr()
    load_params(model, torch.full((10,), 7.0))
    assert bool((model.weight == 7.0).all())
    assert bool((table == 1.0).all())


@pytest.mark.parametrize("stack", ["auto", 2])
@pytest.mark.parametrize(
    ("method", "given"), [(SimpleDPSGD(1.0), [GIVEN] * 3), (HyFreeDP(1.0, 1.0), [{}] * 3)]
)
def test_snapshots_are_what_a_shorter_training_ends_with(method, given, stack):
    common = {"candidates": given, "stack": stack}
    long = fit(method, steps=8, snapshots_at=(2, 7), **common)
    short = fit(method, steps=3, **common)
    for candidate, snapshots in enumerate(long.snapshots):
        assert sorted(snapshots) == [2, 7]
        assert torch.equal(snapshots[2], short.params[candidate])
        assert torch.equal(snapshots[7], long.params[candidate])
        assert not torch.equal(snapshots[2], snapshots[7])
    assert short.snapshots == ({}, {}, {})


def test_empty_batches_release_noise():
    result = fit(SimpleDPSGD(1.0), count=2, steps=4, rate=1e-9)
    assert result.params.isfinite().all()
    assert result.params.abs().max() > 1e3  # noise over an expected batch size of 2e-7


def test_data_must_have_the_size_of_the_schedule():
    x, y = blobs()
    with pytest.raises(InvalidInputError, match="records of the schedule"):
        train(
            SimpleDPSGD(1.0),
            Schedule(len(x) + 1, 0.1, 1),
            model=mlp,
            loss=cross_entropy,
            data=TensorData(x, y),
            candidates=[GIVEN],
            secrets=secrets(1),
        )


@pytest.mark.parametrize("steps", [1, 5, 12, 13, 500])
def test_checkpoints_are_steps_of_the_schedule_and_end_with_the_last(steps):
    chosen = Schedule(100, 0.1, steps).checkpoints()
    assert len(chosen) == min(steps, 12)
    assert chosen[-1] == steps - 1
    assert list(chosen) == sorted(set(chosen))
    assert chosen[0] >= 0


def test_a_training_computes_the_sizes_that_its_length_pays_for(monkeypatch):
    seen, own = [], BatchedKernel.accumulate
    monkeypatch.setattr(
        BatchedKernel,
        "accumulate",
        lambda self, params, rows, *a, **k: (
            seen.append(rows.mask.shape[1]) or own(self, params, rows, *a, **k)
        ),
    )
    fit(SimpleDPSGD(1.0), count=1, steps=60, rate=0.3)
    assert set(seen[-60:]) <= {48, 64, 80}  # in multiples of eight there would be seven
