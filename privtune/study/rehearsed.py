"""Rehearsals of whole studies: the same arms on public records, several times, before anything is charged."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import privtune.accounting as acc
from privtune.errors import InvalidInputError
from privtune.numbers import json_ready
from privtune.strategies.spread import Spread, probability_above, values_of
from privtune.study._study import Study
from privtune.study.observer import Observer
from privtune.study.planning import plan_study
from privtune.study.spec import SpecError, StudySpec
from privtune.study.worth import noise_on_mean
from privtune.tasks import Task, get_task
from privtune.tasks._facts import SPLITS
from privtune.training.mechanism.metrics import is_mean, lower_is_better

if TYPE_CHECKING:
    from privtune.strategies import Plan, Release

FAILURES = ("released nothing", "diverged", "at chance")
"""How a repetition fails; the last: its metric is no better than that of the best constant answer."""


@dataclass(frozen=True, kw_only=True)
class RehearsedArm:
    """What an arm did in a rehearsal.

    Args:
        arm, strategy: Their names.
        values: The metric of each repetition; None where no model was released, or it diverged.
        failed: How many repetitions failed, by how.
    """

    arm: str
    strategy: str
    values: tuple[float | None, ...]
    failed: Mapping[str, int]

    @property
    def spread(self) -> Spread | None:
        """Mean and standard error over the repetitions that have a value; None where none has."""
        return Spread.of(self.values)

    @property
    def share_failed(self) -> float:
        """The share of repetitions that failed in any way."""
        return sum(self.failed.values()) / len(self.values)


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The arms of a study on public records in the place of the user's own.

    Args:
        study: The study's name.
        on: The task that was trained on.
        repeats: How often each arm ran.
        metric: What arms are compared by, such as ``test_accuracy``.
        chance: What the best constant answer reaches on the test records; None where that is not judged.
        arms: The arms, the best mean first.
        differs: What is not as in the study, a sentence each.

    Example:
        >>> none = dict.fromkeys(FAILURES, 0)
        >>> one = RehearsedArm(arm="one", strategy="dog", values=(0.91, 0.93, 0.92), failed=none)
        >>> two = RehearsedArm(arm="two", strategy="fixed", values=(0.90, 0.91, 0.92), failed=none)
        >>> terms = {"study": "s", "on": "iris-logistic", "repeats": 3, "metric": "test_accuracy"}
        >>> found = Rehearsal(**terms, chance=None, arms=(one, two))
        >>> round(found.above(one, two), 3), found.to_dict()["rehearsed"]
        (0.887, 'on iris-logistic, not on your records')
    """

    study: str
    on: str
    repeats: int
    metric: str
    chance: float | None
    arms: tuple[RehearsedArm, ...]
    differs: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """Where it was rehearsed: no result of it is one of the user's records."""
        return f"on {self.on}, not on your records"

    def above(self, first: RehearsedArm, second: RehearsedArm) -> float | None:
        """Return the probability that the mean of ``first`` is better than that of ``second``, by pairs."""
        if _lower(self.metric):
            first, second = second, first
        return probability_above(first.values, second.values)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        arms = [
            {
                "arm": arm.arm,
                "strategy": arm.strategy,
                "mean": None if (spread := arm.spread) is None else spread.mean,
                "standard_error": None if spread is None else spread.error,
                "values": list(arm.values),
                "failed": dict(arm.failed),
                "above": {
                    other.arm: self.above(arm, other) for other in self.arms if other is not arm
                },
            }
            for arm in self.arms
        ]
        return {
            "study": self.study,
            "rehearsed": self.said,
            "repeats": self.repeats,
            "metric": self.metric,
            "chance": self.chance,
            "arms": json_ready(arms),
            "differs": list(self.differs),
        }


def rehearse_study(
    study: Study | StudySpec,
    *,
    repeats: int = 10,
    on: str | Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Rehearsal:
    """Run a study's arms several times on public records. Reads no record of yours, and charges nothing.

    Arms, ε, δ, epochs and batch size are the study's; the storage is a temporary one. Unless ``on`` is given,
    records are generated from the public facts of the study's task: they can be learnt, and are not yours.

    Args:
        study: The study, or its spec.
        repeats: How often each arm runs, at least 1.
        on: A task whose records are public: a built-in name, ``package.module:factory``, or a description.
        tell: Hears, in sentences, how long it will take and how far it is.

    Returns:
        The arms by their means, with standard errors and failures.

    Raises:
        PrivTuneError: If the study is open, the task's records are private, or nothing can be generated.

    Example:
        >>> from privtune import Budget, create_study
        >>> given = {"learning_rate": 0.5, "max_grad_norm": 1.0}
        >>> arm = {"name": "defaults", "strategy": "fixed", "parameters": given}
        >>> study = create_study(
        ...     "flowers",
        ...     budget=Budget(4.0, 1e-5, name="flowers"),
        ...     task="iris-logistic",
        ...     arms=[arm],
        ...     epochs=2,
        ...     expected_batch_size=30,
        ... )
        >>> rehearsal = rehearse_study(study, repeats=2)
        >>> rehearsal.said, len(rehearsal.arms[0].values), study.spent().epsilon
        ('on a stand-in for iris-logistic, not on your records', 2, 0.0)
    """
    spec = study if isinstance(study, StudySpec) else study.spec
    changed, task, differs = _changed(spec, on, repeats)
    name = task.name if on is not None else f"a {task.name}"
    clock = _Clock(repeats, name, tell)
    with tempfile.TemporaryDirectory(prefix="privtune-rehearsal-") as folder:
        made = Study.create(changed, f"sqlite:///{folder}/privtune.db", anyway=True)
        with closing(made):
            releases = made.run(clock, executor="inline", non_private=True, anyway=True)
            plans = made.plans
    found = [values_of(release) for release in releases]
    names = dict.fromkeys(name for values in found for name in values)
    metric = next(iter(sorted(names, key=lambda name: not name.startswith("test_"))), "")
    chance = _chance(task, plans[0], metric)
    arms = [
        _arm(plan, release, tuple(values.get(metric, [None] * repeats)), metric, chance)
        for plan, release, values in zip(plans, releases, found, strict=True)
    ]
    sign = 1.0 if _lower(metric) else -1.0
    arms.sort(key=lambda arm: math.inf if arm.spread is None else sign * arm.spread.mean)
    return Rehearsal(
        study=spec.name,
        on=name,
        repeats=repeats,
        metric=metric,
        chance=None if chance is None else chance[0],
        arms=tuple(arms),
        differs=tuple(differs),
    )


def _changed(
    spec: StudySpec, on: str | Mapping[str, Any] | None, repeats: int
) -> tuple[StudySpec, Task, list[str]]:
    """Return the spec as it is rehearsed, its task, and in what it differs."""
    if spec.task is None:
        raise SpecError(
            f"Study {spec.name!r} is open: it declares no arms that could be rehearsed."
        )
    real, differs = spec.load_task(), []
    if on is None:
        from privtune.tasks.stages import staged_task

        on = {"type": "stand-in", "of": staged_task(spec.task, spec.make_stages())}
    task = get_task(on)
    if not task.benchmark:
        raise InvalidInputError(
            "on",
            task.name,
            "must be a task whose records are public: a built-in one, or one that declares benchmark: true",
            "Leave --on out for generated records.",
        )
    sizes = [[f"{getattr(one, f'{name}_records'):,}" for name in SPLITS] for one in (real, task)]
    if sizes[0] != sizes[1]:
        differs.append(
            f"Its sizes are {', '.join(sizes[1])} (train, validation, test), your task declares "
            f"{', '.join(sizes[0])}: sampling rates, steps and noise are those of the other sizes."
        )
    target = spec.target_epsilon
    if spec.stages:
        differs.append(
            "Stages are not rehearsed: arms have the ε that these leave them, features the declared shapes, "
            "and classes no weights."
        )
    if spec.stages or spec.repeats > 1:
        planned = plan_study(spec, look=False, anyway=True)
        events = [plan.event for plan in planned.plans if plan.is_private]
        terms = {"adjacency": spec.budget.adjacency}
        target = acc.epsilon(acc.Composed(events), spec.budget.delta, **terms).epsilon
    document = {
        **spec.model_dump(mode="json"),
        "task": on,
        "repeats": repeats,
        "epsilon": min(target, spec.budget.epsilon),
        "stages": [],
        "executor": None,
        "artifacts": None,
    }
    return StudySpec.parse(document), task, differs


class _Clock(Observer):
    """Tells how long a rehearsal is expected to take, before the first arm, and which arms are done."""

    def __init__(self, repeats: int, name: str, tell: Callable[[str], None]) -> None:
        self._repeats, self._name, self._tell = repeats, name, tell
        self._seconds: list[float | None] = []

    def rehearsed(self, plan: Plan, seconds: float | None) -> None:
        self._seconds.append(seconds)

    def arm_started(self, plan: Plan) -> None:
        known = [s for s in self._seconds if s is not None]
        if self._seconds:
            self._tell(
                f"Rehearsing {len(self._seconds)} arms, {self._repeats} times each, on {self._name}: about "
                f"{_duration(sum(known) * self._repeats)}, less where repetitions are trained together."
            )
            self._seconds.clear()

    def released(self, plan: Plan, release: Release) -> None:
        self._tell(f"{plan.arm}: done.")


def _duration(seconds: float) -> str:
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1.0, seconds):.0f} seconds"


def _lower(metric: str) -> bool:
    return lower_is_better(metric.partition("_")[2])


def _chance(task: Task, plan: Plan, metric: str) -> tuple[float, float] | None:
    """Return what the best constant answer reaches on the test records, and the standard error of that."""
    split, _, name = metric.partition("_")
    noise = 0.0 if plan.report is None else noise_on_mean(plan.report)
    # The noise on what is no mean is not that on its sums.
    if split != "test" or name not in _CONSTANT or (noise and not is_mean(name)):
        return None
    y = task.load().test.y.double().flatten().numpy()
    y = y[np.isfinite(y) & ((y >= 0) | (task.classes is None))]
    constant, error = _CONSTANT[name](y)
    return constant, math.hypot(error, noise)


def _share(y: Any) -> tuple[float, float]:
    p = float(np.bincount(y.astype(int)).max()) / len(y)
    return p, math.sqrt(p * (1.0 - p) / len(y))


def _balanced(y: Any) -> tuple[float, float]:
    counts = np.bincount(y.astype(int))
    p = 1.0 / len(counts)
    return p, p * math.sqrt(float((p * (1.0 - p) / np.maximum(counts, 1)).sum()))


def _auc(y: Any) -> tuple[float, float]:
    n = np.maximum(np.bincount(y.astype(int), minlength=2), 1)  # Mann and Whitney 1947
    return 0.5, math.sqrt(float((n.sum() + 1) / (12.0 * n.prod())))


def _mean(errors: Any) -> tuple[float, float]:
    return float(errors.mean()), float(errors.std()) / math.sqrt(len(errors))


_CONSTANT: Mapping[str, Callable[[Any], tuple[float, float]]] = {
    "accuracy": _share,
    "balanced_accuracy": _balanced,
    "auc": _auc,
    "mae": lambda y: _mean(np.abs(y - np.median(y))),
    "mse": lambda y: _mean(np.square(y - y.mean())),
    "r2": lambda _: (0.0, 0.0),
}
"""Of a metric, what the best constant answer reaches on targets, and its standard error."""


def _arm(
    plan: Plan,
    release: Release,
    values: tuple[float | None, ...],
    metric: str,
    chance: tuple[float, float] | None,
) -> RehearsedArm:
    runs: Sequence[Any] = release.repetitions or (release,)
    failed = dict.fromkeys(FAILURES, 0)
    for run, value in zip(runs, values, strict=True):
        if getattr(run, "nothing", False) or getattr(run, "is_nothing", False):
            failed["released nothing"] += 1
        elif value is None:
            failed["diverged"] += 1
        elif chance is not None:
            better = (chance[0] - value) if _lower(metric) else (value - chance[0])
            failed["at chance"] += better <= 2.0 * chance[1]
    return RehearsedArm(arm=plan.arm, strategy=plan.strategy, values=values, failed=failed)
