"""Rehearsals of whole studies: the same arms on public records, several times, before anything is charged."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import privtune.accounting as acc
from privtune.errors import InvalidInputError
from privtune.facts import SPLITS
from privtune.numbers import json_ready
from privtune.strategies.spread import Spread, probability_above, values_of
from privtune.study.facade import Study
from privtune.study.observer import Observer
from privtune.study.planning import plan_study
from privtune.study.reports import AUTO
from privtune.study.schedules import with_rule
from privtune.study.spec import SpecError, StudySpec
from privtune.study.worth import noise_on_mean, rarest_of
from privtune.tasks import Task, get_task
from privtune.training.mechanism.constant import constant_answer
from privtune.training.mechanism.estimates import ConstantAnswer
from privtune.training.mechanism.metric_name import MetricName
from privtune.training.mechanism.metrics import is_mean

if TYPE_CHECKING:
    from privtune.strategies import Plan, Release

FAILURES = ("released nothing", "diverged", "at chance")
"""How a repetition fails; the last: its metric is no better than that of the best constant answer."""


@dataclass(frozen=True, kw_only=True)
class RehearsedArm:
    """The results of one arm in a rehearsal.

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
        """The mean and standard error over the repetitions that have a value; None without any."""
        return Spread.of(self.values)

    @property
    def share_failed(self) -> float:
        """The share of repetitions that failed in any way."""
        return sum(self.failed.values()) / len(self.values)


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The results of a study's arms on public records in the place of the user's own.

    Args:
        study: The study's name.
        on: The task that was trained on.
        repeats: How often each arm ran.
        metric: What arms are compared by; None where no model was scored.
        chance: What the best constant answer reaches on the test records; None where that is not judged.
        arms: The arms, the best mean first.
        differs: What is not as in the study, a sentence each.

    Example:
        >>> none = dict.fromkeys(FAILURES, 0)
        >>> one = RehearsedArm(arm="one", strategy="dog", values=(0.91, 0.93, 0.92), failed=none)
        >>> two = RehearsedArm(arm="two", strategy="fixed", values=(0.90, 0.91, 0.92), failed=none)
        >>> accuracy = MetricName("test", "accuracy")
        >>> terms = {"study": "s", "on": "iris-logistic", "repeats": 3, "metric": accuracy}
        >>> rehearsal = Rehearsal(**terms, chance=None, arms=(one, two))
        >>> round(rehearsal.above(one, two), 3), rehearsal.to_dict()["rehearsed"]
        (0.887, 'on iris-logistic, not on your records')
    """

    study: str
    on: str
    repeats: int
    metric: MetricName | None
    chance: float | None
    arms: tuple[RehearsedArm, ...]
    differs: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """The words that name the task of the rehearsal, and say that it is not the user's records."""
        return f"on {self.on}, not on your records"

    def above(self, first: RehearsedArm, second: RehearsedArm) -> float | None:
        """Return the probability that ``first`` has a better mean than ``second``, by paired repetitions."""
        if _lower(self.metric):
            return probability_above(second.values, first.values)
        return probability_above(first.values, second.values)

    def to_dict(self) -> dict[str, Any]:
        """Return the rehearsal as JSON-ready data."""
        arms = [self._arm_document(arm) for arm in self.arms]
        return {
            "study": self.study,
            "rehearsed": self.said,
            "repeats": self.repeats,
            "metric": "" if self.metric is None else str(self.metric),
            "chance": self.chance,
            "arms": json_ready(arms),
            "differs": list(self.differs),
        }

    def _arm_document(self, arm: RehearsedArm) -> dict[str, Any]:
        """Return an arm as JSON-ready data, with the probability that its mean beats each other arm's."""
        others = [other for other in self.arms if other is not arm]
        spread = arm.spread
        return {
            "arm": arm.arm,
            "strategy": arm.strategy,
            "mean": None if spread is None else spread.mean,
            "standard_error": None if spread is None else spread.error,
            "values": list(arm.values),
            "failed": dict(arm.failed),
            "above": {other.arm: self.above(arm, other) for other in others},
        }


def rehearse_study(
    study: Study | StudySpec,
    *,
    repeats: int = 10,
    on: str | Mapping[str, Any] | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Rehearsal:
    """Run a study's arms several times on public records, without reading or charging the study's own.

    Arms, ε, δ, epochs and batch size are the study's, also where planning chooses them (``auto``); the
    storage is a temporary one. Unless ``on`` is given, records are generated from the public facts of the
    study's task: they can be learnt, and are not yours.

    Args:
        study: The study, or its spec.
        repeats: How often each arm runs, at least 1.
        on: A task whose records are public: a built-in name, ``package.module:factory``, or a description.
        notify: Hears, in sentences, how long it will take and how far it is.

    Returns:
        The arms by their means, with standard errors and failures.

    Raises:
        PrivTuneError: If the study is open, the task's records are private, or nothing can be generated.

    Example:
        >>> from privtune import Budget, create_study
        >>> parameters = {"learning_rate": 0.5, "max_grad_norm": 1.0}
        >>> arm = {"name": "defaults", "strategy": "fixed", "parameters": parameters}
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
    rehearsal_spec, task, differs = _rehearsal_spec(spec, on, repeats)
    name = task.name
    if on is None:
        name = f"a {task.name}"
    clock = _Clock(repeats, name, notify)
    with tempfile.TemporaryDirectory(prefix="privtune-rehearsal-") as folder:
        storage = f"sqlite:///{folder}/privtune.db"
        rehearsal = Study.create(rehearsal_spec, storage, force=True)
        with closing(rehearsal):
            releases = rehearsal.run(clock, executor="inline", non_private=True, force=True)
            plans = rehearsal.plans
    values_by_metric = [values_of(release) for release in releases]
    metric = _metric_to_compare(values_by_metric)
    chance = _chance(task, plans[0], metric)
    arms: list[RehearsedArm] = []
    for plan, release, by_metric in zip(plans, releases, values_by_metric, strict=True):
        values: list[float | None] = [None] * repeats
        if metric is not None:
            values = by_metric.get(str(metric), values)
        arm = _arm(plan, release, tuple(values), metric, chance)
        arms.append(arm)
    arms.sort(key=lambda arm: _rank(arm, metric))
    return Rehearsal(
        study=spec.name,
        on=name,
        repeats=repeats,
        metric=metric,
        chance=None if chance is None else chance.value,
        arms=tuple(arms),
        differs=tuple(differs),
    )


def _rank(arm: RehearsedArm, metric: MetricName | None) -> float:
    """Return the sort key of an arm: the best mean comes first, arms without any value last."""
    spread = arm.spread
    if spread is None:
        return math.inf
    if _lower(metric):
        return spread.mean
    return -spread.mean


def _metric_to_compare(values_by_metric: Sequence[Mapping[str, Any]]) -> MetricName | None:
    """Return the first metric of the test records, else the first of all, or None without any."""
    names: list[MetricName] = []
    for by_metric in values_by_metric:
        names += [MetricName.parse(text) for text in by_metric]
    for name in names:
        if name.split == "test":
            return name
    return next(iter(names), None)


def _rehearsal_spec(
    spec: StudySpec, on: str | Mapping[str, Any] | None, repeats: int
) -> tuple[StudySpec, Task, list[str]]:
    """Return the spec of the rehearsal, its task, and the differences from the study's spec."""
    if spec.task is None:
        raise SpecError(
            f"Study {spec.name!r} is open: it declares no arms that could be rehearsed."
        )
    study_task = spec.load_task()
    # Of the study's own records and ε: generated records may be fewer.
    spec = with_rule(spec, study_task)
    differs: list[str] = []
    if on is None:
        from privtune.stages.spec_stages import staged_task

        on = {"type": "stand-in", "of": staged_task(spec.task, spec.make_stages())}
    task = get_task(on)
    if not task.benchmark:
        raise InvalidInputError(
            "on",
            task.name,
            "must be a task whose records are public: a built-in one, or one that declares benchmark: true",
            "Leave --on out for generated records.",
        )
    sizes = _split_sizes(task)
    study_sizes = _split_sizes(study_task)
    if sizes != study_sizes:
        differs.append(
            f"The rehearsal has {sizes} records (train, validation, test), but your task declares "
            f"{study_sizes}. So its sampling rates, steps and noise differ from your study's."
        )
    target = spec.target_epsilon
    report = spec.report
    if report == AUTO:
        # Generated records are public, so planning would choose nothing for them: it is the study's choice.
        report = _chosen_report(spec)
    if spec.stages:
        differs.append(
            "Stages are not rehearsed. Arms get the ε that the stages leave, features have their declared "
            "shapes, and classes have no weights."
        )
    if spec.stages or spec.repeats > 1:
        # The ε of one run of the arms: what stages and further repetitions are charged is left out.
        plans = plan_study(spec, check_header=False, force=True).plans
        events = [plan.event for plan in plans if plan.is_private]
        budget = spec.budget
        composed = acc.Composed(events)
        guarantee = acc.epsilon(composed, budget.delta, adjacency=budget.adjacency)
        target = guarantee.epsilon
    document = {
        **spec.model_dump(mode="json"),
        "task": on,
        "repeats": repeats,
        "report": report,
        "epsilon": min(target, spec.budget.epsilon),
        "stages": [],
        "executor": None,
        "artifacts": None,
    }
    return StudySpec.parse(document), task, differs


def _split_sizes(task: Task) -> str:
    """Return the declared numbers of records of a task's splits, in words."""
    sizes = [getattr(task, f"{name}_records") for name in SPLITS]
    words = [f"{size:,}" for size in sizes]
    return ", ".join(words)


def _chosen_report(spec: StudySpec) -> dict[str, Any] | None:
    """Return the report that planning chooses for a study, or None if it chooses none."""
    if not spec.planning_context().report_choices:
        return None
    plans = plan_study(spec, check_header=False, force=True).plans
    report = plans[0].report
    if report is None:
        return None
    return {"metric": report.metric, **report.options}


class _Clock(Observer):
    """An observer that announces how long a rehearsal may take, and which arms are done."""

    def __init__(self, repeats: int, name: str, notify: Callable[[str], None]) -> None:
        self._repeats = repeats
        self._name = name
        self._notify = notify
        self._seconds: list[float | None] = []  # of each arm, once; told with the first that starts

    def rehearsed(self, plan: Plan, seconds: float | None) -> None:
        """Keep the CPU seconds that an arm is expected to take, which is told when the first arm starts."""
        self._seconds.append(seconds)

    def arm_started(self, plan: Plan) -> None:
        """Announce how long all arms together may take, before the first of them."""
        if not self._seconds:
            return
        once = 0.0
        for seconds in self._seconds:
            if seconds is not None:
                once += seconds
        self._notify(
            f"Rehearsing {len(self._seconds)} arms, {self._repeats} times each, on {self._name}: "
            f"{_durations(once, self._repeats)} of CPU time."
        )
        self._seconds.clear()

    def released(self, plan: Plan, release: Release) -> None:
        """Announce that an arm is done; its numbers stand in the rehearsal's result."""
        self._notify(f"{plan.arm}: done.")


def _durations(once: float, repeats: int) -> str:
    """Return the shortest and longest time of repetitions in words, as many are trained together."""
    most = once * repeats
    if most >= 2.0 * 3600.0:
        unit = "hours"
        seconds = 3600.0
    elif most >= 2.0 * 60.0:
        unit = "minutes"
        seconds = 60.0
    else:
        unit = "seconds"
        seconds = 1.0
    low = max(1, math.floor(once / seconds))
    high = max(1, math.ceil(most / seconds))
    if low < high:
        return f"{low} to {high} {unit}"
    return f"about {high} {unit}"


_DEVIATIONS = 3.92  # of a normal law, in the width of a 95% interval


def _lower(metric: MetricName | None) -> bool:
    """Return whether lower values of a metric are better; False without a metric."""
    return metric is not None and metric.lower_is_better


def _chance(task: Task, plan: Plan, metric: MetricName | None) -> ConstantAnswer | None:
    """Return the score of the best constant answer on test records, with the report's noise in its error."""
    if metric is None or metric.split != "test":
        return None
    labels = task.load().test.y
    y = labels.double().flatten().numpy()
    of_classes = task.classes is not None
    constant = constant_answer(metric.metric, y, of_classes=of_classes)
    if constant is None:
        return None
    report = plan.report
    if report is None or report.event is None:
        return constant
    if is_mean(metric.metric):
        error = math.hypot(constant.error, noise_on_mean(report))
        return ConstantAnswer(constant.value, error)
    if metric.metric != report.metric:
        return None
    # The noise on what is no mean is not that on its sums: the interval that is foretold has it.
    expected = report.expected(classes=task.classes, rarest=rarest_of(task))
    error = max(constant.error, expected.width / _DEVIATIONS)
    return ConstantAnswer(constant.value, error)


def _arm(
    plan: Plan,
    release: Release,
    values: tuple[float | None, ...],
    metric: MetricName | None,
    chance: ConstantAnswer | None,
) -> RehearsedArm:
    """Return an arm's results, with counts of repetitions that failed: no release, diverged, at chance."""
    runs: Sequence[Any] = release.repetitions or (release,)
    failed = dict.fromkeys(FAILURES, 0)
    for run, value in zip(runs, values, strict=True):
        # A repetition says ``nothing``, a release ``is_nothing``.
        is_nothing = getattr(run, "nothing", False) or getattr(run, "is_nothing", False)
        if is_nothing:
            failed["released nothing"] += 1
        elif value is None:
            failed["diverged"] += 1
        elif chance is not None:
            gain = value - chance.value
            if _lower(metric):
                gain = -gain
            failed["at chance"] += gain <= 2.0 * chance.error
    return RehearsedArm(arm=plan.arm, strategy=plan.strategy, values=values, failed=failed)
