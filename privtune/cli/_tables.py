"""What commands print of plans, comparisons and what is sealed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.accounting import epsilon
from privtune.accounting.registry import formula
from privtune.cli._common import DEFAULT_STORAGE, program, say, show_facts, show_table
from privtune.ledger.wording import PromiseWording
from privtune.numbers import show_epsilon, show_left
from privtune.strategies.describe import noise_of, plan_line
from privtune.strategies.laws import few_runs, price_of_minimums, say_few_runs
from privtune.tasks import MECHANISM
from privtune.tasks._facts import declared_note
from privtune.training.mechanism.streams import Streams
from privtune.training.methods._rate_schedule import AVERAGES
from privtune.views import text
from privtune.views.comparison import finite, show_probability, table_of

if TYPE_CHECKING:
    from privtune.accounting import Guarantee
    from privtune.spaces import SearchSpace
    from privtune.strategies import Plan
    from privtune.strategies.plan import StagePlan
    from privtune.study import ArmStatus, Rehearsal, Study, StudySpec
    from privtune.study.planning import StudyPlan
    from privtune.tasks._usable import RecordCheck

_CURATOR = "Curator's view: none of this may be shown to anyone else."


def plan_document(plan: Plan, guarantee: Guarantee, space: SearchSpace) -> dict[str, Any]:
    """Return an arm's plan as JSON-ready data, with what a fewest number of runs would cost."""
    more: dict[str, Any] = {}
    if plan.runs is not None:
        more["few_runs"] = few_runs(plan.runs)
        more["min_runs"] = [
            {"min_runs": fewest, "epsilon": value}
            for fewest, value in _minimums(plan, guarantee, space).items()
        ]
    return {
        **plan.to_dict(),
        **more,
        "guarantee": finite(guarantee.to_dict()),
        "expected_runs": plan.expected_runs,
        "expected_gradient_evaluations": plan.expected_gradient_evaluations,
        "noise_multipliers": noise_of(plan),
        "noise": {**plan.training.noise.to_dict(), "mass_beyond_reach": plan.beyond_reach},
    }


def study_plan_document(
    spec: StudySpec, planned: StudyPlan, examples: Mapping[str, Any] | Sequence[Any]
) -> dict[str, Any]:
    """Return a planned study as JSON-ready data, for ``study plan --json``."""
    from privtune.study.worth import expected_scores

    space = spec.search_space()
    pairs = zip(planned.plans, planned.guarantees, strict=True)
    stages = zip(planned.stages, planned.stage_guarantees, strict=True)
    staged = [{**stage.to_dict(), "guarantee": finite(cost.to_dict())} for stage, cost in stages]
    scores = expected_scores(planned.plans, spec.load_task())
    return {
        "study": spec.name,
        "target_epsilon": spec.target_epsilon,
        "arms": [plan_document(plan, guarantee, space) for plan, guarantee in pairs],
        **({"stages": staged} if staged else {}),
        "total": finite(planned.total.to_dict()),
        "examples": examples,
        "expected_scores": [score.to_dict() for score in scores],
    }


def _minimums(plan: Plan, guarantee: Guarantee, space: SearchSpace) -> dict[int, float]:
    if plan.runs is None or not math.isfinite(guarantee.epsilon) or plan.charged != plan.event:
        return {}
    terms: dict[str, Any] = {"delta": guarantee.delta, "adjacency": guarantee.adjacency}
    return price_of_minimums(plan.event, plan.runs, space, **terms)


def print_plan(plan: Plan, guarantee: Guarantee, space: SearchSpace) -> None:
    """Print one arm of a plan: it reads well in 80 columns."""
    title = f"{plan.arm} ({plan.strategy})"
    if not plan.is_private:
        title += ": no guarantee at all; it needs --non-private"
    say(title, bold=True)
    say(f"  {plan_line(plan, guarantee)}")
    show_facts("", _plan_facts(plan, guarantee, space))


def _plan_facts(plan: Plan, guarantee: Guarantee, space: SearchSpace) -> Iterator[tuple[str, str]]:
    evaluations, details = plan.expected_gradient_evaluations, plan.details
    yield "event", formula(plan.charged)
    noise, missed = plan.training.noise, plan.beyond_reach
    reach = "" if missed < 1e-30 else f"; probability {missed:.2g} of noise that cannot be drawn"
    yield (
        "noise",
        f"from the generator {noise.source!r}, in {noise.floating_point!r} floating point{reach}",
    )
    trainings = plan.search.trainings if plan.search is not None else ()
    methods: list[Any] = [training.method for training in (plan.training, *trainings)]
    for average in sorted({method.average for method in methods}):
        yield "average", f"{average}: scored and released is {AVERAGES[average]}"
    if plan.runs is not None:
        yield (
            "expected runs",
            f"{plan.expected_runs:g}; the selection trains {say_few_runs(plan.runs)}",
        )
    if prices := _minimums(plan, guarantee, space):
        offers = [f"{show_epsilon(e, 4)} with min_runs: {m}" for m, e in prices.items()]
        yield (
            "note",
            "The space is wide, so one candidate alone is likely to be a bad one. The option min_runs sets "
            "the smallest number of candidates. At the same noise and mean number of runs it would raise "
            f"ε = {show_epsilon(guarantee.epsilon, 4)} to {' and to '.join(offers)}.",
        )
    of_one = " of one run" if plan.repeats > 1 else ""
    yield "gradient evaluations", f"{evaluations:,.0f} expected{of_one}"
    if plan.charged != plan.event:
        one = epsilon(plan.event, guarantee.delta, adjacency=guarantee.adjacency)
        yield (
            "repetitions",
            f"{plan.repeats}, each charged: one would cost ε = {show_epsilon(one.epsilon, 4)}",
        )
    elif plan.repeats > 1:
        yield "repetitions", f"{plan.repeats} on public records, which cost what one costs"
    if (whole := details.get("baseline_gradient_evaluations")) is not None:
        yield (
            "",
            f"{whole / evaluations:.2f} times fewer than {whole:,.0f} of tuning on all the data",
        )
    if (share := details.get("report_epsilon_share")) is not None:
        yield "report", f"{share:g} of the arm's ε: more would cost the trainings noise"
    for name in ("chosen", "why", "extrapolation"):
        yield name, str(details.get(name, ""))
    for row in details.get("law_auto", {}).get("trade", ()):
        mark = "chosen: " if row["chosen"] else ""
        noise_of_law = f"noise x {row['noise']:.3f}"
        yield "law: auto", f"{mark}{row['law']}, mean {row['mean_runs']:g}: {noise_of_law}"
    yield "note", details.get("advice", "")
    yield "released", "; ".join(plan.released)
    yield "sealed", "; ".join(plan.sealed)


def print_stage(plan: StagePlan, guarantee: Guarantee, what: str, **more: str) -> None:
    """Print one stage of a plan or of a study."""
    facts = {
        "ε": f"{show_epsilon(guarantee.epsilon, 4)} by {guarantee.method}",
        "event": formula(plan.charged),
        "noise on each sum": f"{plan.scale:.4g}",
        **more,
    }
    show_facts(f"{plan.arm} (stage {plan.stage.type}{what})", facts.items())


def print_public(plans: Sequence[Plan]) -> None:
    """Print what is declared public, and for which arms."""
    facts = text.public_facts(plans)
    rows = [row for arms, known in facts for row in (("arms", arms), *known.items())]
    show_facts("Declared public (the guarantee does not protect these facts)", rows)


def examples(spec: StudySpec) -> list[dict[str, Any]]:
    """Draw example candidates from a spec's space, with a fixed public seed of their own.

    They are no candidates of any round: those derive from the arm's secret.
    """
    space = spec.search_space()
    streams = Streams(bytes(32))
    return [space.draw(streams, number) for number in range(10)] if space else []


def print_examples(drawn: Sequence[Mapping[str, Any]]) -> None:
    """Print example candidates."""
    # Not the table's title, which would be broken into the width of a narrow table.
    say("Ten examples of what the space draws (the arms draw others)", bold=True)
    rows = [[show_value(value) for value in candidate.values()] for candidate in drawn]
    show_table(list(drawn[0]), rows, numeric=list(drawn[0]))


def show_value(value: Any) -> str:
    """Return a hyperparameter as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_arm(plan: Plan, arm: Mapping[str, Any]) -> None:
    """Print one arm of a study, from its part of the comparison."""
    private = arm["epsilon"] is not None
    params = [f"{name} = {show_value(value)}" for name, value in (arm["params"] or {}).items()]
    facts = {
        "state": arm["state"],
        "ε": f"{show_epsilon(arm['epsilon'], 4)} by {arm['bound']}" if private else "∞ NOT PRIVATE",
        "event": formula(plan.charged),
        MECHANISM: plan.public_facts.get(MECHANISM, ""),
        "released parameters": ", ".join(params),
    }
    show_facts(f"{plan.arm} ({plan.strategy})", facts.items())


def print_comparison(study: Study, *, logged: bool = True) -> None:
    """Print the comparison, what it rests on, and how to open it in MLflow or get it there."""
    arms = study.status()
    say(f"Study {study.name} on {study.spec.task_name}", bold=True)
    # Six columns fit a terminal of 80; the other forms have the parameters, and seconds of repeated arms.
    rows = [dict(list(row.items())[:6]) for row in table_of(arms)]
    columns = [*rows[0]] if rows else ["arm"]
    cells = [[*row.values()] for row in rows]
    show_table(columns, cells, numeric=columns[2:], whole=True)
    for line in _footnotes(study, arms):
        say(line)
    if any(arm.release is not None for arm in arms):
        does, command = ("Open it in", "ui --study") if logged else ("Log it to", "study sync")
        say(f"{does} MLflow: {program()} {command} {study.name}{_storage(study)}")


def _storage(study: Study) -> str:
    """Return the option that names the storage, where it needs one; never a password."""
    from privtune.ledger.urls import masked_url

    if study.storage == os.environ.get("PRIVTUNE_STORAGE", DEFAULT_STORAGE):
        return ""
    if masked_url(study.storage) != study.storage:
        return " (with PRIVTUNE_STORAGE set)"
    return f" --storage {study.storage}"


def _footnotes(study: Study, arms: Sequence[ArmStatus]) -> list[str]:
    budget = study.spec.budget
    wording = PromiseWording(budget.unit)
    spent = study.spent()
    lines = [
        f"Budget {budget.name}: ε = {show_epsilon(spent.epsilon)} of {budget.epsilon:g} charged, "
        f"{show_left(study.remaining())} left (δ = {budget.delta:g}, "
        f"{wording.state_adjacency(budget.adjacency)}, {text.together(spent)})."
        if spent.epsilon > 0
        else f"Budget {budget.name}: nothing of ε = {budget.epsilon:g} has been charged yet (δ = "
        f"{budget.delta:g}, {wording.state_adjacency(budget.adjacency)}).",
        wording.short_caveat,
        text.explain_utility(arms),
        *text.spread_notes(arms),
        text.EXPECTED,
    ]
    lines += map(text.stage_line, study.stages)
    if any(arm.plan.is_sealed for arm in arms):
        lines.append(
            "The curator, who holds the data, can read what a selection sealed: "
            f"privtune study show {study.name} --curator."
        )
    lines += [f"{s.plan.arm}: {s.release.note}" for s in arms if s.release and s.release.note]
    for plan in (arm.plan for arm in arms):
        if plan.details.get("sampler") != "random":
            continue  # no candidate is drawn for itself
        from privtune.strategies.everything import selection_instead

        instead = selection_instead(plan, delta=budget.delta, adjacency=budget.adjacency)
        if instead is not None:
            lines.append(
                f"{plan.arm}: its candidates are i.i.d.; released alone, the best of a random number "
                f"of them (mean {plan.expected_runs:g}) would have cost ε = "
                f"{show_epsilon(instead.epsilon)} at the same noise."
            )
    if study.spec.seed is not None:
        lines.append(
            f"Fixed seed {study.spec.seed}: no guarantee holds against whoever knows the seed."
        )
    lines += dict.fromkeys(filter(None, (declared_note(plan.public_facts) for plan in study.plans)))
    return lines


def print_rehearsal(found: Rehearsal) -> None:
    """Print the arms of a rehearsal by their means, how sure their order is, and what failed."""
    say(f"Study {found.study}, rehearsed {found.repeats} times {found.said}", bold=True)
    metric, rows = found.metric, []
    for arm, other in zip(found.arms, [*found.arms[1:], None], strict=True):
        spread = arm.spread
        mean = "—" if spread is None else text.show_spread(metric, spread)
        sure = "—" if other is None else show_probability(found.above(arm, other))
        failed = [f"{count} {how}" for how, count in arm.failed.items() if count]
        rows.append(
            (
                arm.arm,
                arm.strategy,
                mean,
                sure,
                ", ".join((f"{arm.share_failed:.0%}", *failed)),
            )
        )
    title = metric.replace("_", " ") or "metric"
    numeric = (title, "better than next")
    show_table(("arm", "strategy", *numeric, "failed"), rows, numeric=numeric, whole=True)
    chance = "whether it is at chance is not judged"
    if found.chance is not None:
        best = text.show_metric(metric, found.chance)
        chance = (
            f"or it is within two standard errors of the best constant answer ({best}), or worse"
        )
    say(
        "Mean ± standard error over the repetitions that released a model; the probability that an arm's "
        "mean is better than the next one's. Failed: nothing was released, a model's weights are not finite, "
        f"{chance}."
    )
    for line in found.differs:
        say(line)
    say(f"These numbers are {found.said}: they do not tell which order your arms will have.")


def print_sealed(sealed: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the trials of sealed arms, for the curator alone."""
    say(_CURATOR, loud=True)
    for arm, trials in sealed.items():
        rows = [
            (
                str(trial["number"]),
                trial["state"],
                "" if trial["score"] is None else f"{trial['score']:.4f}",
                ", ".join(f"{name}={show_value(v)}" for name, v in trial["params"].items()),
            )
            for trial in trials
        ]
        columns = ("trial", "state", "score", "parameters")
        show_table(columns, rows, title=f"{arm}: {len(trials)} trials")


def print_records(records: RecordCheck, *, err: bool = False) -> None:
    """Print how many records cannot be used, and why, for the curator alone."""
    say(_CURATOR, loud=True, err=err)
    for line in records.lines():
        say(line, err=err)
    if records.reason:
        say(f"A run stops before the charge, unless --anyway: {records.reason}.", err=err)


def print_failures(stopped: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print what stopped arms, for the curator alone."""
    for arm, errors in stopped.items():
        for error in errors:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(error["time"]))
            say(f"{arm} was stopped, {when}:", loud=True)
            say(error["traceback"])
