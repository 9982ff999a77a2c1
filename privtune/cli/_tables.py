"""Tables of plans and comparisons, and the same as JSON."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table

from privtune.accounting.registry import formula
from privtune.cli._common import DEFAULT_STORAGE, console, program
from privtune.ledger import show_adjacency
from privtune.numbers import json_ready, show_epsilon, show_left, show_seconds
from privtune.strategies.describe import noise_of
from privtune.strategies.laws import few_runs, price_of_minimums, say_few_runs
from privtune.tasks import MECHANISM, declared_note
from privtune.training.mechanism.streams import Streams
from privtune.training.methods._rate_schedule import AVERAGES
from privtune.views.text import (
    EXPECTED,
    explain_utility,
    public_facts,
    stage_line,
    together,
    utility_column,
)

if TYPE_CHECKING:
    from privtune.accounting import Guarantee
    from privtune.spaces import SearchSpace
    from privtune.strategies import Plan
    from privtune.strategies.plan import StagePlan
    from privtune.study import ArmStatus, Study, StudySpec
    from privtune.tasks._usable import RecordCheck


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


def _facts() -> Table:
    """Return a table of names and what is said of them, empty yet."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _minimums(plan: Plan, guarantee: Guarantee, space: SearchSpace) -> dict[int, float]:
    if plan.runs is None or not math.isfinite(guarantee.epsilon):
        return {}
    terms: dict[str, Any] = {"delta": guarantee.delta, "adjacency": guarantee.adjacency}
    return price_of_minimums(plan.event, plan.runs, space, **terms)


def plan_view(plan: Plan, guarantee: Guarantee, space: SearchSpace) -> Table:
    """Return one arm of what ``privtune study plan`` prints: it reads well in 80 columns."""
    bounds = sorted(guarantee.bounds.items(), key=lambda item: item[1])
    rest = ", ".join(f"{name} {show_epsilon(value, 4)}" for name, value in bounds[1:])
    noises = ", ".join(f"{name} = {value:.4g}" for name, value in noise_of(plan).items())
    table = _facts()
    table.add_row("event", formula(plan.event))
    table.add_row("noise", noises)
    options, mass = plan.training.noise, plan.beyond_reach
    beyond = "nothing" if mass < 1e-30 else f"a mass of {mass:.2g}"
    table.add_row("", f"{options.source}, {options.floating_point}; beyond its reach: {beyond}")
    for average in _averages(plan):
        table.add_row("average", f"{average}: {AVERAGES[average]} is scored and released")
    epsilon = f"[bold]{show_epsilon(guarantee.epsilon, 4)}[/] by {guarantee.method}"
    if not plan.is_private:
        epsilon = "[bold red]∞: no guarantee at all; no part of the budget; needs --non-private[/]"
    table.add_row("ε", epsilon + (f" (also {rest})" if rest else ""))
    table.add_row("expected runs", f"{plan.expected_runs:g}")
    if plan.runs is not None:
        table.add_row("draws", say_few_runs(plan.runs))
    if prices := _minimums(plan, guarantee, space):
        offers = " and ".join(
            f"min_runs: {m} (ε = {show_epsilon(e, 4)})" for m, e in prices.items()
        )
        table.add_row(
            "[yellow]note[/]",
            "The space is wide: a round of one candidate is likely to find nothing good. "
            f"{show_epsilon(guarantee.epsilon, 4)} would become, at the same noise and mean number of "
            f"runs: {offers}.",
        )
    table.add_row("expected gradient evaluations", f"{plan.expected_gradient_evaluations:,.0f}")
    baseline = plan.details.get("baseline_gradient_evaluations")
    if baseline is not None:
        ratio = baseline / plan.expected_gradient_evaluations
        table.add_row("", f"{ratio:.2f} times fewer than {baseline:,.0f} of tuning on all the data")
    if (share := plan.details.get("report_epsilon_share")) is not None:
        table.add_row("report", f"{share:g} of the arm's ε: more would cost the trainings noise")
    for name in ("chosen", "why", "extrapolation"):
        if name in plan.details:
            table.add_row(name, escape(str(plan.details[name])))
    for row in plan.details.get("law_auto", {}).get("trade", ()):
        mark = "[bold]chosen:[/] " if row["chosen"] else ""
        table.add_row(
            "law: auto",
            f"{mark}{row['law']}, mean {row['mean_runs']:g}: noise x {row['noise']:.3f}",
        )
    if "advice" in plan.details:
        table.add_row("[yellow]note[/]", escape(plan.details["advice"]))
    table.add_row("released", "; ".join(plan.released))
    table.add_row("sealed", "; ".join(plan.sealed))
    return table


def stage_view(plan: StagePlan, guarantee: Guarantee, **more: str) -> Table:
    """Return one stage of what ``privtune study plan`` and ``privtune study show`` print."""
    table = _facts()
    table.add_row("ε", f"[bold]{show_epsilon(guarantee.epsilon, 4)}[/] by {guarantee.method}")
    table.add_row("event", formula(plan.event))
    table.add_row("noise on each sum", f"{plan.scale:.4g}")
    for name, text in more.items():
        table.add_row(name, escape(text))
    return table


def public_view(plans: Sequence[Plan]) -> Table:
    """Return what ``privtune study plan`` prints of what is declared public."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for arms, facts in public_facts(plans):
        table.add_row("arms", escape(arms))
        for name, value in facts.items():
            table.add_row(name, escape(value))
    return table


def examples(spec: StudySpec) -> list[dict[str, Any]]:
    """Draw example candidates from a spec's space, with a fixed public seed of their own.

    They are no candidates of any round: those derive from the arm's secret.
    """
    space = spec.search_space()
    streams = Streams(bytes(32))
    return [space.draw(streams, number) for number in range(10)] if space else []


def examples_table(drawn: list[dict[str, Any]]) -> Table:
    """Return example candidates as a table."""
    table = Table(box=box.SIMPLE)
    for name in drawn[0]:
        table.add_column(name, justify="right")
    for candidate in drawn:
        table.add_row(*(show_value(value) for value in candidate.values()))
    return table


def show_value(value: Any) -> str:
    """Return a hyperparameter as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def arm_view(plan: Plan, arm: dict[str, Any]) -> Table:
    """Return one arm of what ``privtune study show`` prints, from its part of the comparison."""
    table = _facts()
    table.add_row("state", arm["state"])
    private = arm["epsilon"] is not None
    epsilon = f"{show_epsilon(arm['epsilon'], 4)} by {arm['bound']}" if private else "∞ NOT PRIVATE"
    table.add_row("ε", epsilon)
    table.add_row("event", formula(plan.event))
    if MECHANISM in plan.public_facts:
        table.add_row(MECHANISM, plan.public_facts[MECHANISM])
    if arm["params"]:
        shown = ", ".join(f"{k} = {show_value(v)}" for k, v in arm["params"].items())
        table.add_row("released parameters", shown)
    return table


def comparison_document(study: Study, arms: Sequence[ArmStatus] | None = None) -> dict[str, Any]:
    """Return a study's comparison as JSON-ready data, of its arms' states if they were read."""
    budget = study.spec.budget
    spent = study.spent()
    return {
        "study": study.name,
        "task": study.spec.task_name,
        "arms": [
            {
                "arm": status.plan.arm,
                "strategy": status.plan.strategy,
                "state": status.state,
                # JSON has no infinity: null says that there is no guarantee.
                "epsilon": _finite_or_none(status.guarantee.epsilon),
                "delta": status.guarantee.delta,
                "bound": status.guarantee.method,
                "sealed": status.plan.is_sealed,
                "params": None if status.release is None else json_ready(status.release.params),
                "score": None if status.release is None else _finite_or_none(status.release.score),
                "score_of": status.plan.scored,
                "score_metric": None if status.plan.score is None else status.plan.score.metric,
                "note": "" if status.release is None else status.release.note,
                "trials": []
                if status.release is None
                else [
                    {
                        "number": t.index,
                        "params": json_ready(t.params),
                        "score": _finite_or_none(t.score),
                    }
                    for t in status.release.trials
                ],
                "utility": None if status.release is None else dict(status.release.utility),
                "intervals": None
                if status.release is None
                else {name: list(ends) for name, ends in status.release.intervals.items()},
                "gradient_evaluations": status.plan.expected_gradient_evaluations,
                "wall_seconds": None
                if status.release is None
                else status.release.cost.wall_seconds,
                "wall_seconds_expected": status.plan.is_private
                if status.release is None
                else status.release.cost.expected,
            }
            for status in (study.status() if arms is None else arms)
        ],
        **({"stages": [finite(s.to_dict()) for s in study.stages]} if study.stages else {}),
        "budget": {
            "name": budget.name,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "adjacency": str(budget.adjacency),
            "unit": budget.unit,
            "charged": spent.epsilon,
            "bound": spent.method,
            "left": study.remaining(),
        },
    }


def print_comparison(study: Study, *, logged: bool = True) -> None:
    """Print the comparison, what it rests on, and how to open it in MLflow or get it there."""
    arms = study.status()
    utility, values = utility_column(arms)
    _print_arms(study, comparison_document(study, arms), utility, values)
    for line in _footnotes(study, arms):
        console().print(line, soft_wrap=True, highlight=False)
    if all(arm.release is None for arm in arms):
        return
    does, command = ("Open it in", "ui --study") if logged else ("Log it to", "study sync")
    console().print(
        f"{does} MLflow: [bold]{program()} {command} {study.name}{_storage(study)}[/]",
        soft_wrap=True,
        highlight=False,
    )


def _storage(study: Study) -> str:
    """Return the option that names the storage, where it needs one; never a password."""
    from privtune.ledger.urls import masked_url

    if study.storage == os.environ.get("PRIVTUNE_STORAGE", DEFAULT_STORAGE):
        return ""
    if masked_url(study.storage) != study.storage:
        return " (with PRIVTUNE_STORAGE set)"
    return f" --storage {study.storage}"


def _print_arms(
    study: Study, document: Mapping[str, Any], utility: str, values: Mapping[str, str]
) -> None:
    """Print one line an arm if that fits the terminal, else one block: no word is ever broken."""
    console().print(
        f"Study [bold]{escape(study.name)}[/] on {escape(study.spec.task_name)}",
        soft_wrap=True,
        highlight=False,
    )
    rows = [
        {
            "arm": escape(arm["arm"]),
            "strategy": escape(arm["strategy"]),
            "ε": "[bold red]∞ NOT PRIVATE[/]"
            if arm["epsilon"] is None
            else show_epsilon(arm["epsilon"]),
            utility: values.get(arm["arm"], arm["state"]),
            "gradient evaluations": f"{arm['gradient_evaluations']:,.0f}",
            "seconds": show_seconds(arm["wall_seconds"]),
        }
        for arm in document["arms"]
    ]
    # Without vertical lines it fits a terminal of 80 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in rows[0] if rows else ():
        left = column in ("arm", "strategy")
        table.add_column(
            column.replace(" ", "\n"), justify="left" if left else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*row.values())
    free = console().options.update(max_width=10_000)
    if Measurement.get(console(), free, table).maximum <= console().width:
        console().print(table)
        return
    for row in rows:
        block = Table.grid(padding=(0, 2))
        block.add_column(style="dim", no_wrap=True)
        block.add_column(no_wrap=True, overflow="ignore")
        for name, value in list(row.items())[1:]:
            block.add_row(name, value)
        console().print(f"[bold]{row['arm']}[/]", soft_wrap=True, highlight=False)
        console().print(Padding(block, (0, 0, 1, 2)), highlight=False, soft_wrap=True)


def _footnotes(study: Study, arms: Sequence[ArmStatus]) -> list[str]:
    budget = study.spec.budget
    spent = study.spent()
    lines = [
        f"Budget {budget.name}: ε = {show_epsilon(spent.epsilon)} of {budget.epsilon:g} charged, "
        f"{show_left(study.remaining())} left (δ = {budget.delta:g}, "
        f"{show_adjacency(budget.adjacency, budget.unit)}, {together(spent)})."
        if spent.epsilon > 0
        else f"Budget {budget.name}: nothing of ε = {budget.epsilon:g} has been charged yet (δ = "
        f"{budget.delta:g}, {show_adjacency(budget.adjacency, budget.unit)}).",
        explain_utility(arms),
        EXPECTED,
    ]
    lines += map(stage_line, study.stages)
    if any(arm.plan.is_sealed for arm in arms):
        lines.append(
            "The curator's view has what is sealed of a selection (privtune study show --curator)."
        )
    lines += [f"{s.plan.arm}: {s.release.note}" for s in arms if s.release and s.release.note]
    for plan in (arm.plan for arm in arms):
        if plan.details.get("sampler") != "random":
            continue  # no candidate is drawn for itself
        from privtune.strategies import selection_instead

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


def print_sealed(sealed: dict[str, list[Any]]) -> None:
    """Print the trials of sealed arms, for the curator alone."""
    console().print("[bold red]Curator's view: none of this may be shown to anyone else.[/]")
    for arm, trials in sealed.items():
        columns = ("trial", "state", "score", "parameters")
        table = Table(*columns, title=f"{arm}: {len(trials)} trials")
        for trial in trials:
            score = "" if trial["score"] is None else f"{trial['score']:.4f}"
            params = ", ".join(f"{k}={show_value(v)}" for k, v in trial["params"].items())
            table.add_row(str(trial["number"]), trial["state"], score, params)
        console().print(table)


def print_records(records: RecordCheck, *, err: bool = False) -> None:
    """Print how many records cannot be used, and why, for the curator alone.

    Args:
        records: What was found.
        err: Whether to print to standard error, beside what everybody may see.
    """
    from rich.console import Console

    out = Console(stderr=True) if err else console()
    out.print(
        "[bold red]Curator's view: none of this may be shown to anyone else.[/]", soft_wrap=True
    )
    for line in records.lines():
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if records.reason:
        said = f"A run stops before the charge, unless --anyway: {records.reason}."
        out.print(said, markup=False, highlight=False, soft_wrap=True)


def print_failures(stopped: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print what stopped arms, for the curator alone."""
    for arm, errors in stopped.items():
        for error in errors:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(error["time"]))
            console().print(f"[bold red]{arm} was stopped, {when}:[/]")
            console().print(error["traceback"], markup=False, highlight=False, soft_wrap=True)


def _finite_or_none(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _averages(plan: Plan) -> list[str]:
    """Return what is released of the iterates, of each training that differs in it."""
    trainings = plan.search.trainings if plan.search is not None else ()
    methods: list[Any] = [training.method for training in (plan.training, *trainings)]
    return sorted({method.average for method in methods})


def finite(document: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities, which JSON lacks, by null."""
    return {
        key: finite(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in document.items()
    }
