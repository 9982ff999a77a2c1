"""``privtune study``: create, plan, run, list, show, compare."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from privtune.cli._common import DEFAULT_STORAGE, AsJson, Storage, console, emit_json, program
from privtune.training.engine.compute import check_stack

if TYPE_CHECKING:
    from privtune.strategies import Plan, Release
    from privtune.study import Observer, Study

__all__ = ["app", "print_comparison", "run_study"]

app = typer.Typer()

SpecFile = Annotated[Path, typer.Argument(help="The study's spec, a YAML file.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", envvar="PRIVTUNE_DATA", help="File of a task's data, as for MNIST."),
]
Name = Annotated[str, typer.Argument(help="Name of the study.")]


@app.command()
def create(spec: SpecFile, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Plan a study and store it, with its budget if that does not exist. Touches no data."""
    from privtune.study import Study, StudySpec

    study = Study.create(StudySpec.from_file(spec), storage)
    try:
        if as_json:
            emit_json({"study": study.name, "arms": [plan.arm for plan in study.plans]})
        else:
            console.print(
                f"Created study [bold]{study.name}[/] with {len(study.plans)} arms; nothing has been "
                f"charged yet. Run it with: privtune study run {study.name}",
                soft_wrap=True,
            )
    finally:
        study.close()


@app.command()
def plan(spec: SpecFile, as_json: AsJson = False) -> None:
    """Show what a study would do and cost, arm by arm. Touches no data and no storage."""
    from privtune.cli._tables import (
        ceil_to,
        examples,
        examples_table,
        finite,
        plan_document,
        plan_view,
        public_view,
    )
    from privtune.study import StudySpec, plan_study

    parsed = StudySpec.from_file(spec)
    planned = plan_study(parsed)
    pairs = list(zip(planned.plans, planned.guarantees, strict=True))
    if as_json:
        emit_json(
            {
                "study": parsed.name,
                "target_epsilon": parsed.target_epsilon,
                "arms": [plan_document(arm, guarantee) for arm, guarantee in pairs],
                "total": finite(planned.total.to_dict()),
                "examples": examples(parsed),
            }
        )
        return
    for arm, guarantee in pairs:
        console.print(f"[bold]{arm.arm}[/] ({arm.strategy})")
        console.print(Padding(plan_view(arm, guarantee), (0, 0, 1, 2)), highlight=False)
    console.print("[bold]Declared public[/] (no guarantee covers it)")
    console.print(Padding(public_view(planned.plans), (0, 0, 1, 2)), highlight=False)
    if drawn := examples(parsed):
        console.print(examples_table(drawn))
    console.print(
        f"All arms together: ε = {ceil_to(planned.total.epsilon, 4):.4f} at δ = "
        f"{planned.total.delta:g} ({planned.total.adjacency}, by {planned.total.method}); "
        f"target {parsed.target_epsilon:g}. No data was touched.",
        soft_wrap=True,
    )


@app.command()
def run(  # noqa: PLR0917 (the command line passes them by name)
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    mlflow: Annotated[bool, typer.Option(help="Log releases to MLflow.")] = True,
    jobs: Annotated[int, typer.Option(help="Worker processes for sealed rounds.")] = 1,
    stack: Annotated[
        str | None,
        typer.Option(help="Candidates trained in one pass: a number or auto; changes no result."),
    ] = None,
    data: Data = None,
    non_private: Annotated[
        bool, typer.Option("--non-private", help="Let arms without any guarantee run.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a study, or go on where it was interrupted."""
    if data is not None:
        os.environ["PRIVTUNE_DATA"] = str(data.absolute())
    study = _load(name, storage)
    try:
        run_study(
            study,
            mlflow=mlflow,
            quiet=as_json,
            jobs=jobs,
            stack=None if stack is None else check_stack(stack),
            non_private=non_private,
        )
        if as_json:
            from privtune.cli._tables import comparison_document

            emit_json(comparison_document(study))
        else:
            print_comparison(study)
    finally:
        study.close()


@app.command("list")
def list_(storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """List the studies."""
    from privtune.study import study_names

    names = study_names(storage)
    if as_json:
        emit_json(names)
        return
    for name in names:
        console.print(name)


@app.command()
def show(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    curator: Annotated[
        bool,
        typer.Option(
            envvar="PRIVTUNE_CURATOR", help="Show sealed trials. Never show them to anyone else."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a study: its arms, their states, what they cost."""
    from privtune.cli._tables import arm_view, comparison_document

    study = _load(name, storage, curator=curator)
    try:
        document = comparison_document(study)
        sealed = {
            plan.arm: list(study.sealed_trials(plan.arm))
            for plan in study.plans
            if curator and plan.is_sealed
        }
        stopped = {plan.arm: study.failures(plan.arm) for plan in study.plans if curator}
        if as_json:
            own = {"sealed_trials": sealed, "failures": stopped}
            emit_json({**document, **own} if curator else document)
            return
        console.print(f"Study [bold]{study.name}[/] on {study.spec.task_name}", highlight=False)
        for plan, arm in zip(study.plans, document["arms"], strict=True):
            console.print(f"[bold]{plan.arm}[/] ({plan.strategy})", highlight=False)
            console.print(Padding(arm_view(plan, arm), (0, 0, 1, 2)), highlight=False)
        if curator:
            _print_sealed(sealed)
            _print_failures(stopped)
    finally:
        study.close()


@app.command()
def compare(
    name: Name,
    html: Annotated[
        Path | None, typer.Option(help="Write the comparison as one self-contained page.")
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Compare the arms of a study: what each reached, at what ε, at what cost."""
    from privtune.cli._common import write_report
    from privtune.cli._tables import comparison_document

    study = _load(name, storage)
    try:
        if html is not None:
            write_report(study, html)
        elif as_json:
            emit_json(comparison_document(study))
        else:
            print_comparison(study)
    finally:
        study.close()


@app.command()
def export(name: Name, storage: Storage = DEFAULT_STORAGE) -> None:
    """Print all that may leave the trust boundary: spec, plans, releases, the budget's certificate."""
    study = _load(name, storage)
    try:
        emit_json(study.export())
    finally:
        study.close()


@app.command()
def delete(
    name: Name,
    storage: Storage = DEFAULT_STORAGE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a study, its trials and its models. Its charges stay: they cannot be taken back."""
    from privtune.study import delete_study

    if not yes:
        typer.confirm(f"Delete study {name}, its trials and its models?", abort=True)
    delete_study(name, storage)
    console.print(
        f"Deleted study {name}. What it charged stays charged: what was released cannot be taken "
        "back.",
        soft_wrap=True,
    )


def run_study(
    study: Study,
    *,
    mlflow: bool,
    quiet: bool,
    jobs: int = 1,
    stack: int | Literal["auto"] | None = None,
    non_private: bool = False,
) -> None:
    """Run a study with progress on the terminal and, if asked, releases to MLflow."""
    from privtune.study.seal import open_stream

    observers: list[Observer] = []
    if mlflow:
        from privtune.tracking.mlflow import MlflowObserver

        observers.append(MlflowObserver(study))
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        _OpenOnly(MofNCompleteColumn()),
        _OpenOnly(TimeElapsedColumn()),
        console=Console(file=open_stream(sys.stdout)),
        disable=quiet,
    )
    try:
        study.run(
            _Fanout([_ProgressObserver(progress), *observers]),
            n_jobs=jobs,
            stack=stack,
            non_private=non_private,
        )
    finally:
        if progress.live.is_started:
            progress.stop()


def print_comparison(study: Study) -> None:
    """Print the comparison, what it rests on, and how to open it in MLflow."""
    from privtune.cli._tables import comparison_table, footnotes

    console.print(comparison_table(study))
    for line in footnotes(study):
        console.print(line, soft_wrap=True, highlight=False)
    if not study.releases():
        return
    console.print(
        f"Open it in MLflow: [bold]{program()} ui --study {study.name}{_storage(study)}[/]",
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


class _OpenOnly(ProgressColumn):
    """Shows another column for arms that are not sealed: a round's time tells its runs."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return "" if task.fields.get("sealed") else self._column.render(task)


class _ProgressObserver:
    """Shows a bar for an arm; for a sealed arm one that says nothing but that it runs."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, Any] = {}

    def arm_started(self, plan: Plan) -> None:
        label = f"{plan.arm} (sealed)" if plan.is_sealed else plan.arm
        total = None if plan.is_sealed else plan.training.schedule.steps
        # With the first arm and no sooner: bars of nothing are an empty line.
        self._progress.start()
        self._bars[plan.arm] = self._progress.add_task(label, total=total, sealed=plan.is_sealed)

    def step(self, plan: Plan, done: int, steps: int) -> None:
        self._progress.update(self._bars[plan.arm], completed=done, total=steps)

    def released(self, plan: Plan, release: Release) -> None:
        if plan.arm in self._bars:
            self._progress.update(
                self._bars[plan.arm],
                description=f"{plan.arm}: released",
                total=plan.training.schedule.steps,
                completed=plan.training.schedule.steps,
            )

    def arm_failed(self, plan: Plan) -> None:
        self._progress.update(self._bars[plan.arm], description=f"{plan.arm}: interrupted")


class _Fanout:
    """Tells several observers."""

    def __init__(self, observers: list[Any]) -> None:
        self._observers = observers

    def arm_started(self, plan: Plan) -> None:
        for observer in self._observers:
            observer.arm_started(plan)

    def step(self, plan: Plan, done: int, steps: int) -> None:
        for observer in self._observers:
            observer.step(plan, done, steps)

    def released(self, plan: Plan, release: Release) -> None:
        for observer in self._observers:
            observer.released(plan, release)

    def arm_failed(self, plan: Plan) -> None:
        for observer in self._observers:
            observer.arm_failed(plan)


def _load(name: str, storage: str, *, curator: bool = False) -> Study:
    from privtune.study import Study

    return Study(name, storage, curator=curator)


def _print_sealed(sealed: dict[str, list[Any]]) -> None:
    from privtune.cli._tables import show_value

    console.print("[bold red]Curator's view: none of this may be shown to anyone else.[/]")
    for arm, trials in sealed.items():
        table = Table(title=f"{arm}: {len(trials)} trials")
        for column in ("trial", "state", "score", "parameters"):
            table.add_column(column)
        for trial in trials:
            score = "" if trial["score"] is None else f"{trial['score']:.4f}"
            params = ", ".join(f"{k}={show_value(v)}" for k, v in trial["params"].items())
            table.add_row(str(trial["number"]), trial["state"], score, params)
        console.print(table)


def _print_failures(stopped: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for arm, errors in stopped.items():
        for error in errors:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(error["time"]))
            console.print(f"[bold red]{arm} was stopped, {when}:[/]")
            console.print(error["traceback"], markup=False, highlight=False, soft_wrap=True)
