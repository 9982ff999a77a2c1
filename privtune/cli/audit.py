"""``privtune audit``: an empirical lower bound on the ε of a study's arms, as they run here."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.cli._common import DEFAULT_STORAGE, AsJson, Storage, emit_json, say, show_table
from privtune.numbers import show_epsilon, show_left

if TYPE_CHECKING:
    from rich.progress import TaskID

    from privtune.audit import AuditReport
    from privtune.strategies import Plan
    from privtune.study import Study


def audit(  # noqa: PLR0917 (the command line passes them by name)
    name: Annotated[str, typer.Argument(help="Name of the study.")],
    storage: Storage = DEFAULT_STORAGE,
    arm: Annotated[str | None, typer.Option(help="One arm; all of them unless given.")] = None,
    runs: Annotated[
        int, typer.Option(min=100, help="Runs with the canary, and as many without it.")
    ] = 2000,
    confidence: Annotated[float, typer.Option(help="Of each bound.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Everything drawn derives from it.")] = 0,
    model: Annotated[
        str, typer.Option(help="probe: the canary's parameter alone; task: the task's model, too.")
    ] = "probe",
    canary: Annotated[
        str | None,
        typer.Option(
            help="For a declared mechanism: package.module:function of a trial and whether a canary is in."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option(help="Keep the record: certificate and report then carry it.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Bound the ε of a study's arms from below, on made-up records; spends nothing, touches no data."""
    from privtune.errors import InvalidInputError
    from privtune.imports import find_function
    from privtune.study import Study, keep_audit

    if model not in ("probe", "task"):
        raise InvalidInputError("model", model, "must be probe or task")
    with closing(Study(name, storage)) as study:
        plans = {plan.arm: plan for plan in study.plans}
        if arm is not None and arm not in plans:
            raise InvalidInputError("arm", arm, f"must be one of {', '.join(plans)}")
        chosen = [arm] if arm is not None else [a for a, p in plans.items() if p.is_private]
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
        reports = [_audit_one(study, plans[each], options, quiet=as_json) for each in chosen]
        for report in reports if keep else ():
            keep_audit(study, report.to_dict())
    if as_json:
        emit_json([report.to_dict() for report in reports])
    elif keep:
        say("Kept with the study: its report and the certificate of its budget show it.")
    if not all(report.passed for report in reports):
        raise typer.Exit(1)


def _audit_one(study: Study, plan: Plan, options: dict[str, Any], *, quiet: bool) -> AuditReport:
    """Audit one arm with a bar for what takes long, and print what was found."""
    from rich.console import Console
    from rich.progress import Progress

    from privtune.audit import audit as run_audit
    from privtune.audit import estimate

    budget = study.spec.budget
    strategy = next((s.to_strategy() for s in study.spec.arms if s.name == plan.arm), None)
    if not quiet:
        say(
            f"{plan.arm} ({plan.strategy}): {estimate(plan, runs=options['runs']):,} trainings of "
            f"{plan.training.schedule.steps:,} steps in expectation, seed {options['seed']}, confidence "
            f"{options['confidence']:.0%}."
        )
    with Progress(console=Console(file=sys.stderr), transient=True, disable=quiet) as bars:
        known: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done, total=total)

        report = run_audit(
            plan,
            delta=budget.delta,
            strategy=strategy,
            adjacency=budget.adjacency,
            published=budget.epsilon,
            **options,
            progress=tell,
        )
    if not quiet:
        _show(report)
    return report


def _show(report: AuditReport) -> None:
    published = "" if report.published is None else show_epsilon(report.published)
    rows = []
    for row in report.rows:
        low, reported = (show_left(row.epsilon), show_left(row.lower)), show_epsilon(row.reported)
        rows.append((row.name, *low, reported, published, f"{row.runs:,}", f"{row.seconds:.0f} s"))
        rows += [
            (f"  {name}", show_left(at), "", "", "", "", "") for name, at in row.bounds.items()
        ]
    show_table(("", "audited ≤", "lower ≤", "reported ≤", "published", "runs", "time"), rows)
    laws = [
        (check.name, check.seen, f"{check.p_value:.3g}", "holds" if check.passed else "BROKEN")
        for check in report.checks
    ]
    show_table(("law", "seen", "p-value", ""), laws)
    say(f"Nothing is said of {'; nor of '.join(report.untouched)}.")
    if not report.passed:
        say("The audit contradicts what is reported.", loud=True)
        say("Release nothing, and report it (SECURITY.md) with the seed.")
