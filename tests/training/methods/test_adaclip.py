"""What AdaCliP's plan says of its scale, against the recursion itself on noise alone."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from privtune.strategies import make_strategy
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import AdaCliP
from tests.strategies.world import context as context_of

H1, H2 = 1e-12, 1e-3


def steps_to_grow(sigma: float, *, coordinates: int, batch: float, limit: int) -> float:
    """Equations (4) and (5) without a gradient, from sqrt(h1 h2): steps until s is near sqrt(h2)."""
    rng = np.random.default_rng(5)
    deviation = np.full(coordinates, math.sqrt(H1 * H2))
    for step in range(limit):
        if np.sqrt((deviation**2).mean()) > 0.5 * math.sqrt(H2):
            return step
        scale = np.sqrt(deviation * deviation.sum())
        noise = scale * sigma / batch
        moved = noise * rng.standard_normal(coordinates)
        seen = np.clip((moved**2 - noise**2) * batch, H1, H2)
        deviation = np.sqrt(0.9 * deviation**2 + 0.1 * seen)
    return math.inf


@pytest.mark.quick
@pytest.mark.parametrize(
    ("sigma", "steps"),
    [(0.15, 120), (0.25, 120), (0.6, 120), (3.0, 120), (0.6, 3000), (1.2, 1000), (3.0, 1000)],
)
def test_the_plan_says_how_long_the_noise_needs_to_make_the_scale_grow(sigma, steps):
    """What is quoted is a lower bound, at a third of the recursion's steps or more."""
    schedule = Schedule(records=4000, sample_rate=0.025, steps=steps)
    advice = AdaCliP(sigma, start="paper").advice(schedule, lambda: 2698)
    seen = steps_to_grow(sigma, coordinates=2698, batch=100.0, limit=600)
    if not advice:
        assert seen < 0.15 * steps
        return
    assert seen > 0.1 * steps
    assert "Leave out start: paper" in advice
    counted = re.search(r"noise needs at least ([\d,]+) of the 120 steps", advice)
    if counted is None:
        assert "noise alone never makes it grow" in advice
        assert seen == math.inf
    else:
        assert seen / 3.0 < float(counted[1].replace(",", "")) <= seen


@pytest.mark.quick
def test_the_plan_says_where_the_scale_cannot_fall():
    """0.9 in each of 40 steps leaves 0.015 of the first variance, in 50 steps 0.005."""
    few, enough = (Schedule(1000, 0.1, steps) for steps in (40, 50))
    assert "is still 0.015 of that or more" in AdaCliP(1.0).advice(few, lambda: 9)
    assert AdaCliP(1.0).advice(enough, lambda: 9) == ""
    slow = AdaCliP(1.0, deviation_decay=0.997)
    assert "is still 0.86 of" in slow.advice(enough, lambda: 9)


def test_a_plan_shows_it():
    strategy = make_strategy(
        "adaclip",
        arm="a",
        options={"start": "paper", "parameters": {"learning_rate": 0.5, "largest_variance": H2}},
    )
    plan = strategy.plan(context_of({}), epsilon=2.0)
    assert "Leave out start: paper" in plan.details["advice"]
