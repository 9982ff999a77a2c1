"""Tables of one's own, in a file or as the result of a query: features made of columns by public facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger.urls import masked_url
from privtune.numbers import is_number
from privtune.tasks._cells import MISSING, Fault, coded, is_missing, labelled, texts
from privtune.tasks._columns import Category, Column, Number, Paid
from privtune.tasks._declared import NOTATION, PAID, pair_of, read_notation
from privtune.tasks._facts import TaskDataError
from privtune.tasks._partition import by_unit
from privtune.tasks._reader import Columns, Form, Source, open_table
from privtune.tasks._rows import TableRows
from privtune.tasks._task import ModelOf, Task, TaskData, classification_loss, softmax_constants
from privtune.tasks.described import (
    Described,
    Part,
    check_fields,
    own_model,
    read_form,
    shared_fields,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import nn

    from privtune.tasks._sql import SqlTable

_FIELDS = (
    "path", "url", "query", "target", "classes", "target_range", "bounds", "columns", "model", "hidden",
    "class_weights", "id", "projection", "group", "max_per_group", "unit", "rows", "delimiter", "encoding",
    *NOTATION,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Table(Described):
    """A table as it is declared; its file has not been opened."""

    query: str | None
    target: Column
    rows: TableRows  # whose projection is a number until a stage releases it
    unpaid: tuple[str, ...]
    independent: bool  # declared: each row of the query comes from one protected record
    form: Form

    @property
    def features(self) -> tuple[Column, ...]:
        """The declared feature columns."""
        return self.rows.features

    @property
    def names(self) -> tuple[str, ...]:
        """Every column that is read."""
        return (*self.columns, *([] if self.id is None else [self.id]))

    @property
    def range(self) -> tuple[float, float] | None:
        """The range of the targets of a regression."""
        return (self.target.low, self.target.high) if isinstance(self.target, Number) else None

    @property
    def stem(self) -> str:
        """What the table is called."""
        return Path(self.path).name if self.query is None else "a query"

    @property
    def _named(self) -> str:
        return self.path if self.query is None else f"The query of {masked_url(self.path)}"

    def _open(self) -> Source:
        if self.query is not None:
            return self._result().open()
        return open_table(Path(self.path), self.names, self.form)

    def _result(self) -> SqlTable:
        from privtune.tasks._sql import SqlTable

        return SqlTable(self.path, str(self.query), self.independent)

    def check(self) -> None:
        """Check the file, or the table of the query, by its header: how many records it has is private."""
        if self.query is not None:
            self._result().check_source()
        file = self._open()
        file.check(self.names, self._named)
        text = [
            column.name
            for column in self.columns.values()
            if isinstance(column, Number | Paid)
            and file.is_text(column.name)
            and not column.notation.decimal
        ]
        if text:
            raise TaskDataError(
                f"{self._named}: {', '.join(text)} should be numbers, and the file holds text there. Write "
                'decimal: "." (or ",") if that is numbers, else categories, ordinal, date or classes.'
            )

    def header(self) -> None:
        """Check the header of a file, while planning; a database is asked when the study runs."""
        if self.query is None:
            self._open().check(self.names, self.path)

    def load(self) -> TaskData:
        """Read the records."""
        if self.unpaid:
            raise PrivTuneError(f"{', '.join(self.unpaid)} of the table have not been released.")
        self.check()
        return super().load()

    def made(self, x: Any) -> Any:
        """Return inputs projected on the released directions, where there are some."""
        return self.rows.projected(x)

    def parts(self, *, whole: bool) -> tuple[int, Iterator[Part]]:
        """Return features and targets."""
        file = self._open()
        return file.most(), map(self._part, file.batches(self.names))

    def _part(self, batch: Columns) -> Part:
        y, faults = self._targets(batch[self.target.name])
        x, wrong = self.rows.of(batch)
        faults += wrong
        ids = None
        if self.id is not None:
            ids = [str(name).strip() for name in texts(batch[self.id]).to_pylist()]
            if self.grouped:  # a row that belongs to nobody is protected with nobody
                unusable = is_missing(self.target.notation.given(batch[self.id]))
                faults.append(Fault(self.id, "without a group", unusable, cells=batch[self.id]))
        nothing = math.nan if self.classes is None else -1.0
        return Part.of(x, y, faults, ids, nothing=nothing)

    def _targets(self, cells: Any) -> tuple[Any, list[Fault]]:
        """Return the targets of some cells, and which of these are not as declared."""
        name, cells = self.target.name, self.target.notation.given(cells)
        if not isinstance(self.target, Number):
            return labelled(name, cells, self.classes or (), without="without a target")
        values, faults = self.target.numbers(cells)
        low, high = self.target.low, self.target.high
        # A target that is missing is filled by nothing.
        faults = [replace(f, used=f.used and f.why != MISSING) for f in faults]
        return np.clip(values, low, high), faults

    def paid(self) -> tuple[Paid, ...]:
        """Return the columns whose bounds a stage releases."""
        return tuple(column for column in self.features if isinstance(column, Paid))

    def places(self) -> npt.NDArray[np.int64]:
        """Read in which cell of each such column every record is, shape ``[N, d]``; -1 for none."""
        columns = self.paid()
        found = [
            np.stack([column.places(batch[column.name]) for column in columns], axis=1)
            for batch in self._open().batches([column.name for column in columns])
        ]
        return np.concatenate([np.empty((0, len(columns)), dtype=np.int64), *found])

    def values(self, column: Category) -> npt.NDArray[np.int64]:
        """Read which declared value of a column every record has; -1 for another, or none."""
        batches = self._open().batches([column.name])
        found = [coded(column.notation.given(b[column.name]), column.values) for b in batches]
        return np.concatenate([np.empty(0, dtype=np.int64), *found])


def tabular(spec: Mapping[str, Any]) -> Task:
    """Return the task of a table that a spec describes, as docs/spec.md says; the file is not opened."""
    table = read_table(spec)
    what, model = _model(spec, table)
    task = table.task(
        spec,
        name=str(spec.get("name", table.stem.partition(".")[0])),
        description=f"{what} on {table.stem}",
        model=model,
        loss=_loss(spec, table),
        partition="content" if table.id is None else "id",
        bounds={c.name: (c.low, c.high) for c in table.features if isinstance(c, Number)},
        values={c.name: c.words for c in table.features if not isinstance(c, Number)},
        target_range=table.range,
        constants=_constants(spec, table),
        rows_declared=table.independent,
    )
    if not table.grouped:
        return task
    return by_unit(task, unit=table.unit, most=spec["max_per_group"], sizes=table.sizes)


def read_table(spec: Mapping[str, Any]) -> Table:
    """Return the table that ``task: {type: tabular, ...}`` describes: see :func:`tabular`."""
    where = "url" if "query" in spec else "path"
    check_fields("a table", spec, _FIELDS, needed=(where, "target"))
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
    features, names, target = rows.features, rows.names, str(spec["target"])
    if target in names:
        field = "bounds" if target in map(str, spec.get("bounds") or ()) else "columns"
        raise InvalidInputError(f"task.{field}", target, "is the target, not a feature")
    grouped = _grouped(spec)
    by = "group" if grouped else "id"
    identity = None if spec.get(by) is None else str(spec[by])
    if identity in (*names, target):
        raise InvalidInputError(f"task.{by}", identity, "must be a column of its own")
    unpaid = [f"bounds of {column.name}" for column in features if isinstance(column, Paid)]
    if spec.get("class_weights") == PAID:
        unpaid.append("class_weights")
    width = sum(column.width for column in features)
    _check_projection(rows.projection, width)
    if isinstance(rows.projection, int):
        unpaid.append("projection")
        width = rows.projection
    elif rows.projection is not None:
        width = len(rows.projection)
    place, query = _source(spec)
    shared = shared_fields(spec)
    goal = _target(spec, target, shared["classes"])
    return Table(
        **shared,
        path=place,
        query=query,
        shape=(width,),
        target=goal,
        columns={column.name: column for column in (*features, goal)},
        known=not any(isinstance(column, Paid) for column in features),
        form=read_form(spec),
        rows=rows,
        id=identity,
        unpaid=tuple(unpaid),
        grouped=grouped,
        unit=str(spec.get("unit", identity)) if grouped else "record",
        independent=_independent(spec),
    )


def _target(spec: Mapping[str, Any], name: str, classes: tuple[Any, ...] | None) -> Column:
    notation = read_notation("task", spec)
    if classes is not None:
        return Category(name=name, notation=notation, values=classes)
    low, high = pair_of("task.target_range", spec["target_range"])
    return Number(name=name, notation=notation, low=low, high=high, missing=low)


def _grouped(spec: Mapping[str, Any]) -> bool:
    """Say whether rows are grouped, and refuse half of what that takes."""
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
            "task.max_per_group", None, "is required with group: how many rows of one count at most"
        )
    if "id" in spec:
        raise InvalidInputError("task.id", spec["id"], "must be left out: splits are made by group")
    return True


def _source(spec: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return where the table is, and the query that it is the result of, if it is one."""
    if "query" not in spec:
        if "url" in spec:
            raise InvalidInputError("task.url", "...", "goes with a query alone")
        return str(spec["path"]), None
    if "path" in spec:
        raise InvalidInputError("task.path", spec["path"], "goes without a query")
    for field in ("delimiter", "encoding", "decimal", "thousands"):
        if field in spec:
            raise InvalidInputError(
                f"task.{field}", spec[field], "goes with a file, not with a query"
            )
    query = spec["query"]
    if not isinstance(query, str) or not query.strip():
        raise InvalidInputError("task.query", query, "must be one SELECT")
    from privtune.tasks._sql import check_query, check_url

    url = check_url(spec["url"])
    if not _independent(spec):
        check_query(url, query)
    return url, query


def _independent(spec: Mapping[str, Any]) -> bool:
    """Say whether the rows of a query are declared to come from one protected record each."""
    if "rows" not in spec:
        return False
    if spec["rows"] != "independent" or "query" not in spec:
        raise InvalidInputError(
            "task.rows", spec["rows"], "must be independent, goes with a query, and may be left out"
        )
    return True


def _check_projection(given: Any, width: int) -> None:
    """Refuse what is no public directions, nor how many of them a stage will release."""
    if given is None or isinstance(given, int):
        return
    listed = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if not listed or not all(
        isinstance(row, Sequence) and len(row) == width and all(map(is_number, row))
        for row in given
    ):
        raise InvalidInputError(
            "task.projection", given, f"must be a list of directions, {width} numbers each"
        )


def _model(spec: Mapping[str, Any], table: Table) -> tuple[str, Callable[[], nn.Module]]:
    """Return what the model is called, and what builds it."""
    given, (features,) = spec.get("model", "linear"), table.shape
    outputs = 1 if table.classes is None else len(table.classes)
    if given != "mlp" and "hidden" in spec:
        raise InvalidInputError("task.hidden", spec["hidden"], "goes with model: mlp alone")
    build: Callable[[], nn.Module]
    if given in ("linear", "logistic"):
        build = ModelOf("linear", (features, outputs))
        what = "linear regression" if table.classes is None else "logistic regression"
    elif given == "mlp":
        hidden = _hidden(spec.get("hidden", (64,)))
        build = ModelOf("mlp", (features, outputs, hidden))
        what = f"MLP {'-'.join(map(str, (features, *hidden, outputs)))}"
    else:
        what, built_in = str(given), ("linear", "logistic", "mlp")
        of = "the numbers of features and outputs"
        build = own_model(what, features, outputs, built_in=built_in, of=of)
    if table.range is None:
        return what, build
    return what, ModelOf("in_range", (build, *table.range))


def _hidden(given: Any) -> tuple[int, ...]:
    widths = [given] if isinstance(given, int) else given
    listed = isinstance(widths, Sequence) and not isinstance(widths, str) and len(widths) > 0
    if not listed or not all(
        isinstance(w, int) and not isinstance(w, bool) and 1 <= w <= 10**5 for w in widths
    ):
        raise InvalidInputError(
            "task.hidden", given, "must be a list of whole numbers of at least 1"
        )
    return tuple(widths)


def _loss(
    spec: Mapping[str, Any], table: Table
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    weights = spec.get("class_weights")
    if table.range is not None:
        if weights is not None:
            raise InvalidInputError("task.class_weights", weights, "goes with classes alone")
        low, high = table.range
        return partial(_squared_error, half=0.5 * (high - low))
    if weights is None or weights == PAID:  # unweighted, until a stage has released them
        return classification_loss
    listed = isinstance(weights, Sequence) and not isinstance(weights, str)
    numbers = listed and all(isinstance(w, int | float) and 0 < w < 1e6 for w in weights)
    if not numbers or len(weights) != len(table.classes or ()):
        raise InvalidInputError(
            "task.class_weights",
            weights,
            "must be one number above 0 for each class, in their order",
        )
    return partial(_weighted, weights=tuple(map(float, weights)))


def _squared_error(outputs: torch.Tensor, targets: torch.Tensor, *, half: float) -> torch.Tensor:
    """Return the squared error of each record in units of half a range."""
    return ((outputs.squeeze(-1) - targets) / half).square()


def _weighted(
    outputs: torch.Tensor, targets: torch.Tensor, *, weights: Sequence[float]
) -> torch.Tensor:
    """Return the cross-entropy of each record, times the public weight of its class."""
    from torch.nn.functional import cross_entropy

    known = outputs.new_tensor(weights)
    return cross_entropy(outputs, targets, weight=known, reduction="none")


def _constants(spec: Mapping[str, Any], table: Table) -> Mapping[str, float]:
    """Return what is proven of the loss of a linear model on declared features; of others nothing."""
    weights = spec.get("class_weights") or ()
    linear = spec.get("model", "linear") in ("linear", "logistic")
    if not linear or table.rows.projection is not None or weights == PAID:
        return {}
    square = sum(column.square for column in table.features)
    if table.classes is None:
        return {"smoothness": 2.0 * (square + 1.0), "gap": 1.0}
    return softmax_constants(square, len(table.classes), weight=max(weights, default=1.0))
