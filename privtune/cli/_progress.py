"""Progress on the terminal while a study runs; of a sealed arm nothing but that it runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, RenderableType
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

from privtune.imports import libraries

if TYPE_CHECKING:
    from privtune.strategies import Plan, Release
    from privtune.study import Observer, Study
    from privtune.tasks._usable import RecordCheck


def run_study(
    study: Study,
    *,
    mlflow: bool,
    quiet: bool,
    executor: str | None = None,
    jobs: int = 1,
    device: str | None = None,
    stack: int | Literal["auto"] | None = None,
    non_private: bool = False,
    anyway: bool = False,
) -> None:
    """Run a study with progress on the terminal and, if asked, releases to MLflow."""
    from privtune.cli._tables import print_records
    from privtune.study.seal import open_stream
    from privtune.tasks._reader import ON_READ

    observers: list[Observer] = []
    if mlflow:
        with libraries():  # torch among them
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
        study.run(
            _Fanout([_ProgressObserver(progress), *observers]),
            executor=executor,
            n_jobs=jobs,
            device=device,
            stack=stack,
            non_private=non_private,
            anyway=anyway,
            told=told,
        )
    finally:
        ON_READ.reset(heard)
        if progress.live.is_started:
            progress.stop()


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
