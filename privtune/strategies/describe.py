"""Plans in words: one line for a plan, and its noise multipliers by purpose."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from privtune.accounting import Guarantee
from privtune.numbers import show_epsilon
from privtune.strategies.plan import CANDIDATE, Plan, TrainingPlan


def plan_line(plan: Plan, guarantee: Guarantee) -> str:
    """Return a plan in one line: its noise, its ε, and the number and length of its trainings.

    It is read before the charge, so it also has the next best bound: one that lies far above the answer
    says that ε rests on a single account.
    """
    parts = [_cost(plan, guarantee), _trainings(plan)]
    noises = _noises(plan)
    if noises:
        parts.insert(0, noises)
    return " · ".join(parts)


def _noises(plan: Plan) -> str:
    """Return a plan's noise multipliers in words, or an empty text if it has no noise."""
    words = []
    for name, value in noise_of(plan).items():
        purpose = name.replace("_", " ")
        words.append(f"{purpose} {value:.3g}")
    return ", ".join(words)


def _cost(plan: Plan, guarantee: Guarantee) -> str:
    """Return ε by the least bound in words, with the second least bound where that is finite."""
    if not plan.is_private:
        return "ε = ∞: NOT PRIVATE, not charged to the budget"
    answer = show_epsilon(guarantee.epsilon, 2)
    bound = _bound(guarantee.method)
    others = []
    for name, epsilon in guarantee.bounds.items():
        if name != guarantee.method:
            others.append((epsilon, name))
    second, second_name = min(others, default=(math.inf, ""))
    if math.isfinite(second):
        second_answer = show_epsilon(second, 2)
        bound += f"; {_bound(second_name)} {second_answer}"
    return f"ε = {answer} ({bound})"


def _bound(name: str) -> str:
    """Return the name of a bound as papers write it."""
    return name.upper() if name in ("rdp", "pld") else name


def _trainings(plan: Plan) -> str:
    """Return the number of trainings and their length, in words.

    The number of trials of a sealed round is secret: its mean alone, a public fact, is told.
    """
    final = _steps((plan.training,))
    if plan.search is None:
        return final
    trials = f"{plan.search.trials} trials"
    if plan.runs is not None:
        mean = plan.runs.expected_runs
        trials = f"a secret number of trials ({mean:.3g} on average)"
    each = _steps(plan.search.trainings)
    words = f"{trials} of {each}"
    if plan.final:
        words += f"; then one training of {final}"
    return words


def _steps(trainings: tuple[TrainingPlan, ...]) -> str:
    """Return steps and expected batch sizes of trainings in words, as spans where they differ."""
    schedules = [training.schedule for training in trainings]
    steps = _span([schedule.steps for schedule in schedules], ",")
    batch = _span([schedule.expected_batch_size for schedule in schedules], ".4g")
    return f"{steps} steps, expected batch {batch}"


def _span(values: Sequence[float], form: str) -> str:
    """Return the least and the greatest value as text, or one of them if both look alike."""
    low = format(min(values), form)
    high = format(max(values), form)
    if low == high:
        return low
    return f"{low} to {high}"


def noise_of(plan: Plan) -> dict[str, float]:
    """Return every noise multiplier of a plan by its name, such as ``score_noise_multiplier``.

    Trials that differ in what they cost have noise of their own: each is listed, with its candidate or its
    hyperparameters in parentheses. After a search with a last training, the noise is that of the last one.
    """
    noises: dict[str, float] = {}
    for training, point in _trainings_and_points(plan):
        suffix = _suffix(point)
        fields = training.to_dict()["method"]
        for name, value in fields.items():
            if name.endswith("noise_multiplier") and value is not None:
                noises[name + suffix] = value
    scores = {"score": plan.score, "report": plan.report}
    for name, score in scores.items():
        if score is None or score.noise_multiplier is None:
            continue
        noises[f"{name}_noise_multiplier"] = score.noise_multiplier
    return noises


def _trainings_and_points(
    plan: Plan,
) -> tuple[tuple[TrainingPlan, Mapping[str, Any]], ...]:
    """Return the trainings whose noise is shown, each with the grid point that distinguishes it."""
    search = plan.search
    if search is None or plan.final or len(search.trainings) <= 1:
        return ((plan.training, {}),)
    return tuple(zip(search.trainings, search.points, strict=True))


def _suffix(point: Mapping[str, object]) -> str:
    """Return a grid point in parentheses, which distinguishes a trial's noise, or an empty text."""
    if not point:
        return ""
    values: Collection[Any] = point.values()
    if CANDIDATE in point:
        values = (point[CANDIDATE],)
    words = ", ".join(str(value) for value in values)
    return f" ({words})"
