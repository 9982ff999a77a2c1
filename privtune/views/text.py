"""Words and numbers as people read them: ε rounded up, the budget in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.facts import EXACT, ROWS, UNCHARGED, declared_note
from privtune.ledger.wording import PromiseWording
from privtune.numbers import show_epsilon, show_left
from privtune.prose import capitalise
from privtune.strategies.spread import Spread, values_of
from privtune.study.arm_row import word_draws
from privtune.study.observer import releases_of
from privtune.tasks import MECHANISM
from privtune.training.mechanism.estimates import NO_INFORMATION, NOT_COVERED, joined, show_value
from privtune.training.mechanism.metric_name import MetricName
from privtune.training.mechanism.metrics import label

if TYPE_CHECKING:
    from privtune.accounting import Guarantee
    from privtune.strategies import Plan, Release
    from privtune.strategies.release import Repetition
    from privtune.strategies.score_plan import ScorePlan
    from privtune.study import Study
    from privtune.study.observer import Arms, StageStatus
    from privtune.study.spec import BudgetSpec


def show_params(params: Mapping[str, Any]) -> str:
    """Return hyperparameters in one line, numbers to four digits.

    Example:
        >>> show_params({"learning_rate": 0.12345, "momentum": None})
        'learning_rate = 0.1235, momentum = None'
    """
    parts = []
    for name, value in params.items():
        is_float = isinstance(value, float)
        text = f"{value:.4g}" if is_float else str(value)
        parts.append(f"{name} = {text}")
    return ", ".join(parts)


def stage_line(stage: StageStatus) -> str:
    """Return a line about a stage: its ε alone, and its release or its state.

    A stage is a release before the arms, such as quantiles of columns: no arm pays for it again.
    """
    cost = f"ε = {show_epsilon(stage.guarantee.epsilon)}"
    state = stage.words or stage.state
    return f"Stage {stage.plan.arm}, shared by all arms: {cost}; {state}."


def weakened(study: Study) -> str:
    """Return what weakens the guarantee of a study, in words; empty if nothing does.

    Such as a fixed seed, with which no guarantee holds, or facts that are declared and not enforced.
    """
    notes = [study.spec.weakened]
    for plan in study.plans:
        note = declared_note(plan.public_facts)
        if note not in notes[1:]:
            notes.append(note)
    return "; ".join(filter(None, notes))


def declared_trainings(study: Study) -> list[str]:
    """Return the declarations of trainings, each once, with what was compared with their charge.

    Such trainings are another library's: that they fit their event is that person's word.
    """
    sentences: dict[str, None] = {}
    for arm in study.status():
        mechanism = arm.plan.public_facts.get(MECHANISM)
        if not mechanism:
            continue
        sentence = mechanism
        if arm.release is not None and arm.release.checked:
            sentence = f"{mechanism}; {arm.release.checked}"
        sentences[sentence] = None
    return list(sentences)


Facts = Mapping[str, str]
"""Public facts by name, in words."""


def public_facts(plans: Sequence[Plan]) -> list[tuple[str, Facts]]:
    """Return each list of declared public facts once, with the names of the arms that rest on it.

    Returns:
        Pairs of the arms' names, joined by commas, and their facts by name. Arms of one study mostly
        rest on the same facts: a list for each arm would be read by nobody.
    """
    facts_by_arm = {plan.arm: plan.public_facts for plan in plans}
    names: list[str] = []
    lists: list[Facts] = []
    for arm, facts in facts_by_arm.items():
        if facts in lists:
            place = lists.index(facts)
            names[place] += f", {arm}"
        else:
            names.append(arm)
            lists.append(facts)
    return list(zip(names, lists, strict=True))


ONE_DRAW = word_draws(1)
"""What stands behind the numbers of an arm that was run once."""
NOT_MEASURED = "not measured"
"""What stands for a metric that no charge paid for."""
EXPECTED = (
    "Gradients counts the gradients of single records. This number and the CPU seconds are expected values; "
    "the seconds are measured on a few steps with made-up records. The true values stay secret, since they "
    "would tell the sizes of the random batches, or how many candidates a selection trained."
)
"""What stands below every comparison."""


def show_metric(name: MetricName, value: float) -> str:
    """Return the value of a metric as text, a share in percent.

    Example:
        >>> show_metric(MetricName("test", "accuracy"), 0.912)
        '91.2%'
        >>> show_metric(MetricName("test", "mae"), 12.34567)
        '12.3457'
    """
    return show_value(value, share=name.is_share)


def first_metric(arms: Arms) -> MetricName:
    """Return the one metric that arms are ranked by, as losses and accuracies have no common order.

    Where arms released different metrics it is the first; arms without it stand last.
    """
    return utility_names(arms)[0]


def utility_names(arms: Arms) -> list[MetricName]:
    """Return the metrics that arms are compared by: test metrics, or else validation scores.

    Arms that released different metrics are compared by all of them. Before anything is released it is the
    one that is planned.
    """
    names = _test_metrics(arms) or _validation_metrics(arms)
    if names:
        return [MetricName.parse(name) for name in names]
    metric = _planned_metric(arms)
    if metric is None:
        has_numbers = any("target" in arm.plan.public_facts for arm in arms)
        metric = "mae" if has_numbers else "accuracy"
    return [MetricName("test", metric)]


def _draws(release: Release) -> Sequence[Release | Repetition]:
    """Return the repetitions of a release, or the release itself in a tuple if it has none."""
    return release.repetitions or (release,)


def _test_metrics(arms: Arms) -> list[str]:
    """Return the first test metric of each release, without duplicates."""
    names: dict[str, None] = {}
    for release in releases_of(arms):
        for draw in _draws(release):
            first = list(draw.estimates)[:1]
            names |= dict.fromkeys(first)
    return list(names)


def _validation_metrics(arms: Arms) -> list[str]:
    """Return the validation scores that arms chose by, each once."""
    names: dict[str, None] = {}
    for arm in arms:
        if arm.release is None or arm.plan.scored != "validation":
            continue
        for draw in _draws(arm.release):
            names |= dict.fromkeys(draw.choice)
    return list(names)


def _planned_metric(arms: Arms) -> str | None:
    """Return the metric that the first arm with a report measures; None if no arm has one."""
    report = _first_report(arms)
    return None if report is None else label(report.metric)


def _first_report(arms: Arms) -> ScorePlan | None:
    """Return the report of the first arm that has one: how its released model is scored on the test split."""
    reports = (arm.plan.report for arm in arms)
    return next(filter(None, reports), None)


def utility_column(arms: Arms) -> tuple[str, dict[str, str]]:
    """Return the title of the column that compares arms, and its text for every released arm.

    Returns:
        The title, and a cell by arm: the value with its interval or standard error, and behind a
        semicolon other metrics of the same release. An arm that has not released has no cell.
    """
    names = utility_names(arms)
    texts = {}
    for arm in arms:
        if arm.release is not None:
            texts[arm.plan.arm] = _utility_text(arm.release, names)
    title = " or ".join(name.words for name in names)
    return title, texts


def _utility_text(release: Release, names: Sequence[MetricName]) -> str:
    """Return a release's cell of the comparison: its value of the compared metric, then other metrics.

    Args:
        release: Each metric has its interval, or over repetitions its standard error.
        names: Metrics that arms are compared by: the first one that the release has stands first.
    """
    first = next((name for name in names if str(name) in release.scores), None)
    cells = [NOT_MEASURED]
    if first is not None:
        cells = [_show_score(first, release)]
    for text in release.estimates:
        name = MetricName.parse(text)
        if name in names:
            continue
        metric = name.metric.replace("_", " ")
        score = _show_score(name, release)
        cells.append(f"{metric} {score}")
    return "; ".join(cells)


def _show_score(name: MetricName, release: Release) -> str:
    """Return a metric as text: one draw with its interval, or a mean with its standard error."""
    if not release.repetitions:
        return release.scores[str(name)].text
    no_values = [None] * len(release.repetitions)
    values = values_of(release).get(str(name), no_values)
    spread = Spread.of(values)
    if spread is None:
        return NO_INFORMATION
    text = show_spread(name, spread)
    count = len(values)
    if spread.n == count:
        return text
    return f"{text} ({spread.n} of {count})"


def show_spread(name: MetricName, spread: Spread) -> str:
    """Return the mean of a metric as text, with its standard error if it has more than one value."""
    if name.is_share:
        mean = f"{spread.mean:.2%}"
        number_format = ".2%"
    else:
        mean = show_metric(name, spread.mean)
        number_format = ".2g"
    if spread.error is None:
        return mean
    return f"{mean} ± {spread.error:{number_format}}"


def draws_of(arms: Arms) -> str:
    """Return in words how many draws the numbers of released arms stand for; empty before a release.

    Empty before anything is released.
    """
    draws = map(_draws, releases_of(arms))
    counts = dict.fromkeys(map(len, draws))
    return " or ".join(word_draws(count) for count in counts)


def charged_repetitions(plan: Plan) -> str:
    """Return a sentence on whether an arm's repetitions were charged; empty for one draw or without ε.

    All of them are, unless every record is declared public: a benchmark shows what one run would cost.
    """
    if plan.repeats == 1 or not plan.is_private:
        return ""
    if plan.repeats_charged:
        return f"Each of the {plan.repeats} repetitions was charged: ε is the cost of all together."
    return (
        f"One of the {plan.repeats} repetitions was charged, and ε is that of one: all records are declared "
        "public (a benchmark)."
    )


def declared_sentences(plans: Sequence[Plan]) -> list[str]:
    """Return sentences, each once, on facts that are declared but not enforced, and on uncharged parts.

    What repetitions were charged is said by :func:`charged_repetitions`.
    """
    sentences: dict[str, None] = {}
    for plan in plans:
        facts = plan.public_facts
        for name in (ROWS, MECHANISM):
            if name in facts:
                sentence = capitalise(f"{name} {facts[name]}")
                sentences[f"{sentence.rstrip('.')}."] = None
        if EXACT in facts.get(UNCHARGED, ""):
            sentence = (
                f"{EXACT} were not charged, since all records are declared public (a benchmark)."
            )
            sentences[capitalise(sentence)] = None
    return list(sentences)


def spread_notes(arms: Arms) -> list[str]:
    """Return notes below a comparison: what repetitions show, or what single draws cannot show.

    Returns:
        Sentences to stand below a comparison; none before anything is released.
    """
    if not releases_of(arms):
        return []
    repeated = []
    for arm in arms:
        if arm.release is not None and arm.release.repetitions:
            repeated.append((arm.plan, arm.release))
    if not repeated:
        return [
            "Each arm ran once, and another run may give another result. "
            "With repeats: N each arm runs N times."
        ]
    lines = [
        "Each score is the mean ± its standard error over repetitions, which share the test records. “Better "
        "than next” is the probability that an arm's mean is better than the mean of the arm below it "
        "(Student's t test on the differences between paired repetitions). Gradients and CPU seconds are "
        "those of one repetition."
    ]
    charges = (charged_repetitions(plan) for plan, _ in repeated)
    lines += dict.fromkeys(filter(None, charges))
    for plan, release in repeated:
        count = len(release.repetitions)
        failures = _count_failures(release)
        if failures:
            lines.append(f"{plan.arm}: of {count} repetitions, {failures}.")
    return lines


def _count_failures(release: Release) -> str:
    """Return in words how many repetitions released nothing and how many diverged; empty if all succeeded."""
    runs = release.repetitions
    empty = sum(run.nothing for run in runs)
    diverged = sum(run.diverged for run in runs)
    parts = []
    if empty:
        parts.append(f"{empty} released nothing (and do not count in the probabilities)")
    if diverged:
        parts.append(f"{diverged} diverged")
    return ", ".join(parts)


def explain_utility(arms: Arms) -> str:
    """Return a text that explains the column of :func:`utility_column`, and how it was paid for."""
    title, texts = utility_column(arms)
    title = capitalise(title)
    coverage = _coverage(arms)
    how = (
        "To measure every arm on the private test split, with noise and at a cost in ε, write "
        "report: {metric: ...} in the spec."
    )
    if first_metric(arms).split == "validation":
        sentence = (
            f"{title} is the score by which an arm chose its best candidate. It has noise and was charged, "
            f"unless the validation split is public{coverage}"
        )
        if NOT_MEASURED in texts.values():
            sentence += f" Arms without a search have no such score. {how}"
        return sentence
    if set(texts.values()) <= {NOT_MEASURED}:
        why = "the task's test split is private" if texts else "nothing is released yet"
        return f"{title} was not measured: {why}. {how}"
    of_all = ""
    if any(len(_draws(release)) > 1 for release in releases_of(arms)):
        of_all = ", as the mean over the models of all repetitions"
    report = _first_report(arms)
    if report is not None and report.event is not None:
        return f"{title} is measured on the private test split{of_all}, with noise, and was charged{coverage}"
    return (
        f"{title} is measured without noise on the test split, which the task declares public{of_all}"
        f"{coverage}"
    )


def _coverage(arms: Arms) -> str:
    """Return the end of a sentence on what the intervals of arms of one draw cover."""
    parts: dict[str, None] = {}
    has_scores = False
    for release in releases_of(arms):
        if release.repetitions:
            continue
        scores = release.estimates or release.choice
        for score in scores.values():
            has_scores = True
            parts.update(dict.fromkeys(score.covers))
    if not has_scores:
        return "."
    return f". The 95% interval accounts for {joined(list(parts))}. {NOT_COVERED}"


def together(spent: Guarantee) -> str:
    """Return by which method the total cost of all charges is known, as the end of a sentence.

    The end of a sentence: it follows an ε.
    """
    # As long as something may be added, it is no composition but an upper bound that holds at any time.
    match spent.method:
        case "odometer":
            return "by a privacy odometer: an upper bound for all charges, valid at any time"
        case "filter":
            return "by the privacy filter: the budget minus the part that the filter has left"
        case method:
            return f"by {method}: the composition of all charges, not their sum"


def describe_dataset(certificate: Mapping[str, Any]) -> str:
    """Return the protected dataset of a budget's certificate in words: its name and its source.

    A source that repeats the name, alone or before a bracket, is not written twice. A budget that
    names no dataset is described by its own name.

    Args:
        certificate: As :func:`privtune.ledger.export_certificate` returns it.
    """
    budget = certificate["budget"]
    name = budget["dataset"]
    sources = budget["datasets"]
    if not name:
        return f"the data of budget {budget['terms']['name']}"
    if sources == [name] or not sources:
        return str(name)
    first = str(sources[0])
    if len(sources) == 1 and first.startswith(f"{name} ("):
        return first
    return f"{name}, read from {'; '.join(sources)}"


def budget_line(budget: BudgetSpec, spent: Guarantee, left: float) -> str:
    """Return the state of a budget in one line, for the first line of a note.

    Args:
        budget: Its terms, fixed at creation.
        spent: What all charges cost together: shown rounded up.
        left: ε that the filter still grants: shown rounded down.
    """
    wording = PromiseWording(budget.unit)
    adjacency = wording.state_adjacency(budget.adjacency)
    return (
        f"Privacy budget {budget.name}: ε = {show_epsilon(spent.epsilon)} of {budget.epsilon:g} "
        f"charged, {show_left(left)} left (δ = {budget.delta:g}, {adjacency})"
    )


def choice_lines(
    budget: BudgetSpec,
    spent: Guarantee,
    arms: Arms,
) -> list[str]:
    """Return a sentence on the ε of an arm that is chosen among two released arms or more.

    Args:
        budget: The study's.
        spent: What all charges of the budget cost together.
        arms: Those that are compared.
    """
    if len(releases_of(arms)) < 2:
        return []
    return [
        "The ε of an arm is of that arm alone. Whoever takes one by looking at this table quotes "
        f"{_epsilon_of_all(budget, spent)}"
    ]


def _epsilon_of_all(budget: BudgetSpec, spent: Guarantee) -> str:
    """Return the end of a sentence: the ε of all charges of a budget, which a choice among arms has used."""
    return f"ε = {show_epsilon(spent.epsilon)}: all charges of budget {budget.name} together, up to now."


def chosen_line(budget: BudgetSpec, alone: Guarantee, spent: Guarantee) -> str:
    """Return a sentence on which ε to quote for an arm's release: its own, or the budget's.

    Whoever looked at several arms and takes the best has used all their charges.

    Args:
        budget: The study's.
        alone: What the arm's charge costs.
        spent: What all charges of the budget cost together.
    """
    return (
        f"ε = {show_epsilon(alone.epsilon)} is of this arm alone. If it was chosen by looking at other "
        f"arms' results, quote {_epsilon_of_all(budget, spent)}"
    )
