"""A table of one's own, as CSV, Parquet or Arrow: features made of columns by public facts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger.urls import masked_url
from privtune.numbers import is_number
from privtune.tasks._cells import coded, missing_of, numbers_of
from privtune.tasks._columns import (
    PAID,
    Category,
    Column,
    Number,
    Paid,
    pair_of,
    read_columns,
)
from privtune.tasks._files import (
    Batch,
    TableFile,
    check_columns,
    counted,
    header_of,
    open_table,
)
from privtune.tasks._of_tables import constants_of, loss_of, model_of
from privtune.tasks._partition import KEY, Sizes, places, split, split_read
from privtune.tasks._spec_fields import check_fields, read_classes, read_flag, read_sizes
from privtune.tasks._task import Task, TaskData, TaskDataError
from privtune.tasks._units import by_unit
from privtune.tasks._usable import (
    CLIPPED,
    NO_NUMBER,
    Fault,
    RecordCheck,
    Tally,
    fault_of,
    label_faults,
)

if TYPE_CHECKING:
    from privtune.tasks._sql import SqlTable

_FIELDS = {
    "type", "name", "path", "url", "query", "target", "classes", "target_range", "bounds", "columns", "model",
    "hidden", "class_weights", "train", "validation", "test", "public_test", "id", "key", "projection",
    "group", "max_per_group", "unit", "rows",
}  # fmt: skip

Projection = int | tuple[tuple[float, ...], ...]
"""Directions that features are projected on; their number alone until a stage releases them."""


@dataclass(frozen=True)
class Table:
    """A table as it is declared; its file has not been opened."""

    place: str
    query: str | None
    target: str
    classes: tuple[Any, ...] | None
    target_range: tuple[float, float] | None
    features: tuple[Column, ...]
    sizes: Sizes
    id: str | None
    key: str
    projection: Projection | None
    unpaid: tuple[str, ...]
    grouped: bool = False  # by the id
    unit: str = "record"  # what is grouped
    independent: bool = False  # declared: each row of the query comes from one protected record

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read."""
        features = (column.name for column in self.features)
        return (*features, self.target, *([] if self.id is None else [self.id]))

    def check(self) -> None:
        """Check what can be checked before anything is charged: the file and its header.

        How many records there are is private, and not checked.

        Raises:
            TaskDataError: Without any value of a record.
        """
        if self.query is not None:
            self._result().check_source()
        file = self._open()
        check_columns(file, self.columns, self._named)
        words = file.text_columns()
        if text := [c.name for c in self.features if c.kind == "bounds" and c.name in words]:
            raise TaskDataError(
                f"{self._named}: task.bounds names {', '.join(text)}, which holds no numbers. Leave it out "
                "of the bounds, or declare it under columns as categories, ordinal or date."
            )
        if self.target_range is not None and self.target in words:
            raise TaskDataError(
                f"{self._named}: the target {self.target} holds no numbers, which a target_range asks "
                "for. Say classes for a classification."
            )

    def header(self) -> None:
        """Check the header of a file, while planning; a database is asked when the study runs."""
        if self.query is None:
            header_of(Path(self.place), self.columns)

    def load(self) -> TaskData:
        """Read the records. One that is not as declared has no target, and so contributes nothing.

        Raises:
            PrivTuneError: If a stage has yet to release what features are made of.
        """
        import numpy as np

        if self.unpaid:
            raise PrivTuneError(f"{', '.join(self.unpaid)} of the table have not been released.")
        self.check()
        file = self._open()
        most = file.most
        read = map(self._encoded, counted(file.batches(self.columns, exact=self._exact), most))
        if self.grouped:
            nothing = np.zeros((1, self.width), np.float32), np.array([np.nan]), [""]
            if self.classes is not None:
                nothing[1][:] = -1
            xs, ys, ids = zip(*(list(read) or [nothing]), strict=True)
            known = [name for part in ids for name in part or ()]
            return split(
                np.concatenate(xs),
                np.concatenate(ys),
                self.sizes,
                ids=known,
                key=self.key,
                numbers=self.classes is None,
                groups=True,
            )
        back = None if self.projection is None else np.asarray(self.projection, np.float32).T
        return split_read(
            read,
            most=most,
            shape=(self.width,),
            sizes=self.sizes,
            key=self.key,
            numbers=self.classes is None,
            made=lambda x: x if back is None else x @ back,
        )

    def examine(self) -> RecordCheck:
        """Read the records, and return how many cannot be used, and why. For the curator alone.

        Where bounds are yet to be released and there is no id, nobody knows the split of a record.
        """
        import numpy as np

        sizes = vars(self.sizes)
        placed = self.id is not None or not self.paid()
        tally = Tally(
            sizes if placed else {"all splits": sum(sizes.values())},
            what=self.unit if self.grouped else "record",
            by="" if self.grouped or not placed else "content" if self.id is None else "id",
            classes=self.classes or (),
        )
        file = self._open()
        most = file.most
        for batch in counted(file.batches(self.columns, exact=self._exact), most):
            x: Any = None
            ids = None if self.id is None else list(map(_id_text, batch[self.id]))
            y = self._targets(batch[self.target])
            if not self.paid():
                x, y, _ = self._encoded(batch)
            shares = tuple(sizes.values()) if placed else (1,)
            drawn = (
                places(x, y, shares, ids=ids, key=self.key)
                if placed
                else np.zeros(len(y), dtype=np.int64)
            )
            owners = ids if self.grouped else None
            tally.add(drawn, self._faults(batch), units=owners, x=x, y=y, ids=ids)
        return tally.check()

    def _faults(self, batch: Batch) -> Iterator[Fault]:
        """Yield which of some records are not as declared: one that is not used has no target."""
        cells = batch[self.target]
        without = "without a target"
        if self.classes is not None:
            yield from label_faults(self.target, cells, self.classes, without=without)
        else:
            yield fault_of(self.target, without, missing_of(cells), cells)
            low, high = self.target_range or (-math.inf, math.inf)
            values, broken = numbers_of(cells)
            said = f"target_range [{low:g}, {high:g}]"
            yield fault_of(self.target, NO_NUMBER, broken, cells)
            outside = (values < low) | (values > high)
            yield fault_of(self.target, CLIPPED, outside, cells, used=True, declared=said)
        for column in self.features:
            yield from column.faults(batch[column.name])
        if self.grouped:
            owner = batch[str(self.id)]
            yield fault_of(str(self.id), "without a group", missing_of(owner), owner)

    @property
    def _named(self) -> str:
        return self.place if self.query is None else f"The query of {masked_url(self.place)}"

    @property
    def stem(self) -> str:
        """What the table is called."""
        return Path(self.place).name if self.query is None else "a query"

    def paid(self) -> tuple[Paid, ...]:
        """Return the columns whose bounds a stage releases."""
        return tuple(column for column in self.features if isinstance(column, Paid))

    def cells(self) -> Any:
        """Read in which cell of each such column every record is, shape ``[N, d]``; -1 for none."""
        import numpy as np

        columns = self.paid()
        file = self._open()
        most = file.most
        found = [
            np.stack([column.cells(batch[column.name]) for column in columns], axis=1)
            for batch in counted(file.batches([c.name for c in columns]), most)
        ]
        return np.concatenate([np.empty((0, len(columns)), dtype=np.int64), *found])

    def values(self, column: Category) -> Any:
        """Read which declared value of a column every record has; -1 for another, or none."""
        import numpy as np

        file = self._open()
        most = file.most
        batches = counted(file.batches([column.name]), most)
        found = [coded(batch[column.name], column.values) for batch in batches]
        return np.concatenate([np.empty(0, dtype=np.int64), *found])

    def _open(self) -> TableFile:
        return open_table(Path(self.place)) if self.query is None else self._result()

    def _result(self) -> SqlTable:
        from privtune.tasks._sql import SqlTable

        return SqlTable(self.place, str(self.query), self.independent)

    @property
    def _exact(self) -> tuple[str, ...]:
        return () if self.id is None else (self.id,)

    @property
    def width(self) -> int:
        """How many features a record has as models see it."""
        if self.projection is not None:
            return self.projection if isinstance(self.projection, int) else len(self.projection)
        return sum(column.width for column in self.features)

    def _encoded(self, table: Batch) -> tuple[Any, Any, Sequence[str] | None]:
        import numpy as np

        y = self._targets(table[self.target])
        x = np.empty((len(y), sum(c.width for c in self.features)), dtype=np.float32)
        broken = np.zeros(len(x), dtype=bool)
        start = 0
        for column in self.features:
            x[:, start : start + column.width], lost = column.encode(table[column.name])
            broken |= lost
            start += column.width
        if self.grouped:  # a row that belongs to nobody is protected with nobody
            broken |= missing_of(table[str(self.id)])
        y[broken] = np.nan if self.classes is None else -1
        x[np.isnan(y) | (self.classes is not None) & (y < 0)] = 0.0  # alike: they share a split
        ids = None if self.id is None else [_id_text(value) for value in table[self.id]]
        return x, y, ids

    def _targets(self, cells: Sequence[Any]) -> Any:
        import numpy as np

        if self.classes is not None:
            return coded(cells, self.classes).astype(float)
        return np.clip(numbers_of(cells)[0], *(self.target_range or ()))


def tabular(spec: Mapping[str, Any]) -> Task:
    """Return a task of a table: a classification or a regression, by a model of a few kinds.

    Args:
        spec: ``path`` (CSV with one record a line, Parquet or Arrow), or ``query`` (a SELECT) and ``url``
            (SQLAlchemy's, of the database; ``rows: independent`` declares that each row of a query that is
            more than columns and conditions of one table comes from one protected record), ``target``
            (column), and either
            ``classes`` (every value it can have) or ``target_range`` (public ``[low, high]``, which
            targets are clipped to). Features: ``bounds`` (by numeric column: public ``[low, high]``;
            values are clipped to them and scaled to [-1, 1]) and ``columns`` (by column ``{bounds:
            [low, high], missing: number}``, ``{categories: [...]}``, ``{ordinal: [...], missing:
            level}`` or ``{date: [first, last], parts: [time, month, weekday, hour]}``). ``model``:
            ``logistic`` or ``linear`` (the same: from zero weights), ``mlp`` (with ``hidden``), or
            ``package.module:factory``, called with the numbers of features and outputs.
            ``class_weights`` (public, one a class). ``train``, ``validation``, ``test`` (numbers
            of records, declared public: how many each split is expected to hold; records fall into
            splits by a keyed hash, and the file's own number of records is not checked, for it is
            private), ``public_test`` (false unless said), ``id`` (column that records are known by;
            their content unless given), ``key`` (the hash's public key), ``name``. To protect more
            than rows: ``group`` (the column that says whose a row is), ``max_per_group`` (the most
            rows of one that count, declared public; of more, the first), ``unit`` (what one is, in a
            word, as the budget's; the column's name unless given); ``train``, ``validation`` and
            ``test`` then count those.

    Returns:
        The task; the file has not been opened. ``check`` looks at the file and its header before
        anything is charged. A record that is not as declared (a class that is none, a word for a
        number) contributes nothing; a missing number counts as the declared fill, or the middle of
        its bounds; a category that is not declared counts as "another".

    Raises:
        InvalidInputError: If a field is missing, unknown or outside its domain, or bounds would
            come from the data.
    """
    table = read_table(spec)
    task = _task(spec, table, public_test=read_flag(spec, "public_test"))
    if not table.grouped:
        return task
    return by_unit(task, unit=table.unit, most=spec["max_per_group"], sizes=table.sizes)


def read_table(spec: Mapping[str, Any]) -> Table:
    """Return the table that ``task: {type: tabular, ...}`` describes: see :func:`tabular`."""
    where = "url" if "query" in spec else "path"
    check_fields("a table", spec, sorted(_FIELDS), needed=(where, "target"))
    if ("classes" in spec) == ("target_range" in spec):
        raise InvalidInputError(
            "task.classes",
            spec.get("classes"),
            "is required for a classification, target_range: [low, high] for a regression; one of them",
        )
    features = read_columns(spec.get("bounds"), spec.get("columns"))
    names = [column.name for column in features]
    if str(spec["target"]) in names:
        field = "bounds" if spec.get("bounds") and spec["target"] in spec["bounds"] else "columns"
        raise InvalidInputError(f"task.{field}", spec["target"], "is the target, not a feature")
    grouped = _grouped(spec)
    by = "group" if grouped else "id"
    identity = None if spec.get(by) is None else str(spec[by])
    if identity is not None and identity in (*names, str(spec["target"])):
        raise InvalidInputError(f"task.{by}", identity, "must be a column of its own")
    unpaid = [f"bounds of {column.name}" for column in features if isinstance(column, Paid)]
    if spec.get("class_weights") == PAID:
        unpaid.append("class_weights")
    if isinstance(spec.get("projection"), int):
        unpaid.append("projection")
    return Table(
        *_source(spec),
        str(spec["target"]),
        read_classes(spec["classes"]) if "classes" in spec else None,
        pair_of("task.target_range", spec["target_range"]) if "target_range" in spec else None,
        features,
        read_sizes(spec),
        identity,
        str(spec.get("key", KEY)),
        _projection(spec.get("projection"), sum(column.width for column in features)),
        tuple(unpaid),
        grouped,
        str(spec.get("unit", identity)) if grouped else "record",
        _independent(spec),
    )


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


def _projection(given: Any, width: int) -> Projection | None:
    """Return public directions, or how many of them a stage will release."""
    if given is None:
        return None
    if isinstance(given, int):
        return given
    listed = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if not listed or not all(
        isinstance(row, Sequence) and len(row) == width and all(map(is_number, row))
        for row in given
    ):
        raise InvalidInputError(
            "task.projection", given, f"must be a list of directions, {width} numbers each"
        )
    return tuple(tuple(map(float, row)) for row in given)


def _task(spec: Mapping[str, Any], table: Table, *, public_test: bool) -> Task:
    classes = None if table.classes is None else len(table.classes)
    width = table.width
    what, model = model_of(spec, width, table)
    return Task(
        name=str(spec.get("name", table.stem.partition(".")[0])),
        description=f"{what} on {table.stem}",
        **table.sizes.declared(),
        input_shape=(width,),
        classes=classes,
        load=table.load,
        model=model,
        loss=loss_of(spec, table),
        public_test=public_test,
        partition="content" if table.id is None else "id",
        bounds={c.name: (c.low, c.high) for c in table.features if isinstance(c, Number)},
        values={c.name: c.words for c in table.features if not isinstance(c, Number)},
        class_names=table.classes,
        target_range=table.target_range,
        check=table.check,
        header=table.header,
        constants=constants_of(spec, table),
        rows_declared=table.independent,
        examine=table.examine,
    )


def _id_text(value: Any) -> str:
    """Return an id as text: a whole number is the same whether or not its column lacks others."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value).strip()
