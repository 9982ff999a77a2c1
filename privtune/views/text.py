"""Words and numbers as people read them: ε rounded up, the budget in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.ledger.wording import PromiseWording
from privtune.numbers import show_epsilon, show_left
from privtune.strategies.spread import Spread, values_of
from privtune.tasks import MECHANISM
from privtune.tasks._facts import declared_note
from privtune.training.mechanism.estimates import NO_INFORMATION, NOT_COVERED, joined, show_value
from privtune.training.mechanism.metrics import is_share

if TYPE_CHECKING:
    from privtune.accounting import Guarantee
    from privtune.strategies import Plan, Release
    from privtune.study import ArmStatus, Study
    from privtune.study.observer import StageStatus
    from privtune.study.spec import BudgetSpec


def show_params(params: Mapping[str, Any]) -> str:
    """Return hyperparameters in one line."""
    return ", ".join(
        f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in params.items()
    )


def stage_line(stage: StageStatus) -> str:
    """Return what a stage released, or how far it is, and what it cost alone."""
    cost = f"ε = {show_epsilon(stage.guarantee.epsilon)}"
    return f"Stage {stage.plan.arm}, shared by all arms: {cost}; {stage.words or stage.state}."


def weakened(study: Study) -> str:
    """Name what weakens the guarantee of a study; empty if nothing does."""
    notes = {declared_note(plan.public_facts): None for plan in study.plans}
    return "; ".join(filter(None, (study.spec.weakened, *notes)))


def declared_trainings(study: Study) -> list[str]:
    """Return by whom trainings are declared, and what was compared with the charge, each once."""
    said: dict[str, None] = {}
    for arm in study.status():
        if words := arm.plan.public_facts.get(MECHANISM):
            checked = "" if arm.release is None else arm.release.checked
            said["; ".join(filter(None, (words, checked)))] = None
    return list(said)


def public_facts(plans: Sequence[Plan]) -> list[tuple[str, Mapping[str, str]]]:
    """Return what is declared public, each list once, with the arms that rest on it."""
    lists: list[tuple[list[str], Mapping[str, str]]] = []
    for plan in plans:
        arms = next((arms for arms, facts in lists if facts == plan.public_facts), None)
        if arms is None:
            lists.append(([plan.arm], plan.public_facts))
        else:
            arms.append(plan.arm)
    return [(", ".join(arms), facts) for arms, facts in lists]


NOT_MEASURED = "not measured"
"""What stands for a metric that no charge paid for."""
EXPECTED = (
    "Gradient evaluations, and the seconds of private arms, are the plan's expectations. The true numbers "
    "stay sealed: they would tell the sizes of the random batches, or how many runs a selection made."
)
"""What stands below every comparison."""


def metric_of(name: str) -> str:
    """Return the metric in a name such as ``test_accuracy``.

    Example:
        >>> metric_of("validation_macro_f1")
        'macro_f1'
    """
    return name.removeprefix("validation_").removeprefix("tuning_").removeprefix("test_")


def show_metric(name: str, value: float) -> str:
    """Return the value of a metric on a split as people read it: a share in percent.

    Example:
        >>> show_metric("test_accuracy", 0.912), show_metric("test_mae", 12.34567)
        ('91.2%', '12.3457')
    """
    return show_value(value, share=is_share(metric_of(name)))


def first_metric(arms: Sequence[ArmStatus]) -> str:
    """Return the one metric that arms are ranked by: losses and accuracies have no order in common."""
    return utility_name(arms).split(" or ")[0]


def utility_name(arms: Sequence[ArmStatus]) -> str:
    """Return the name of what arms are compared by: a test metric, or else the validation score."""
    released = [
        (arm.plan, run)
        for arm in arms
        if arm.release is not None
        for run in arm.release.repetitions or (arm.release,)
    ]
    # Of several metrics of one release, the first.
    names = dict.fromkeys(name for _, run in released for name in list(run.estimates)[:1])
    names = names or dict.fromkeys(
        name for plan, run in released if plan.scored == "validation" for name in run.choice
    )
    if names:
        return " or ".join(names)
    plans = [arm.plan for arm in arms]
    asked = next((plan.report.metric for plan in plans if plan.report is not None), None)
    numbers = any("target" in plan.public_facts for plan in plans)
    return f"test_{asked or ('mae' if numbers else 'accuracy')}"


def utility_column(arms: Sequence[ArmStatus]) -> tuple[str, dict[str, str]]:
    """Return the title of what arms are compared by, and its text for every released arm."""
    names = utility_name(arms).split(" or ")
    shown = {}
    for arm in arms:
        release = arm.release
        if release is None:
            continue
        first = next((name for name in names if name in release.scores), None)
        cells = [NOT_MEASURED if first is None else _shown(first, release)]
        for name in release.estimates:
            if name not in names:
                cells.append(f"{metric_of(name).replace('_', ' ')} {_shown(name, release)}")
        shown[arm.plan.arm] = "; ".join(cells)
    return " or ".join(names).replace("_", " "), shown


def _shown(name: str, release: Release) -> str:
    """Return a metric of one draw with its interval, or its mean over repetitions with the standard error."""
    if not release.repetitions:
        return release.scores[name].text
    values = values_of(release).get(name, [None] * len(release.repetitions))
    spread = Spread.of(values)
    if spread is None:
        return NO_INFORMATION
    text = show_spread(name, spread)
    return text if spread.n == len(values) else f"{text} ({spread.n} of {len(values)})"


def show_spread(name: str, spread: Spread) -> str:
    """Return the mean of a metric with its standard error."""
    share = is_share(metric_of(name))
    text = f"{spread.mean:.2%}" if share else show_metric(name, spread.mean)
    if spread.error is not None:
        text += f" ± {spread.error:.2%}" if share else f" ± {spread.error:.2g}"
    return text


def draws_of(arms: Sequence[ArmStatus]) -> str:
    """Return what stands behind the numbers of released arms: one draw each, or the mean of several."""
    found = dict.fromkeys(draws(arm.release) for arm in arms if arm.release is not None)
    return " or ".join(found)


def draws(release: Release) -> str:
    """Return what stands behind the numbers of a release: one draw, or the mean of several."""
    return f"mean of {len(release.repetitions)}" if release.repetitions else "one draw"


def charged_repetitions(plan: Plan) -> str:
    """Return whether the repetitions of an arm were charged; empty of one draw, or without ε."""
    if plan.repeats == 1 or not plan.is_private:
        return ""
    if plan.repeats_charged:
        return f"Each of the {plan.repeats} repetitions was charged: ε is that of all."
    return (
        f"The {plan.repeats} repetitions were not charged: all records are declared public (a benchmark). "
        "ε is that of one."
    )


def spread_notes(arms: Sequence[ArmStatus]) -> list[str]:
    """Return what one draw does not say, or what repetitions say, how many gave nothing, and who paid."""
    released = [(arm.plan, arm.release) for arm in arms if arm.release is not None]
    repeated = [(plan, release) for plan, release in released if release.repetitions]
    if not repeated:
        once = "Each arm is one draw: another run of it may turn out otherwise. "
        return [f"{once}repeats: N in the spec shows the spread of N runs."] if released else []
    lines = [
        "After ± stands the standard error of the mean over repetitions, which share the test records. "
        "Better than next: the probability that an arm's mean is better than that of the arm below it "
        "(Student's t of the differences, repetition by repetition). Gradient evaluations, and the seconds "
        "of private arms, are of one repetition."
    ]
    lines += dict.fromkeys(filter(None, (charged_repetitions(plan) for plan, _ in repeated)))
    for plan, release in repeated:
        runs = release.repetitions
        nothing = "released nothing (their pairs are in no probability)"
        counts = {nothing: sum(run.nothing for run in runs)}
        counts["diverged"] = sum(run.diverged for run in runs)
        if said := ", ".join(f"{count} {what}" for what, count in counts.items() if count):
            lines.append(f"{plan.arm}: of {len(runs)} repetitions, {said}.")
    return lines


def explain_utility(arms: Sequence[ArmStatus]) -> str:
    """Return one sentence: what the column of :func:`utility_column` is, and how it was paid for."""
    title, shown = utility_column(arms)
    how = (
        "For a score of every arm on the private test split, noised and charged, say in the spec "
        "report: {metric: ...}."
    )
    title = title[0].upper() + title[1:]
    if title.startswith("Validation"):
        missing = f" Arms that choose nothing have none. {how}"
        return (
            f"{title} is the score that the arm was chosen by: noised and charged, unless the "
            f"validation split is public{_covered(arms)}"
            f"{missing if NOT_MEASURED in shown.values() else ''}"
        )
    if set(shown.values()) <= {NOT_MEASURED}:
        why = "the task's test split is private" if shown else "nothing is released yet"
        return f"{title} was not measured: {why}. {how}"
    covered = _covered(arms)
    reports = [arm.plan.report for arm in arms if arm.plan.report is not None]
    if reports and reports[0].event is not None:
        return f"{title} is that of the released model on the private test split: noised and charged{covered}"
    return (
        f"{title} is that of the released model on the test split, which the task declares "
        f"public{covered}"
    )


def _covered(arms: Sequence[ArmStatus]) -> str:
    """Return the end of a sentence: what the intervals of arms of one draw cover, and what they do not."""
    scores = [
        score
        for arm in arms
        if arm.release is not None and not arm.release.repetitions
        for score in (arm.release.estimates or arm.release.choice).values()
    ]
    if not scores:
        return "."
    covers = dict.fromkeys(part for score in scores for part in score.covers)
    return f", with a 95% interval that covers {joined(list(covers))}. {NOT_COVERED}"


def together(spent: Guarantee) -> str:
    """Return how it is known what all charges cost together."""
    # As long as something may be added, it is no composition but an upper bound that holds at any time.
    bound = {
        "odometer": "by the odometer: a bound on all charges that may be read at any time",
        "filter": "by the filter: the budget less what the filter has left",
    }
    known = bound.get(spent.method)
    return known or f"by {spent.method}: the composition of all charges, not their sum"


def budget_line(budget: BudgetSpec, spent: Guarantee, left: float) -> str:
    """Return the state of a budget in one line, for the first line of a note."""
    return (
        f"Privacy budget {budget.name}: ε = {show_epsilon(spent.epsilon)} of {budget.epsilon:g} "
        f"charged, {show_left(left)} left (δ = {budget.delta:g}, "
        f"{PromiseWording(budget.unit).state_adjacency(budget.adjacency)})"
    )
