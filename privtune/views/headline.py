"""The answer of a study in a sentence: which arm is best, how surely, and how its model is used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from privtune.accounting import Composed, Repeated, epsilon
from privtune.numbers import show_epsilon, show_left
from privtune.plots.study_charts import ranked
from privtune.strategies.spread import Spread, values_of
from privtune.study.arm_row import beats_constant, score_of
from privtune.study.observer import releases_of
from privtune.tasks import MECHANISM
from privtune.training.mechanism.metric_name import MetricName
from privtune.views.order import order_of, show_probability
from privtune.views.text import first_metric, show_metric, show_spread

if TYPE_CHECKING:
    from privtune.strategies import Release
    from privtune.study import Study
    from privtune.study.observer import Arms

SURE = 0.95
"""How probable an order of two means must be to be called shown."""

_SUGGESTED = 5  # repetitions
_OF_TWO_CLASSES = 0.5  # balanced accuracy of the constant answer
_UNSURE = "No arm is shown to be best"
_OF_ESTIMATOR = re.compile("-[0-9a-f]{12}$")  # how the name of a fit's study ends


@dataclass(frozen=True)
class Headline:
    """The answer of a study in sentences: the best arm, the use of its model, and advice.

    Args:
        answer: Which arm is best and how surely, or that none is shown to be.
        use: How the best arm's model is used; empty where there is none.
        advice: What would tell more, and what that would cost; empty where the answer is sure.
    """

    answer: str
    use: str = ""
    advice: str = ""

    @property
    def lines(self) -> list[str]:
        """The lines that are not empty: the answer with the advice, then the use."""
        sentences = f"{self.answer} {self.advice}"
        lines = (sentences.rstrip(), self.use)
        return list(filter(None, lines))


def headline(study: Study, arms: Arms, *, option: str = "") -> Headline:
    """Return a study's answer, from the states of its arms.

    An order of arms is called shown where their repetitions make it at least 95% probable, or where the
    95% interval of the best one lies beyond those of all others.

    Args:
        study: The study.
        arms: The states of its arms.
        option: What a command needs besides to find the study's storage.
    """
    released = releases_of(arms)
    if not released:
        again = f"privtune study run {study.name}{option}"
        if study.spec.task is None:
            again = "run its program"
        return Headline(f"Nothing is released yet: {again}")
    metric = first_metric(arms)
    measured = _measured(arms, metric)
    if not measured:
        answer = "No arm was measured, so it is unknown which one is best."
        return Headline(answer, _use(study, released[0], option))
    best = measured[0]
    constant = _constant(best, metric)
    if constant is not None and not _is_any_useful(measured, metric):
        return Headline(_of_none(metric, constant))
    if len(measured) == 1:
        answer = _of_one(arms, best, metric)
        return Headline(answer, _use(study, best, option))
    is_repeated = all(release.repetitions for release in measured)
    if is_repeated:
        answer, is_sure = _of_repetitions(arms, measured, metric)
    else:
        answer, is_sure = _of_intervals(measured, metric)
    advice = "" if is_sure or is_repeated else _advise_repetitions(study)
    use = _use(study, best, option, sure=is_sure)
    return Headline(answer, use, advice)


def _is_any_useful(releases: Sequence[Release], metric: MetricName) -> bool:
    """Return whether some release is shown to be better than the constant answer."""
    return any(beats_constant(release, metric) for release in releases)


def _measured(arms: Arms, metric: MetricName) -> list[Release]:
    """Return the releases that have a score by a metric, the best first."""
    releases = []
    for arm, value in ranked(arms, metric):
        if value is None or arm.release is None:
            continue
        if score_of(arm.release, metric) is not None:
            releases.append(arm.release)
    return releases


def _of_one(arms: Arms, release: Release, metric: MetricName) -> str:
    """Return the answer of a study with a single measured arm."""
    reached = f"reaches {_reached(release, metric)}"
    if len(arms) == 1:
        return f"`{release.arm}`, the only arm, {reached}."
    is_alone = len(releases_of(arms)) == 1
    how = "is released so far" if is_alone else "was measured"
    return f"Only `{release.arm}` {how}: it {reached}."


def _of_none(metric: MetricName, constant: float) -> str:
    """Return the answer of a study in which no arm is shown to be better than a constant answer.

    Args:
        metric: What arms are compared by.
        constant: What always giving the same answer reaches.
    """
    reached = show_metric(metric, constant)
    answer = f"By {metric.words} no arm is shown to be better than always giving the same answer ({reached})."
    is_balanced = metric.metric == "balanced_accuracy"
    if is_balanced and constant == _OF_TWO_CLASSES:
        answer += (
            " It judges the class that is named, not how records are ranked: where one class is rare, "
            "report: {metric: auc} of a new study measures that."
        )
    return answer


def constant_notes(arms: Arms) -> list[str]:
    """Return a line for each arm not shown to beat a constant answer, with the advice of its plan.

    Noise may drown a training: its score then looks like a result, and is that of no model at all.
    """
    metric = first_metric(arms)
    notes: list[str] = []
    for arm in arms:
        if arm.release is None:
            continue
        if beats_constant(arm.release, metric) is not False:  # None: that is not known
            continue
        constant = _constant(arm.release, metric) or 0.0
        reached = show_metric(metric, constant)
        note = (
            f"{arm.plan.arm}: not shown to be better than always giving the same answer "
            f"({reached})."
        )
        advice = str(arm.plan.details.get("advice", ""))
        # Where another arm's note has the advice, it is not repeated.
        if advice and not any(other.endswith(advice) for other in notes):
            note += f" {advice}"
        notes.append(note)
    return notes


def _constant(release: Release, metric: MetricName) -> float | None:
    """Return the score of the best constant answer by a metric, or None if it is unknown."""
    score = score_of(release, metric)
    return None if score is None else score.constant


def _spread(release: Release, metric: MetricName) -> Spread | None:
    """Return the mean and standard error of a metric over repetitions, or None without any value."""
    values = values_of(release).get(str(metric), [])
    return Spread.of(values)


def _reached(release: Release, metric: MetricName) -> str:
    """Return an arm's value of a metric as text, with its interval or its standard error."""
    spread = _spread(release, metric)
    if release.repetitions and spread is not None:
        return show_spread(metric, spread)
    return release.scores[str(metric)].text


def _of_repetitions(
    arms: Arms, releases: Sequence[Release], metric: MetricName
) -> tuple[str, bool]:
    """Return the answer for repeated arms, ordered by their means, and whether it is sure."""
    best, second = releases[:2]
    reached = _reached(best, metric)
    probabilities = order_of(arms)[best.arm]
    worse = []
    doubtful = []
    for arm, probability in probabilities.items():
        if probability is not None and probability >= SURE:
            worse.append(f"`{arm}`")
        else:
            doubtful.append(f"`{arm}` ({show_probability(probability)})")
    if not doubtful:
        wins = _count_wins(best, second, metric)
        answer = (
            f"`{best.arm}` is best: {reached}, better than `{second.arm}` in {wins} repetitions."
        )
        return answer, True
    answer = (
        f"{_UNSURE}: the best mean is that of `{best.arm}`, {reached}, and it is less than {SURE:.0%} sure "
        f"to be better than that of {', '.join(doubtful)}"
    )
    if worse:
        verb = "is" if len(worse) == 1 else "are"
        answer += f"; {', '.join(worse)} {verb} shown to be worse"
    return f"{answer}.", False


def _count_wins(best: Release, second: Release, metric: MetricName) -> str:
    """Return, as text, in how many of the common repetitions the best arm beats the second."""
    best_values = values_of(best)[str(metric)]
    second_values = values_of(second)[str(metric)]
    wins = 0
    pairs = 0
    for value, other in zip(best_values, second_values, strict=False):
        if value is None or other is None:
            continue
        pairs += 1
        is_won = value < other if metric.lower_is_better else value > other
        wins += is_won
    return f"{wins} of {pairs}"


def _of_intervals(releases: Sequence[Release], metric: MetricName) -> tuple[str, bool]:
    """Return the answer for arms of one draw, ordered best first, and whether it is sure.

    It is where the best one's interval lies beyond those of all others: a stricter rule than a test of
    the difference, and one that needs no assumption about what the arms share.

    Raises:
        KeyError: If the best arm has no score by the metric.
    """
    best, *others = releases
    first = score_of(best, metric)
    if first is None:
        raise KeyError(str(metric))
    overlapping = []
    for other in others:
        score = score_of(other, metric)
        if score is None:
            continue
        if metric.lower_is_better:
            overlaps = first.high >= score.low
        else:
            overlaps = first.low <= score.high
        if overlaps:
            overlapping.append(f"`{other.arm}`")
    if not overlapping:
        side = "below" if metric.lower_is_better else "above"
        answer = f"`{best.arm}` is best: {first.text}, {side} the intervals of all other arms."
        return answer, True
    names = ", ".join(overlapping)
    if len(overlapping) == 1:
        overlap = f"the interval of {names} overlaps"
    else:
        overlap = f"the intervals of {names} overlap"
    answer = f"{_UNSURE}: `{best.arm}` has {first.text}, and {overlap} with it."
    return answer, False


def _advise_repetitions(study: Study) -> str:
    """Return the advice to repeat arms in a new study, its largest cost, and whether the budget holds it."""
    repeats = f"repeats: {_SUGGESTED}"
    if study.spec.task is None:  # of a program, not of a spec
        repeats = f"repeats={_SUGGESTED}"
    more = f"A new study of {repeats} tells more"
    plans = [plan for plan in study.plans if plan.is_private]
    if not any(plan.repeats_charged for plan in plans):
        return (
            f"{more}, and with a new budget it takes ε from nobody, since all records are public."
        )
    events = [Repeated(_SUGGESTED, plan.event) for plan in plans]
    budget = study.spec.budget
    everything = Composed(events)
    # By RDP alone: a quick upper bound.
    cost = epsilon(
        everything,
        budget.delta,
        adjacency=budget.adjacency,
        method="rdp",
    )
    needs = f"with the noise of this one it costs ε = {show_epsilon(cost.epsilon)}"
    if study._life.ledger.holds(budget.name, events):
        return f"{more}: {needs}, which budget {budget.name} holds."
    return (
        f"Budget {budget.name}, with {show_left(study.remaining())} of ε left, does not hold a new study of "
        f"{repeats}, which would tell more: {needs}."
    )


def _use(study: Study, release: Release, option: str, *, sure: bool = True) -> str:
    """Return a sentence on how to use an arm's model: by the command line if it takes rows of a file.

    Args:
        study: The arm's.
        release: The arm's; of a release without a model there is nothing to use.
        option: What a command needs besides to find the study's storage.
        sure: Whether the arm is shown to be the best one.
    """
    if release.is_nothing:
        return ""
    use = "Use it" if sure else f"Use {release.arm}, as no other is shown to be better"
    if _takes_rows(study.spec.task):
        return f"{use}: privtune predict {study.name} {release.arm} RECORDS.csv{option}"
    comma = "," if sure else ";"
    python = f"{use}{comma} in Python"
    release_of = f"privtune.load_study({study.name!r}).release({release.arm!r})"
    if study.spec.task is not None:
        return f"{python}: {release_of}.predict(...)"
    facts_by_arm = {plan.arm: plan.public_facts for plan in study.plans}
    if MECHANISM in facts_by_arm[release.arm]:
        # Another program trained it, and nobody else knows its network.
        return f"{python}: your_model.load_state_dict({release_of}.state_dict())"
    is_of_estimator = release.arm == "fit" and _OF_ESTIMATOR.search(study.name)
    if is_of_estimator:
        return f"{python}: predict of the estimator that was fitted; another fit is another charge."
    # Its model is code of the program, and in no other process.
    return (
        f"{python}: run the program again, with create_study(..., load_if_exists=True), and call "
        f".predict(...) on the release of {release.arm!r}, which optimize returns at no charge."
    )


def _takes_rows(task: object) -> bool:
    """Return whether a task in a spec takes rows of a file: it is of a table or of texts."""
    while isinstance(task, Mapping) and "task" in task:
        task = task["task"]  # of a fine-tuning
    if not isinstance(task, Mapping):
        return False
    return task.get("type") in ("tabular", "text")
