"""Every training method, with all that it releases shown: audited at most what is reported."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from privtune.accounting import Adjacency, epsilon
from privtune.audit.bounds import Claim, lower_bound
from privtune.audit.canaries import canaries, secrets_of, train_canaries
from privtune.training.mechanism import oracle as releases
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import METHODS
from tests.statistical.rounds import note
from tests.training.methods.test_contract import candidate, options

pytestmark = pytest.mark.statistical

PRIVATE = sorted(METHODS)
DELTA = 1e-3
TARGET = 4.0
SAMPLED, WHOLE = Schedule(20, 0.5, 4), Schedule(20, 1.0, 4)


def planned(name, schedule, asked=MappingProxyType({})):
    more = options(name, 2) | dict(asked)
    if name == "pur":
        more["distance"] = 0.16  # its noise: little enough for four steps to be worth the target
    made = METHODS[name].for_budget(schedule, epsilon=TARGET, delta=DELTA, **more)
    adjacency = Adjacency(getattr(made, "adjacency", "add-remove"))
    return made, epsilon(made.event(schedule), DELTA, adjacency=adjacency).epsilon


def audited(name, schedule, *, runs, of="", confidence=0.95, asked=MappingProxyType({})):
    """Audit a method; without sampling, every method's claim is that of one Gaussian."""
    method, reported = planned(name, schedule, asked)
    adjacency = Adjacency(getattr(method, "adjacency", "add-remove"))
    replaced = adjacency is Adjacency.REPLACE_ONE

    def audit():
        sides = [
            train_canaries(
                method,
                schedule,
                candidate(method),
                secrets_of(100, f"{name}, {sign:g}", runs),
                data=canaries([sign]),
                replaced=replaced,
            ).ratio
            for sign in (-1.0 if replaced else 0.0, 1.0)
        ]
        claim = Claim(method.event(schedule), DELTA, adjacency) if schedule == WHOLE else None
        return lower_bound(*sides, delta=DELTA, confidence=confidence, claim=claim)

    label = f"{name}, rate {schedule.sample_rate:g}{of}"
    return note(label, audit, reported).epsilon, reported


@pytest.mark.parametrize("name", PRIVATE)
def test_no_method_releases_more_than_it_reports(name):
    """2 x 500 trainings of 4 steps at rate 1/2, 2 x 1000 at 1: above by chance at most at 5% and at 0.2%."""
    found, reported = audited(name, SAMPLED, runs=500)
    assert 0.12 * reported < found <= reported
    found, reported = audited(name, WHOLE, runs=1000, confidence=0.998)
    assert 0.5 * reported < found <= reported


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("dp-adam", {"noise_floor": 0.1}),
        ("public-rate", {"method": "dpsgd", "schedule": "linear"}),
        ("public-rate", {"method": "dp-adam", "schedule": "linear"}),
    ],
)
def test_no_option_releases_more_than_it_reports(name, asked):
    """2 x 1000 trainings of 4 steps at rate 1: above by chance at most at 0.2%."""
    of = "".join(f", {option}: {value}" for option, value in asked.items())
    found, reported = audited(name, WHOLE, runs=1000, of=of, confidence=0.998, asked=asked)
    assert 0.5 * reported < found <= reported


@pytest.mark.parametrize("name", ["dpsgd", "adaclip", "hyfreedp", "pur"])
def test_half_the_noise_is_found(name, monkeypatch):
    """The same test says of half the noise that more is released than reported: its power.

    Of every other method the share above that is found says so.
    """
    real = releases.noise_scale
    monkeypatch.setattr(releases, "noise_scale", lambda *args: real(*args) / 2.0)
    found, reported = audited(name, WHOLE, runs=400, of=", half the noise")
    assert found > reported


def test_gradients_that_are_not_clipped_are_found(monkeypatch):
    monkeypatch.setattr(Flat, "rule", staticmethod(lambda norms, _: torch.ones_like(norms)))
    found, reported = audited("dpsgd", WHOLE, runs=400, of=", no clipping")
    assert found > reported


def test_samples_that_hold_everybody_are_found(monkeypatch):
    class Everybody(releases.PoissonSampler):
        def __init__(self, *, rate, **rest):
            super().__init__(rate=1.0, **rest)

    monkeypatch.setattr(releases, "PoissonSampler", Everybody)
    found, reported = audited("dpsgd", Schedule(20, 0.1, 4), runs=3000, of=", everybody sampled")
    assert found > reported
