"""Strategies, methods and plans in words: what each can be told, and a plan in one line."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Mapping
from typing import Any

from privtune.accounting import Guarantee
from privtune.errors import InvalidInputError
from privtune.numbers import show_epsilon
from privtune.strategies.options import words_of
from privtune.strategies.plan import CANDIDATE, Plan, TrainingPlan
from privtune.strategies.registry import STRATEGIES, registered
from privtune.training.methods import METHODS

_ARGUMENT = re.compile(r"^    (\w+): (.*)$")


def arguments(of: Any) -> dict[str, str]:
    """Return what a docstring says of each argument, those of the classes above included."""
    found: dict[str, str] = {}
    for owner in reversed(of.__mro__ if inspect.isclass(of) else (of,)):
        text = inspect.cleandoc(owner.__doc__ or "")
        section, _, _ = text.partition("\nArgs:\n")[2].partition("\n\n")
        name = ""
        for line in section.splitlines():
            if match := _ARGUMENT.match(line):
                name, found[match[1]] = match[1], match[2]
            elif name:
                found[name] += " " + line.strip()
    return found


def options_of(cls: type[Any], *, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the options of a dataclass: ``name``, ``type``, ``default``, ``required``, ``what``.

    Args:
        cls: The dataclass.
        without: Fields that are none of its options.
    """
    said, hints = arguments(cls), typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if not field.init or field.name.startswith("_") or field.name in without:
            continue
        made = field.default_factory
        required = field.default is made is dataclasses.MISSING
        default = field.default if made is dataclasses.MISSING else made()
        rows.append(
            {
                "name": field.name,
                "type": words_of(hints[field.name]),
                "default": None if required else default,
                "required": required,
                "what": said.get(field.name, ""),
            }
        )
    return rows


def describe(name: str) -> dict[str, Any]:
    """Return what a strategy, or an in-run method, does and can be told.

    Args:
        name: Its name in specs.

    Returns:
        ``name``, ``what``, ``parameters`` (hyperparameters that are left to the user) and
        ``options``, JSON-ready.

    Raises:
        InvalidInputError: If there is none of the name.
    """
    installed = {found.name: found.strategy for found in registered() if found.strategy is not None}
    cls: Any = STRATEGIES.get(name) or installed.get(name)
    if cls is not None:
        return {
            "name": name,
            "what": cls.summary,
            "parameters": [],
            "options": options_of(cls, without=("arm",)),
        }
    if name not in METHODS:
        known = ", ".join(sorted({*STRATEGIES, *METHODS, *installed}))
        raise InvalidInputError("strategy", name, f"must be one of {known}")
    method: Any = METHODS[name]
    return {
        "name": name,
        "what": method.summary,
        "parameters": list(method.parameters),
        # A plan finds the noise for the arm's target.
        "options": options_of(method, without=("noise_multiplier",)),
    }


def plan_line(plan: Plan, guarantee: Guarantee) -> str:
    """Return a plan in one line: its noise, what it costs by the two least bounds, what it trains.

    Example:
        >>> from privtune.accounting import epsilon
        >>> plan = study.plans[0]
        >>> plan_line(plan, epsilon(plan.event, 1e-5))
        'noise multiplier 1.06 · ε = 4.16 (PLD; RDP 4.75) · 3 steps, expected batch 30'
    """
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
