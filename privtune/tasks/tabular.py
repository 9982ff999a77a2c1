"""A table of one's own, as CSV, Parquet or Arrow: features made of columns by public facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.imports import find_function
from privtune.tasks._columns import (
    Column,
    Number,
    is_missing,
    label_of,
    numbers_of,
    pair_of,
    read_columns,
    values_of,
)
from privtune.tasks._data import classification_loss
from privtune.tasks._files import open_table
from privtune.tasks._partition import KEY, Sizes, split
from privtune.tasks._task import Task, TaskData, TaskDataError
from privtune.tasks._units import by_unit

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["tabular"]

_FIELDS = {
    "type", "name", "path", "target", "classes", "target_range", "bounds", "columns", "model", "hidden",
    "class_weights", "train", "validation", "test", "public_test", "id", "key", "group", "max_per_group",
    "unit",
}  # fmt: skip
_HIDDEN = (64,)


@dataclass(frozen=True)
class _Table:
    path: str
    target: str
    classes: tuple[Any, ...] | None
    target_range: tuple[float, float] | None
    features: tuple[Column, ...]
    sizes: Sizes
    id: str | None
    key: str
    grouped: bool = False  # by the id

    @property
    def columns(self) -> tuple[str, ...]:
        features = (column.name for column in self.features)
        return (*features, self.target, *([] if self.id is None else [self.id]))

    def check(self) -> None:
        """Check what can be checked before anything is charged: the file and its header.

        How many records there are is private, and not checked.

        Raises:
            TaskDataError: Without any value of a record.
        """
        file = open_table(Path(self.path))
        if missing := [c for c in self.columns if c not in file.columns]:
            raise TaskDataError(f"{self.path} lacks the declared columns {', '.join(missing)}.")
        if twice := [c for c in self.columns if file.columns.count(c) > 1]:
            raise TaskDataError(f"{self.path} has two columns called {', '.join(twice)}.")
        words = file.text_columns()
        if text := [c.name for c in self.features if isinstance(c, Number) and c.name in words]:
            raise TaskDataError(
                f"{self.path}: task.bounds names {', '.join(text)}, which holds no numbers. Leave it out "
                "of the bounds, or declare it under columns as categories, ordinal or date."
            )
        if self.target_range is not None and self.target in words:
            raise TaskDataError(
                f"{self.path}: the target {self.target} holds no numbers, which a target_range asks "
                "for. Say classes for a classification."
            )

    def load(self) -> TaskData:
        """Read the records. One that is not as declared has no target, and so contributes nothing."""
        import numpy as np

        self.check()
        table = open_table(Path(self.path)).read(self.columns)
        x = np.empty(
            (len(table[self.target]), sum(c.width for c in self.features)), dtype=np.float32
        )
        broken = np.zeros(len(x), dtype=bool)
        start = 0
        for column in self.features:
            x[:, start : start + column.width], lost = column.encode(table.pop(column.name))
            broken |= lost
            start += column.width
        y = self._targets(table[self.target])
        if self.grouped:  # a row that belongs to nobody is protected with nobody
            broken |= np.array([is_missing(cell) for cell in table[str(self.id)]], dtype=bool)
        y[broken] = np.nan if self.classes is None else -1
        x[np.isnan(y) | (self.classes is not None) & (y < 0)] = 0.0  # alike: they share a split
        ids = None if self.id is None else [_id_text(value) for value in table[self.id]]
        return split(
            x,
            y,
            self.sizes,
            ids=ids,
            key=self.key,
            numbers=self.classes is None,
            groups=self.grouped,
        )

    def _targets(self, cells: Sequence[Any]) -> Any:
        import numpy as np

        if self.classes is not None:
            number = {label_of(value): index for index, value in enumerate(self.classes)}
            return np.array([number.get(label_of(cell), -1) for cell in cells], dtype=float)
        return np.clip(numbers_of(cells)[0], *(self.target_range or ()))


def tabular(spec: Mapping[str, Any]) -> Task:
    """Return a task of a table: a classification or a regression, by a model of a few kinds.

    Args:
        spec: ``path`` (CSV with one record a line, Parquet or Arrow), ``target`` (column), and either
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
    if unknown := sorted(map(str, set(spec) - _FIELDS)):
        raise InvalidInputError("task", unknown, f"a table takes {', '.join(sorted(_FIELDS))}")
    for field in ("path", "target", "train", "validation", "test"):
        if field not in spec:
            raise InvalidInputError(f"task.{field}", None, "is required for a table")
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
    table = _Table(
        str(spec["path"]),
        str(spec["target"]),
        _classes(spec["classes"]) if "classes" in spec else None,
        pair_of("task.target_range", spec["target_range"]) if "target_range" in spec else None,
        features,
        Sizes(*(_size(field, spec[field]) for field in ("train", "validation", "test"))),
        identity,
        str(spec.get("key", KEY)),
        grouped,
    )
    public = spec.get("public_test", False)
    if not isinstance(public, bool):
        raise InvalidInputError("task.public_test", public, "must be true or false")
    task = _task(spec, table, public_test=public)
    if not grouped:
        return task
    unit = str(spec.get("unit", identity))
    return by_unit(task, unit=unit, most=spec["max_per_group"], sizes=table.sizes)


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


def _task(spec: Mapping[str, Any], table: _Table, *, public_test: bool) -> Task:
    classes = None if table.classes is None else len(table.classes)
    width = sum(column.width for column in table.features)
    what, model = _model(spec, width, table)
    return Task(
        name=str(spec.get("name", Path(table.path).stem)),
        description=f"{what} on {Path(table.path).name}",
        train_records=table.sizes.train,
        validation_records=table.sizes.validation,
        test_records=table.sizes.test,
        input_shape=(width,),
        classes=classes,
        load=table.load,
        model=model,
        loss=_loss(spec, table),
        public_test=public_test,
        partition="content" if table.id is None else "id",
        bounds={c.name: (c.low, c.high) for c in table.features if isinstance(c, Number)},
        values={c.name: c.words for c in table.features if not isinstance(c, Number)},
        class_names=table.classes,
        target_range=table.target_range,
        check=table.check,
    )


def _model(
    spec: Mapping[str, Any], features: int, table: _Table
) -> tuple[str, Callable[[], nn.Module]]:
    """Return what the model is called, and what builds it."""
    given = spec.get("model", "linear")
    outputs = 1 if table.classes is None else len(table.classes)
    if given != "mlp" and "hidden" in spec:
        raise InvalidInputError("task.hidden", spec["hidden"], "goes with model: mlp alone")
    build: tuple[int, ...] | Callable[..., object] | None
    if given in ("linear", "logistic"):
        what, build = "linear regression" if table.classes is None else "logistic regression", None
    elif given == "mlp":
        hidden = _hidden(spec.get("hidden", _HIDDEN))
        what, build = f"MLP {'-'.join(map(str, (features, *hidden, outputs)))}", hidden
    else:
        factory = find_function(
            "task.model",
            str(given),
            allowed="must be linear, logistic, mlp, or package.module:factory",
            must="must name a function of the numbers of features and outputs",
        )
        what, build = str(given), factory

    def model() -> nn.Module:
        from torch import nn

        from privtune.tasks._models import InRange, linear, mlp, own_model

        if build is None:
            made = linear(features, outputs)
        elif isinstance(build, tuple):
            made = mlp(features, outputs, build)
        else:
            made = own_model(build, what, features, outputs)
        return (
            made
            if table.target_range is None
            else nn.Sequential(made, InRange(*table.target_range))
        )

    return what, model


def _loss(
    spec: Mapping[str, Any], table: _Table
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    weights = spec.get("class_weights")
    if table.target_range is not None:
        if weights is not None:
            raise InvalidInputError("task.class_weights", weights, "goes with classes alone")
        low, high = table.target_range

        def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            from privtune.tasks._models import squared_error

            return squared_error(outputs, targets, half=0.5 * (high - low))

        return squared
    if weights is None:
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


def _weighted(
    outputs: torch.Tensor, targets: torch.Tensor, *, weights: tuple[float, ...]
) -> torch.Tensor:
    from privtune.tasks._models import weighted_cross_entropy

    return weighted_cross_entropy(outputs, targets, weights=weights)


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


def _size(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**12:
        allowed = "must be a whole number of at least 1, and of records that exist"
        raise InvalidInputError(f"task.{field}", value, allowed)
    return value


def _classes(given: Any) -> tuple[Any, ...]:
    return values_of("task.classes", given, least=2)


def _id_text(value: Any) -> str:
    """Return an id as text: a whole number is the same whether or not its column lacks others."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value).strip()
