"""The average of the iterates is what is released: of every method, in every stack, at the same charge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from privtune.errors import InvalidInputError
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import METHODS, FixedDPSGD
from privtune.training.methods._rate_schedule import average_weights
from studies.four_tasks.averages import averaged
from tests.training.engine import test_checkpoint as checkpoints
from tests.training.methods.test_contract import DIMENSION, candidate, planned
from tests.training.methods.test_rate_schedule import STEPS, fit
from tests.training.simple import blobs

USUAL = {"learning_rate": 0.1, "max_grad_norm": 1.0}


@pytest.mark.quick
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 9])
def test_weights_are_those_of_means_and_moving_averages(steps):
    values = torch.arange(1.0, steps + 1.0, dtype=torch.float64).square()
    for average, expected in averaged(values[:, None]).items():
        found = values[0]
        for weight, value in zip(average_weights(average, steps), values, strict=True):
            found = found + weight * (value - found)
        assert found.item() == pytest.approx(expected.item(), rel=1e-12), average


@pytest.mark.quick
def test_another_average_is_refused():
    with pytest.raises(InvalidInputError, match="must be one of last, tail, ema"):
        FixedDPSGD(1.0, average="mean")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_releases_the_average_of_the_iterates_that_it_had(name):
    """The iterates are the same whatever is made of them, and so are transcript and event."""
    schedule = Schedule(len(blobs()[0]), 0.1, STEPS)
    method = planned(name, schedule, DIMENSION)
    plain = fit(replace(method, average="last"), [candidate(method)], snapshots_at=range(STEPS))
    iterates = torch.stack([plain.snapshots[0][step] for step in range(STEPS)])
    for average, expected in averaged(iterates).items():
        averaging = replace(method, average=average)
        assert averaging.event(schedule) == method.event(schedule)
        found = fit(averaging, [candidate(method)], snapshots_at=(STEPS - 1,))
        torch.testing.assert_close(found.params[0], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(found.snapshots[0][STEPS - 1], found.params[0])
        assert found.transcripts == plain.transcripts
    assert torch.equal(plain.params[0], iterates[-1])


@pytest.mark.parametrize("average", ["tail", "ema"])
def test_a_diverged_iterate_makes_a_diverged_average_and_no_other(average):
    method = FixedDPSGD(1.0, average=average)
    wild = {"learning_rate": 1e38, "max_grad_norm": 1e9}
    found = fit(method, [wild, USUAL], stack=2)
    assert found.diverged == (True, False)
    alone = fit(method, [wild, USUAL], stack=1)
    torch.testing.assert_close(found.params[1], alone.params[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", ["tail", "ema"])
@pytest.mark.parametrize("stop", [3, 18, 19, 30])
def test_a_training_that_is_stopped_goes_on_with_its_average(average, stop, monkeypatch):
    monkeypatch.setattr(checkpoints.checkpoint, "_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints.checkpoint, "_SHARE", 1e9)
    made = checkpoints.planned
    monkeypatch.setattr(checkpoints, "planned", lambda *a: replace(made(*a), average=average))
    whole = checkpoints.run("dpsgd")
    drawer = checkpoints.Drawer()
    with pytest.raises(checkpoints.Stop):
        checkpoints.run("dpsgd", drawer=drawer, stop=stop)
    assert drawer.times
    checkpoints.check_same(checkpoints.run("dpsgd", drawer=drawer), whole)
