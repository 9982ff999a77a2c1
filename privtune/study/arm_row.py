"""The facts of an arm as one row, from which every table, document, data frame and tracker is made.

A new fact is one :class:`ArmColumn`; where it is shown stands beside how it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from privtune.numbers import ceil_to, finite, json_ready, show_epsilon, show_seconds
from privtune.strategies.spread import Spread, values_of
from privtune.training.mechanism.metric_name import MetricName

if TYPE_CHECKING:
    from privtune.strategies import Release, TrialResult
    from privtune.study.observer import ArmStatus
    from privtune.training.mechanism.estimates import ScoreEstimate

_ERRORS = 2.0  # standard errors of a mean by which it must be above the constant answer


@dataclass(frozen=True)
class ArmColumn:
    """One fact of an arm: how it is read, and under which names it is shown.

    Args:
        name: Its name in JSON, CSV and data frames.
        read: Returns it from an arm's status; None where it is not known.
        title: The head of its column in tables that people read; empty where it stands in none.
        show: Words it for such a table.
        metric: The name of a tracker's metric; empty where it is none.
        round: Rounds it for a tracker: an upper bound upwards.
        tag: The name of a tracker's tag; empty where it is none.
        word: Words it for a tag.
    """

    name: str
    read: Callable[[ArmStatus], Any]
    title: str = ""
    show: Callable[[Any], str] = str
    metric: str = ""
    round: Callable[[float], float] = float
    tag: str = ""
    word: Callable[[Any], str] = str


def _of_release(read: Callable[[Release], object]) -> Callable[[ArmStatus], Any]:
    """Return a reader of a fact of an arm's release, which gives None before the release."""

    def read_status(status: ArmStatus) -> object:
        if status.release is None:
            return None
        return read(status.release)

    return read_status


def _show_cost(value: float) -> str:
    """Return ε as text for people; NOT PRIVATE where it is infinite."""
    return show_epsilon(value) if math.isfinite(value) else "∞ NOT PRIVATE"


def word_draws(count: int) -> str:
    """Return whether a release's numbers are one draw or a mean of ``count`` repetitions, in words."""
    return f"mean of {count}" if count > 1 else "one draw"


def _beats_constant(release: Release) -> bool | None:
    """Return whether a release beats the best constant answer, by its first score; None without one."""
    names = [*release.estimates, *release.choice]
    if not names:
        return None
    return beats_constant(release, MetricName.parse(names[0]))


COLUMNS = (
    ArmColumn("arm", lambda status: status.plan.arm, title="arm"),
    ArmColumn(
        "strategy",
        lambda status: status.plan.strategy,
        title="strategy",
        tag="privtune.strategy",
    ),
    ArmColumn("state", lambda status: status.state),
    ArmColumn(
        "epsilon",
        lambda status: status.guarantee.epsilon,
        title="ε",
        show=_show_cost,
        metric="eps/arm",
        round=partial(ceil_to, places=4),
    ),
    ArmColumn(
        "delta",
        lambda status: status.guarantee.delta,
        tag="privtune.delta",
        word="{:g}".format,
    ),
    ArmColumn("bound", lambda status: status.guarantee.method, tag="privtune.bound"),
    ArmColumn(
        "sealed",
        lambda status: status.plan.is_sealed,
        tag="privtune.visibility",
        word=lambda sealed: "sealed trials, winner only" if sealed else "everything",
    ),
    ArmColumn("score", _of_release(lambda release: release.score)),
    ArmColumn("score_of", lambda status: status.plan.scored),
    ArmColumn(
        "score_metric",
        lambda status: None if status.plan.score is None else status.plan.score.metric,
    ),
    ArmColumn(
        "draws",
        _of_release(lambda release: len(release.repetitions) or 1),
        tag="privtune.draws",
        word=word_draws,
    ),
    ArmColumn(
        "repetitions_charged",
        lambda status: status.plan.repeats_charged if status.plan.repeats > 1 else None,
    ),
    ArmColumn(
        "beats_constant",
        _of_release(_beats_constant),
        tag="privtune.beats_constant",
        word=lambda beats: "yes" if beats else "not shown to be better than always the same answer",
    ),
    ArmColumn(
        "gradient_evaluations",
        lambda status: status.plan.expected_gradient_evaluations,
        title="gradients",
        show="{:,.0f}".format,
        metric="cost/gradients",
        round=lambda value: round(value, 0),
    ),
    ArmColumn(
        "cpu_seconds",
        _of_release(lambda release: release.cost.cpu_seconds),
        title="CPU seconds",
        show=show_seconds,
        metric="cost/cpu_seconds",
        # Three digits: a tenth of a second would be 0.0 for a small study.
        round=lambda value: float(f"{value:.3g}"),
    ),
    ArmColumn("note", _of_release(lambda release: release.note)),
)
"""The facts of every arm, in the order of their columns."""


@dataclass(frozen=True)
class ArmRow:
    """The facts, hyperparameters and scores of one arm in a comparison.

    Args:
        facts: Its facts by the names of their :data:`COLUMNS`.
        params: The released hyperparameters; None where nothing is released.
        scores: The release's scores by name, such as ``test_accuracy``.
        spreads: The spread of each score of a repeated arm; None where no repetition has it.
        trials: The trials of an arm that pays for all of them, JSON-ready.
        repetitions: What each repetition released, JSON-ready.
    """

    facts: Mapping[str, Any]
    params: Mapping[str, Any] | None = None
    scores: Mapping[str, ScoreEstimate] = field(default_factory=dict)
    spreads: Mapping[str, Spread | None] = field(default_factory=dict)
    trials: Sequence[Mapping[str, Any]] = ()
    repetitions: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, status: ArmStatus) -> Self:
        """Return the row of an arm, read from its status."""
        facts = {column.name: column.read(status) for column in COLUMNS}
        release = status.release
        if release is None:
            return cls(facts)
        spreads: dict[str, Spread | None] = {}
        if release.repetitions:
            for name, values in values_of(release).items():
                spreads[name] = Spread.of(values)
        return cls(
            facts,
            params=release.params,
            scores=release.scores,
            spreads=spreads,
            trials=[_trial_document(trial) for trial in release.trials],
            repetitions=[json_ready(asdict(run)) for run in release.repetitions],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a JSON-ready dict, with null for infinite numbers."""
        document = {
            **self.facts,
            **self._released_document(),
            "trials": [finite(json_ready(trial)) for trial in self.trials],
            "repetitions": [finite(dict(run)) for run in self.repetitions],
        }
        return finite(document)

    def _released_document(self) -> dict[str, object]:
        """Return hyperparameters and scores, JSON-ready; null for each where nothing is released."""
        if self.params is None:
            return dict.fromkeys(("params", "estimates", "spread"))
        spreads: dict[str, dict[str, Any]] = {}
        for name, spread in self.spreads.items():
            spreads[name] = {} if spread is None else asdict(spread)
        return {
            "params": json_ready(self.params),
            "estimates": {name: score.to_shown() for name, score in self.scores.items()},
            "spread": spreads,
        }

    def to_flat(self, *, no_information: object = None) -> dict[str, Any]:
        """Return the row as a flat dict of column names and values, for CSV and data frames.

        Args:
            no_information: What stands for a score whose interval says nothing; None leaves it out.

        Returns:
            The facts, each score with the ends of its interval as ``NAME_low`` and ``NAME_high``, of
            repeated arms ``NAME_mean``, ``NAME_error`` and ``NAME_n``, and ``params.NAME``.
        """
        line = dict(self.facts)
        for name, score in self.scores.items():
            if score.is_informative:
                line[name] = score.value
            elif no_information is not None:
                line[name] = no_information
            line[f"{name}_low"] = score.low
            line[f"{name}_high"] = score.high
        for name, spread in self.spreads.items():
            if spread is None:
                continue
            for part, number in asdict(spread).items():
                line[f"{name}_{part}"] = number
        for name, value in (self.params or {}).items():
            line[f"params.{name}"] = value
        return line

    def to_cells(self) -> dict[str, str]:
        """Return the titled facts as text for people, by the titles of their columns."""
        cells: dict[str, str] = {}
        for column in COLUMNS:
            if column.title:
                fact = self.facts[column.name]
                cells[column.title] = column.show(fact)
        return cells

    def to_metrics(self) -> dict[str, float]:
        """Return the known facts that a tracker stores as metrics, by metric name."""
        metrics: dict[str, float] = {}
        for column in COLUMNS:
            fact = self.facts[column.name]
            if column.metric and fact is not None:
                metrics[column.metric] = column.round(fact)
        return metrics

    def to_tags(self) -> dict[str, str]:
        """Return the known facts that a tracker stores as tags, by tag name."""
        tags: dict[str, str] = {}
        for column in COLUMNS:
            fact = self.facts[column.name]
            if column.tag and fact is not None:
                tags[column.tag] = column.word(fact)
        return tags


def answer_first(arms: Sequence[ArmRow]) -> list[str]:
    """Return the column names of a table of arms, with ε and the compared score before all others.

    Args:
        arms: The rows of the table; a column that one of them has is a column of all.
    """
    names: list[str] = []
    scores: list[str] = []
    for arm in arms:
        names.extend(arm.to_flat())
        scores.extend(arm.scores)
        scores.extend(arm.spreads)
    columns = ["arm", "epsilon"]
    on_test = [name for name in scores if MetricName.parse(name).split == "test"]
    for score in (on_test or scores)[:1]:  # the one that arms are compared by
        answer = [f"{score}{end}" for end in ("_mean", "_error", "", "_low", "_high")]
        columns.extend(name for name in answer if name in names)
    columns.extend(names)
    return list(dict.fromkeys(columns))


def beats_constant(release: Release, metric: MetricName) -> bool | None:
    """Return whether a release is shown to beat the best constant answer; None where that is not known.

    Of one draw its 95% interval must lie beyond that answer; of repetitions the mean, by two standard errors.

    Args:
        release: What an arm released.
        metric: The score that says so.
    """
    score = score_of(release, metric)
    if score is None or score.constant is None:
        return None
    constant = score.constant
    if not release.repetitions:
        if metric.lower_is_better:
            return score.high < constant
        return score.low > constant
    values = values_of(release).get(str(metric), [])
    spread = Spread.of(values)
    if spread is None:
        return None
    gain = spread.mean - constant
    if metric.lower_is_better:
        gain = -gain
    return gain > _ERRORS * (spread.error or 0.0)


def score_of(release: Release, metric: MetricName) -> ScoreEstimate | None:
    """Return the estimate of a metric in a release, or in the first repetition that has it; else None."""
    name = str(metric)
    if name in release.scores:
        return release.scores[name]
    for run in release.repetitions:
        if name in run.scores:
            return run.scores[name]
    return None


def _trial_document(trial: TrialResult) -> dict[str, object]:
    """Return a trial that is paid for: its hyperparameters, its score and the score's interval."""
    return {
        "number": trial.index,
        "params": trial.params,
        "score": trial.score,
        "estimate": None if trial.estimate is None else trial.estimate.to_shown(),
    }
