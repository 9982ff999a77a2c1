"""A table of one's own, as CSV or Parquet: features scaled by public bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from privtune.errors import InvalidInputError
from privtune.tasks._data import logistic
from privtune.tasks._partition import KEY, Sizes, split
from privtune.tasks._task import Task, TaskData, TaskDataError

__all__ = ["tabular"]

_DATA_DEPENDENT = ("auto", "minmax", "standard", "data", "robust", "quantile")
_FIELDS = {
    "type", "name", "path", "target", "classes", "bounds", "train", "validation", "test", "public_test",
    "id", "key",
}  # fmt: skip


@dataclass(frozen=True)
class _Table:
    path: str
    target: str
    classes: tuple[Any, ...]
    bounds: Mapping[str, tuple[float, float]]
    sizes: Sizes
    id: str | None
    key: str

    def load(self) -> TaskData:
        import numpy as np
        import pandas as pd

        path = Path(self.path)
        try:
            if path.suffix == ".parquet":
                frame = pd.read_parquet(path)
            else:
                # Ids as they are written: what pandas makes of one hangs on its whole column.
                frame = pd.read_csv(path, dtype=None if self.id is None else {self.id: str})
        except (OSError, ValueError, ImportError) as error:
            raise TaskDataError(f"{path} cannot be read ({type(error).__name__}).") from error
        needed = (*self.bounds, self.target, *([] if self.id is None else [self.id]))
        if missing := [c for c in needed if c not in frame.columns]:
            raise TaskDataError(f"{path} lacks the declared columns {', '.join(missing)}.")
        columns = []
        for name, (low, high) in self.bounds.items():
            values = frame[name].to_numpy(dtype=float)
            # What is missing becomes the middle of the bounds: no mean of the others is used.
            values = np.nan_to_num(np.clip(values, low, high), nan=(low + high) / 2)
            columns.append(2.0 * (values - low) / (high - low) - 1.0)
        number = {value: index for index, value in enumerate(self.classes)}
        labels = [number.get(value, -1) for value in frame[self.target].tolist()]
        if -1 in labels:
            raise TaskDataError(
                f"{path}: column {self.target!r} holds values outside of the declared classes "
                f"{list(self.classes)}. Declare every class that can occur."
            )
        ids = None if self.id is None else [_id_text(value) for value in frame[self.id]]
        return split(np.stack(columns, axis=1), np.array(labels), self.sizes, ids=ids, key=self.key)


def tabular(spec: Mapping[str, Any]) -> Task:
    """Return a task of logistic regression on a table.

    Args:
        spec: ``path`` (CSV or Parquet), ``target`` (column), ``classes`` (every value it can have),
            ``bounds`` (by feature column: public ``[low, high]``; values are clipped to them and
            scaled to [-1, 1]), ``train``, ``validation``, ``test`` (numbers of records, declared
            public: how many each split is expected to hold; records fall into splits by a keyed
            hash, and the file's own number of records is not checked, for it is private),
            ``public_test`` (false unless said), ``id`` (column that records are known by; their
            content unless given), ``key`` (the hash's public key), ``name``.

    Returns:
        The task; the file has not been opened.

    Raises:
        InvalidInputError: If a field is missing or unknown, or bounds would come from the data.
    """
    if unknown := sorted(set(spec) - _FIELDS):
        raise InvalidInputError("task", unknown, f"a table takes {', '.join(sorted(_FIELDS))}")
    for field in ("path", "target", "classes", "bounds", "train", "validation", "test"):
        if field not in spec:
            raise InvalidInputError(f"task.{field}", None, "is required for a table")
    bounds = _bounds(spec["bounds"])
    if str(spec["target"]) in bounds:
        raise InvalidInputError("task.bounds", spec["target"], "is the target, not a feature")
    column = None if spec.get("id") is None else str(spec["id"])
    if column is not None and column in (*bounds, str(spec["target"])):
        raise InvalidInputError("task.id", column, "must be a column of its own")
    sizes = Sizes(int(spec["train"]), int(spec["validation"]), int(spec["test"]))
    classes: Sequence[Any] = spec["classes"]
    table = _Table(
        str(spec["path"]),
        str(spec["target"]),
        tuple(classes),
        bounds,
        sizes,
        column,
        str(spec.get("key", KEY)),
    )
    task = logistic(
        str(spec.get("name", Path(table.path).stem)),
        f"logistic regression on {Path(table.path).name}",
        features=len(bounds),
        classes=len(classes),
        sizes=sizes,
        load=table.load,
        bounds=bounds,
        partition="content" if column is None else "id",
    )
    return replace(
        task, public_test=bool(spec.get("public_test", False)), class_names=table.classes
    )


def _id_text(value: Any) -> str:
    """Return an id as text: a whole number is the same whether or not its column lacks others."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _bounds(given: Any) -> dict[str, tuple[float, float]]:
    if given in _DATA_DEPENDENT or given is None:
        raise InvalidInputError(
            "task.bounds",
            given,
            "must be public numbers for each feature: a minimum, maximum, mean or deviation of the "
            "records is a release about them that nothing charges",
            "Write [low, high] of each column from what is known without the data.",
        )
    if not isinstance(given, Mapping) or not given:
        raise InvalidInputError(
            "task.bounds", given, "must give [low, high] of each feature column"
        )
    bounds: dict[str, tuple[float, float]] = {}
    for name, pair in given.items():
        if isinstance(pair, str):
            return _bounds(pair)
        try:
            low, high = (float(value) for value in pair)
        except (TypeError, ValueError):
            raise InvalidInputError(f"task.bounds.{name}", pair, "must be [low, high]") from None
        if not low < high:
            raise InvalidInputError(f"task.bounds.{name}", pair, "must be [low, high], low < high")
        bounds[str(name)] = (low, high)
    return bounds
