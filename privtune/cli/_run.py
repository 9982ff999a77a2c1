"""A study is made from its spec and run, with progress on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import progress as rich_progress
from rich.console import Console, RenderableType

from privtune.cli._common import planning, say
from privtune.imports import libraries
from privtune.study.observer import Observer

if TYPE_CHECKING:
    from privtune.strategies import Plan, Release
    from privtune.study import Study, StudySpec
    from privtune.tasks._usable import RecordCheck


def run_study(study: Study, *, mlflow: bool, quiet: bool, **how: Any) -> None:
    """Run a study with progress on the terminal and, if asked, releases to MLflow.

    Args:
        study: The study.
        mlflow: Whether releases are logged.
        quiet: Whether nothing is shown.
        how: What else :meth:`privtune.study.Study.run` takes.
    """
    from privtune.cli._tables import print_records
    from privtune.study.seal import open_stream
    from privtune.tasks._reader import ON_READ

    observer = None
    if mlflow:
        with libraries():  # torch among them
            from privtune.tracking.mlflow import MlflowObserver

        observer = MlflowObserver(study)
    progress = rich_progress.Progress(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        _OpenOnly(rich_progress.MofNCompleteColumn()),
        _OpenOnly(rich_progress.TimeElapsedColumn()),
        console=Console(file=open_stream(sys.stdout)),
        disable=quiet,
    )
    bars: list[Any] = []

    def read(share: float) -> None:
        progress.start()
        if not bars or progress.tasks[bars[-1]].finished:
            bars.append(progress.add_task("reading", total=1.0, sealed=True))
        progress.update(bars[-1], completed=share)

    def told(records: RecordCheck) -> None:
        progress.stop()
        print_records(records, err=True)

    heard = ON_READ.set(read)
    try:
        study.run(_ProgressObserver(progress, observer), told=told, **how)
    finally:
        ON_READ.reset(heard)
        if progress.live.is_started:
            progress.stop()


class _OpenOnly(rich_progress.ProgressColumn):
    """Shows another column for arms that are not sealed: a round's time tells its runs."""

    def __init__(self, column: rich_progress.ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: rich_progress.Task) -> RenderableType:
        return "" if task.fields.get("sealed") else self._column.render(task)


class _ProgressObserver(Observer):
    """Shows a bar for an arm, of a sealed one that it runs and no more; then tells the tracker's observer."""

    def __init__(self, progress: rich_progress.Progress, then: Observer | None) -> None:
        self._progress = progress
        self._then = then
        self._bars: dict[str, Any] = {}

    def rehearsed(self, plan: Plan, seconds: float | None) -> None:
        if self._then is not None:
            self._then.rehearsed(plan, seconds)

    def arm_started(self, plan: Plan) -> None:
        label = f"{plan.arm} (sealed)" if plan.is_sealed else plan.arm
        total = None if plan.is_sealed else plan.training.schedule.steps
        # With the first arm and no sooner: bars of nothing are an empty line.
        self._progress.start()
        self._bars[plan.arm] = self._progress.add_task(label, total=total, sealed=plan.is_sealed)
        if self._then is not None:
            self._then.arm_started(plan)

    def step(self, plan: Plan, done: int, steps: int) -> None:
        self._progress.update(self._bars[plan.arm], completed=done, total=steps)

    def released(self, plan: Plan, release: Release) -> None:
        if plan.arm in self._bars:
            steps, said = plan.training.schedule.steps, f"{plan.arm}: released"
            bar = self._bars[plan.arm]
            self._progress.update(bar, description=said, total=steps, completed=steps)
        if self._then is not None:
            self._then.released(plan, release)

    def arm_failed(self, plan: Plan) -> None:
        self._progress.update(self._bars[plan.arm], description=f"{plan.arm}: interrupted")
        if self._then is not None:
            self._then.arm_failed(plan)


def made(
    spec: StudySpec, storage: str, *, curator: bool = False, anyway: bool = False
) -> tuple[Study, list[str]]:
    """Create a study, or load the one of its name; return it, and in which fields its spec was another."""
    from privtune.study import Study, StudyExistsError

    try:
        Study.create(spec, storage, anyway=anyway).close()
        return Study(spec.name, storage, curator=curator), []
    except StudyExistsError:
        study = Study(spec.name, storage, curator=curator)
    stored, given = (each.model_dump(mode="json") for each in (study.spec, spec))
    return study, sorted(key for key in given if given[key] != stored[key])


def opened(name: str, storage: str, *, curator: bool = False, anyway: bool = False) -> Study:
    """Return the study of a name, or of a spec: created unless it was, by the very same one."""
    from privtune.errors import PrivTuneError
    from privtune.study import Study, StudySpec, study_names

    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml"):
        return Study(name, storage, curator=curator)
    if not path.is_file() and name in study_names(storage):
        return Study(name, storage, curator=curator)
    spec = StudySpec.from_file(path)
    with planning(spec):
        study, others = made(spec, storage, curator=curator, anyway=anyway)
    if others and (status := study.status()) and {one.state for one in status} == {"planned"}:
        # Whoever corrects a spec after a refusal goes on with it: nothing depends on the old plan.
        say(
            f"Study {spec.name!r} had charged nothing, and is planned anew: {', '.join(others)}.",
            err=True,
        )
        study.delete()
        study.close()
        with planning(spec):
            study, others = made(spec, storage, curator=curator, anyway=anyway)
    if others:
        study.close()
        raise PrivTuneError(
            f"Study {spec.name!r} exists already, and was created with other {', '.join(others)} than "
            f"{path.name} has now. Go on with it as it was planned: privtune study run {spec.name}. Or "
            "give the spec another name, or delete the study first (what it charged stays charged): "
            f"privtune study delete {spec.name}."
        )
    return study
