"""Public schedules: factors on the rate, and the average of the iterates that is released."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from privtune.errors import InvalidInputError
from privtune.strategies import make_strategy
from privtune.study.spec import StudySpec
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import ADADP, METHODS, FixedDPSGD
from privtune.training.methods.rate_schedule import RateSchedule, average_weights
from tests.training import simple
from tests.training.engine import test_checkpoint as checkpoints
from tests.training.methods.test_contract import DIMENSION, candidate, planned
from tests.training.simple import blobs

STEPS = 20


@pytest.mark.quick
@pytest.mark.parametrize(
    ("said", "reference"),
    [
        ({"type": "linear", "end": 0.1}, ("LinearLR", {"start_factor": 1.0, "end_factor": 0.1})),
        ({"type": "cosine"}, ("CosineAnnealingLR", {})),
        ({"type": "step", "every": 0.25, "factor": 0.5}, ("StepLR", {"gamma": 0.5})),
    ],
)
def test_factors_are_those_of_torchs_schedulers(said, reference):
    name, options = reference
    length = {"LinearLR": "total_iters", "CosineAnnealingLR": "T_max", "StepLR": "step_size"}[name]
    options = {**options, length: STEPS // 4 if name == "StepLR" else STEPS}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    found = RateSchedule.of(said).factors(Schedule(100, 0.1, STEPS))
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.quick
def test_decay_is_equation_5_1_and_warmup_comes_first():
    schedule = Schedule(100, 0.5, 10)
    assert RateSchedule.of({"type": "decay", "start": 0.2}).factors(schedule) == pytest.approx(
        [1.0, 1.0, *(1 / (1 + 0.1 * k) for k in (1, 1, 2, 2, 3, 3, 4, 4))]
    )
    # As printed, for 100 epochs of 60 steps: constant up to epoch 50, then eta / (1 + 0.1 (k - 50)).
    printed = RateSchedule.of({"type": "decay", "start": 0.5}).factors(Schedule(600, 1 / 60, 6000))
    by_epoch = [set(printed[60 * k : 60 * (k + 1)]) for k in range(100)]
    assert by_epoch[:50] == [{1.0}] * 50
    assert by_epoch[50:52] == [{1 / 1.1}, {1 / 1.2}]  # epochs 51 and 52
    assert by_epoch[98:] == [{1 / (1 + 0.1 * 49)}, {1 / 6}]
    warm = RateSchedule.of({"type": "linear", "warmup": 0.4, "start": 0.1}).factors(schedule)
    assert warm[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])  # falls once it is warm
    assert warm[5] == pytest.approx(5 / 6)
    assert all(f == 1.0 for f in RateSchedule().factors(schedule))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("cosin", "must be one of constant"),
        ({"type": 3}, "must be one of"),
        ({"type": "cosine", "every": 0.1}, "cosine takes warmup, start, end"),
        ({"type": "linear", "end": "low"}, "must be a finite number"),
        ({"type": "linear", "end": True}, "must be a finite number"),
        ({"warmup": 1.0}, "below 1"),
        ({"type": "step", "every": 0.0}, "above 0"),
        ({"type": "decay", "decay": float("nan")}, "at least 0"),
        ({"type": "decay", "start": float("inf")}, "below 1"),
        (None, "must be one of"),
    ],
)
def test_what_is_no_schedule_is_refused(said, why):
    with pytest.raises(InvalidInputError, match=why):
        FixedDPSGD(1.0, schedule=said)


def fit(method, given, **options):
    return simple.fit(method, given, steps=STEPS, **options)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_stands_still_at_a_rate_of_nothing(name):
    """And its charge is the same: a schedule is public."""
    stop = {"type": "step", "start": 0.5, "every": 1e-9, "factor": 0.0}
    method = planned(name, Schedule(len(blobs()[0]), 0.1, STEPS), DIMENSION)
    if name == "dog":
        method = replace(method, averaging=None)  # the average goes on moving
    stopping = replace(method, schedule=stop)
    schedule = Schedule(len(blobs()[0]), 0.1, STEPS)
    assert stopping.event(schedule) == method.event(schedule)
    snapshots = fit(stopping, [candidate(method)], snapshots_at=range(STEPS)).snapshots[0]
    free = fit(method, [candidate(method)], snapshots_at=range(STEPS)).snapshots[0]
    assert torch.equal(snapshots[STEPS // 2], snapshots[STEPS - 1])
    assert torch.equal(snapshots[STEPS // 2 - 1], free[STEPS // 2 - 1])
    if "pur" not in name:  # whose horizon may be over by then
        assert not torch.equal(free[STEPS // 2], free[STEPS - 1])


def test_a_candidates_schedule_is_its_own_whatever_its_stack():
    method = FixedDPSGD(1.0, schedule={"type": "linear", "end": 0.5})
    usual = {"learning_rate": 0.1, "max_grad_norm": 1.0}
    given = [usual, {**usual, "schedule": "cosine"}, {**usual, "warmup": 0.5}]
    mixed = fit(method, given)
    own = [method.schedule, "cosine", {"type": "linear", "end": 0.5, "warmup": 0.5}]
    for k in range(3):
        alone = fit(replace(method, schedule=own[k]), [usual], secrets=[simple.secrets(3)[k]])
        torch.testing.assert_close(mixed.params[k], alone.params[0], rtol=1e-4, atol=1e-5)


def context_of(space):
    return StudySpec(
        name="s",
        task="iris-logistic",
        budget={"name": "b", "epsilon": 2.0, "delta": 1e-5},
        space=space,
        arms=[{"name": "a", "strategy": "adadp", "parameters": {"max_grad_norm": 1.0}}],
        epochs=2,
        expected_batch_size=16,
    ).planning_context()


RATE = {"type": "float", "low": 0.01, "high": 1.0}
NORM = {"max_grad_norm": 1.0}


def test_a_space_may_search_it_and_wrong_values_are_found_while_planning():
    def plan(space, **options):
        strategy = make_strategy(
            "papernot-steinke", arm="a", options={"mean_runs": 3, "parameters": NORM, **options}
        )
        return strategy.plan(context_of({"learning_rate": RATE, **space}), epsilon=2.0)

    found = plan(
        {
            "schedule": {"type": "categorical", "choices": ["constant", "cosine"]},
            "warmup": {"type": "float", "low": 0.0, "high": 0.2},
        }
    )
    assert found.search is not None
    with pytest.raises(InvalidInputError, match="must be one of constant"):
        plan({"schedule": {"type": "categorical", "choices": ["constant", "cosin"]}})
    with pytest.raises(InvalidInputError, match="warmup"):
        plan({"warmup": {"type": "float", "low": 0.0, "high": 1.0}})
    with pytest.raises(InvalidInputError, match="warmup"):
        plan({"warmup": {"type": "log_normal", "median": 0.1, "sigma": 1.0}})
    fixed = plan({}, parameters={**NORM, "schedule": "linear", "warmup": 0.1})
    assert fixed.params["schedule"] == "linear"
    assert plan({}, options={"schedule": {"type": "cosine"}}).event == fixed.event
    with pytest.raises(InvalidInputError, match="must be a finite number"):
        plan({}, parameters={**NORM, "warmup": "long"})


def test_the_plan_says_where_the_rule_for_the_tolerance_is_not_meant_for():
    advice = ADADP(1.0).advice(Schedule(55_000, 512 / 55_000, 323), lambda: 50_890)
    assert "here it is 158" in advice
    assert "the tolerance is 1;" in advice
    assert (
        ADADP(1.0, tolerance=1.0).advice(Schedule(55_000, 512 / 55_000, 323), lambda: 50_890) == ""
    )
    assert ADADP(1.0).advice(Schedule(1000, 0.1, 200), lambda: 100) == ""
    strategy = make_strategy("adadp", arm="a", options={"parameters": NORM})
    context = context_of({})
    near = replace(context, schedule=Schedule(context.schedule.records, 0.5, 140))
    longer = replace(strategy, options={"adapt_share": 0.4})
    assert "advice" not in longer.plan(near, epsilon=2.0).details  # iris: d = 15
    far = replace(context, schedule=Schedule(context.schedule.records, 0.5, 4000))
    assert "here it is 0.00375" in strategy.plan(far, epsilon=2.0).details["advice"]


USUAL = {"learning_rate": 0.1, "max_grad_norm": 1.0}


def averaged(iterates: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is released of iterates, shape ``[T, P]``, by each rule: the formulas, from all of them."""
    steps, moving = len(iterates), iterates[0]
    for step in range(1, steps):
        decay = min(0.9999, (1 + step) / (10 + step))
        moving = decay * moving + (1.0 - decay) * iterates[step]
    return {"last": iterates[-1], "tail": iterates[steps // 2 :].mean(dim=0), "ema": moving}


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


@pytest.mark.parametrize("name", ["hyfreedp", "dog", "pur"])
def test_a_method_releases_the_average_of_the_iterates_that_it_had(name):
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


@pytest.mark.parametrize(("average", "stop"), [("tail", 3), ("tail", 19), ("ema", 19)])
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
