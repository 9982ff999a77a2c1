"""``privtune study``: create, plan, run, list, show, compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privtune.cli import _common as common
from privtune.errors import InvalidInputError
from privtune.imports import libraries, users_code
from privtune.numbers import json_ready, show_epsilon, show_left

if TYPE_CHECKING:
    from privtune.study import Study, StudyPlan, StudySpec

app = typer.Typer()
SpecFile = Annotated[Path, typer.Argument(help="The study's spec, a YAML file.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", envvar="PRIVTUNE_DATA", help="File of a task's data, as for MNIST."),
]
Name = Annotated[str, typer.Argument(help="Name of the study.")]
Curator = Annotated[
    bool,
    typer.Option(
        "--curator",
        envvar="PRIVTUNE_CURATOR",
        help="Read the records, and say how many cannot be used. Never show it to anyone else.",
    ),
]


Anyway = Annotated[
    bool,
    typer.Option(
        "--anyway", help="Plan although δ is above one over the number of protected records."
    ),
]


@app.command()
def create(
    spec: SpecFile,
    artifacts: Annotated[
        str | None,
        typer.Option(help="Absolute URL of an object store for large results: s3://bucket/folder."),
    ] = None,
    storage: common.Storage = common.DEFAULT_STORAGE,
    anyway: Anyway = False,
    as_json: common.AsJson = False,
) -> None:
    """Plan a study and store it, with its budget if that does not exist. Touches no data."""
    from privtune.study import Study, StudySpec

    parsed = StudySpec.from_file(spec)
    if artifacts is not None:
        parsed = StudySpec.parse({**parsed.model_dump(mode="json"), "artifacts": artifacts})
    with common.planning(parsed):
        study = Study.create(parsed, storage, anyway=anyway)
    with closing(study):
        common.tell(
            {"study": study.name, "arms": list(study.arms)},
            f"Created study {study.name} with {len(study.arms)} arms; nothing has been charged yet. "
            f"Run it with: privtune study run {study.name}",
            as_json=as_json,
        )


@app.command()
def draft(
    file: Annotated[Path, typer.Argument(help="A table: CSV, JSON lines, Parquet or Arrow.")],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Write here; else to the file's name with .yaml, here."),
    ] = None,
    delimiter: Annotated[str, typer.Option(help="What parts the columns of a CSV file.")] = "",
    encoding: Annotated[str, typer.Option(help="The letters of a CSV file.")] = "utf-8",
) -> None:
    """Write the spec of a table from its header, with what you must declare left open. Reads no record."""
    from privtune.tasks import draft as draft_of

    text = draft_of(file, target=target, delimiter=delimiter, encoding=encoding)
    place = to or Path(f"{file.stem}.yaml")
    try:
        with place.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise InvalidInputError("to", str(place), "must be a file that is not there yet") from None
    common.say(
        f"Wrote {place}. Write what is known without the data in the place of every TODO in it."
    )


@app.command()
def plan(  # noqa: PLR0917 (the command line passes them by name)
    spec: SpecFile,
    advice: Annotated[
        bool, typer.Option("--advice", help="Say what would cost or save most; takes longer.")
    ] = False,
    data: Data = None,
    curator: Curator = False,
    storage: Annotated[
        str | None,
        typer.Option("--storage", help="Say also whether the budget of this database holds it."),
    ] = None,
    anyway: Anyway = False,
    as_json: common.AsJson = False,
) -> None:
    """Show what a study would do and cost, arm by arm. Charges nothing; reads data for a curator alone."""
    from privtune.cli import _tables
    from privtune.ledger.wording import PromiseWording
    from privtune.study import StudySpec, plan_study
    from privtune.study.planning import advice as advice_on
    from privtune.study.worth import words_of
    from privtune.views.text import together

    _give(data)
    parsed = StudySpec.from_file(spec)
    with common.planning(parsed):
        planned = plan_study(parsed, anyway=anyway)
        advised = advice_on(planned) if advice else None
    records = None
    if curator and parsed.task is not None:
        with users_code("task", parsed.task_name, "its records cannot be read"):
            records = parsed.load_task().check_records()
    pairs = list(zip(planned.plans, planned.guarantees, strict=True))
    stages = list(zip(planned.stages, planned.stage_guarantees, strict=True))
    space, drawn = parsed.search_space(), _tables.examples(parsed)
    task = parsed.load_task()
    if as_json:
        document = _tables.study_plan_document(parsed, planned, drawn)
        if advised is not None:
            document["advice"] = advised.to_dict()["changes"]
        if records is not None:
            document["records"] = records.to_dict()
        common.emit_json(document)
        _check_budget(planned, parsed, storage)
        return
    for stage, guarantee in stages:
        _tables.print_stage(stage, guarantee, ", before the arms, for all")
    for arm, guarantee in pairs:
        _tables.print_plan(arm, guarantee, space)
    _tables.print_public(planned.plans)
    if drawn:
        _tables.print_examples(drawn)
    # Of a user's own data the first record was read for its shapes.
    own = isinstance(parsed.task, Mapping) and parsed.task.get("type") == "own"
    total = planned.total
    wording = PromiseWording(parsed.budget.unit)
    common.say(
        f"{'All stages and arms' if stages else 'All arms'} together: ε = "
        f"{show_epsilon(total.epsilon, 4)} at δ = {total.delta:g} "
        f"({wording.state_adjacency(total.adjacency)}, {together(total)}); target "
        f"{parsed.target_epsilon:g}. "
        f"{'No data was touched.' if records is None and not own else 'Nothing was charged.'}"
    )
    rehearse_it = f"privtune study rehearse {spec} shows on generated records"
    for sentence in (
        wording.short_caveat,
        *words_of(planned.plans, task),
        f"How far trainings move apart, {rehearse_it}.",
    ):
        common.say(sentence)
    if records is not None:
        _tables.print_records(records)
    if advised is not None:
        common.say("With a change, and everything else as planned, all arms together would be:")
        common.show_changes(advised)
    if left := _check_budget(planned, parsed, storage):
        common.say(left)


@app.command()
def rehearse(
    spec: SpecFile,
    on: Annotated[
        str | None,
        typer.Option(
            help="A task of public records to rehearse on: built in, or package.module:function. Unless "
            "given, records are generated from the public facts of the spec's task."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each arm runs.")] = 10,
    data: Data = None,
    as_json: common.AsJson = False,
) -> None:
    """Run a study's arms several times on public records. Charges nothing; reads no record of yours."""
    from privtune.cli._tables import print_rehearsal

    _give(data)
    with libraries():
        from privtune.study import StudySpec, rehearse_study

        parsed = StudySpec.from_file(spec)

        def tell(said: str) -> None:
            common.say(said, err=True)

        found = rehearse_study(parsed, repeats=repeats, on=on, tell=tell)
    if as_json:
        common.emit_json(found.to_dict())
    else:
        print_rehearsal(found)


def _check_budget(planned: StudyPlan, spec: StudySpec, storage: str | None) -> str:
    """Refuse a study that a stored budget does not hold; say what holds it."""
    if storage is None:
        return ""
    from privtune.ledger import Ledger
    from privtune.ledger.places import checked_url, database_path

    name, path = spec.budget.name, database_path(checked_url(storage))
    absent = f"Budget {name} is not there yet: privtune study create makes it."
    if path is not None and not path.exists():
        return absent  # opening a ledger would make the file
    with Ledger(storage) as ledger:
        if name not in [budget.name for budget in ledger.budgets()]:
            return absent
        left = ledger.remaining(name)
        events = [plan.charged for plan in planned.plans if plan.is_private]
        ledger.check(name, [*(stage.event for stage in planned.stages), *events])
    return f"Budget {name}, of which ε = {show_left(left)} is left, holds this study."


@app.command()
def run(  # noqa: PLR0917 (the command line passes them by name)
    name: Annotated[
        str, typer.Argument(help="Name of the study; or its spec, a YAML file, to create it first.")
    ],
    storage: common.Storage = common.DEFAULT_STORAGE,
    mlflow: Annotated[bool, typer.Option(help="Log releases to MLflow.")] = True,
    jobs: Annotated[int, typer.Option(help="Worker processes for sealed rounds.")] = 1,
    executor: Annotated[
        str | None,
        typer.Option(help="inline, processes, or external: wait for privtune worker, anywhere."),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(help="Candidates trained in one pass: a number or auto; changes no result."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N; what the spec says unless given.")
    ] = None,
    data: Data = None,
    non_private: Annotated[
        bool, typer.Option("--non-private", help="Let arms without any guarantee run.")
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Charge and run although most records cannot be used, a score will say nothing, or δ is "
            "too large for the number of records.",
        ),
    ] = False,
    curator: Curator = False,
    as_json: common.AsJson = False,
) -> None:
    """Run a study, or go on where it was interrupted."""
    from privtune.training.engine.compute import check_stack

    _give(data)
    with libraries():
        from privtune.cli._run import opened, run_study
        from privtune.cli._tables import print_comparison
        from privtune.views.comparison import comparison_document

        study = opened(name, storage, curator=curator, anyway=anyway)
    with closing(study):
        if study.finished:
            typer.echo(
                f"Study {study.name} is finished: every arm has been released, so nothing was run and "
                "nothing was spent.",
                err=as_json,
            )
        else:
            run_study(
                study,
                mlflow=mlflow,
                quiet=as_json,
                executor=executor,
                n_jobs=jobs,
                device=device,
                stack=None if stack is None else check_stack(stack),
                non_private=non_private,
                anyway=anyway,
            )
        if as_json:
            common.emit_json(comparison_document(study))
        else:
            print_comparison(study, logged=mlflow)


@app.command("list")
def list_(storage: common.Storage = common.DEFAULT_STORAGE, as_json: common.AsJson = False) -> None:
    """List the studies."""
    from privtune.study import study_names

    names = study_names(storage)
    common.tell(names, *names, as_json=as_json)


@app.command()
def show(
    name: Name,
    storage: common.Storage = common.DEFAULT_STORAGE,
    curator: Annotated[
        bool,
        typer.Option(
            envvar="PRIVTUNE_CURATOR", help="Show sealed trials. Never show them to anyone else."
        ),
    ] = False,
    as_json: common.AsJson = False,
) -> None:
    """Show a study: its arms, their states, what they cost."""
    from privtune.cli import _tables
    from privtune.views.comparison import comparison_document

    with closing(_load(name, storage, curator=curator)) as study:
        document = comparison_document(study)
        sealed = {
            plan.arm: list(study.sealed_trials(plan.arm))
            for plan in study.plans
            if curator and plan.is_sealed
        }
        named = (*(stage.plan.arm for stage in study.stages), *study.arms)
        stopped = {name: study.failures(name) for name in named if curator}
        if as_json:
            own = {"sealed_trials": json_ready(sealed), "failures": stopped}
            common.emit_json({**document, **own} if curator else document)
            return
        common.say(f"Study {study.name} on {study.spec.task_name}", bold=True)
        for stage in study.stages:
            more = {"state": stage.state, "released": stage.words or "nothing yet"}
            _tables.print_stage(stage.plan, stage.guarantee, "", **more)
        for plan, arm in zip(study.plans, document["arms"], strict=True):
            _tables.print_arm(plan, arm)
        if curator:
            _tables.print_sealed(sealed)
            _tables.print_failures(stopped)


@app.command()
def compare(  # noqa: PLR0917 (the command line passes them by name)
    name: Name,
    html: Annotated[
        Path | None, typer.Option(help="Write the comparison as one self-contained page.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write its chart alone: .html, .png, .svg or .pdf.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print one line of CSV an arm.")] = False,
    as_markdown: Annotated[bool, typer.Option("--md", help="Print a table of Markdown.")] = False,
    storage: common.Storage = common.DEFAULT_STORAGE,
    as_json: common.AsJson = False,
) -> None:
    """Compare the arms of a study: what each reached, at what ε, at what cost."""
    from privtune.cli._tables import print_comparison
    from privtune.plots._image import KINDS
    from privtune.views.comparison import comparison_document, to_csv, to_markdown
    from privtune.views.report import render_chart, render_study

    if sum((html is not None, plot is not None, as_csv, as_markdown, as_json)) > 1:
        raise typer.BadParameter("give one of --html, --plot, --csv, --md and --json")
    kind = ".html" if plot is None else plot.suffix.lower()
    if kind not in (".html", *KINDS):
        raise typer.BadParameter(f"--plot {plot}: a chart ends in .html, {', '.join(KINDS)}")
    with closing(_load(name, storage)) as study:
        if html is not None:
            common.write_page(html, render_study(study))
        elif plot is not None:
            common.write_page(plot, render_chart(study, kind))
        elif as_json:
            common.emit_json(comparison_document(study))
        elif as_csv:
            sys.stdout.write(to_csv(comparison_document(study)))
        elif as_markdown:
            sys.stdout.write(to_markdown(study))
        else:
            print_comparison(study)


@app.command()
def export(
    name: Name,
    registry: Annotated[
        bool, typer.Option("--registry", help="As a draft for OpenDP's deployments registry, YAML.")
    ] = False,
    evaluation: Annotated[
        bool, typer.Option("--sp800-226", help="As answers to NIST SP 800-226, Markdown.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="With --sp800-226: write a page here instead.")
    ] = None,
    storage: common.Storage = common.DEFAULT_STORAGE,
) -> None:
    """Print all that may leave the trust boundary: spec, plans, releases, the budget's certificate."""
    if (registry and evaluation) or (html is not None and not evaluation):
        raise typer.BadParameter("give --registry, or --sp800-226 (which --html goes with)")
    with closing(_load(name, storage)) as study:
        if registry:
            from privtune.views.officer import to_yaml

            sys.stdout.write(to_yaml(study))
        elif evaluation:
            from privtune.views.officer import to_html, to_markdown

            if html is not None:
                common.write_page(html, to_html(study))
            else:
                sys.stdout.write(to_markdown(study))
        else:
            common.emit_json(study.export())


@app.command()
def delete(
    name: Name,
    storage: common.Storage = common.DEFAULT_STORAGE,
    leave_objects: Annotated[
        bool,
        typer.Option(
            "--leave-objects", help="Leave what is in an object store that is gone for good."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a study, its trials and its models. Its charges stay: they cannot be taken back."""
    from privtune.study import delete_study

    if not yes:
        typer.confirm(f"Delete study {name}, its trials and its models?", abort=True)
    left = delete_study(name, storage, leave_objects=leave_objects)
    common.say(
        f"Deleted study {name}. What it charged stays charged: what was released cannot be taken back."
    )
    for folder in left:
        common.say(f"{folder} stays: it holds files that the study did not make.")


def _give(data: Path | None) -> None:
    if data is not None:
        os.environ["PRIVTUNE_DATA"] = str(data.absolute())


def _load(name: str, storage: str, *, curator: bool = False) -> Study:
    from privtune.study import Study

    return Study(name, storage, curator=curator)


@app.command()
def sync(
    name: Annotated[str, typer.Argument(help="Name of the study.")],
    *,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI",
            help="MLflow's store or server; beside the study's database unless given.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Log this arm's released model in MLflow's own format; repeatable."),
    ] = None,
    register: Annotated[
        str | None, typer.Option(help="Register those models under this name.")
    ] = None,
    storage: common.Storage = common.DEFAULT_STORAGE,
    as_json: common.AsJson = False,
) -> None:
    """Log releases to MLflow that are not there yet, such as those of a study run while it was down."""
    from privtune.study import Study
    from privtune.tracking.mlflow import log_model, sync_study

    with closing(Study(name, storage)) as study:
        logged = sync_study(study, uri=tracking_uri)
        models = {
            arm: log_model(study, arm, register=register, uri=tracking_uri) for arm in model or ()
        }
    common.tell(
        {"study": name, "logged": list(logged), "models": models},
        *(f"Logged the model of {arm}: {address}" for arm, address in models.items()),
        f"Logged {', '.join(logged)}." if logged else "Nothing to log.",
        as_json=as_json,
    )
