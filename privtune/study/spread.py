"""How far apart arms must be to be told apart: what public facts alone say before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from privtune.numbers import ceil_digits, ceil_to
from privtune.strategies import Plan, Scoring
from privtune.strategies.laws import few_runs
from privtune.training.mechanism.metrics import is_clipped, is_mean, is_share, label, make_metric

if TYPE_CHECKING:
    from privtune.strategies import ScorePlan
    from privtune.tasks import Task


@dataclass(frozen=True, kw_only=True)
class ExpectedSpread:
    """Bounds on standard errors of the test metric, of one draw an arm.

    A record adds a number in [a, b] to the mean, so the standard deviation of what it adds is at most
    (b - a)/2 (Popoviciu 1935), and for the difference of two arms on the same records at most b - a.

    Args:
        metric: The metric of the arms; empty where none is measured on test records.
        records: How many test records are declared.
        noise: Standard deviation of the noise on it, the largest of any arm.
        arm: Bound on the standard error of an arm, for the drawing of the records and the noise; None where
            public facts give none.
        difference: Bound on that of the difference of two arms.
        alone: By arm, the probability that its selection trains no candidate or one alone.

    Example:
        >>> spread = expected_spread(study.plans, study.spec.load_task())
        >>> spread.records, round(spread.arm, 3), round(spread.difference, 3), list(spread.alone)
        (30, 0.091, 0.183, ['selection'])
    """

    metric: str
    records: int
    noise: float
    arm: float | None
    difference: float | None
    alone: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return asdict(self)

    @property
    def words(self) -> str:
        """The spread in words."""
        said = "Expected spread of one draw an arm: "
        if not self.metric:
            said += "no arm is measured on the private test split (report: {metric: ...} would pay for it)."
        elif self.arm is None or self.difference is None:
            said += f"public facts give no bound on that of {self.metric}."
        else:
            noise = ""
            if self.noise:  # then the split is private, and its true size sealed
                noise = f", if as many are there, with noise of {self._shown(self.noise)}"
            said += (
                f"drawing {self.records:,} test records{noise} gives {self.metric} a standard error of at "
                f"most {self._shown(self.arm)} for an arm, and of at most {self._shown(self.difference)} for "
                "the difference of two."
            )
        for arm, share in self.alone.items():
            said += f" Arm {arm} trains no more than one candidate with probability {share:.1%}."
        return f"{said} How much trainings add to it no public fact says:"

    def _shown(self, value: float) -> str:
        if is_share(self.metric):
            return f"{ceil_to(100.0 * value, 1):g} points"
        return f"{ceil_digits(value, 3):g}"


def expected_spread(plans: Sequence[Plan], task: Task) -> ExpectedSpread:
    """Return what is known of the spread of arms from public facts alone.

    Args:
        plans: The plans of the arms.
        task: The task; its data is not touched.
    """
    reports = [plan.report for plan in plans if plan.report is not None]
    public = task.public_test or task.benchmark
    if not reports and public and (task.classes is not None or task.target_range is not None):
        reports = [Scoring().exact(records=task.test_records, target_range=task.target_range)]
    law = {plan.arm: few_runs(plan.runs) for plan in plans if plan.runs is not None}
    alone = {arm: min(1.0, found["none"] + found["one"]) for arm, found in law.items()}
    if not reports:
        metric = "its own score" if public else ""
        return ExpectedSpread(
            metric=metric,
            records=task.test_records,
            noise=0.0,
            arm=None,
            difference=None,
            alone=alone,
        )
    first = reports[0]
    arm = difference = None
    noise = max(map(noise_on, reports))
    if is_mean(first.metric) and first.metric != "perplexity":
        low, high = _metric(first).span
        drawn = (high - low) / math.sqrt(first.records)
        arm, difference = math.hypot(0.5 * drawn, noise), math.hypot(drawn, math.sqrt(2.0) * noise)
    return ExpectedSpread(
        metric=label(first.metric),
        records=first.records,
        noise=noise,
        arm=arm,
        difference=difference,
        alone=alone,
    )


def _metric(report: ScorePlan) -> Any:
    options = {name: value for name, value in report.options.items() if name != "beside"}
    if is_clipped(report.metric):
        options = {"bound": report.bound, **options}
    return make_metric(report.metric, **options)


def noise_on(report: ScorePlan) -> float:
    """Return the standard deviation of the noise on a report's first metric."""
    units = _metric(report).norm(report.mechanism) if "beside" in report.options else 1.0
    return (
        report.standard_deviation
        * units
        * (1.0 if report.mechanism == "gaussian" else math.sqrt(2.0))
    )
