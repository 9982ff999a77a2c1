from __future__ import annotations

import pytest
import torch

from privtune.errors import InvalidInputError
from privtune.training.engine.kernels import BatchedKernel
from privtune.training.engine.stacks import granule
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import flatten_params, load_params
from privtune.training.mechanism.sampling import GRANULE, padded
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


def sizes_of(steps, candidates, row_bytes, batch=64):
    """Return the multiple of physical sizes, and how many of them occur within six deviations."""
    schedule = Schedule(2000, batch / 2000, steps)
    multiple = granule(schedule, None, row_bytes, candidates)
    spread = range(max(1, round(batch - 3 * batch**0.5)), round(batch + 3 * batch**0.5))
    return multiple, len({padded(n, multiple) for n in spread})


def test_short_trainings_of_small_nets_have_few_shapes_and_long_ones_close_sizes():
    assert sizes_of(300, 1, 3e3) == (32, 2)
    assert sizes_of(20_000, 16, 3e3)[0] == GRANULE
    assert sizes_of(100, 1, 2e5, batch=256)[0] <= 32  # convolutions: what fills up is a step's time
    multiples = [sizes_of(10**n, 4, 3e3)[0] for n in range(1, 7)]
    assert multiples == sorted(multiples, reverse=True)
    assert all(multiple <= 32 for multiple in multiples)


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
