"""Documents and printed texts of plans, studies, comparisons, rehearsals and sealed trials.

A command computes a result in one call and hands it over. Here it becomes JSON, or text that reads well in 80
columns. What a page shows, too, comes from `privtune.views`, so that terminal and page say the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.accounting import epsilon
from privtune.accounting.registry import formula
from privtune.cli._common import program, say, say_left_out, show_facts, show_table
from privtune.imports import has
from privtune.ledger.wording import PromiseWording
from privtune.names import usual_storage
from privtune.numbers import finite, show_epsilon, show_left
from privtune.strategies.describe import noise_of, plan_line
from privtune.strategies.laws import (
    Floor,
    few_runs,
    floor_of,
    other_minimums,
    price_of_minimums,
    priced_floor_of,
    say_few_runs,
)
from privtune.tasks import MECHANISM
from privtune.training.mechanism.streams import Streams
from privtune.training.methods.rate_schedule import AVERAGES
from privtune.views import text
from privtune.views.comparison import table_of
from privtune.views.headline import Headline, constant_notes, headline
from privtune.views.order import show_probability

if TYPE_CHECKING:
    from privtune.accounting import Event, Guarantee
    from privtune.rehearsal import Rehearsal
    from privtune.spaces import SearchSpace
    from privtune.stages.stage_plan import StagePlan
    from privtune.strategies import Plan
    from privtune.study import ArmStatus, Study, StudySpec
    from privtune.study.planning import StudyPlan
    from privtune.tables.unusable import RecordCheck

_SPARE = (
    "released parameters", "CPU seconds", "gradients", "strategy", "better than next",
)  # fmt: skip
"""Columns of a comparison that a narrow terminal does without, the first one first."""

_NEGLIGIBLE = 1e-30
"""Probability of noise beyond the generator's range below which it is not mentioned."""

_CURATOR = "Curator's view: none of this may be shown to anyone else."


def plan_document(
    plan: Plan, guarantee: Guarantee, space: SearchSpace, *, with_prices: bool
) -> dict[str, Any]:
    """Return an arm's plan as JSON-ready data.

    Args:
        plan: The arm's plan.
        guarantee: What the arm costs by itself.
        space: The study's search space; the wider it is, the more a fewest number of runs matters.
        with_prices: Whether to account its ε at other minimum numbers of runs.
    """
    selection: dict[str, Any] = {}
    if plan.runs is not None:
        floor = _floor_of_runs(plan, guarantee, with_prices=with_prices)
        selection["few_runs"] = few_runs(plan.runs)
        selection["floor"] = None if floor is None else floor.to_dict()
        if with_prices:
            prices = _prices_of_fewest_runs(plan, guarantee, space)
            selection["min_runs"] = [
                {"min_runs": fewest, "epsilon": price} for fewest, price in prices.items()
            ]
    return {
        **plan.to_dict(),
        **selection,
        "guarantee": finite(guarantee.to_dict()),
        "expected_runs": plan.expected_runs,
        "expected_gradient_evaluations": plan.expected_gradient_evaluations,
        "noise_multipliers": noise_of(plan),
        "noise": {**plan.training.noise.to_dict(), "mass_beyond_reach": plan.beyond_reach},
    }


def study_plan_document(
    spec: StudySpec,
    study_plan: StudyPlan,
    examples: Mapping[str, Any] | Sequence[Any],
    *,
    with_prices: bool,
) -> dict[str, Any]:
    """Return the plan of a study as JSON-ready data, for ``study plan --json``.

    Args:
        spec: The study's spec.
        study_plan: Its arms and stages, with what each costs and all cost together.
        examples: Candidates drawn from its space, as `draw_examples` returns them.
        with_prices: Whether to account the arms' ε at other minimum numbers of runs.
    """
    from privtune.study.worth import expected_scores

    space = spec.search_space()
    arms = []
    for plan, guarantee in zip(study_plan.plans, study_plan.guarantees, strict=True):
        arms.append(plan_document(plan, guarantee, space, with_prices=with_prices))
    stages = []
    for stage, cost in zip(study_plan.stages, study_plan.stage_guarantees, strict=True):
        stages.append({**stage.to_dict(), "guarantee": finite(cost.to_dict())})
    scores = expected_scores(study_plan.plans, spec.load_task())
    document: dict[str, Any] = {
        "study": spec.name,
        "target_epsilon": spec.target_epsilon,
        "arms": arms,
    }
    if stages:
        document["stages"] = stages
    document["total"] = finite(study_plan.total.to_dict())
    document["examples"] = examples
    document["expected_scores"] = [score.to_dict() for score in scores]
    return document


def _prices_of_fewest_runs(
    plan: Plan, guarantee: Guarantee, space: SearchSpace
) -> dict[int, float]:
    """Return the ε that an arm would cost at other minimum numbers of runs, by that number.

    Empty where there is nothing to offer.
    """
    if plan.runs is None or not _other_minimums(plan, guarantee, space):
        return {}
    return price_of_minimums(
        plan.event, plan.runs, space, delta=guarantee.delta, adjacency=guarantee.adjacency
    )


def _other_minimums(plan: Plan, guarantee: Guarantee, space: SearchSpace) -> dict[int, Event]:
    """Return the events of other minimum numbers of runs that are offered for an arm, by that number.

    Empty where there is nothing to offer: no selection, no finite ε, or repetitions, whose common ε says
    nothing of one selection.
    """
    if plan.runs is None or not math.isfinite(guarantee.epsilon) or plan.charged != plan.event:
        return {}
    return other_minimums(plan.event, plan.runs, space)


def _floor_of_runs(plan: Plan, guarantee: Guarantee, *, with_prices: bool) -> Floor | None:
    """Return the effect of the minimum number of runs on an arm, None if the arm has no minimum."""
    if plan.runs is None or not math.isfinite(guarantee.epsilon):
        return None
    if not with_prices:
        return floor_of(plan.runs)
    return priced_floor_of(
        plan.charged, plan.runs, delta=guarantee.delta, adjacency=guarantee.adjacency
    )


def print_plan(plan: Plan, guarantee: Guarantee, space: SearchSpace, *, with_prices: bool) -> None:
    """Print an arm's plan: its title, a summary in one line, and labelled facts.

    Args:
        plan: The arm's plan.
        guarantee: What the arm costs by itself.
        space: The study's search space.
        with_prices: Whether to account its ε at other minimum numbers of runs.
    """
    title = f"{plan.arm} ({plan.strategy})"
    if not plan.is_private:
        title += ": no privacy guarantee; runs only with --non-private"
    say(title, bold=True)
    say(f"  {plan_line(plan, guarantee)}")
    show_facts("", _plan_facts(plan, guarantee, space, with_prices=with_prices))


def _plan_facts(
    plan: Plan, guarantee: Guarantee, space: SearchSpace, *, with_prices: bool
) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts that are printed below the title of an arm's plan.

    A label whose text is empty is not printed. The order is that of a reader's questions: what is charged,
    which noise protects it, what is trained, what it costs to compute, and what leaves the boundary.
    """
    yield "event", formula(plan.charged)
    yield "noise", _noise_words(plan)
    searches = plan.search.trainings if plan.search is not None else ()
    methods: list[Any] = [training.method for training in (plan.training, *searches)]
    for average in sorted({method.average for method in methods}):
        yield "average", f"{average}: the model that is scored and released is {AVERAGES[average]}"
    yield from _selection_facts(plan, guarantee, space, with_prices=with_prices)
    yield from _cost_facts(plan, guarantee)
    yield from _report_facts(plan)
    for name in ("chosen", "why", "extrapolation"):
        yield name, str(plan.details.get(name, ""))
    for row in plan.details.get("law_auto", {}).get("trade", ()):
        mark = "chosen: " if row["chosen"] else ""
        noise_of_law = f"noise x {row['noise']:.3f}"
        yield "law: auto", f"{mark}{row['law']}, mean {row['mean_runs']:g}: {noise_of_law}"
    yield "released", "; ".join(plan.released)
    yield "sealed (secret)", "; ".join(plan.sealed)


def _noise_words(plan: Plan) -> str:
    """Return a text on an arm's random generator, and on the probability of noise beyond its range."""
    noise = plan.training.noise
    words = f"random generator: {noise.source}; floating-point treatment: {noise.floating_point}"
    if noise.is_correlated:
        words += f"; correlated over {noise.bands} steps"
        if "error_of_sums" in plan.details:
            share = plan.details["error_of_sums"]
            words += f", the error in sums of noise is {share:.2f} of that of independent noise"
    if plan.beyond_reach < _NEGLIGIBLE:
        return words
    probability = f"{plan.beyond_reach:.2g}"
    return f"{words}; noise lies beyond the generator's range with probability {probability}"


def _selection_facts(
    plan: Plan, guarantee: Guarantee, space: SearchSpace, *, with_prices: bool
) -> Iterator[tuple[str, str]]:
    """Yield labelled texts on how many candidates a selection trains, and the ε of higher minimums."""
    if plan.runs is not None:
        trains = say_few_runs(plan.runs)
        yield "mean runs", f"{plan.expected_runs:g}; the selection trains {trains}"
    floor = _floor_of_runs(plan, guarantee, with_prices=with_prices)
    if floor is not None:
        yield "fewest runs", floor.words
    if not _other_minimums(plan, guarantee, space):
        return
    wide = (
        "The search space is wide, so a single candidate is likely to be a bad one. The option min_runs "
        "sets the smallest number of candidates"
    )
    if not with_prices:
        yield "note", f"{wide}; --prices adds what it costs."
        return
    now = show_epsilon(guarantee.epsilon, 4)
    offers = []
    for fewest, price in _prices_of_fewest_runs(plan, guarantee, space).items():
        offers.append(f"{show_epsilon(price, 4)} with min_runs: {fewest}")
    yield (
        "note",
        f"{wide}. At the same noise and mean number of runs it raises ε from {now} to "
        f"{' and to '.join(offers)}.",
    )


def _cost_facts(plan: Plan, guarantee: Guarantee) -> Iterator[tuple[str, str]]:
    """Yield labelled texts on an arm's gradient evaluations and on how its repetitions are charged."""
    evaluations = plan.expected_gradient_evaluations
    of_one = " of one run" if plan.repeats > 1 else ""
    yield "gradient evaluations", f"{evaluations:,.0f} expected{of_one}"
    if plan.charged != plan.event:
        one = epsilon(plan.event, guarantee.delta, adjacency=guarantee.adjacency)
        cost = show_epsilon(one.epsilon, 4)
        yield "repetitions", f"{plan.repeats}, each charged; one alone would cost ε = {cost}"
    elif plan.repeats > 1:
        yield (
            "repetitions",
            f"{plan.repeats}; all records are declared public, so ε is that of the first, and no ε covers "
            "the others",
        )
    baseline = plan.details.get("baseline_gradient_evaluations")
    if baseline is not None:
        ratio = baseline / evaluations
        yield "", f"{ratio:.2f} times fewer than the {baseline:,.0f} of tuning on all the data"


def _report_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield labelled texts on an arm's report on the test split and its calibrated probabilities."""
    share = plan.details.get("report_epsilon_share")
    if share is not None:
        metric = "score" if plan.report is None else plan.report.metric
        yield (
            "report",
            f"{metric} on the test split. This score alone would cost {share:g} of the arm's ε; a larger "
            "share would need more noise in training",
        )
    if plan.report is None or plan.report.calibrator is None:
        return
    split = "the public test split"
    if plan.report.event is not None:
        split = f"the test split, with {plan.report.calibration:.0%} of the report's release"
    yield (
        "probabilities",
        f"calibrated by a temperature, fitted on {split}; the predicted classes do not change",
    )


def print_advice(plans: Sequence[Plan]) -> None:
    """Print each piece of advice that methods give once, with the names of the arms that it concerns."""
    arms_by_advice: dict[str, list[str]] = {}
    for plan in plans:
        advice = str(plan.details.get("advice", ""))
        if advice:
            arms_by_advice.setdefault(advice, []).append(plan.arm)
    facts = [(", ".join(arms), advice) for advice, arms in arms_by_advice.items()]
    show_facts("", facts)


def print_stage(plan: StagePlan, guarantee: Guarantee, what: str, **more: str) -> None:
    """Print one stage of a plan or of a study.

    Args:
        plan: What the stage releases before the arms, and with how much noise.
        guarantee: What it costs by itself.
        what: What follows its type in the title, with a comma before it.
        more: Further facts by their labels, such as its state in a study that runs.
    """
    facts = {
        "ε": f"{show_epsilon(guarantee.epsilon, 4)} by {guarantee.method}",
        "event": formula(plan.charged),
        "noise on each sum": f"{plan.scale:.4g}",
        **more,
    }
    show_facts(f"{plan.arm} (stage {plan.stage.type}{what})", facts.items())


def print_public(plans: Sequence[Plan]) -> None:
    """Print the facts that are declared public, with the names of the arms that use them."""
    rows: list[tuple[str, str]] = []
    for arms, facts in text.public_facts(plans):
        rows.append(("arms", arms))
        rows.extend(facts.items())
    show_facts("Declared public (the guarantee does not protect these facts)", rows)


def draw_examples(spec: StudySpec) -> list[dict[str, Any]]:
    """Draw ten example candidates from a spec's space, with a fixed public seed.

    They are no candidates of any round: those derive from the arm's secret.
    """
    space = spec.search_space()
    streams = Streams(bytes(32))
    if not space:
        return []
    return [space.draw(streams, number) for number in range(10)]


def print_examples(candidates: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of example candidates, one row each."""
    # Not the table's title, which would be broken into the width of a narrow table.
    say(
        "Ten random candidates from the search space (examples only: the arms draw their own)",
        bold=True,
    )
    columns = list(candidates[0])
    rows = [[show_value(value) for value in candidate.values()] for candidate in candidates]
    show_table(columns, rows, numeric=columns)


def show_value(value: Any) -> str:
    """Return a hyperparameter as text: floats in four digits, everything else as Python writes it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def print_arm(plan: Plan, arm: Mapping[str, Any]) -> None:
    """Print the state, ε, event and released parameters of one arm of a study.

    Args:
        plan: The arm's plan.
        arm: Its part of the comparison's document, with what was released of it.
    """
    cost = "∞ NOT PRIVATE"
    if arm["epsilon"] is not None:
        cost = f"{show_epsilon(arm['epsilon'], 4)} by {arm['bound']}"
    parameters = arm["params"] or {}
    values = [f"{name} = {show_value(value)}" for name, value in parameters.items()]
    facts = {
        "state": arm["state"],
        "ε": cost,
        "event": formula(plan.charged),
        MECHANISM: plan.public_facts.get(MECHANISM, ""),
        "released parameters": ", ".join(values),
    }
    show_facts(f"{plan.arm} ({plan.strategy})", facts.items())


def print_comparison(study: Study, *, logged: bool = True, wide: bool = False) -> None:
    """Print a study's answer, the table of its arms, footnotes, and the command for MLflow.

    Args:
        study: The study.
        logged: Whether its arms are in MLflow.
        wide: Whether to print every column, however narrow the terminal is.
    """

    def read() -> tuple[Sequence[ArmStatus], Headline, list[str]]:
        arms = study.status()
        answer = headline(study, arms, option=_storage_option(study))
        return arms, answer, _footnotes(study, arms)

    # All of it, before the first line is printed.
    arms, answer, footnotes = study._life.outlast(read)
    say(f"Study {study.name} on {study.spec.task_name}", bold=True)
    for line in answer.lines:
        say(line)
    rows = table_of(arms)
    columns = list(rows[0]) if rows else ["arm"]
    cells = [list(row.values()) for row in rows]
    numeric = columns[2:-1]
    if wide:
        show_table(columns, cells, numeric=numeric, wide=True)
    else:
        spare = [name for name in _SPARE if name in columns]
        omitted = show_table(columns, cells, numeric=numeric, keep_lines=True, spare=spare)
        say_left_out(omitted)
    for line in footnotes:
        say(line)
    if any(arm.release is not None for arm in arms):
        say(_way_to_mlflow(study, logged=logged))


def _way_to_mlflow(study: Study, *, logged: bool) -> str:
    """Return the command that opens a study's arms in MLflow, or logs them there.

    What logs is always there; the server of the pages is an extra, which may have to be installed first.
    """
    action = "Log it to"
    command = "study sync"
    install = ""
    if logged:
        action = "Open it in"
        command = "ui --study"
        if not has("flask"):
            install = " (first: pip install 'privtune[ui]')"
    option = _storage_option(study)
    return f"{action} MLflow{install}: {program()} {command} {study.name}{option}"


def _storage_option(study: Study) -> str:
    """Return the ``--storage`` option for a printed command, empty where the default will do."""
    from privtune.ledger.urls import masked_url

    if study.storage == str(usual_storage()):
        return ""
    if masked_url(study.storage) != study.storage:
        return " (with PRIVTUNE_STORAGE set)"
    return f" --storage {study.storage}"


def _footnotes(study: Study, arms: Sequence[ArmStatus]) -> list[str]:
    """Return the lines below a comparison: the budget, caveats, notes on arms, and public facts."""
    wording = PromiseWording(study.spec.budget.unit)
    spent = study.spent()
    lines = [
        _budget_words(study, spent),
        *text.choice_lines(study.spec.budget, spent, arms),
        wording.short_caveat,
        text.explain_utility(arms),
        *constant_notes(arms),
        *text.spread_notes(arms),
        text.EXPECTED,
    ]
    lines += map(text.stage_line, study.stages)
    if any(arm.plan.is_sealed for arm in arms):
        lines.append(
            "A selection keeps its other candidates secret. The curator, who holds the data, can read them: "
            f"privtune study show {study.name} --curator."
        )
    for arm in arms:
        if arm.release and arm.release.note:
            lines.append(f"{arm.plan.arm}: {arm.release.note}")
    for arm in arms:
        lines += _price_of_openness(study, arm.plan)
    if study.spec.seed is not None:
        lines.append(
            f"The seed is fixed ({study.spec.seed}): no guarantee holds against anyone who knows the seed."
        )
    return [*lines, *text.declared_sentences(study.plans)]


def _budget_words(study: Study, spent: Guarantee) -> str:
    """Return a sentence on how much ε of a study's budget is charged, and how much is left."""
    budget = study.spec.budget
    adjacency = PromiseWording(budget.unit).state_adjacency(budget.adjacency)
    if spent.epsilon <= 0:
        return (
            f"Budget {budget.name}: nothing of ε = {budget.epsilon:g} has been charged yet (δ = "
            f"{budget.delta:g}, {adjacency})."
        )
    remainder = show_left(study.remaining())
    return (
        f"Budget {budget.name}: ε = {show_epsilon(spent.epsilon)} of {budget.epsilon:g} charged, "
        f"{remainder} left (δ = {budget.delta:g}, {adjacency}, {text.together(spent)})."
    )


def _price_of_openness(study: Study, plan: Plan) -> list[str]:
    """Return a line on what private selection would have cost an arm that releases every trial.

    Of arms that draw no candidate for itself there is nothing to compare.
    """
    if plan.details.get("sampler") != "random":
        return []
    from privtune.strategies.everything import selection_instead

    budget = study.spec.budget
    selection = selection_instead(plan, delta=budget.delta, adjacency=budget.adjacency)
    if selection is None:
        return []
    return [
        f"{plan.arm} releases every trial. Private selection, which releases only the best of a "
        f"random number of trials (mean {plan.expected_runs:g}), would have cost ε = "
        f"{show_epsilon(selection.epsilon)} with the same noise."
    ]


def print_rehearsal(rehearsal: Rehearsal) -> None:
    """Print a table of a rehearsal's arms: mean scores, certainty of their order, and failures.

    Args:
        rehearsal: Its arms stand in the order of their means, so each is compared with the next one alone.
    """
    title = f"Study {rehearsal.study}, rehearsed {rehearsal.repeats} times {rehearsal.said}"
    say(title, bold=True)
    metric = rehearsal.metric
    next_arms = [*rehearsal.arms[1:], None]
    rows = []
    for arm, next_arm in zip(rehearsal.arms, next_arms, strict=True):
        mean = "—"
        if metric is not None and arm.spread is not None:
            mean = text.show_spread(metric, arm.spread)
        certainty = "—"
        if next_arm is not None:
            certainty = show_probability(rehearsal.above(arm, next_arm))
        failures = [f"{arm.share_failed:.0%}"]
        failures += [f"{count} {how}" for how, count in arm.failed.items() if count]
        rows.append((arm.arm, arm.strategy, mean, certainty, ", ".join(failures)))
    metric_title = "metric" if metric is None else metric.words
    numeric = (metric_title, "better than next")
    columns = ("arm", "strategy", *numeric, "failed")
    show_table(columns, rows, numeric=numeric, keep_lines=True)
    failure = "it released no model, or one whose weights are not finite"
    if metric is not None and rehearsal.chance is not None:
        best = text.show_metric(metric, rehearsal.chance)
        failure += f", or a model that is no better than always giving the same answer ({best})"
    say(
        "Each score is the mean ± its standard error, over the repetitions that released a model. “Better "
        "than next” is the probability that the arm's mean is better than the mean of the arm below it. A "
        f"repetition failed if {failure}."
    )
    for line in rehearsal.differs:
        say(line)
    say(f"These numbers are {rehearsal.said}, where the order of the arms may differ.")


def print_sealed(trials_by_arm: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the trials of sealed arms, for the curator alone: no budget has paid for their scores.

    Args:
        trials_by_arm: Trials as a study stores them: number, state, parameters, and a score or None.
    """
    say(_CURATOR, loud=True)
    columns = ("trial", "state", "score", "parameters")
    for arm, trials in trials_by_arm.items():
        rows = []
        for trial in trials:
            score = "" if trial["score"] is None else f"{trial['score']:.4f}"
            values = [f"{name}={show_value(value)}" for name, value in trial["params"].items()]
            rows.append((str(trial["number"]), trial["state"], score, ", ".join(values)))
        show_table(columns, rows, title=f"{arm}: {len(trials)} trials")


def print_records(records: RecordCheck, *, err: bool = False) -> None:
    """Print how many records cannot be used, and why, for the curator alone.

    Args:
        records: The counts, which are exact: no noise protects them.
        err: Whether they go to standard error, where the result of a run is yet to be printed.
    """
    say(_CURATOR, loud=True, err=err)
    for line in records.lines():
        say(line, err=err)
    if records.reason:
        say(
            f"privtune study run would stop before it charges anything (--force overrides): "
            f"{records.reason}.",
            err=err,
        )


def print_failures(errors_by_arm: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the errors that stopped arms, for the curator alone, as they may quote records.

    Args:
        errors_by_arm: Errors by the stage or arm, each with its time (seconds since 1970) and its traceback.
    """
    for arm, errors in errors_by_arm.items():
        for error in errors:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(error["time"]))
            say(f"{arm} was stopped, {when}:", loud=True)
            say(error["traceback"], as_is=True)
