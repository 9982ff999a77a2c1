"""``privtune audit``: an empirical lower bound on the ε of a study's arms, as they run here.

The audit trains each arm many times, with a canary record and without it, on records that are made up.
Where an attacker tells the two apart better than the reported ε allows, the code that runs here does
not do what the accounting assumes: the command then exits with 1.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.cli._common import AsJson, Storage, emit_json, say, show_table
from privtune.names import DEFAULT_STORAGE
from privtune.numbers import show_epsilon, show_left

if TYPE_CHECKING:
    from rich.progress import TaskID

    from privtune.audit import AuditReport
    from privtune.strategies import Plan
    from privtune.study import Study


def audit(  # noqa: PLR0917 (the command line passes them by name)
    name: Annotated[str, typer.Argument(help="Name of the study.")],
    storage: Storage = DEFAULT_STORAGE,
    arm: Annotated[
        str | None, typer.Option(help="Audit this arm alone. By default all arms.")
    ] = None,
    runs: Annotated[
        int,
        typer.Option(
            min=100, help="Number of trainings with the canary record, and again without it."
        ),
    ] = 2000,
    confidence: Annotated[float, typer.Option(help="Confidence of each lower bound.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers of the audit.")] = 0,
    model: Annotated[
        str,
        typer.Option(
            help="What is trained. probe: one parameter that the canary moves; task: the task's model, too."
        ),
    ] = "probe",
    canary: Annotated[
        str | None,
        typer.Option(
            help="For a declared mechanism: package.module:function that takes a trial and whether "
            "a canary is in."
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            help="Store the result: the study's report and the budget's certificate then show it."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Test the reported ε of arms by attacks. Charges nothing, reads no data: the records are made up."""
    from privtune.imports import find_function
    from privtune.names import refuse_name
    from privtune.study import Study, keep_audit

    if model not in ("probe", "task"):
        refuse_name("model", model, ("probe", "task"))
    with closing(Study(name, storage)) as study:
        plans = {plan.arm: plan for plan in study.plans}
        if arm is not None and arm not in plans:
            refuse_name("arm", arm, plans)
        if arm is not None:
            arms = [arm]
        else:
            arms = [plan.arm for plan in plans.values() if plan.is_private]
        options: dict[str, Any] = {"runs": runs, "confidence": confidence, "seed": seed}
        if model == "task":
            options["task"] = study.spec.load_task()
        if canary is not None:
            options["canary"] = find_function(
                "canary",
                canary,
                allowed="must be package.module:function",
                must="must name a function of a trial and whether the canary is in",
            )
        reports = [_audit_arm(study, plans[each], options, quiet=as_json) for each in arms]
        if keep:
            for report in reports:
                keep_audit(study, report.to_dict())
    if as_json:
        emit_json([report.to_dict() for report in reports])
    elif keep:
        say("The audit is stored: the study's report and its budget's certificate show it.")
    if not all(report.passed for report in reports):
        raise typer.Exit(1)


def _audit_arm(study: Study, plan: Plan, options: dict[str, Any], *, quiet: bool) -> AuditReport:
    """Audit one arm with progress bars on standard error, and print the report.

    Args:
        study: The study, for its budget's δ, adjacency and published ε.
        plan: The arm's.
        options: What else :func:`privtune.audit.audit` takes: ``runs``, ``confidence``, ``seed``, and
            where they are asked for ``task`` and ``canary``.
        quiet: Whether to print nothing: standard output then holds one JSON document of all arms.

    Returns:
        The report, passed or not.
    """
    from rich.console import Console
    from rich.progress import Progress

    from privtune.audit import audit as run_audit
    from privtune.audit import estimate

    budget = study.spec.budget
    strategy = next((arm.to_strategy() for arm in study.spec.arms if arm.name == plan.arm), None)
    if not quiet:
        trainings = estimate(plan, runs=options["runs"])
        say(
            f"{plan.arm} ({plan.strategy}): {trainings:,} trainings of "
            f"{plan.training.schedule.steps:,} steps (expected number), seed {options['seed']}, confidence "
            f"{options['confidence']:.0%}."
        )
    with Progress(console=Console(file=sys.stderr), transient=True, disable=quiet) as bars:
        bar_of: dict[str, TaskID] = {}

        def show_progress(label: str, count: int, total: int) -> None:
            if label not in bar_of:
                bar_of[label] = bars.add_task(label, total=total)
            bars.update(bar_of[label], completed=count, total=total)

        report = run_audit(
            plan,
            delta=budget.delta,
            strategy=strategy,
            adjacency=budget.adjacency,
            published=budget.epsilon,
            **options,
            progress=show_progress,
        )
    if not quiet:
        _print_report(report)
    return report


def _print_report(report: AuditReport) -> None:
    """Print an audit's bounds, the laws that it tested, what it does not cover, and the verdict.

    A row's columns rise from left to right where the code is sound: what the attacks prove, what the
    worst mechanism with this event costs, the reported ε and the published one. Lower bounds are rounded
    down and the ε of promises up, as each of the two is valid only in that direction.
    """
    published = "" if report.published is None else show_epsilon(report.published)
    rows = []
    for row in report.rows:
        rows.append(
            (
                row.name,
                show_left(row.epsilon),
                show_left(row.lower),
                show_epsilon(row.reported),
                published,
                f"{row.runs:,}",
                f"{row.seconds:.0f} s",
            )
        )
        # Below it the bounds of single attacks: the row's own is the largest of them.
        for attack, bound in row.bounds.items():
            rows.append((f"  {attack}", show_left(bound), "", "", "", "", ""))
    show_table(("", "audited ≤", "lower ≤", "reported ≤", "published", "runs", "time"), rows)
    laws = []
    for check in report.checks:
        verdict = "holds" if check.passed else "BROKEN"
        laws.append((check.name, check.seen, f"{check.p_value:.3g}", verdict))
    show_table(("law", "seen", "p-value", ""), laws)
    say(f"This audit does not cover: {'; '.join(report.untouched)}.")
    if not report.passed:
        say("The audit contradicts the reported ε.", loud=True)
        say("Do not release anything. Report it with the seed (see SECURITY.md).")
