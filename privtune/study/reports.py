"""The choice of a report by planning, where the user declares none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.strategies import Plan, Reporting, Scoring
from privtune.strategies.arms import with_metric
from privtune.study.worth import (
    CLEAR,
    NO_REPORT,
    WIDE,
    ExpectedScore,
    expected_scores,
    preferred_metrics,
)
from privtune.training.mechanism.metrics import OF_CLASSES, find_metric

if TYPE_CHECKING:
    from privtune.tasks import Task

AUTO = "auto"
"""The report of a study that declares none: planning chooses its metric, or that there is none."""


def read_report(report: Mapping[str, object] | str | None) -> Mapping[str, object] | str | None:
    """Check a report as the user wrote it; return ``auto``, a mapping of its fields, or None.

    Args:
        report: What a spec or a call says; a name of a metric stands for ``{metric: NAME}``.

    Raises:
        InvalidInputError: If it is no report.

    Example:
        >>> read_report("auc"), read_report("auto"), read_report(None)
        ({'metric': 'auc'}, 'auto', None)
    """
    if report is None or report == AUTO:
        return report
    if isinstance(report, str):
        report = {"metric": report}
    if not isinstance(report, Mapping):
        raise InvalidInputError(
            "report",
            report,
            "must be auto, the name of a metric, a mapping like {metric: auc}, or null for none",
        )
    Reporting.from_dict(report)
    return report


def report_choices(task: Task, scoring: Scoring, adjacency: Adjacency) -> tuple[Reporting, ...]:
    """Return the reports that planning chooses from by public facts, the preferred one first.

    The metric that trials are scored by comes first, where the user names one. Then come the metrics that
    suit the target.

    Args:
        task: The task.
        scoring: How trials are scored; without a metric where the user names none.
        adjacency: The budget's neighbouring relation.

    Returns:
        None where a report is free without asking, or cannot be: a public split, no test split, or splits
        that a replaced record may change.
    """
    if task.public_test or task.benchmark or task.test_records < 1:
        return ()
    if task.partition == "content" and adjacency is Adjacency.REPLACE_ONE:
        return ()
    suitable = preferred_metrics(task)
    if scoring.metric is None:
        return tuple(Reporting(metric=name) for name in suitable)
    terms = {field.name: getattr(scoring, field.name) for field in fields(Scoring)}
    of_trials = Reporting(**terms)
    reports = [of_trials]
    if find_metric(str(of_trials.metric)).takes in OF_CLASSES:
        for name in suitable:
            if name != of_trials.metric:
                reports.append(Reporting(metric=name))
    return tuple(reports)


def choose_report(
    plans: Sequence[Plan], choices: Sequence[Reporting], task: Task
) -> tuple[Plan, ...] | None:
    """Return the plans with the best report that is worth its charge; None if no report is.

    Widths are of the intervals of a model of middling quality, by public facts, in parts of what the metric
    can be. The first report is chosen whose interval is at most two fifths of that. Where there is none, the
    one of the narrowest interval is, if that is at most a half and leaves out what the best constant answer
    reaches. A narrower interval alone is no reason to prefer a later metric: where a class is rare, a model
    that ranks records well still names the other class for nearly all of them, so that its balanced accuracy
    is that of the constant answer, told exactly. All choices cost the same: the noise is on one vector of
    bounded length, whatever the metric.

    Args:
        plans: The plans of the arms, with the report of any of the choices.
        choices: The reports, the preferred one first.
        task: The task; its public facts are read.
    """
    best: tuple[Plan, ...] | None = None
    narrowest = WIDE
    for choice in choices:
        candidates = _with_choice(plans, choice, task)
        scores = _test_scores(candidates, task)
        if any(score.is_worthless for score in scores):
            continue
        widths = [score.estimate.share_of_range for score in scores]
        width = max(widths, default=0.0)
        if width <= CLEAR:
            return candidates
        if width <= narrowest:
            best = candidates
            narrowest = width
    return best


def _with_choice(plans: Sequence[Plan], choice: Reporting, task: Task) -> tuple[Plan, ...]:
    """Return the plans with another metric in their report, at the same noise and the same charge."""
    terms = choice.exact(records=task.test_records, target_range=task.target_range)
    return tuple(with_metric(plan, terms) for plan in plans)


def _test_scores(plans: Sequence[Plan], task: Task) -> list[ExpectedScore]:
    """Return the scores on the test split that a model of middling quality would get, one an arm."""
    return [score for score in expected_scores(plans, task) if score.split == "test"]


def words_of_none(plans: Sequence[Plan], choices: Sequence[Reporting], task: Task) -> str:
    """Return why no report was chosen, in a sentence, with the width of the last choice's interval."""
    last_plans = _with_choice(plans, choices[-1], task)
    score = _test_scores(last_plans, task)[0]
    names = [choice.make(task.target_range).name for choice in choices]
    return (
        f"No arm is measured on the test split. With {task.test_records:,} records, the interval of "
        f"{' or '.join(names)} would "
        f"cover more than {WIDE:.0%} of the metric's range ({score.metric}: about "
        f"{score.estimate.ends}). More "
        "test records or a larger ε would help. To measure all the same, write report: {metric: ...}."
    )


def without_report(plan: Plan, why: str) -> Plan:
    """Return the plan with the reason why planning chose no report."""
    details = {**plan.details, NO_REPORT: why}
    return replace(plan, details=details)
