"""A plan in one line, and its noise by what it is for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from privtune.accounting import Guarantee
from privtune.numbers import show_epsilon
from privtune.strategies.plan import CANDIDATE, Plan, TrainingPlan


def plan_line(plan: Plan, guarantee: Guarantee) -> str:
    """Return a plan in one line: its noise, what it costs by the two least bounds, what it trains."""
    noises = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in noise_of(plan).items()]
    cost = "ε = ∞: NOT PRIVATE, no part of the budget"
    if plan.is_private:
        others = [(e, name) for name, e in guarantee.bounds.items() if name != guarantee.method]
        value, name = min(others, default=(math.inf, ""))
        other = f"; {_bound(name)} {show_epsilon(value, 2)}" if math.isfinite(value) else ""
        cost = f"ε = {show_epsilon(guarantee.epsilon, 2)} ({_bound(guarantee.method)}{other})"
    return " · ".join([*filter(None, [", ".join(noises)]), cost, _trainings(plan)])


def _bound(name: str) -> str:
    return name.upper() if name in ("rdp", "pld") else name


def _trainings(plan: Plan) -> str:
    """Return how many trainings there are, and how long each is."""
    last = _steps((plan.training,))
    if plan.search is None:
        return last
    trials = f"{plan.search.trials} trials of"
    if plan.runs is not None:
        trials = f"a secret number of trials, {plan.runs.expected_runs:.3g} in the mean, of"
    final = f"; then one training of {last}" if plan.final else ""
    return f"{trials} {_steps(plan.search.trainings)}{final}"


def _steps(trainings: tuple[TrainingPlan, ...]) -> str:
    def span(values: set[float], show: str) -> str:
        low, high = (format(end, show) for end in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    steps = span({t.schedule.steps for t in trainings}, ",")
    batch = span({t.schedule.expected_batch_size for t in trainings}, ".4g")
    return f"{steps} steps, expected batch {batch}"


def noise_of(plan: Plan) -> dict[str, float]:
    """Return every noise multiplier of a plan by what it is for; of trials that differ, each."""
    noises: dict[str, float] = {}
    each: tuple[tuple[TrainingPlan, Mapping[str, Any]], ...] = ((plan.training, {}),)
    if plan.search is not None and not plan.final and len(plan.search.trainings) > 1:
        each = tuple(zip(plan.search.trainings, plan.search.points, strict=True))
    for training, point in each:
        said = (point[CANDIDATE],) if CANDIDATE in point else point.values()
        of = f" ({', '.join(map(str, said))})" if point else ""
        noises |= {
            name + of: value
            for name, value in training.to_dict()["method"].items()
            if name.endswith("noise_multiplier") and value is not None
        }
    for name, score in (("score", plan.score), ("report", plan.report)):
        if score is not None and score.noise_multiplier is not None:
            noises[f"{name}_noise_multiplier"] = score.noise_multiplier
    return noises
