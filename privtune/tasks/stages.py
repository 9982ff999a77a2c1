"""Stages: one noised release each, made before the arms, and part of the task that all of them share.

A stage takes what a table leaves open (bounds of a column, weights of the classes, directions to
project on) from the records, and writes what it released into the task's own description: an arm then
sees a table like any other, whose public facts were paid for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.names import check_name
from privtune.numbers import is_number
from privtune.tasks._columns import Category
from privtune.tasks._declared import PAID
from privtune.tasks._facts import SPLITS
from privtune.tasks.built_in import get_task
from privtune.tasks.tabular import Table, read_table, tabular
from privtune.training.mechanism.metrics import (
    Floats,
    count_sensitivity,
    counts,
    moment_sensitivity,
    moments,
    symmetric,
)

_MOST_FEATURES = 2000  # of a covariance

TaskSpec = Mapping[str, Any]
"""A task as a spec describes it."""

_SHARE = 0.05  # of the study's ε, unless given


@dataclass(frozen=True, kw_only=True)
class TaskStage(ABC):
    """What is released once, before the arms."""

    type: ClassVar[str]
    name: str = ""  # among the study's arms and stages; its type unless given
    epsilon_share: float | None = None  # what it may cost alone, of the study's ε
    noise_multiplier: float | None = None  # noise over sensitivity, in the place of a share

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidInputError("stages.name", self.name, "must be text")
        if not self.name:
            object.__setattr__(self, "name", self.type)
        if self.epsilon_share is None and self.noise_multiplier is None:
            object.__setattr__(self, "epsilon_share", _SHARE)
        elif self.epsilon_share is not None and self.noise_multiplier is not None:
            self._refuse("epsilon_share", self.epsilon_share, "goes without a noise_multiplier")
        if self.epsilon_share is not None and not 0.0 < as_number(self.epsilon_share) < 1.0:
            self._refuse(
                "epsilon_share", self.epsilon_share, "must be a number above 0 and below 1"
            )
        if self.noise_multiplier is not None and not 0 < as_number(self.noise_multiplier) < 1e6:
            self._refuse("noise_multiplier", self.noise_multiplier, "must be a number above 0")

    def _refuse(self, field: str, value: object, allowed: str) -> None:
        raise InvalidInputError(f"stages.{self.name}.{field}", value, allowed)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Read a stage's fields; refuse one that is unknown."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(map(str, set(data) - {*known, "type"})):
            raise InvalidInputError(
                "stages", unknown, f"are no fields of {cls.type}; these are: {', '.join(known)}"
            )
        return cls(**{name: value for name, value in data.items() if name != "type"})

    def to_dict(self) -> dict[str, Any]:
        """Return the stage as a spec has it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        return {"type": self.type, **given}

    @abstractmethod
    def check(self, task: TaskSpec) -> None:
        """Refuse a task that it has nothing to release for. Touches no data."""

    def planned(self, task: TaskSpec) -> TaskSpec:
        """Return the task as it is planned with: shapes are public, what is released is not known."""
        return task

    @abstractmethod
    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        """Return how far :meth:`sums` can move between neighbours, in the L2 norm."""

    @abstractmethod
    def sums(self, task: TaskSpec) -> Floats:
        """Read the records, and sum what each adds."""

    @abstractmethod
    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        """Return what is released, JSON-ready, of sums with noise of this standard deviation."""

    def applied(self, task: TaskSpec, document: Mapping[str, Any]) -> TaskSpec:
        """Return the task with what was released in its place."""
        return task

    def refusal(self, document: Mapping[str, Any]) -> str:
        """Return why the study stops after what was released; nothing where it goes on. Public."""
        return ""

    @abstractmethod
    def words(self, document: Mapping[str, Any]) -> str:
        """Return what was released, for people."""


def as_number(value: object) -> float:
    """Return a number, NaN for what is none: it is in no range."""
    return float(value) if is_number(value) else math.nan


@dataclass(frozen=True, kw_only=True)
class Usable(TaskStage):
    """How many records can be used, over all splits: a study of too few stops, and says so in public."""

    # Whether a record can be used hangs on it alone, so one record moves the count by 1 at most.
    type: ClassVar[str] = "usable"
    at_least: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < as_number(self.at_least) <= 1.0:
            self._refuse("at_least", self.at_least, "must be a share, above 0 and at most 1")

    def check(self, task: TaskSpec) -> None:
        """Every task has records."""

    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        return 1.0

    def sums(self, task: TaskSpec) -> Floats:
        """The usable records of all splits."""
        found = get_task(task)
        found.check()
        # No model is tried on the records: one of them could decide how all are counted.
        return np.array([found.check_records(tried=False).usable], dtype=np.float64)

    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        declared = get_task(task)
        return {
            "usable": float(noised[0]),
            "noise": scale,
            "declared": sum(getattr(declared, f"{name}_records") for name in SPLITS),
            "at_least": self.at_least,
        }

    def refusal(self, document: Mapping[str, Any]) -> str:
        if document["usable"] >= document["at_least"] * document["declared"]:
            return ""
        said = f"{max(document['usable'], 0.0):,.0f} records can be used"
        return (
            f"Stage {self.name!r} released that about {said} (with noise of deviation "
            f"{document['noise']:,.1f}), which is below {self.at_least:.0%} of the "
            f"{document['declared']:,} that are declared"
        )

    def words(self, document: Mapping[str, Any]) -> str:
        return (
            f"about {max(document['usable'], 0.0):,.0f} usable records of {document['declared']:,} declared, "
            f"with noise of deviation {document['noise']:,.1f}"
        )


@dataclass(frozen=True, kw_only=True)
class Quantiles(TaskStage):
    """Bounds of all columns that say ``bounds: paid``, by noised counts on a public grid."""

    type: ClassVar[str] = "quantiles"
    low: float = 0.01  # share of values below the lower bound, about
    high: float = 0.99  # share of values below the upper bound, about

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= as_number(self.low) < as_number(self.high) <= 1.0:
            self._refuse("low", [self.low, self.high], "must be shares, 0 <= low < high <= 1")

    def check(self, task: TaskSpec) -> None:
        if not read_table(task).paid():
            raise InvalidInputError(
                "stages", self.name, "has no column to find bounds for", "Say bounds: paid of one."
            )

    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        return count_sensitivity(len(read_table(task).paid()), adjacency)

    def sums(self, task: TaskSpec) -> Floats:
        """Counts of all records of the file, whatever split they will fall into."""
        table = _checked(task)
        return counts(table.places(), [len(column.edges) - 1 for column in table.paid()])

    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        """See ``TaskStage``. A cell that does not rise above the noise counts as empty."""
        bounds, start = {}, 0
        for column in read_table(task).paid():
            edges = column.edges
            own = noised[start : start + len(edges) - 1]
            start += len(own)
            # The largest of k Gaussian draws is rarely above this.
            above = np.where(own > scale * math.sqrt(2.0 * math.log(len(own))), own, 0.0)
            first, last = 0, len(own) - 1
            if above.any():
                total = np.cumsum(above)
                first = min(int(np.searchsorted(total, self.low * total[-1], side="right")), last)
                end = int(np.searchsorted(total, self.high * total[-1], side="left"))
                last = min(max(first, end), last)
            bounds[column.name] = [float(edges[first]), float(edges[last + 1])]
        return {"bounds": bounds}

    def applied(self, task: TaskSpec, document: Mapping[str, Any]) -> TaskSpec:
        """A fill beyond the bounds is clipped to them, as values are."""
        fills = {column.name: column.missing for column in read_table(task).paid()}

        def column(name: str, given: Any) -> Any:
            if name not in document["bounds"]:
                return given
            low, high = document["bounds"][name]
            fill = fills[name]
            filled = {} if fill is None else {"missing": min(max(fill, low), high)}
            return {"bounds": [low, high], **filled}

        parts = {
            part: {name: column(str(name), given) for name, given in task[part].items()}
            for part in ("bounds", "columns")
            if task.get(part)
        }
        return {**task, **parts}

    def words(self, document: Mapping[str, Any]) -> str:
        bounds = document["bounds"].items()
        return ", ".join(f"{name} [{low:g}, {high:g}]" for name, (low, high) in bounds)


def _checked(task: TaskSpec) -> Table:
    """Return a table whose header has been checked."""
    table = read_table(task)
    table.check()
    return table


@dataclass(frozen=True, kw_only=True)
class Histogram(TaskStage):
    """How often each class of the training records, or each category of the table's, occurs."""

    type: ClassVar[str] = "histogram"
    column: str | None = None  # of declared categories; the target unless given
    most: float = 20.0  # the largest weight of a class over the smallest

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1.0 <= as_number(self.most) < 1e5:
            self._refuse("most", self.most, "must be a number of at least 1")

    def check(self, task: TaskSpec) -> None:
        self._category(read_table(task))

    def _category(self, table: Table) -> Category:
        if self.column in (None, table.target.name) and isinstance(table.target, Category):
            return table.target
        for column in table.features:
            if isinstance(column, Category) and column.name == self.column:
                return column
        raise InvalidInputError(
            f"stages.{self.name}.column",
            self.column,
            "must be a column with declared categories, or the target of a classification",
        )

    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        return count_sensitivity(1, adjacency)

    def sums(self, task: TaskSpec) -> Floats:
        """Counts of all records of the file."""
        table = _checked(task)
        column = self._category(table)
        return counts(table.values(column)[:, None], [len(column.values)])

    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        """See ``TaskStage``. A class that does not rise above the noise counts as much as the noise."""
        values = [str(value) for value in self._category(read_table(task)).values]
        released = {"counts": dict(zip(values, noised.tolist(), strict=True))}
        if not self._weighs(task):
            return released
        weights = 1.0 / np.maximum(noised, max(scale, 1.0))
        weights = np.minimum(weights / weights.min(), self.most)
        return {**released, "class_weights": (weights / weights.mean()).tolist()}

    def _weighs(self, task: TaskSpec) -> bool:
        own = self.column in (None, str(task.get("target")))
        return own and task.get("class_weights") == PAID

    def applied(self, task: TaskSpec, document: Mapping[str, Any]) -> TaskSpec:
        weights = document.get("class_weights")
        return task if weights is None else {**task, "class_weights": weights}

    def words(self, document: Mapping[str, Any]) -> str:
        found = ", ".join(f"{name} {count:.0f}" for name, count in document["counts"].items())
        if "class_weights" not in document:
            return found
        return f"{found}; class weights {', '.join(f'{w:.3g}' for w in document['class_weights'])}"


@dataclass(frozen=True, kw_only=True)
class DpPca(TaskStage):
    """The directions of the largest noised second moments, which features are projected on."""

    type: ClassVar[str] = "dp-pca"
    components: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.components, int) and not isinstance(self.components, bool)
        if not whole or self.components < 1:
            self._refuse("components", self.components, "must be a whole number of at least 1")

    def check(self, task: TaskSpec) -> None:
        width = read_table(task).shape[0]
        if not self.components < width <= _MOST_FEATURES:
            self._refuse(
                "components",
                self.components,
                f"must be below the number of features, {width}, of which there may be {_MOST_FEATURES}",
            )

    def planned(self, task: TaskSpec) -> TaskSpec:
        return {**task, "projection": self.components}

    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        return moment_sensitivity(adjacency)

    def sums(self, task: TaskSpec) -> Floats:
        """Second moments of the training records, clipped to length 1."""
        return moments(tabular(task).load().train.x.numpy())

    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        values, vectors = np.linalg.eigh(symmetric(noised))
        largest = np.argsort(values)[::-1][: self.components]
        return {"moments": values[largest].tolist(), "projection": vectors[:, largest].T.tolist()}

    def applied(self, task: TaskSpec, document: Mapping[str, Any]) -> TaskSpec:
        return {**task, "projection": document["projection"]}

    def words(self, document: Mapping[str, Any]) -> str:
        found = ", ".join(f"{value:.4g}" for value in document["moments"][:5])
        more = ", ..." if len(document["moments"]) > 5 else ""
        return f"{len(document['moments'])} directions; noised moments {found}{more}"


STAGES: Mapping[str, type[TaskStage]] = {
    stage.type: stage for stage in (Usable, Quantiles, Histogram, DpPca)
}
"""The stages by type, in the order in which they may stand: each reads what those before released."""


def make_stage(data: Mapping[str, Any]) -> TaskStage:
    """Return a stage from its fields in a spec."""
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in STAGES:
        raise InvalidInputError("stages.type", kind, f"must be one of {', '.join(STAGES)}")
    check_name(str(data.get("name") or kind), "stage")
    return STAGES[kind].of(data)


def staged_task(task: Any, stages: Sequence[TaskStage]) -> Any:
    """Check a task of a spec against its stages, and return it as it is planned with. Touches no data."""
    if not isinstance(task, Mapping) or task.get("type") != "tabular":
        if any(not isinstance(stage, Usable) for stage in stages):
            raise InvalidInputError(
                "stages", [stage.name for stage in stages], "go with a table: task.type: tabular"
            )
        return task
    if stages and "group" in task:
        raise InvalidInputError(
            "stages",
            [stage.name for stage in stages],
            "go with tables of one row a record: rows of one group move more than what is charged",
        )
    if "projection" in task and isinstance(task["projection"], int):
        raise InvalidInputError(
            "task.projection", task["projection"], "must be a list of directions"
        )
    order = [list(STAGES).index(stage.type) for stage in stages]
    if order != sorted(order):
        raise InvalidInputError(
            "stages", [stage.type for stage in stages], f"must be in the order {', '.join(STAGES)}"
        )
    for kind in (Usable, Quantiles, DpPca):
        if sum(isinstance(stage, kind) for stage in stages) > 1:
            raise InvalidInputError("stages", kind.type, "may be there once")
    unpaid = list(read_table(task).unpaid)
    if any(isinstance(stage, Quantiles) for stage in stages):
        unpaid = [what for what in unpaid if not what.startswith("bounds of ")]
    if any(isinstance(stage, Histogram) and stage._weighs(task) for stage in stages):
        unpaid = [what for what in unpaid if what != "class_weights"]
    if unpaid:
        raise InvalidInputError(
            "task",
            unpaid,
            "are to be paid for, and no stage does",
            "Say stages: [{type: quantiles}] for bounds, [{type: histogram}] for class_weights.",
        )
    for stage in stages:
        stage.check(task)
        task = stage.planned(task)
    return task
