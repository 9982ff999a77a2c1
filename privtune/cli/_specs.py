"""Specs at the command line: planned with a word on what takes long, and made into studies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from privtune.cli._common import patience

if TYPE_CHECKING:
    from privtune.study import Study, StudySpec


@contextmanager
def planning(spec: StudySpec) -> Iterator[None]:
    """Say on stderr what planning does if it takes long, and that a task's data is not here."""
    if spec.task is not None and (absent := spec.load_task().look()):
        typer.echo(absent, err=True)
    arms = ", ".join(arm.name for arm in spec.arms)
    with patience(f"Planning {arms}: their noise is calibrated to one target"):
        yield


def made(spec: StudySpec, storage: str, *, curator: bool = False) -> tuple[Study, list[str]]:
    """Create a study, or load the one of its name; return it, and in which fields its spec was another."""
    from privtune.study import Study, StudyExistsError

    try:
        Study.create(spec, storage).close()
        return Study(spec.name, storage, curator=curator), []
    except StudyExistsError:
        study = Study(spec.name, storage, curator=curator)
    stored, given = (each.model_dump(mode="json") for each in (study.spec, spec))
    return study, sorted(key for key in given if given[key] != stored[key])


def opened(name: str, storage: str, *, curator: bool = False) -> Study:
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
        study, others = made(spec, storage, curator=curator)
    if others:
        study.close()
        raise PrivTuneError(
            f"Study {spec.name!r} exists already, and was created with other {', '.join(others)} than "
            f"{path.name} has now. Go on with it as it was planned: privtune study run {spec.name}. Or "
            "give the spec another name, or delete the study first (what it charged stays charged): "
            f"privtune study delete {spec.name}."
        )
    return study
