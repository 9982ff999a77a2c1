"""What scores will be worth: how wide their intervals will be, by public facts alone, before a charge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.strategies import Plan, ScorePlan, Scoring
from privtune.strategies.laws import few_runs
from privtune.training.mechanism.estimates import NO_INFORMATION, ScoreEstimate, show_value
from privtune.training.mechanism.metrics import label

if TYPE_CHECKING:
    from privtune.tasks import Task

WIDE = 0.5
"""Share of a metric's range above which an interval deserves a warning."""
_UNDECLARED = 3.0  # a rarest class that nobody declares has this part of an equal share


class WorthlessScoreError(PrivTuneError):
    """A score would be paid for, and its interval would be all that its metric can be."""


@dataclass(frozen=True, kw_only=True)
class ExpectedScore:
    """The interval that a model of middling quality would have.

    Args:
        split: ``test``, ``validation`` or ``tuning``.
        metric: Name of the metric.
        arms: The arms that are scored so.
        records: Declared number of records of the split.
        private: Whether the score is noised, and charged.
        rarest: The share of the rarest class that was reckoned with; None where classes do not matter.
        estimate: The interval around a value of 0.8, or in the middle of what the metric can be.

    Example:
        >>> scores = expected_scores(study.plans, study.spec.load_task())
        >>> [(score.split, score.metric, score.records, score.is_wide) for score in scores]
        [('test', 'accuracy', 30, False), ('validation', 'accuracy', 30, False)]
    """

    split: str
    metric: str
    arms: tuple[str, ...]
    records: int
    private: bool
    rarest: float | None
    estimate: ScoreEstimate

    @property
    def is_wide(self) -> bool:
        """Whether the interval would hold more than half of what the metric can be."""
        return self.estimate.share_of_range > WIDE

    @property
    def is_worthless(self) -> bool:
        """Whether the score would be charged and say nothing."""
        return self.private and not self.estimate.is_informative

    @property
    def words(self) -> str:
        """What is expected, in a sentence; of a wide interval also what would narrow it."""
        records = f"{self.records:,} {self.split} records"
        if self.rarest is not None:
            records += f", {self.rarest:.1%} of them of the rarest class,"
        score = self.estimate
        if not score.is_informative:
            what = f"{NO_INFORMATION}: its interval would be all that it can be"
        else:
            middle = show_value(score.value, share=score.share)
            what = f"an interval of about {score.ends} around {middle}"
        sentence = f"Arms {', '.join(self.arms)}: on {records} {self.metric} will have {what}."
        return f"{sentence} {self.remedy}" if self.is_wide else sentence

    @property
    def remedy(self) -> str:
        """What narrows the interval."""
        where = "report" if self.split == "test" else "scoring"
        ways = ["more records in the split", "fewer arms or a larger ε"]
        if self.split == "test":
            ways.insert(0, "a larger report: {epsilon_share: ...}")
        if self.metric not in ("accuracy", "top_k"):
            ways.append(f"{where}: {{metric: accuracy}}")
        if self.rarest is not None:
            ways.append("the declared rarest_share, if that class is more frequent")
        return f"Narrower by {'; '.join(ways)}."

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "split": self.split,
            "metric": self.metric,
            "arms": list(self.arms),
            "records": self.records,
            "private": self.private,
            "rarest_share": self.rarest,
            "informative": self.estimate.is_informative,
            "share_of_range": self.estimate.share_of_range,
            **self.estimate.to_dict(),
        }


def expected_scores(plans: Sequence[Plan], task: Task) -> tuple[ExpectedScore, ...]:
    """Return what is known beforehand of the scores of arms. Touches no data.

    Args:
        plans: The plans of the arms.
        task: The task; its public facts are read.

    Returns:
        Those of the test split first; arms that are scored alike stand together.
    """
    scores: dict[tuple[str, str], ExpectedScore] = {}
    rarest = _rarest(task)
    for split, arm, terms in _scored(plans, task):
        key = (split, repr(terms))
        if key in scores:
            scores[key] = replace(scores[key], arms=(*scores[key].arms, arm))
            continue
        of_classes = any(metric.takes in ("classes", "two") for metric in terms.make_metrics())
        alike = terms.metric in ("accuracy", "top_k")
        scores[key] = ExpectedScore(
            split=split,
            metric=label(terms.metric),
            arms=(arm,),
            records=terms.records,
            private=terms.event is not None,
            rarest=rarest if of_classes and not alike else None,
            estimate=terms.expected(classes=task.classes or 2, rarest=rarest),
        )
    return tuple(scores.values())


def check_worth(plans: Sequence[Plan], task: Task) -> None:
    """Refuse scores that would be charged and say nothing.

    Raises:
        WorthlessScoreError: If the interval of one would be all that its metric can be.
    """
    worthless = [score for score in expected_scores(plans, task) if score.is_worthless]
    if worthless:
        raise WorthlessScoreError(
            f"{' '.join(score.words for score in worthless)} Nothing was charged. To run it all the same: "
            "--anyway (in Python anyway=True)."
        )


def noise_on_mean(report: ScorePlan) -> float:
    """Return the most that the noise on a mean deviates, if as many records are there as declared."""
    metric = report.make_metrics()[0]
    least, most = metric.range
    return report.noises[0].deviation * (most - least) / report.records


def words_of(plans: Sequence[Plan], task: Task) -> list[str]:
    """Return what scores will be worth and how likely selections train few candidates, in sentences."""
    scores = expected_scores(plans, task)
    sentences = [score.words for score in scores]
    if all(score.split != "test" for score in scores):
        sentences.append(
            "No arm is measured on the private test split: report: {metric: ...} would pay for it."
        )
    few = candidates_words(plans)
    return [*sentences, few] if few else sentences


def candidates_words(plans: Sequence[Plan]) -> str:
    """Return how probable it is that a selection trains no more than one candidate, a sentence an arm."""
    sentences = []
    for plan in plans:
        if plan.runs is None:
            continue
        law = few_runs(plan.runs)
        share = min(1.0, law["none"] + law["one"])
        sentences.append(
            f"Arm {plan.arm} trains no more than one candidate with probability {share:.1%}."
        )
    return " ".join(sentences)


def _scored(plans: Sequence[Plan], task: Task) -> list[tuple[str, str, ScorePlan]]:
    """Return the split, the arm and the terms of each score: reports, then what candidates are chosen by."""
    public = task.public_test or task.benchmark
    measurable = public and (task.classes is not None or task.target_range is not None)
    scores = []
    for plan in plans:
        if plan.report is not None:
            scores.append(("test", plan.arm, plan.report))
        elif measurable and task.test_records > 0:
            exact = Scoring().exact(records=task.test_records, target_range=task.target_range)
            scores.append(("test", plan.arm, exact))
    for plan in plans:
        if plan.score is not None and plan.score.records > 0:
            # A choice needs the order of candidates alone: the interval of each is enough.
            scores.append((plan.scored, plan.arm, replace(plan.score, candidates=1.0)))
    return scores


def _rarest(task: Task) -> float:
    """Return the share of the rarest class: as it is declared, else a third of an equal share."""
    if task.rarest_share is not None:
        return task.rarest_share
    return 1.0 / (_UNDECLARED * (task.classes or 2))
