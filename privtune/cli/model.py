"""``privtune model`` and ``privtune predict``: exports of released models, and their predictions."""

from __future__ import annotations

import csv
import io
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from privtune.cli._common import AsJson, Storage, emit_json, patience, say
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import open_whole
from privtune.names import DEFAULT_STORAGE
from privtune.numbers import json_ready
from privtune.prose import complain

if TYPE_CHECKING:
    from privtune.serving.prediction import Cells
    from privtune.tables.raw_rows import Answers

app = typer.Typer()
Name = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study.")]
Arm = Annotated[str, typer.Argument(help="Name of an arm that has been released.")]


@app.command()
def export(
    name: Name,
    arm: Arm,
    to: Annotated[Path, typer.Option("--to", help="Folder to write; it must not exist.")],
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Write a released model as an MLflow model. It takes raw rows, and needs mlflow and torch alone."""
    from privtune.serving.exported import export_model, tags_of
    from privtune.study import Study

    with closing(Study(name, storage)) as study, patience("Exporting the model"):
        export_model(study, arm, to)
        tags = tags_of(study, arm)
        takes = study.release(arm).served.rows.takes
    if as_json:
        emit_json({"model": str(to), **tags})
    else:
        say(
            f"Wrote {to}. Serve it with: mlflow models serve --env-manager local --model-uri {to}\n"
            f"In Python: mlflow.pyfunc.load_model({str(to)!r}).predict(rows). It takes {takes}.\n"
            f"{tags['privtune.quote']}"
        )


def predict(
    name: Name,
    arm: Arm,
    file: Annotated[
        Path,
        typer.Argument(help="A CSV file of raw rows; of a task of arrays also a .npy file."),
    ],
    *,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="File to write. By default the predictions are printed."),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone", help="Write only the predictions, without the columns of the file."
        ),
    ] = False,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Predict for the rows of a file with a released model. Predictions follow the file's columns."""
    from privtune.serving.prediction import predict_parts, read_parts
    from privtune.study import Study

    if as_json and to is not None:
        raise typer.BadParameter("give --to or --json")
    if to is not None and to.exists() and to.samefile(file):
        raise InvalidInputError("to", str(to), "must be another file than the one that is read")
    with closing(Study(name, storage)) as study:
        model = study.release(arm).served
        task = study.spec.task
    header, parts = read_parts(file, model.rows, task)
    predictions_by_part = predict_parts(parts, model)
    # The first part tells the titles of the answers; there is one even of a file without rows.
    first_part = next(predictions_by_part)
    answer_columns = list(first_part[1])
    file_columns = [] if alone or as_json else header
    for title in file_columns:
        if title in answer_columns:
            raise PrivTuneError(f"{file} has a column called {title} already: give --alone.")
    width = len(file_columns)
    counts = _Counts(width)
    all_parts = itertools.chain([first_part], predictions_by_part)
    rows = counts.watch(_join_rows(all_parts, width))
    titles = [*file_columns, *answer_columns]
    if as_json:
        predictions = [dict(zip(titles, row, strict=True)) for row in rows]
        emit_json({"study": name, "arm": arm, "predictions": json_ready(predictions)})
    elif to is None:
        _write_csv(sys.stdout, titles, rows)
    else:
        with open_whole(to) as output:
            text = io.TextIOWrapper(output, encoding="utf-8", newline="", write_through=True)
            _write_csv(text, titles, rows)
            text.detach()  # whoever opened the file closes it
        say(f"Wrote {to}, readable by you alone.")
    if counts.unanswered:
        complain(
            f"No prediction for {counts.unanswered:,} of {counts.rows:,} rows: a cell is missing or is not "
            "as the columns were declared, or the row has more or fewer cells than the header."
        )


def _join_rows(
    parts: Iterable[tuple[list[Cells], Answers]], width: int
) -> Iterator[tuple[Any, ...]]:
    """Yield rows to write: the cells of a row in the file, followed by its predictions.

    Args:
        parts: Some rows at a time: cells by column, and answers by the name of their column.
        width: How many columns of the file are written; 0 where the answers stand alone.
    """
    for cells, answers in parts:
        values = [column for column, _ in answers.values()]
        yield from zip(*cells[:width], *values, strict=True)


def _write_csv(output: TextIO, titles: list[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Write a header and rows as CSV, one row at a time."""
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows(rows)


@dataclass
class _Counts:
    """A count of the rows written, and of those whose predictions are all empty.

    Attributes:
        columns: How many columns of the file stand before the answers.
        rows: The rows so far.
        unanswered: Those without any answer.
    """

    columns: int
    rows: int = 0
    unanswered: int = 0

    def watch(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield rows unchanged, and count each of them on the way."""
        for row in rows:
            answers = row[self.columns :]
            self.rows += 1
            self.unanswered += all(value is None or value == "" for value in answers)
            yield row
