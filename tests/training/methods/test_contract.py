"""What every method owes: its charge is what happens, its state can be stored, its names are told."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from privtune.accounting import Adjacency, NonPrivate, epsilon, scale_noise
from privtune.errors import InvalidInputError
from privtune.strategies.in_run import InRun
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.oracle import Oracle
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.transcript import TranscriptMismatchError, looks_of
from privtune.training.methods import METHODS, PUR
from privtune.training.methods.method import (
    Method,
    fraction,
    nonnegative,
    positive,
    restore_state,
    state_tensors,
)
from tests.training.methods.world import LiteralOracle, World
from tests.training.simple import blobs, fit, mlp

STEPS = 11  # odd, and no multiple of HyFreeDP's interval
DIMENSION = sum(p.numel() for p in mlp().parameters())


def options(name, dimension):
    """What a plan has to give beside the budget."""
    bounds = {"lipschitz": 1.0, "smoothness": 1.0, "dimension": dimension}
    return {"pur": {**bounds, "regime": "convex", "distance": 3.0}, "pur-constant": bounds}.get(
        name, {}
    )


def candidate(method):
    usual = {"learning_rate": 0.1, "max_grad_norm": 1.0, "largest_variance": 0.1}
    return {name: usual[name] for name in method.parameters}


def planned(name, schedule, dimension, eps=4.0):
    method = METHODS[name]
    return method.for_budget(schedule, epsilon=eps, delta=1e-5, **options(name, dimension))


def every(ids):
    return pytest.mark.parametrize("name", ids)


def check_transcript(method, schedule, x, y):
    """Train two candidates: what was released is what the event charges, look by look."""
    given = {"steps": schedule.steps, "rate": schedule.sample_rate, "data": TensorData(x, y)}
    result = fit(method, [candidate(method)] * 2, **given)
    event = method.event(schedule)
    if isinstance(event, NonPrivate):
        return
    for transcript in result.transcripts:
        assert transcript.looks() == looks_of(event)
    assert not any(result.diverged)


WHOLE = {"adaclip", "norm-bound", "pur", "pur-constant"}


@every(METHODS)
def test_clipping_by_layer_is_taken_or_refused_with_its_reason(name, monkeypatch):
    x, y = blobs()
    schedule = Schedule(len(x), 0.2, 5)
    terms = {"epsilon": 4.0, "delta": 1e-5, **options(name, DIMENSION)}
    if name in WHOLE:
        with pytest.raises(InvalidInputError, match="option = 'clipping': cannot be had here: "):
            METHODS[name].for_budget(schedule, **terms, clipping="by-layer")
        return
    seen, charged = [], []
    release = Oracle._gradient

    def watched(self, drawn, params, clipping, *args, **others):
        seen.append(clipping)
        return release(self, drawn, params, clipping, *args, **others)

    monkeypatch.setattr(Oracle, "_gradient", watched)
    option = "clipping" in {each.name for each in fields(METHODS[name])}
    assert option, (
        "give it `clipping: str = by_layer_option()`, or say in `clips_whole` why it cannot clip by layer "
        "and name it in WHOLE"
    )
    for how in ("flat", "by-layer"):
        method = METHODS[name].for_budget(schedule, **terms, clipping=how)
        charged.append(method.event(schedule))
        check_transcript(method, schedule, x, y)
    flat, layers = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert charged[0] == charged[1]
    assert {each.by_layer for each in flat} == {False}
    assert {each.by_layer for each in layers} == {True}
    # The state may have moved elsewhere by the second step: the first is of one state.
    assert torch.equal(flat[0].sensitivity(2), layers[0].sensitivity(2))
    norms = torch.tensor([1e-9, 0.3, 1.0, 50.0, 1e30]).expand(4, 2, 5)
    length = (layers[0].coefficients(norms) * norms).double().square().sum(dim=0).sqrt()
    assert bool((length <= layers[0].sensitivity(2)[:, None] * (1 + 1e-6)).all())


@pytest.mark.quick
@every(METHODS)
def test_transcript_equals_the_event_exactly(name, monkeypatch):
    """And gradients are evaluated as often as was planned: within 5 standard deviations of samples."""
    happened, counted = [0], Oracle._gradient

    def counting(self, drawn, *args, **options):
        happened[0] += int(drawn.sizes.sum()) / self.candidates
        return counted(self, drawn, *args, **options)

    monkeypatch.setattr(Oracle, "_gradient", counting)
    x, y = blobs()
    schedule = Schedule(len(x), 0.1, STEPS)
    method = planned(name, schedule, DIMENSION)
    check_transcript(method, schedule, x, y)
    expected = method.gradient_evaluations(schedule)
    if name.startswith("pur"):  # all records in each update, whatever the sampling rate
        assert happened[0] == expected == schedule.records * min(method.horizon or STEPS, STEPS)
    else:
        assert abs(happened[0] - expected) < 5 * (expected / 2) ** 0.5


@pytest.mark.parametrize("batch", ["same", "separate"])
def test_laplace_losses_are_in_the_transcript(batch):
    x, y = blobs()
    schedule = Schedule(len(x), 0.1, STEPS)
    method = METHODS["hyfreedp"].for_budget(
        schedule, epsilon=4.0, delta=1e-5, loss_noise="laplace", loss_batch=batch
    )
    check_transcript(method, schedule, x, y)
    looks = looks_of(method.event(schedule))
    kinds = sorted("".join(kind[0] for kind, _ in atoms) for _, atoms in looks)
    assert kinds == (["g", "glll"] if batch == "same" else ["g", "lll"])
    assert looks.total() == (STEPS if batch == "same" else STEPS + 3)
    reached = epsilon(method.event(schedule), 1e-5).epsilon
    assert 0.99 * 4.0 < reached <= 4.0
    with pytest.raises(InvalidInputError, match="gaussian, laplace"):
        METHODS["hyfreedp"].for_budget(schedule, epsilon=4.0, delta=1e-5, loss_noise="cauchy")


@every(METHODS)
def test_early_stop_is_within_and_one_step_more_is_not(name):
    oracle = LiteralOracle([World(1), World(2)], STEPS)
    method = planned(name, oracle.schedule, 3)
    event = method.event(oracle.schedule)
    state = method.init(oracle.start(), [candidate(method)] * 2)
    horizon = getattr(method, "horizon", None) or STEPS
    for step in range(STEPS):
        if 0 < step < min(horizon, STEPS):
            done = oracle.transcripts()[0]
            done.check_within(event)
            assert done.looks().total() < looks_of(event).total()
        state = method.update(state, oracle)
    assert oracle.transcripts()[0].looks() == looks_of(event)
    if not name.startswith("pur"):  # those stop by themselves
        method.update(state, oracle)
        with pytest.raises(TranscriptMismatchError):
            oracle.transcripts()[0].check_within(event)


@every(METHODS)
def test_the_plan_meets_its_budget_and_wastes_little(name):
    eps = 0.7 if name == "pur" else 4.0
    schedule = Schedule(50_000 if name == "pur" else 5000, 0.02, 300)
    method = planned(name, schedule, 3, eps)
    adjacency = Adjacency(getattr(method, "adjacency", "add-remove"))
    reached = epsilon(method.event(schedule), 1e-5, adjacency=adjacency).epsilon
    least = 0.999 if name == "pur" else 0.8
    assert least * eps < reached <= eps


def gaussian_composition(method, schedule):
    """Return μ of a full-batch training's releases, each about one replaced record."""
    noises = [part.noise_multiplier for part in method.event(schedule).events]
    return math.sqrt(sum(noise**-2 for noise in noises))


def delta_of(mu, eps):
    """Balle and Wang 2018, Theorem 8."""
    first = stats.norm.cdf(mu / 2.0 - eps / mu)
    return first - math.exp(eps) * stats.norm.cdf(-mu / 2.0 - eps / mu)


@pytest.mark.parametrize("regime", ["convex", "non-convex"])
@pytest.mark.parametrize(("records", "steps"), [(50_000, 300), (3_000, 300), (20_000, 7)])
def test_pur_takes_the_steps_of_its_schedule_and_the_noise_of_the_target(regime, records, steps):
    """Whole steps at the paper's noise leave a part of ε; the noise of these steps takes it all."""
    schedule, eps = Schedule(records, 1.0, steps), 2.0
    terms = {"epsilon": eps, "delta": 1e-5, **options("pur", 3), "regime": regime}
    paper = PUR.for_budget(schedule, **terms, noise_multiplier=1.0)
    fitted = PUR.for_budget(schedule, **terms)
    assert paper.noise_multiplier == 1.0
    assert delta_of(gaussian_composition(paper, schedule), eps) <= 1e-5
    if paper.horizon < steps:
        longer = replace(paper, horizon=paper.horizon + 1)
        assert delta_of(gaussian_composition(longer, schedule), eps) > 1e-5
    assert fitted.horizon == paper.horizon
    assert fitted.noise_multiplier < 1.0
    spent = delta_of(gaussian_composition(fitted, schedule), eps)
    assert 0.9999e-5 < spent <= 1e-5
    reached = epsilon(fitted.event(schedule), 1e-5, adjacency=Adjacency.REPLACE_ONE).epsilon
    assert eps * (1 - 1e-5) < reached <= eps


def test_pur_says_where_its_steps_hardly_move_the_weights():
    """The noise of a few steps moves the weights as far as clipped gradients can, or nearly so."""
    terms = {"epsilon": 2.0, "delta": 1e-5, **options("pur", 3)}
    for records, said in ((200, True), (3_000, False)):
        schedule = Schedule(records, 1.0, 1000)
        method = PUR.for_budget(schedule, **terms)
        moved = method.horizon * 1.0 / (2.0 * 1.0)
        noises = [method.deviation(step) for step in range(method.horizon)]
        drift = math.sqrt(3.0 * sum(noise**2 for noise in noises)) / 2.0
        advice = method.advice(schedule, lambda: 3)
        assert (moved < 5.0 * drift) == said == bool(advice)
        if said:
            said_of = (
                f"In {method.horizon} steps at learning rate 0.5, gradients can move the weights by"
            )
            assert f"{said_of} {moved:.3g} at most" in advice
            assert f"{drift:.3g}" in advice
    short = Schedule(1_000_000, 1.0, 50)
    method = PUR.for_budget(short, **terms)
    assert method.horizon == 50
    assert "All 50 steps need only" in method.advice(short, lambda: 3)
    letter = PUR.for_budget(short, **terms, noise_multiplier=1.0)
    assert "All 50 steps fit" not in letter.advice(short, lambda: 3)


def test_a_checkpoint_of_something_else_is_refused():
    oracle = LiteralOracle([World(1)], 3)
    method = planned("dpsgd", oracle.schedule, 3)
    state = method.init(oracle.start(), [candidate(method)])
    tensors = state_tensors(state)
    with pytest.raises(InvalidInputError):
        restore_state(state, {**tensors, "more": torch.ones(1)})
    with pytest.raises(InvalidInputError):
        restore_state(state, {**tensors, "params": tensors["params"][:, :2]})
    with pytest.raises(InvalidInputError):
        restore_state(state, {**tensors, "params": tensors["params"].float()})


@every(sorted(set(METHODS) - {"pur"}))
def test_scaled_noise_is_the_scaled_event(name):
    schedule = Schedule(1000, 0.05, STEPS)
    method = planned(name, schedule, 3)
    scaled = method.scaled(2.0)
    assert scaled.event(schedule) == scale_noise(method.event(schedule), 2.0)


@pytest.mark.parametrize("kind", [positive, nonnegative, fraction])
def test_fields_are_numbers_of_any_type_that_a_float_holds(kind):
    @dataclass(frozen=True)
    class Plain(Method):
        option: float = kind(0.5)
        init = update = None

    for right in (0.5, np.float32(0.5), np.float64(0.5)):
        Plain(right)
    for wrong in (10**400, -(10**400), math.nan, math.inf, np.float32("nan"), "x", None, True, -1):
        with pytest.raises(InvalidInputError, match="option"):
            Plain(wrong)


@every(METHODS)
def test_a_candidate_that_misses_or_mistypes_is_refused(name):
    oracle = LiteralOracle([World(1)], 3)
    method = planned(name, oracle.schedule, 3)
    for parameter in method.parameters:
        incomplete = {k: v for k, v in candidate(method).items() if k != parameter}
        for wrong in (incomplete, {**incomplete, parameter: math.nan}):
            with pytest.raises(InvalidInputError):
                method.init(oracle.start(), [wrong])
    with pytest.raises(InvalidInputError, match="must be one of"):
        METHODS[name].for_budget(oracle.schedule, epsilon=1.0, delta=1e-5, lerning_rate=1.0)


def test_a_method_scaled_for_another_adjacency_is_refused():
    """Noise for adding a record is half of what replacing one needs."""
    stated = {**options("pur", 3), "adjacency": "replace-one"}
    arm = InRun(arm="pur", method="pur", options=stated)
    context = SimpleNamespace(
        adjacency=Adjacency.ADD_REMOVE,
        schedule=Schedule(10_000, 1.0, 5),
        delta=1e-5,
        define_by_run=False,
        task=SimpleNamespace(constants={}),
    )
    with pytest.raises(InvalidInputError, match="add-remove"):
        arm.plan(context, epsilon=4.0)


@every(["dpsgd", "hyfreedp", "quantile-clipping", "adaclip"])
def test_without_noise_the_event_guarantees_nothing(name):
    schedule = Schedule(100, 0.1, 5)
    silent = planned(name, schedule, 3).scaled(0.0)
    assert silent.event(schedule) == NonPrivate()
