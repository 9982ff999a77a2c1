"""Creates or loads a study, and runs it with progress on the terminal.

``privtune study run`` takes the name of a study or a spec's file, and the same command goes on with a
study that was interrupted. So each function here finds out first whether the study exists.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import progress as rich_progress
from rich.console import Console, RenderableType

from privtune.cli._common import declare_dataset, planning, say
from privtune.imports import libraries
from privtune.study.observer import Observer
from privtune.study.schedules import with_chosen_numbers

if TYPE_CHECKING:
    from privtune.strategies import Plan, Release
    from privtune.study import Study, StudySpec
    from privtune.tables.unusable import RecordCheck


def run_study(study: Study, *, mlflow: bool, quiet: bool, **how: Any) -> None:
    """Run a study with progress on the terminal and, if asked, log its releases to MLflow.

    Args:
        study: The study.
        mlflow: Whether releases are logged.
        quiet: Whether nothing is shown.
        how: What else :meth:`privtune.study.Study.run` takes.

    Raises:
        PrivTuneError: The run was refused before it charged anything, or an arm of it failed.
    """
    from privtune.cli._tables import print_records
    from privtune.study.seal import open_stream
    from privtune.tables.listening import ON_READ

    observer = None
    if mlflow:
        with libraries():  # torch among them
            from privtune.tracking.mlflow import MlflowObserver

        observer = MlflowObserver(study)
    # While trials train, what is printed goes to the curator's log, and the bars would with it.
    console = Console(file=open_stream(sys.stdout))
    progress = rich_progress.Progress(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        _UnsealedColumn(rich_progress.MofNCompleteColumn()),
        _UnsealedColumn(rich_progress.TimeElapsedColumn()),
        console=console,
        auto_refresh=console.is_terminal,
        disable=quiet,
    )
    reading_bars: list[Any] = []

    def show_reading(share: float) -> None:
        progress.start()
        # Several tables are read one after the other: each gets a bar of its own.
        if not reading_bars or progress.tasks[reading_bars[-1]].finished:
            reading_bars.append(progress.add_task("reading", total=1.0, sealed=True))
        progress.update(reading_bars[-1], completed=share)

    def show_records(records: RecordCheck) -> None:
        # A bar that is still drawn would overwrite these lines.
        progress.stop()
        print_records(records, err=True)

    token = ON_READ.set(show_reading)
    try:
        study.run(_ProgressObserver(progress, observer), on_check=show_records, **how)
    finally:
        ON_READ.reset(token)
        for task in progress.tasks:
            progress.update(task.id, visible=True)
        if progress.live.is_started:
            progress.stop()


_FULL_BARS = 20
"""The most full bars that are drawn, several times a second; at the end all are."""


class _UnsealedColumn(rich_progress.ProgressColumn):
    """A progress column that stays empty for sealed arms, whose counts and times are secret.

    How many trials a private selection trains is drawn in secret, and its ε holds only as long as nobody
    can count them or measure how long they took.

    Args:
        column: The column, which stays empty for sealed arms.
    """

    def __init__(self, column: rich_progress.ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: rich_progress.Task) -> RenderableType:
        return "" if task.fields.get("sealed") else self._column.render(task)


class _ProgressObserver(Observer):
    """An observer that draws a progress bar for each arm and passes events on to the tracker's observer.

    Args:
        progress: What draws the bars.
        tracker: The observer that logs to MLflow; None where nothing is logged. It hears of arms, not of
            single steps.
    """

    def __init__(self, progress: rich_progress.Progress, tracker: Observer | None) -> None:
        self._progress = progress
        self._tracker = tracker
        self._bars: dict[str, Any] = {}

    def rehearsed(self, plan: Plan, seconds: float | None) -> None:
        if self._tracker is not None:
            self._tracker.rehearsed(plan, seconds)

    def arm_started(self, plan: Plan) -> None:
        label = f"{plan.arm} (sealed)" if plan.is_sealed else plan.arm
        total = None if plan.is_sealed else plan.training.schedule.steps
        # With the first arm and no sooner: bars of nothing are an empty line.
        self._progress.start()
        self._bars[plan.arm] = self._progress.add_task(label, total=total, sealed=plan.is_sealed)
        if self._tracker is not None:
            self._tracker.arm_started(plan)

    def step(self, plan: Plan, done: int, steps: int) -> None:
        self._progress.update(self._bars[plan.arm], completed=done, total=steps)

    def released(self, plan: Plan, release: Release) -> None:
        # An arm that an earlier run of the study released has no bar in this one.
        if plan.arm in self._bars:
            steps = plan.training.schedule.steps
            label = f"{plan.arm}: released"
            bar = self._bars[plan.arm]
            self._progress.update(bar, description=label, total=steps, completed=steps)
            full_bars = [task.id for task in self._progress.tasks if task.visible and task.finished]
            if len(full_bars) > _FULL_BARS:
                self._progress.update(full_bars[0], visible=False)
        if self._tracker is not None:
            self._tracker.released(plan, release)

    def arm_failed(self, plan: Plan) -> None:
        self._progress.update(self._bars[plan.arm], description=f"{plan.arm}: interrupted")
        if self._tracker is not None:
            self._tracker.arm_failed(plan)


def create_or_load(
    spec: StudySpec, storage: str, *, curator: bool = False, force: bool = False
) -> tuple[Study, list[str]]:
    """Create a study from its spec, or load the study that has its name.

    Args:
        spec: What the study shall be.
        storage: The database of studies.
        curator: Whether who calls may see what is sealed.
        force: Whether to plan although δ is above one over the number of protected records.

    Returns:
        The study, and the fields in which the spec that it was created from differs from this one; none
        where it was created now.
    """
    from privtune.study import Study, StudyExistsError

    try:
        Study.create(spec, storage, force=force).close()
        return Study(spec.name, storage, curator=curator), []
    except StudyExistsError:
        study = Study(spec.name, storage, curator=curator)
    stored_fields = study.spec.model_dump(mode="json")
    fields = with_chosen_numbers(spec, study.plans).model_dump(mode="json")
    differences = sorted(key for key in fields if fields[key] != stored_fields[key])
    return study, differences


def open_study(
    name: str,
    storage: str,
    *,
    curator: bool = False,
    force: bool = False,
    dataset: str | None = None,
) -> Study:
    """Return the study of a name, or of a spec's file, from which it is created if it is missing.

    Args:
        name: The name of a study, or the path of a spec (``.yaml``, ``.yml``).
        storage: The database of studies.
        curator: Whether who calls may see what is sealed.
        force: Whether to plan although δ is above one over the number of protected records.
        dataset: The dataset that the study's data is declared to be, for a study that is created now.

    Returns:
        The study. One that has charged nothing is planned again where its spec has changed.

    Raises:
        PrivTuneError: The study exists, and a dataset is declared or its spec was another: what has been
            charged was charged for the old plan, and must not be reported under a new one.
    """
    from privtune.errors import PrivTuneError
    from privtune.study import Study, StudySpec, study_names

    path = Path(name)
    is_spec = path.suffix.lower() in (".yaml", ".yml")
    # A study may be named like a file: its spec's, if that exists, comes first.
    if not is_spec or (not path.is_file() and name in study_names(storage)):
        if dataset is not None:
            raise PrivTuneError(
                f"--dataset is declared when a study is made, and {name} is there: leave it out, or run "
                "the study's spec under another name."
            )
        return Study(name, storage, curator=curator)
    spec = declare_dataset(StudySpec.from_file(path), dataset)
    with planning(spec):
        study, differences = create_or_load(spec, storage, curator=curator, force=force)
    if differences and _is_unstarted(study):
        # Whoever corrects a spec after a refusal goes on with it: nothing depends on the old plan.
        say(
            f"The spec of study {spec.name!r} has changed: {', '.join(differences)}. Nothing had been "
            "charged, so the study is planned again.",
            err=True,
        )
        study.delete()
        study.close()
        with planning(spec):
            study, differences = create_or_load(spec, storage, curator=curator, force=force)
    if differences:
        study.close()
        raise PrivTuneError(
            f"Study {spec.name!r} exists already, and was created with other {', '.join(differences)} "
            f"than {path.name} has now. Go on with it as it was planned: privtune study run {spec.name}. Or "
            "give the spec another name, or delete the study first (what it charged stays charged): "
            f"privtune study delete {spec.name}."
        )
    return study


def _is_unstarted(study: Study) -> bool:
    """Return whether a study has arms and all of them are still only planned."""
    states = {arm.state for arm in study.status()}
    return states == {"planned"}
