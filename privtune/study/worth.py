"""The expected width of scores' intervals, from public facts alone, before a charge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.strategies import Plan, ScorePlan, Scoring
from privtune.strategies.laws import few_runs
from privtune.training.mechanism.constant import declared_constant
from privtune.training.mechanism.estimates import NO_INFORMATION, ScoreEstimate, show_value
from privtune.training.mechanism.metrics import OF_CLASSES, label

if TYPE_CHECKING:
    from privtune.tasks import Task

WIDE = 0.5
"""Share of a metric's range above which an interval deserves a warning."""
CLEAR = 0.4
"""Share of a metric's range up to which a report is taken unasked: noise makes some intervals wider."""
_IMBALANCED = 0.5
"""Part of an equal share below which a declared rarest class makes a task an imbalanced one."""
_UNDECLARED = 3.0  # a rarest class that nobody declares has this part of an equal share


NO_REPORT = "no_report"
"""The detail of a plan that says why planning chose no report."""


class WorthlessScoreError(PrivTuneError):
    """A score would be charged although its interval tells nothing."""


@dataclass(frozen=True, kw_only=True)
class ExpectedScore:
    """The interval that a score of a middling model is expected to have.

    Args:
        split: ``test``, ``validation`` or ``tuning``.
        metric: Name of the metric.
        arms: The arms that are scored so.
        records: Declared number of records of the split.
        private: Whether the score is noised, and charged.
        rarest: The share of the rarest class that was reckoned with; None where classes do not matter.
        estimate: The interval around a value of 0.8, or in the middle of what the metric can be.
        constant: What the best constant answer reaches, where public facts tell.
        sealed_size: Whether the number of records is an expectation, and the true one is sealed.
        instead: Of a wide interval the metric to ask for in its place, in words; empty where none is
            narrower.

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
    constant: float | None = None
    instead: str = ""
    sealed_size: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether the interval would cover more than half of the metric's range."""
        return self.estimate.share_of_range > WIDE

    @property
    def holds_constant(self) -> bool:
        """Whether the best constant answer lies within the interval, below the middling model."""
        if self.constant is None:
            return False
        estimate = self.estimate
        return estimate.low <= self.constant < estimate.value

    @property
    def is_worthless(self) -> bool:
        """Whether the score would be charged and say nothing.

        Of a score that candidates are chosen by, the order counts, and it may hold the constant answer.
        """
        if not self.private:
            return False
        says_nothing = self.split == "test" and self.holds_constant
        return says_nothing or not self.estimate.is_informative

    @property
    def words(self) -> str:
        """A sentence on the expected interval, with remedies if it is wide or worthless."""
        split = self.split
        if self.sealed_size:
            split = f"expected {self.split}"
        records = f"{self.records:,} {split} records"
        if self.rarest is not None:
            records += f" ({self.rarest:.1%} of them in the rarest class)"
        score = self.estimate
        if not score.is_informative:
            prospect = f"give {NO_INFORMATION}: its interval would cover all possible values"
        else:
            middle = show_value(score.value, share=score.share)
            prospect = f"have a 95% interval of about {score.ends} if it is {middle}"
        noun = "Arm" if len(self.arms) == 1 else "Arms"
        names = ", ".join(self.arms)
        arms = f"{noun} {names}"
        sentence = f"{arms}: {self.metric} on {records} will {prospect}.{self._warning}"
        if self.is_wide or self.is_worthless:
            return f"{sentence} {self.remedy}"
        return sentence

    @property
    def _warning(self) -> str:
        """A sentence on the best constant answer if it may be as good; else empty."""
        score = self.estimate
        if self.constant is None:
            return ""
        constant = show_value(self.constant, share=score.share)
        if score.is_informative and self.holds_constant:
            return (
                f" That tells nothing: always giving the same answer reaches {constant}, inside "
                "the interval."
            )
        if score.share and self.constant >= score.value:
            return f" Always giving the same answer reaches {constant}, which is more."
        return ""

    @property
    def remedy(self) -> str:
        """A sentence on what would narrow the interval."""
        ways = []
        if self.instead:
            ways.append(self.instead)
        if self.split == "test":
            ways.append("a larger report: {epsilon_share: ...}")
        ways.append("more records in the split")
        ways.append("fewer arms or a larger ε")
        if self.rarest is not None:
            ways.append("a larger rarest_share, if the rarest class is more frequent than declared")
        return f"To narrow the interval: {'; '.join(ways)}."

    def to_dict(self) -> dict[str, Any]:
        """Return the expected score as a JSON-ready dict."""
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


def expected_scores(
    plans: Sequence[Plan],
    task: Task,
) -> tuple[ExpectedScore, ...]:
    """Return the expected scores of arms from public facts, those on the test split first.

    Args:
        plans: The plans of the arms.
        task: The task; its public facts are read.

    Returns:
        Those of the test split first; arms that are scored alike stand together.
    """
    scores: dict[tuple[str, str], ExpectedScore] = {}
    for split, arm, terms in _scored(plans, task):
        key = (split, repr(terms))
        if key in scores:
            score = scores[key]
            arms = (*score.arms, arm)
            scores[key] = replace(score, arms=arms)
        else:
            scores[key] = _expected_score(split, arm, terms, task)
    return tuple(scores.values())


def _expected_score(
    split: str,
    arm: str,
    terms: ScorePlan,
    task: Task,
) -> ExpectedScore:
    """Return the expected score of one arm on one split."""
    rarest = rarest_of(task)
    is_private = terms.event is not None
    metrics = terms.make_metrics()
    takes_classes = any(metric.takes in OF_CLASSES for metric in metrics)
    # Where all records count alike, a rare class makes the interval no wider.
    counts_alike = metrics[0].takes in OF_CLASSES and metrics[0].counts_alike
    # A split by content or by ids draws each record for itself: its size is one that happened.
    is_size_sealed = is_private and task.partition in ("content", "id")
    return ExpectedScore(
        split=split,
        metric=label(terms.metric),
        arms=(arm,),
        records=terms.records,
        private=is_private,
        rarest=rarest if takes_classes and not counts_alike else None,
        estimate=terms.expected(classes=task.classes or 2, rarest=rarest),
        constant=declared_constant(terms.metric, classes=task.classes, rarest=task.rarest_share),
        instead=_narrower(terms, split, task),
        sealed_size=is_size_sealed,
    )


def preferred_metrics(task: Task) -> tuple[str, ...]:
    """Return the metrics that suit a task's target, the one that says most first.

    Where a class is declared to be rare, accuracy says little: answering the other class always is nearly
    right. The area under the curve compares models at any threshold, balanced accuracy at theirs.

    Args:
        task: The task; its public facts are read.

    Returns:
        ``mae`` for a target in a range; ``accuracy`` for classes, after ``auc`` (of two classes) and
        ``balanced_accuracy`` where the declared share of the rarest class is below half of an equal share;
        nothing where the facts do not say what the target is.
    """
    if task.target_range is not None:
        return ("mae",)
    if task.classes is None:
        if task.like is None:
            return ()
        labels = task.like[1]
        are_classes = not labels.is_floating_point() and labels.ndim == 1
        return ("accuracy",) if are_classes else ()
    share = task.rarest_share
    usual_share = _IMBALANCED / task.classes
    if share is None or share >= usual_share:
        return ("accuracy",)
    if task.classes == 2:
        return ("auc", "balanced_accuracy", "accuracy")
    return ("balanced_accuracy", "accuracy")


def check_worth(plans: Sequence[Plan], task: Task) -> None:
    """Refuse scores that would be charged and say nothing.

    Args:
        plans: The plans of the arms.
        task: The task; its public facts are read.

    Raises:
        WorthlessScoreError: If the interval of one would be all that its metric can be.
    """
    scores = expected_scores(plans, task)
    worthless = [score.words for score in scores if score.is_worthless]
    if worthless:
        sentences = " ".join(worthless)
        raise WorthlessScoreError(
            f"{sentences} Nothing was charged. To run it all the same: "
            "--force (in Python force=True)."
        )


def noise_on_mean(report: ScorePlan) -> float:
    """Return the standard deviation of the noise on a mean over the declared number of records."""
    metric = report.make_metrics()[0]
    least, most = metric.range
    deviation = report.noises[0].deviation  # on the sum over records, in units of the range
    return deviation * (most - least) / report.records


def words_of(plans: Sequence[Plan], task: Task) -> list[str]:
    """Return what scores will be worth and how likely selections train few candidates, in sentences."""
    scores = expected_scores(plans, task)
    sentences = [score.words for score in scores]
    if all(score.split != "test" for score in scores):
        advice = "No arm is measured on the private test split. To measure all, write report: {metric: ...}."
        reasons = [plan.details.get(NO_REPORT, advice) for plan in plans]
        sentences += dict.fromkeys(map(str, reasons))  # each once
    few = candidates_words(plans)
    if few:
        sentences.append(few)
    return sentences


def candidates_words(plans: Sequence[Plan]) -> str:
    """Return a sentence for each selection on how few candidates it may train."""
    sentences = []
    for plan in plans:
        if plan.runs is None:
            continue
        floor = plan.runs.minimum
        if floor is not None and floor >= 2:
            sentences.append(f"Arm {plan.arm} trains at least {floor} candidates.")
            continue
        law = few_runs(plan.runs)
        share = law["none"] + law["one"]
        share = min(1.0, share)  # rounding may add up to more
        sentences.append(
            f"With probability {share:.1%}, arm {plan.arm} trains at most one candidate."
        )
    return " ".join(sentences)


def _scored(plans: Sequence[Plan], task: Task) -> list[tuple[str, str, ScorePlan]]:
    """Return split, arm and terms of each score: first of reports, then of choices among candidates.

    Without a report an arm is measured on a test split that is public, or of a benchmark, exactly.
    """
    is_public = task.public_test or task.benchmark
    has_target = task.classes is not None or task.target_range is not None
    scores = []
    for plan in plans:
        if plan.report is not None:
            scores.append(("test", plan.arm, plan.report))
        elif is_public and has_target and task.test_records > 0:
            accuracy = Scoring()  # or the error of a target in a range
            exact = accuracy.exact(
                records=task.test_records,
                target_range=task.target_range,
            )
            scores.append(("test", plan.arm, exact))
    for plan in plans:
        if plan.score is not None and plan.score.records > 0:
            # A choice needs the order of candidates alone: the interval of each is enough.
            terms = replace(plan.score, candidates=1.0)
            scores.append((plan.scored, plan.arm, terms))
    return scores


def _narrower(terms: ScorePlan, split: str, task: Task) -> str:
    """Return words on another metric of classes with a narrower interval; empty without one."""
    if task.classes is None or terms.records < 1:
        return ""
    names = ["balanced_accuracy", "accuracy"]
    if task.classes == 2:
        names.insert(0, "auc")
    for name in names:
        if name == terms.metric:
            continue
        other = Scoring(metric=name, mechanism=terms.mechanism)
        exact = other.exact(records=terms.records)
        noised = replace(
            exact,
            noise_multiplier=terms.noise_multiplier,
            adjacency=terms.adjacency,
            candidates=terms.candidates,
        )
        estimate = noised.expected(
            classes=task.classes,
            rarest=rarest_of(task),
        )
        if estimate.share_of_range > WIDE:
            continue
        constant = declared_constant(
            name,
            classes=task.classes,
            rarest=task.rarest_share,
        )
        if constant is not None and estimate.high <= constant:
            continue  # it would say surely that a middling model is worse than no model
        field = "report" if split == "test" else "scoring"
        words = f"{field}: {{metric: {name}}}, an interval of about {estimate.ends}"
        if constant is None:
            return words
        value = show_value(constant, share=estimate.share)
        return f"{words} (always giving the same answer reaches {value})"
    return ""


def rarest_of(task: Task) -> float:
    """Return the share of the rarest class: as it is declared, else a third of an equal share."""
    if task.rarest_share is not None:
        return task.rarest_share
    return 1.0 / (_UNDECLARED * (task.classes or 2))
