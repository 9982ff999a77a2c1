"""A temperature: what a record can change, what noise it has, and what it does to probabilities."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant

from privtune.accounting import Adjacency, epsilon
from privtune.errors import InvalidInputError
from privtune.strategies import Reporting, ScorePlan
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.scoring import fit_temperature, released_sums
from privtune.training.mechanism.temperature import INVERSES, Confidence

TERMS = {"epsilon": 1.0, "delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}


class Given(torch.nn.Module):
    """A model whose inputs are its logits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def planned(records: int, classes: int = 3, **terms: object) -> ScorePlan:
    reporting = Reporting(calibration="temperature")
    score = reporting.plan(records=records, public=False, **{**TERMS, **terms})
    return reporting.with_temperature(score, classes=classes)


def extreme_logits(classes: int) -> torch.Tensor:
    """Logits of every kind: level, sure, huge, of two sure classes, drawn at several scales."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        10.0**power * torch.randn(40, classes, generator=generator) for power in range(-4, 9, 2)
    ]
    sure = [scale * torch.eye(classes) for scale in (1e-3, 1.0, 30.0, 1e4, 1e30)]
    two = 1e6 * (torch.eye(classes) + torch.eye(classes).roll(1, 1)).clamp(max=1.0)
    return torch.cat([torch.zeros(1, classes), two, *sure, *drawn])


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_no_neighbours_are_further_apart_than_the_sensitivity(classes, mechanism):
    """By brute force over records of every kind; the bounds are reached, so they are not loose."""
    logits = extreme_logits(classes)
    order = 1 if mechanism == "laplace" else 2
    metric = Confidence(classes=classes, mechanism=mechanism)
    vectors = []
    for target in range(classes):
        targets = torch.full((len(logits),), target)
        vectors.append(metric.parts(logits, targets, torch.nn.functional.cross_entropy))
    every = torch.cat([*vectors, torch.zeros(1, 1 + len(INVERSES))])  # the last: an unusable record
    longest = torch.linalg.vector_norm(every, ord=order, dim=1).max().item()
    assert longest <= metric.norm * (1.0 + 1e-12)
    assert longest >= 0.999 * metric.norm
    furthest = torch.cdist(every, every, p=float(order)).max().item()
    moves = replace(metric, adjacency=Adjacency.REPLACE_ONE).sensitivity
    assert furthest <= moves * (1.0 + 1e-9)
    assert furthest >= 0.999 * moves


def test_logits_that_are_no_numbers_add_nothing():
    logits = torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [-math.inf, 1.0]])
    parts = Confidence(classes=2).parts(logits, torch.tensor([1, 0, 1]), lambda x, y: x)
    assert bool((parts == 0.0).all())


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("share", [0.01, 0.2])
def test_metrics_and_temperature_together_are_the_charged_event(adjacency, share):
    """By dp-accounting's composition of what each costs by the noise that it really gets."""
    score = Reporting.from_dict({"metric": ["accuracy", "balanced_accuracy"]}).plan(
        records=100, public=False, **{**TERMS, "adjacency": adjacency}
    )
    plan = replace(score, calibration=share, classes=3)
    assert plan.event == score.event
    metrics, noises = plan.make_metrics(), plan.noises
    each = [noise.scale / metric.sensitivity for metric, noise in zip(metrics, noises, strict=True)]
    each.append(plan.calibration_noise.scale / plan.calibrator.sensitivity)
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for multiplier in each:
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier))
    charged = epsilon(plan.event, 1e-5, adjacency=adjacency).epsilon
    assert accountant.get_epsilon(1e-5) == pytest.approx(charged, rel=1e-3)


def test_the_sums_get_the_noise_that_is_charged(monkeypatch):
    """400 draws of 11 sums: their deviation is within 7% of the plan's (5 standard errors of 1.1%)."""
    plan = planned(records=200)
    data = TensorData(
        torch.randn(200, 3, generator=torch.Generator().manual_seed(1)), torch.arange(200) % 3
    )
    seen = []
    fit = Confidence.temperature

    def noted(self, sums, noise, *, records):
        seen.append(sums)
        return fit(self, sums, noise, records=records)

    monkeypatch.setattr(Confidence, "temperature", noted)
    exact = replace(plan, noise_multiplier=None)
    fit_temperature(exact, Given(), data, rng=np.random.default_rng(0))
    for draw in range(400):
        fit_temperature(plan, Given(), data, rng=np.random.default_rng(draw))
    errors = np.stack(seen[1:]) - seen[0]
    assert np.std(errors) == pytest.approx(plan.calibration_noise.scale, rel=0.07)
    together = np.corrcoef(errors.T) - np.eye(errors.shape[1])
    assert np.abs(together).max() < 0.25  # 5 standard errors of independent draws


def test_the_metrics_are_noised_with_what_is_left():
    """The same random numbers give the same errors, larger by 1/√(1 - share)."""
    alone = Reporting().plan(records=200, public=False, **TERMS)
    plan = replace(alone, calibration=0.2, classes=3)
    data = TensorData(
        torch.randn(200, 3, generator=torch.Generator().manual_seed(1)), torch.arange(200) % 3
    )
    sums = []
    for terms in (replace(alone, noise_multiplier=None), alone, plan):
        (found,) = released_sums(terms, Given(), data, np.random.default_rng(3)) or []
        sums.append(found)
    exact, without, beside = sums
    np.testing.assert_allclose(beside - exact, (without - exact) / math.sqrt(0.8), rtol=1e-9)


def drawn(records: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return true logits, and classes drawn by them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(records, classes, generator=generator)
    targets = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    return logits, targets


def loss(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> float:
    return torch.nn.functional.cross_entropy(logits / temperature, targets).item()


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("factor", [0.1, 0.5, 4.0, 50.0])
def test_probabilities_get_better(classes, factor):
    """Logits too small or too large by a factor, ε = 1, 1,000 records, 20 draws: each improves others.

    Of 2,000 other seeds none fails: one seed does with a probability of at most 0.15% (95%). Seeds are fixed.
    """
    plan = planned(records=1_000, classes=classes)
    fresh, answers = drawn(5_000, classes, 999)
    best = loss(fresh, answers, 1.0)
    for seed in range(20):
        logits, targets = drawn(1_000, classes, seed)
        data = TensorData(factor * logits, targets)
        rng = np.random.default_rng(seed)
        temperature = fit_temperature(plan, Given(), data, rng=rng)
        assert temperature is not None
        after = loss(factor * fresh, answers, temperature)
        assert after < loss(factor * fresh, answers, 1.0)
        assert after < best + 0.1


def test_without_noise_it_is_the_factor():
    logits, targets = drawn(20_000, 4, 0)
    plan = replace(planned(records=20_000, classes=4), noise_multiplier=None)
    for factor in (1 / 30, 1.0, 30.0):
        found = fit_temperature(
            plan, Given(), TensorData(factor * logits, targets), rng=np.random.default_rng(0)
        )
        assert found == pytest.approx(factor, rel=0.1)


def test_a_few_right_answers_are_no_reason_to_be_sure():
    """Twenty of twenty records right: the model is to be right in nine of ten, not always."""
    targets = torch.arange(20) % 2
    logits = torch.nn.functional.one_hot(targets, 2).float()
    plan = replace(planned(records=20, classes=2), noise_multiplier=None)
    data = TensorData(logits, targets)
    temperature = fit_temperature(plan, Given(), data, rng=np.random.default_rng(0))
    assert temperature is not None
    confidence = (logits / temperature).softmax(dim=1).max().item()
    assert 0.85 <= confidence <= 0.97


@pytest.mark.parametrize("logits", [torch.zeros(50, 3), torch.full((50, 3), torch.nan)])
def test_outputs_that_say_nothing_get_no_temperature(logits):
    plan = replace(planned(records=50), noise_multiplier=None)
    data = TensorData(logits.clone(), torch.arange(50) % 3)
    assert fit_temperature(plan, Given(), data, rng=np.random.default_rng(0)) is None


def test_the_share_is_the_least_that_is_enough():
    errors = {}
    for records in (10_000, 3_000, 1_000, 500, 200, 50):
        reporting = Reporting()
        score = reporting.plan(records=records, public=False, **TERMS)
        plan = reporting.with_temperature(score, classes=3)
        errors[records] = plan.calibration_error
        if plan.calibration == 0.0:
            assert plan == score
            assert replace(score, calibration=0.2, classes=3).calibration_error > 0.05
        elif plan.calibration > 0.01:
            less = {0.02: 0.01, 0.05: 0.02, 0.1: 0.05, 0.2: 0.1}[plan.calibration]
            assert replace(plan, calibration=less).calibration_error > 0.02
    assert errors[10_000] <= 0.02
    assert errors[500] <= 0.05
    assert errors[50] == 0.0  # too few: none


def test_it_is_refused_where_there_are_no_probabilities():
    asked = Reporting(calibration="temperature")
    classes = asked.plan(records=100, public=False, **TERMS)
    numbers = Reporting(metric="mae", calibration="temperature").plan(
        records=100, public=False, target_range=(0.0, 1.0), **TERMS
    )
    laplace = Reporting(mechanism="laplace").plan(records=100, public=False, **TERMS)
    for score, count in itertools.product((classes, numbers, laplace), (None, 3)):
        if score is classes and count == 3:
            assert asked.with_temperature(score, classes=count).calibrator is not None
            continue
        with pytest.raises(InvalidInputError, match=r"report\.calibration"):
            asked.with_temperature(score, classes=count)
        assert Reporting().with_temperature(score, classes=count) == score
    assert Reporting(calibration="none").with_temperature(classes, classes=3) == classes
    with pytest.raises(InvalidInputError, match="auto, temperature, none"):
        Reporting(calibration="prior")
