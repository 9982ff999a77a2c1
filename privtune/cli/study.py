"""``privtune study``: create, plan, run, list, show, compare.

A command's docstring is its help text, so it speaks to whoever types the command. What is said to readers of
the code stands in comments and in the private functions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.cli import _common as common
from privtune.errors import InvalidInputError
from privtune.files import write_whole
from privtune.imports import libraries, users_code
from privtune.names import DEFAULT_STORAGE
from privtune.numbers import json_ready, show_epsilon, show_left

if TYPE_CHECKING:
    from privtune.accounting import Event
    from privtune.ledger import Charge
    from privtune.strategies.schedule_rule import ScheduleCurve
    from privtune.study import Study, StudyPlan, StudySpec
    from privtune.study.rows import AnyPlan, StudySummary

app = typer.Typer()
SpecFile = Annotated[Path, typer.Argument(help="The study's spec, a YAML file.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="PRIVTUNE_DATA",
        help="File with the data of a built-in task, such as MNIST.",
    ),
]
Name = Annotated[str, typer.Argument(help="Name of the study.")]
Curator = Annotated[
    bool,
    typer.Option(
        "--curator",
        envvar="PRIVTUNE_CURATOR",
        help="Read the records and print how many cannot be used. Do not show the output to anyone else.",
    ),
]
LargeDelta = Annotated[
    bool,
    typer.Option("--force", help="Plan even if δ is above 1 / (number of protected records)."),
]
DatasetName = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="Declare that the study's data is the dataset of this name, the one that the budget protects.",
    ),
]


@app.command()
def create(  # noqa: PLR0917 (the command line passes them by name)
    spec: SpecFile,
    artifacts: Annotated[
        str | None,
        typer.Option(help="URL of an object store for large results: s3://bucket/folder."),
    ] = None,
    dataset: DatasetName = None,
    storage: common.Storage = DEFAULT_STORAGE,
    force: LargeDelta = False,
    as_json: common.AsJson = False,
) -> None:
    """Plan a study and store it. Creates its budget if there is none yet. Touches no data."""
    from privtune.study import Study, StudySpec

    parsed = common.declare_dataset(StudySpec.from_file(spec), dataset)
    if artifacts is not None:
        document = parsed.model_dump(mode="json")
        parsed = StudySpec.parse({**document, "artifacts": artifacts})
    with common.planning(parsed):
        study = Study.create(parsed, storage, force=force)
    with closing(study):
        common.emit(
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
        typer.Option(
            "--to", help="Spec to write. By default the file's name with .yaml, in this folder."
        ),
    ] = None,
    delimiter: Annotated[
        str,
        typer.Option(
            help="Column separator of a CSV file. By default it is detected from the header."
        ),
    ] = "",
    encoding: Annotated[str, typer.Option(help="Text encoding of a CSV file.")] = "utf-8",
) -> None:
    """Write a draft spec for a table from its header. TODOs are for you to fill in. Reads no record."""
    from privtune.tasks import draft as draft_spec

    path = to or Path(f"{file.stem}.yaml")
    text = draft_spec(file, target=target, delimiter=delimiter, encoding=encoding, spec=path)
    try:
        write_whole(path, text, replace=False)
    except FileExistsError:
        raise InvalidInputError("to", str(path), "must be a file that is not there yet") from None
    common.say(
        f"Wrote {path}. Fill in every TODO in it, from what you know without looking at the records."
    )


@app.command()
def plan(  # noqa: PLR0917 (the command line passes them by name)
    spec: SpecFile,
    advice: Annotated[
        bool,
        typer.Option(
            "--advice",
            help="Also print which changes would raise or lower ε, and by how much. Takes longer.",
        ),
    ] = False,
    prices: Annotated[
        bool,
        typer.Option(
            "--prices",
            help="Also print what other minimum numbers of runs would cost. Takes longer.",
        ),
    ] = False,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve",
            help="Also print noise and work of other epochs and batches, and what twice the work would buy.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write the curve as one self-contained HTML page.")
    ] = None,
    data: Data = None,
    curator: Curator = False,
    storage: common.Storage = DEFAULT_STORAGE,
    force: LargeDelta = False,
    as_json: common.AsJson = False,
) -> None:
    """Show what each arm of a study would do and cost. Charges nothing; reads data only with --curator."""
    from privtune.cli import _curve, _tables
    from privtune.study import StudySpec, plan_study
    from privtune.study.planning import advice as advise

    if plot is not None and plot.suffix.lower() != ".html":
        raise typer.BadParameter(f"--plot {plot}: the chart of a curve ends in .html")
    _set_data(data)
    parsed = StudySpec.from_file(spec)
    with common.planning(parsed):
        study_plan = plan_study(parsed, force=force)
        changes = advise(study_plan) if advice else None
        schedules = _curve_of(parsed) if curve or plot is not None else None
    if schedules is not None and plot is not None:
        _write_curve(plot, schedules, parsed.name, quiet=as_json)
    records = None
    if curator and parsed.task is not None:
        with users_code("task", parsed.task_name, "its records cannot be read"):
            records = parsed.load_task().check_records()
    if as_json:
        examples = _tables.draw_examples(parsed)
        document = _tables.study_plan_document(parsed, study_plan, examples, with_prices=prices)
        if changes is not None:
            document["advice"] = changes.to_dict()["changes"]
        if schedules is not None:
            document["curve"] = _curve.curve_document(schedules)
        if records is not None:
            document["records"] = records.to_dict()
        common.emit_json(document)
        _check_budget(study_plan, parsed, storage)
        return
    _print_study_plan(study_plan, parsed, with_prices=prices)
    # Of a user's own data the first record was read for its shapes.
    is_own_data = isinstance(parsed.task, Mapping) and parsed.task.get("type") == "own"
    _print_total(study_plan, parsed, untouched=records is None and not is_own_data)
    _print_caveats(study_plan, parsed, spec)
    if records is not None:
        _tables.print_records(records)
    if changes is not None:
        common.say("With one change, and the rest as planned, ε of all arms together would be:")
        common.show_changes(changes)
    if schedules is not None and curve:
        _curve.print_curve(schedules)
    budget_words = _check_budget(study_plan, parsed, storage)
    if budget_words:
        common.say(budget_words)


def _curve_of(spec: StudySpec) -> ScheduleCurve:
    """Return the curve of a study's epochs and batch; refuse an open study, which has neither."""
    from privtune.study.schedules import curve_of

    return curve_of(spec, spec.planning_context())


def _write_curve(file: Path, curve: ScheduleCurve, name: str, *, quiet: bool) -> None:
    """Write the chart of a curve as a page, and say where it is unless JSON is printed."""
    from privtune.views.report import render_schedule

    page = render_schedule(curve, name)
    if quiet:
        write_whole(file, page)
    else:
        common.write_page(file, page)


def _print_study_plan(study_plan: StudyPlan, spec: StudySpec, *, with_prices: bool) -> None:
    """Print the stages and arms of a study's plan, what is declared public, and example candidates."""
    from privtune.cli import _tables

    space = spec.search_space()
    for stage, cost in zip(study_plan.stages, study_plan.stage_guarantees, strict=True):
        _tables.print_stage(stage, cost, ", before the arms, for all")
    for arm, cost in zip(study_plan.plans, study_plan.guarantees, strict=True):
        _tables.print_plan(arm, cost, space, with_prices=with_prices)
    detail = study_plan.plans[0].details.get("schedule")
    if detail is not None:
        common.show_facts("", [("epochs, batch", f"chosen for all arms: {detail['why']}")])
    _tables.print_advice(study_plan.plans)
    _tables.print_public(study_plan.plans)
    candidates = _tables.draw_examples(spec)
    if candidates:
        _tables.print_examples(candidates)


def _print_total(study_plan: StudyPlan, spec: StudySpec, *, untouched: bool) -> None:
    """Print the ε of all arms and stages together, and whether planning touched data.

    Args:
        study_plan: The study's plan.
        spec: The study's spec.
        untouched: Whether no record was read. A plan never charges; only this may differ.
    """
    from privtune.ledger.wording import PromiseWording
    from privtune.views.text import together

    total = study_plan.total
    wording = PromiseWording(spec.budget.unit)
    parts = "All stages and arms" if study_plan.stages else "All arms"
    adjacency = wording.state_adjacency(total.adjacency)
    assurance = "No data was touched." if untouched else "Nothing was charged."
    common.say(
        f"{parts} together: ε = {show_epsilon(total.epsilon, 4)} at δ = {total.delta:g} "
        f"({adjacency}, {together(total)}); target {spec.target_epsilon:g}. {assurance}"
    )
    if spec.weakened:
        common.say(f"Weakened by a {spec.weakened}.")


def _print_caveats(study_plan: StudyPlan, spec: StudySpec, file: Path) -> None:
    """Print what ε does not promise, warnings on scores and duplicate arms, and how to rehearse.

    Args:
        study_plan: The study's plan.
        spec: The study's spec.
        file: Where the spec is, as it was typed: the command that is printed names it.
    """
    from privtune.ledger.wording import PromiseWording
    from privtune.study.planning import twins_words
    from privtune.study.schedules import far_from_rule
    from privtune.study.worth import words_of

    common.say(PromiseWording(spec.budget.unit).short_caveat)
    for sentence in words_of(study_plan.plans, spec.load_task()):
        common.say(sentence)
    for sentence in twins_words(study_plan.plans):
        common.say(sentence)
    advice = far_from_rule(spec, spec.planning_context())
    if advice:
        common.say(advice)
    common.say(
        "To see on generated records how much results vary from run to run, run: "
        f"privtune study rehearse {file}"
    )


@app.command()
def rehearse(
    spec: SpecFile,
    on: Annotated[
        str | None,
        typer.Option(
            help="Task of public records to rehearse on: a built-in one, or package.module:function. By "
            "default records are generated from the public facts of the spec's task."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each arm runs.")] = 10,
    data: Data = None,
    as_json: common.AsJson = False,
) -> None:
    """Run a study's arms several times on public records. Charges nothing; reads no record of yours."""
    from privtune.cli._tables import print_rehearsal

    _set_data(data)
    with libraries():
        from privtune.rehearsal import rehearse_study
        from privtune.study import StudySpec

        parsed = StudySpec.from_file(spec)

        def notify(sentence: str) -> None:
            common.say(sentence, err=True)

        rehearsal = rehearse_study(parsed, repeats=repeats, on=on, notify=notify)
    if as_json:
        common.emit_json(rehearsal.to_dict())
    else:
        print_rehearsal(rehearsal)


def _check_budget(study_plan: StudyPlan, spec: StudySpec, storage: str) -> str:
    """Refuse a study that exceeds a stored budget, or return a sentence on what it leaves of the budget.

    Args:
        study_plan: The study's plan.
        spec: The study's spec, which names its budget.
        storage: The database of the budget.

    Returns:
        A sentence; none where the database or the budget does not exist yet.

    Raises:
        BudgetExceededError: If the budget does not hold what is not charged yet of the study.
        DatasetMismatchError: If it protects another dataset than the study's.
    """
    from privtune.ledger import Ledger
    from privtune.ledger.places import is_missing

    name = spec.budget.name
    if is_missing(storage):
        return ""
    with Ledger(storage) as ledger:
        if name not in ledger.log.names():
            return ""
        limit = ledger.budget(name).epsilon
        dataset = spec.dataset_of(study_plan.plans[0].dataset)
        ledger.check_dataset(name, dataset)
        events = _uncharged_events(study_plan, ledger.charges(name, study=spec.name))
        spent = show_epsilon(ledger.spent(name).epsilon, 4)
        # By the odometer: more may be charged after a start, so more than the study's own ε counts as spent.
        remainder = show_left(ledger.remaining_after(name, events), 4)
    now = f"ε = {spent} of {limit:g} is spent now"
    if not events:
        return f"Budget {name} is charged for this study already: {now}, and {remainder} is left."
    return f"Budget {name} holds this study: {now}, and {remainder} is left once the study has started."


def _uncharged_events(study_plan: StudyPlan, charges: Sequence[Charge]) -> list[Event]:
    """Return the events of a study's stages and private arms that its charges do not hold yet.

    Args:
        study_plan: The study's plan.
        charges: The charges of the study of this name.
    """
    paid = []
    for charge in charges:
        if charge.state != "voided":
            paid.append((charge.arm, charge.event))
    plans: list[AnyPlan] = [*study_plan.stages]
    plans += [plan for plan in study_plan.plans if plan.is_private]
    events = []
    for plan in plans:
        event = plan.charged
        if (plan.arm, event) not in paid:
            events.append(event)
    return events


@app.command()
def run(  # noqa: PLR0917 (the command line passes them by name)
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the study; or its spec, a YAML file: then the study is created first."
        ),
    ],
    storage: common.Storage = DEFAULT_STORAGE,
    mlflow: Annotated[bool, typer.Option(help="Log releases to MLflow.")] = True,
    jobs: Annotated[
        int, typer.Option(help="Number of processes that train the candidates of a selection.")
    ] = 1,
    executor: Annotated[
        str | None,
        typer.Option(
            help="Where the candidates of a selection are trained: inline (in this process), processes (on "
            "this machine), or external (by privtune worker, on any machine)."
        ),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(
            help="How many candidates are trained at once: a number or auto. Changes no result."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N. By default as in the spec.")
    ] = None,
    data: Data = None,
    non_private: Annotated[
        bool, typer.Option("--non-private", help="Also run arms that have no privacy guarantee.")
    ] = False,
    dataset: DatasetName = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Charge and run even if most records cannot be used, a score will say nothing, or δ is "
            "too large for the number of records.",
        ),
    ] = False,
    curator: Curator = False,
    as_json: common.AsJson = False,
) -> None:
    """Run a study, or continue it where it was interrupted."""
    from privtune.training.engine.compute import check_stack

    _set_data(data)
    with libraries():
        from privtune.cli._progress import open_study, run_study
        from privtune.cli._tables import print_comparison
        from privtune.study.program import check_finished
        from privtune.views.comparison import comparison_document

        study = open_study(name, storage, curator=curator, force=force, dataset=dataset)
    with closing(study):
        if study._life.outlast(lambda: study.finished):
            study._life.outlast(partial(check_finished, study._life))
            common.say(
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
                force=force,
            )
        if as_json:
            common.emit_json(study._life.outlast(partial(comparison_document, study)))
        else:
            print_comparison(study, logged=mlflow)


@app.command("list")
def list_(storage: common.Storage = DEFAULT_STORAGE, as_json: common.AsJson = False) -> None:
    """List the studies: budget, ε, progress, day of the first charge."""
    from privtune.study.rows import list_studies

    studies = list_studies(storage)
    if as_json:
        common.emit_json(json_ready([asdict(study) for study in studies]))
        return
    if not studies:
        common.say("There is no study in this storage: privtune study create SPEC makes one.")
        return
    rows = []
    for study in studies:
        epsilon = show_epsilon(study.epsilon, 4) if study.since else "—"
        rows.append((study.name, study.budget, _state_of(study), epsilon, study.since or "—"))
    columns = ("study", "budget", "state", "ε charged", "since")
    common.show_table(columns, rows, numeric=("ε charged",), keep_lines=True)
    common.say(
        "The ε of a study is that of its own charges together; privtune budget show has the ε of everything "
        "charged to a budget, and privtune budget charges that of each charge alone."
    )


def _state_of(study: StudySummary) -> str:
    """Return a study's progress as text, such as ``2 of 3 arms released``."""
    if study.since is None:
        return "planned, nothing charged" if study.arms else "no arm yet"
    return f"{study.released} of {study.arms} arms released"


@app.command()
def show(
    name: Name,
    storage: common.Storage = DEFAULT_STORAGE,
    curator: Annotated[
        bool,
        typer.Option(
            envvar="PRIVTUNE_CURATOR",
            help="Also print secret (sealed) trials. Do not show them to anyone else.",
        ),
    ] = False,
    as_json: common.AsJson = False,
) -> None:
    """Show the arms of a study, with state and ε."""
    from privtune.cli import _tables
    from privtune.views.comparison import comparison_document

    with closing(_load(name, storage, curator=curator)) as study:
        document = comparison_document(study)
        trials: dict[str, list[Mapping[str, Any]]] = {}
        errors: dict[str, Sequence[Mapping[str, Any]]] = {}
        if curator:
            trials = _read_sealed_trials(study)
            errors = _read_failures(study)
        if as_json:
            if curator:
                document = {**document, "sealed_trials": json_ready(trials), "failures": errors}
            common.emit_json(document)
            return
        common.say(f"Study {study.name} on {study.spec.task_name}", bold=True)
        for stage in study.stages:
            facts = {"state": stage.state, "released": stage.words or "nothing yet"}
            _tables.print_stage(stage.plan, stage.guarantee, "", **facts)
        for plan, arm in zip(study.plans, document["arms"], strict=True):
            _tables.print_arm(plan, arm)
        if curator:
            _tables.print_sealed(trials)
            _tables.print_failures(errors)


def _read_sealed_trials(study: Study) -> dict[str, list[Mapping[str, Any]]]:
    """Return the trials of sealed arms by the arm's name, from a study opened as its curator.

    They are in Optuna's tables from then on.
    """
    trials = {}
    for plan in study.plans:
        if plan.is_sealed:
            trials[plan.arm] = list(study.sealed_trials(plan.arm))
            study._life.lay_out_trials(plan)
    return trials


def _read_failures(study: Study) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Return the errors that stopped each stage and arm, by its name, for the curator."""
    names = [stage.plan.arm for stage in study.stages]
    names += study.arms
    return {name: study.failures(name) for name in names}


@app.command()
def compare(  # noqa: PLR0917 (the command line passes them by name)
    name: Name,
    html: Annotated[
        Path | None, typer.Option(help="Write the comparison as one self-contained HTML page.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write its chart alone: .html, .png, .svg or .pdf.")
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV, one line for each arm.")
    ] = False,
    as_markdown: Annotated[bool, typer.Option("--md", help="Print a Markdown table.")] = False,
    wide: common.Wide = False,
    storage: common.Storage = DEFAULT_STORAGE,
    as_json: common.AsJson = False,
) -> None:
    """Compare the arms of a study: score, ε and computing cost of each."""
    from privtune.cli._tables import print_comparison
    from privtune.plots.image import KINDS
    from privtune.views.comparison import comparison_document, to_csv, to_markdown
    from privtune.views.report import render_chart, render_study

    formats = (html is not None, plot is not None, as_csv, as_markdown, as_json)
    if sum(formats) > 1:
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
            sys.stdout.write(to_csv(study))
        elif as_markdown:
            sys.stdout.write(to_markdown(study))
        else:
            print_comparison(study, logged=_may_be_logged(study), wide=wide)


def _may_be_logged(study: Study) -> bool:
    """Return whether there is an MLflow store that a study may have been logged to.

    The comparison ends with the command that opens it in MLflow, or with the one that logs it. To ask MLflow
    itself would take seconds and, of a server, a network.
    """
    from privtune.ledger.places import artifact_root

    if "MLFLOW_TRACKING_URI" in os.environ:
        return True
    local_store = artifact_root(study.storage) / "mlflow.db"
    return local_store.exists()


@app.command()
def export(
    name: Name,
    registry: Annotated[
        bool,
        typer.Option(
            "--registry", help="Print a draft entry for OpenDP's registry of deployments, as YAML."
        ),
    ] = False,
    evaluation: Annotated[
        bool,
        typer.Option(
            "--sp800-226", help="Print answers to the questions of NIST SP 800-226, as Markdown."
        ),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="With --sp800-226: write an HTML page to this file.")
    ] = None,
    storage: common.Storage = DEFAULT_STORAGE,
) -> None:
    """Print what a study may publish: plans, releases, certificate.

    That is the spec, the plans, the releases and the budget's certificate.
    """
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
    storage: common.Storage = DEFAULT_STORAGE,
    leave_objects: Annotated[
        bool,
        typer.Option(
            "--leave-objects",
            help="Do not delete objects of an object store that no longer exists.",
        ),
    ] = False,
    leave_files: Annotated[
        bool,
        typer.Option("--leave-files", help="Do not delete files in folders that no longer exist."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a study, its trials and its models. Its charges stay on the budget."""
    from privtune.study import delete_study

    if not yes:
        typer.confirm(f"Delete study {name}, its trials and its models?", abort=True)
    folders = delete_study(name, storage, leave_objects=leave_objects, leave_files=leave_files)
    common.say(
        f"Deleted study {name}. Its charges stay on the budget: what was released cannot be taken back."
    )
    for folder in folders:
        common.say(f"{folder} was not deleted: it holds files that the study did not make.")


def _set_data(data: Path | None) -> None:
    """Set ``PRIVTUNE_DATA`` to a built-in task's data, for this process and those that it starts.

    The path is made absolute, as workers may run in other folders.
    """
    if data is not None:
        os.environ["PRIVTUNE_DATA"] = str(data.absolute())


def _load(name: str, storage: str, *, curator: bool = False) -> Study:
    """Return a stored study, opened as its curator if sealed results are to be read."""
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
            help="MLflow tracking URI. By default a store beside the study's database.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Also log the released model of this arm, as an MLflow model. Repeatable."
        ),
    ] = None,
    register: Annotated[
        str | None,
        typer.Option(help="Register those models under this name in MLflow's model registry."),
    ] = None,
    storage: common.Storage = DEFAULT_STORAGE,
    as_json: common.AsJson = False,
) -> None:
    """Log releases to MLflow that are missing there. MLflow may have been down when a study ran."""
    from privtune.study import Study
    from privtune.tracking.mlflow import log_model, sync_study

    addresses = {}
    with closing(Study(name, storage)) as study:
        logged = sync_study(study, uri=tracking_uri)
        for arm in model or ():
            addresses[arm] = log_model(study, arm, register=register, uri=tracking_uri)
        arms = study.status()
        sealed = [arm.plan.arm for arm in arms if arm.plan.is_sealed and arm.release is None]
    lines = []
    if logged:
        lines.append(f"Logged {', '.join(logged)}.")
    for arm, address in addresses.items():
        lines.append(f"Logged the model of {arm}: {address}")
    if not lines:
        lines.append(_why_nothing_is_logged(sealed))
    common.emit(
        {"study": name, "logged": list(logged), "models": addresses},
        *lines,
        as_json=as_json,
    )


def _why_nothing_is_logged(sealed: list[str]) -> str:
    """Return why nothing was logged: sealed arms are unreleased, or all releases are logged.

    Args:
        sealed: Arms without a release yet. Between two runs in MLflow one could read how long they took.
    """
    if sealed:
        return f"Nothing is logged before every sealed arm has been released: {', '.join(sealed)}."
    return "Nothing to log."
