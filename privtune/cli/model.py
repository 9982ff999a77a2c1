"""``privtune model`` and ``privtune predict``: released models, and what they say of raw rows."""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from privtune.cli._common import DEFAULT_STORAGE, AsJson, Storage, emit_json, patience, say
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.numbers import json_ready

app = typer.Typer()
Name = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")]
Arm = Annotated[str, typer.Argument(help="A released arm.")]

_AT_ONCE = 4096  # lines


@app.command()
def export(
    name: Name,
    arm: Arm,
    to: Annotated[Path, typer.Option("--to", help="A new folder.")],
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Write a released model for MLflow: it takes raw rows, wherever mlflow and torch are."""
    from privtune.study import Study
    from privtune.tracking.model import export_model, tags_of

    with closing(Study(name, storage)) as study, patience("Exporting the model"):
        export_model(study, arm, to)
        tags = tags_of(study, arm)
    if as_json:
        emit_json({"model": str(to), **tags})
    else:
        say(
            f"Wrote {to}. Serve it with: mlflow models serve --env-manager local --model-uri {to}\n"
            f"In Python: mlflow.pyfunc.load_model({str(to)!r}).predict(frame)"
        )


def predict(
    name: Name,
    arm: Arm,
    file: Annotated[Path, typer.Argument(help="A CSV file of raw rows, a header first.")],
    *,
    to: Annotated[
        Path | None, typer.Option("--to", help="Write here; else to standard output.")
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="The predictions without the columns of the file.")
    ] = False,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Ask a released model about the rows of a file: its columns, and the predictions after them."""
    from privtune.study import Study
    from privtune.tasks._reader import csv_rows
    from privtune.tasks.described import read_form

    if as_json and to is not None:
        raise typer.BadParameter("give --to or --json")
    if to is not None and to.exists() and to.samefile(file):
        raise InvalidInputError("to", str(to), "must be another file than the one that is read")
    with closing(Study(name, storage)) as study:
        served, task = study.release(arm).served, study.spec.task
    if not served.rows.names:
        raise PrivTuneError(
            f"Arm {arm!r} takes arrays, which no CSV file holds: ask release.predict(arrays) in Python."
        )
    while isinstance(task, Mapping) and "task" in task:
        task = task["task"]  # of a fine-tuning
    form = read_form(task if isinstance(task, Mapping) else {})
    header, lines = csv_rows(file, served.rows.names, form)
    if twice := [name for name in served.rows.names if header.count(name) > 1]:
        raise PrivTuneError(f"{file} has two columns called {', '.join(twice)}.")
    parts = (list(zip(*part, strict=True)) or [()] * len(header) for part in _parts(lines))
    found = (
        (cells, served.answers(*served.rows.read(dict(zip(header, cells, strict=True)))))
        for cells in parts
    )
    first = next(found)
    kept = [] if alone or as_json else header
    if both := [title for title in kept if title in first[1]]:
        raise PrivTuneError(f"{file} has a column called {both[0]} already: give --alone.")
    rows = (
        row
        for cells, columns in itertools.chain([first], found)
        for row in zip(
            *cells[: len(kept)], *(answers for answers, _ in columns.values()), strict=True
        )
    )
    titles = [*kept, *first[1]]
    if as_json:
        predictions = [dict(zip(titles, row, strict=True)) for row in rows]
        emit_json({"study": name, "arm": arm, "predictions": json_ready(predictions)})
        return
    place = nullcontext(sys.stdout) if to is None else to.open("w", encoding="utf-8", newline="")
    with place as out:
        csv.writer(out, lineterminator="\n").writerows(itertools.chain([titles], rows))
    if to is not None:
        say(f"Wrote {to}.")


def _parts(lines: Iterator[list[str | None]]) -> Iterator[list[list[str | None]]]:
    """Yield lines many at once; of no lines one part without any, whose columns are looked at."""
    yield list(itertools.islice(lines, _AT_ONCE))
    while part := list(itertools.islice(lines, _AT_ONCE)):
        yield part
