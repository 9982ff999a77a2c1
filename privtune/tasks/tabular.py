"""Tasks of the user's own table, in a file or from a query, with features scaled by public facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.facts import TaskDataError
from privtune.ledger.datasets import Dataset
from privtune.ledger.urls import masked_url
from privtune.numbers import is_number
from privtune.tables.cells import MISSING, Fault, coded, is_missing, labelled, texts
from privtune.tables.column_spec import NOTATION, PAID, pair_of, read_notation
from privtune.tables.columns import Category, Column, Number, PaidColumn
from privtune.tables.raw_rows import TableRows
from privtune.tables.reader import Columns, Form, Source, open_table
from privtune.tasks.described import (
    Described,
    Part,
    TaskSpec,
    check_fields,
    own_model,
    read_form,
    shared_fields,
)
from privtune.tasks.partition import by_unit
from privtune.tasks.task import ModelOf, Task, TaskData, classification_loss, softmax_constants

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import nn

    from privtune.tables.sql import SqlTable

_MOST_UNITS = 10**5  # of a hidden layer

_FIELDS = (
    "path", "url", "query", "target", "classes", "target_range", "bounds", "columns", "model", "hidden",
    "class_weights", "id", "projection", "group", "max_per_group", "unit", "rows", "delimiter", "encoding",
    *NOTATION,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Table(Described):
    """A table as it is declared; its file has not been opened.

    Attributes:
        query: The query that it is the result of; None for a file.
        target: The column that is predicted.
        rows: Its features, whose projection is a number until a stage releases it.
        unpaid: What stages have yet to release, in words.
        independent: Declared: each row of the query comes from one protected record.
        form: How a text file is written.
    """

    query: str | None
    target: Column
    rows: TableRows
    unpaid: tuple[str, ...]
    independent: bool
    form: Form

    @property
    def features(self) -> tuple[Column, ...]:
        """The declared feature columns."""
        return self.rows.features

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns that are read."""
        names = tuple(self.columns)
        if self.id is None:
            return names
        return (*names, self.id)

    @property
    def range(self) -> tuple[float, float] | None:
        """Low and high end of a regression's targets, or None for classes."""
        target = self.target
        if not isinstance(target, Number):
            return None
        return target.low, target.high

    @property
    def stem(self) -> str:
        """Name of the table in descriptions: its file's name, or ``a query``."""
        if self.query is not None:
            return "a query"
        return Path(self.path).name

    @property
    def _title(self) -> str:
        """Name of the table in errors, without the password of its database."""
        if self.query is None:
            return self.path
        return f"The query of {masked_url(self.path)}"

    def _open(self) -> Source:
        """Open the file, or the result of the query."""
        if self.query is not None:
            return self._result().open()
        return open_table(Path(self.path), self.names, self.form)

    def _result(self) -> SqlTable:
        """Return the result of the query; connects to nothing yet."""
        from privtune.tables.sql import SqlTable

        return SqlTable(self.path, str(self.query), self.independent)

    def check(self) -> None:
        """Check that the table has the declared columns, with numbers where numbers are declared.

        Raises:
            TaskDataError: If a column is absent, or holds text where numbers are declared.
        """
        if self.query is not None:
            self._result().check_source()
        file = self._open()
        file.check(self.names, self._title)
        names = []
        for column in self.columns.values():
            is_number_column = isinstance(column, Number | PaidColumn)
            if is_number_column and file.is_text(column.name) and not column.notation.decimal:
                names.append(column.name)
        if names:
            listing = ", ".join(names)
            raise TaskDataError(
                f"{self._title}: {listing} should be numbers, and the file holds text there. "
                'Write decimal: "." (or ",") if that is numbers, else categories, ordinal, date or classes.'
            )

    def dataset(self) -> Dataset:
        """Return the identity of the dataset: of a query, its table and its database without the password."""
        if self.query is None:
            return super().dataset()
        place = masked_url(self.path)
        columns = tuple(self.columns)
        if self.independent:  # a free query, of any number of tables
            _, _, database = place.rpartition("/")
            return Dataset(database, place, columns)
        from privtune.tables.sql import check_query

        table = check_query(self.path, self.query).name
        return Dataset(table, f"{place}, table {table}", columns)

    def header(self) -> None:
        """Check the header of a file, while planning; a database is asked when the study runs."""
        if self.query is None:
            self._open().check(self.names, self.path)

    def load(self) -> TaskData:
        """Return the records by split, of a table of which nothing is left to release.

        Raises:
            PrivTuneError: If something is: a model trained without it would be another one.
        """
        if self.unpaid:
            listing = ", ".join(self.unpaid)
            raise PrivTuneError(f"{listing} of the table have not been released.")
        self.check()
        return super().load()

    def model_inputs(self, x: Any) -> Any:
        """Return inputs projected on the released directions, where there are some."""
        return self.rows.projected(x)

    def parts(self, *, with_inputs: bool) -> tuple[int, Iterator[Part]]:
        """Return an upper bound on the number of rows, and an iterator over batches of records."""
        file = self._open()
        most = file.most()
        batches = file.batches(self.names)
        return most, map(self._part, batches)

    def _part(self, batch: Columns) -> Part:
        """Return a batch of rows as records, with its faults."""
        y, target_faults = self._targets(batch[self.target.name])
        x, feature_faults = self.rows.of(batch)
        faults = [*target_faults, *feature_faults]
        ids = None
        if self.id is not None:
            cells = batch[self.id]
            names = texts(cells).to_pylist()
            ids = [str(name).strip() for name in names]
            if self.grouped:
                faults.append(self._without_group(self.id, cells))
        nothing = -1.0
        if self.classes is None:
            nothing = math.nan
        return Part.of(x, y, faults, ids, nothing=nothing)

    def _without_group(self, column: str, cells: Any) -> Fault:
        """Return the fault of rows without a group: their privacy unit is unknown.

        Args:
            column: That says whose a row is.
            cells: What it holds, ``[n]``.
        """
        filled_cells = self.target.notation.given(cells)
        unusable = is_missing(filled_cells)
        return Fault(column, "without a group", unusable, cells=cells)

    def _targets(self, cells: Any) -> tuple[Any, list[Fault]]:
        """Return the targets in a batch of cells, and their faults."""
        target = self.target
        cells = target.notation.given(cells)
        if not isinstance(target, Number):
            return labelled(
                target.name,
                cells,
                self.classes or (),
                without="without a target",
            )
        values, faults = target.numbers(cells)
        target_faults = []
        for fault in faults:
            # A target that is missing is filled by nothing.
            is_used = fault.used and fault.why != MISSING
            target_faults.append(replace(fault, used=is_used))
        targets = np.clip(values, target.low, target.high)
        return targets, target_faults

    def paid(self) -> tuple[PaidColumn, ...]:
        """Return the columns whose bounds a stage releases."""
        return tuple(column for column in self.features if isinstance(column, PaidColumn))

    def places(self) -> npt.NDArray[np.int64]:
        """Return the cell of its public grid that each unpaid column of a row is in, ``[N, d]``, or -1.

        Of all records of the file, whatever split they fall into: a stage counts them before splits are.
        """
        columns = self.paid()
        names = [column.name for column in columns]
        nothing = np.empty((0, len(columns)), dtype=np.int64)  # of a file without rows
        places = [nothing]
        file = self._open()
        for batch in file.batches(names):
            cells = [column.places(batch[column.name]) for column in columns]
            rows = np.stack(cells, axis=1)
            places.append(rows)
        return np.concatenate(places)

    def values(self, column: Category) -> npt.NDArray[np.int64]:
        """Return the place of each row's cell among a column's declared values, ``[N]``, or -1 for others."""
        nothing = np.empty(0, dtype=np.int64)  # of a file without rows
        places = [nothing]
        file = self._open()
        for batch in file.batches([column.name]):
            cells = column.notation.given(batch[column.name])
            places.append(coded(cells, column.values))
        return np.concatenate(places)


def tabular(spec: TaskSpec) -> Task:
    """Return the task of a table that a spec describes (docs/spec.md), without opening the file.

    Of a table with ``group`` the records are units: a row's task is made first, then that of units.

    Raises:
        InvalidInputError: If a field is unknown, missing, or does not go with another.
    """
    table = read_table(spec)
    what, model = _model(spec, table)
    bounds = {}
    values = {}
    for column in table.features:
        if isinstance(column, Number):
            bounds[column.name] = (column.low, column.high)
        else:
            values[column.name] = column.words
    task = table.task(
        spec,
        name=str(spec.get("name", table.stem.partition(".")[0])),
        description=f"{what} on {table.stem}",
        model=model,
        loss=_loss(spec, table),
        partition="content" if table.id is None else "id",
        bounds=bounds,
        values=values,
        target_range=table.range,
        constants=_constants(spec, table),
        rows_declared=table.independent,
    )
    if not table.grouped:
        return task
    return by_unit(
        task,
        unit=table.unit,
        most=spec["max_per_group"],
        sizes=table.sizes,
    )


def read_table(spec: TaskSpec) -> Table:
    """Return the :class:`Table` that ``task: {type: tabular, ...}`` describes, without opening its file."""
    where = "url" if "query" in spec else "path"
    check_fields("a table", spec, _FIELDS, required=(where, "target"))
    if ("classes" in spec) == ("target_range" in spec):
        raise InvalidInputError(
            "task.classes",
            spec.get("classes"),
            "is required for a classification, target_range: [low, high] for a regression; one of them",
        )
    rows = TableRows(
        bounds=spec.get("bounds"),
        columns=spec.get("columns"),
        projection=spec.get("projection"),
        notation={name: spec[name] for name in NOTATION if name in spec},
    )
    target_name = str(spec["target"])
    if target_name in rows.names:
        bounded_names = map(str, spec.get("bounds") or ())
        field = "bounds" if target_name in bounded_names else "columns"
        raise InvalidInputError(f"task.{field}", target_name, "is the target, not a feature")
    grouped = _is_grouped(spec)
    id_field = "group" if grouped else "id"
    identity = None
    if spec.get(id_field) is not None:
        identity = str(spec[id_field])
    if identity in (*rows.names, target_name):
        raise InvalidInputError(f"task.{id_field}", identity, "must be a column of its own")
    width = _width(rows)
    place, query = _source(spec)
    shared = shared_fields(spec)
    target = _target(spec, target_name, shared["classes"])
    columns = {column.name: column for column in rows.features}
    columns[target.name] = target
    are_paid = [isinstance(column, PaidColumn) for column in rows.features]
    unit = "record"
    if grouped:
        unit = str(spec.get("unit", identity))
    return Table(
        **shared,
        path=place,
        query=query,
        shape=(width,),
        target=target,
        columns=columns,
        public_features=not any(are_paid),
        form=read_form(spec),
        rows=rows,
        id=identity,
        unpaid=_unpaid(spec, rows),
        grouped=grouped,
        unit=unit,
        independent=_is_independent(spec),
    )


def _width(rows: TableRows) -> int:
    """Return how many numbers a model sees of a row: its features, or their projections."""
    width = sum(column.width for column in rows.features)
    _check_projection(rows.projection, width)
    if rows.projection is None:
        return width
    if isinstance(rows.projection, int):  # until a stage releases so many directions
        return rows.projection
    return len(rows.projection)


def _unpaid(spec: TaskSpec, rows: TableRows) -> tuple[str, ...]:
    """Return what stages have yet to release for a table, in words."""
    unpaid = []
    for column in rows.features:
        if isinstance(column, PaidColumn):
            unpaid.append(f"bounds of {column.name}")
    if spec.get("class_weights") == PAID:
        unpaid.append("class_weights")
    if isinstance(rows.projection, int):
        unpaid.append("projection")
    return tuple(unpaid)


def _target(spec: TaskSpec, name: str, classes: tuple[Any, ...] | None) -> Column:
    """Return the target column: a category of the classes, or a number in a range."""
    notation = read_notation("task", spec)
    if classes is not None:
        return Category(name=name, notation=notation, values=classes)
    low, high = pair_of("task.target_range", spec["target_range"])
    return Number(
        name=name,
        notation=notation,
        low=low,
        high=high,
        missing=low,
    )


def _is_grouped(spec: TaskSpec) -> bool:
    """Return whether rows are grouped by unit, or refuse an incomplete declaration of groups."""
    if "group" not in spec:
        for field in ("max_per_group", "unit"):
            if field in spec:
                raise InvalidInputError(
                    f"task.{field}",
                    spec[field],
                    "goes with group, the column that says whose a row is",
                )
        return False
    if "max_per_group" not in spec:
        raise InvalidInputError(
            "task.max_per_group",
            None,
            "is required with group: how many rows of one count at most",
        )
    if "id" in spec:
        raise InvalidInputError("task.id", spec["id"], "must be left out: splits are made by group")
    return True


def _source(spec: TaskSpec) -> tuple[str, str | None]:
    """Return the path of a file and None, or the address of a database and the query.

    A path goes with no query, an address with one: half of each would leave open which is read.
    """
    if "query" not in spec:
        if "url" in spec:
            raise InvalidInputError("task.url", "...", "goes with a query alone")
        return str(spec["path"]), None
    if "path" in spec:
        raise InvalidInputError("task.path", spec["path"], "goes without a query")
    for field in ("delimiter", "encoding", "decimal", "thousands"):
        if field in spec:
            raise InvalidInputError(
                f"task.{field}",
                spec[field],
                "goes with a file, not with a query",
            )
    query = spec["query"]
    if not isinstance(query, str) or not query.strip():
        raise InvalidInputError("task.query", query, "must be one SELECT")
    from privtune.tables.sql import check_query, check_url

    url = check_url(spec["url"])
    if not _is_independent(spec):
        check_query(url, query)
    return url, query


def _is_independent(spec: TaskSpec) -> bool:
    """Return whether each row of a query is declared to come from one protected record."""
    if "rows" not in spec:
        return False
    if spec["rows"] != "independent" or "query" not in spec:
        raise InvalidInputError(
            "task.rows",
            spec["rows"],
            "must be independent, goes with a query, and may be left out",
        )
    return True


def _check_projection(projection: Any, width: int) -> None:
    """Refuse a projection other than a count or a list of directions of ``width`` numbers."""
    if projection is None or isinstance(projection, int):
        return

    def is_direction(row: Any) -> bool:
        is_as_wide = isinstance(row, Sequence) and len(row) == width
        return is_as_wide and all(map(is_number, row))

    are_directions = _is_list(projection) and all(map(is_direction, projection))
    if not are_directions:
        raise InvalidInputError(
            "task.projection",
            projection,
            f"must be a list of directions, {width} numbers each",
        )


def _is_list(value: Any) -> bool:
    """Return whether a value is a sequence with elements, and no text."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and len(value) > 0


def _model(spec: TaskSpec, table: Table) -> tuple[str, Callable[[], nn.Module]]:
    """Return a description of the model, and the function that builds it.

    The outputs of a regression are taken to the target's range: so the model itself learns numbers about 1,
    whatever the units of the target are.
    """
    model = spec.get("model", "linear")
    (features,) = table.shape
    outputs = 1 if table.classes is None else len(table.classes)
    if model != "mlp" and "hidden" in spec:
        raise InvalidInputError("task.hidden", spec["hidden"], "goes with model: mlp alone")
    build: Callable[[], nn.Module]
    if model in ("linear", "logistic"):
        build = ModelOf("linear", (features, outputs))
        what = "logistic regression"
        if table.classes is None:
            what = "linear regression"
    elif model == "mlp":
        hidden = _hidden_widths(spec.get("hidden", (64,)))
        build = ModelOf("mlp", (features, outputs, hidden))
        widths = "-".join(map(str, (features, *hidden, outputs)))
        what = f"MLP {widths}"
    else:
        what = str(model)
        build = own_model(
            what,
            features,
            outputs,
            built_in=("linear", "logistic", "mlp"),
            of="the numbers of features and outputs",
        )
    if table.range is None:
        return what, build
    low, high = table.range
    return what, ModelOf("in_range", (build, low, high))


def _hidden_widths(hidden: Any) -> tuple[int, ...]:
    """Return the widths of a perceptron's hidden layers, of one number or a list."""
    widths = [hidden] if isinstance(hidden, int) else hidden

    def is_width(width: Any) -> bool:
        is_whole = isinstance(width, int) and not isinstance(width, bool)
        return is_whole and 1 <= width <= _MOST_UNITS

    are_widths = _is_list(widths) and all(map(is_width, widths))
    if not are_widths:
        raise InvalidInputError(
            "task.hidden",
            hidden,
            "must be a list of whole numbers of at least 1",
        )
    return tuple(widths)


def _loss(spec: TaskSpec, table: Table) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss function: squared error, or cross-entropy with the public class weights."""
    weights = spec.get("class_weights")
    if table.range is not None:
        if weights is not None:
            raise InvalidInputError("task.class_weights", weights, "goes with classes alone")
        low, high = table.range
        half = 0.5 * (high - low)
        return partial(_squared_error, half=half)
    if weights is None or weights == PAID:  # unweighted, until a stage has released them
        return classification_loss

    def is_weight(weight: Any) -> bool:
        return isinstance(weight, int | float) and 0 < weight < 1e6

    are_weights = _is_list(weights) and all(map(is_weight, weights))
    if not are_weights or len(weights) != len(table.classes or ()):
        raise InvalidInputError(
            "task.class_weights",
            weights,
            "must be one number above 0 for each class, in their order",
        )
    return partial(_weighted, weights=_relative(weights))


def _relative(weights: Sequence[float]) -> tuple[float, ...]:
    """Return class weights divided by the largest.

    A weight above 1 makes gradients longer, and clipping shortens them again: it would do nothing. One below
    1 makes those of its class shorter, which clipping leaves as they are.
    """
    largest = max(weights)
    return tuple(float(weight) / largest for weight in weights)


def _squared_error(outputs: torch.Tensor, targets: torch.Tensor, *, half: float) -> torch.Tensor:
    """Return the squared error of each record in units of half a range."""
    errors = outputs.squeeze(-1) - targets
    return (errors / half).square()


def _weighted(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    weights: Sequence[float],
) -> torch.Tensor:
    """Return the cross-entropy of each record, times the public weight of its class, 1 at most."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(
        outputs,
        targets,
        weight=outputs.new_tensor(weights),
        reduction="none",
    )


def _constants(spec: TaskSpec, table: Table) -> Mapping[str, float]:
    """Return the proven constants of a linear model's loss on declared features, none for other models.

    A release that may change features or weights leaves nothing proven: the constants are public before it.
    """
    is_linear = spec.get("model", "linear") in ("linear", "logistic")
    is_unpaid = spec.get("class_weights") == PAID
    if not is_linear or is_unpaid or table.rows.projection is not None:
        return {}
    square = sum(column.square for column in table.features)
    if table.classes is None:
        return {
            "smoothness": 2.0 * (square + 1.0),
            "gap": 1.0,
        }
    # Class weights are parts of the largest, so that no record weighs more than 1.
    return softmax_constants(square, len(table.classes))
