"""Stand-ins: generated records with a task's public facts, to rehearse a study on before it is charged.

Nothing of a record is used but what is public: shapes and types, which a task of one's own reads from its
first. Every generated record has a few hidden numbers; inputs and targets are functions of these and of
noise, so that a model can learn one from the other. What hidden numbers a class has, and how inputs show
them, is drawn once with a public seed: a stand-in is the same wherever it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from privtune.errors import InvalidInputError
from privtune.tasks._facts import SPLITS
from privtune.tasks._rows import TableRows, TextRows
from privtune.tasks._task import Task, TaskData

if TYPE_CHECKING:
    import torch

    from privtune.tasks._columns import Column
    from privtune.training.mechanism.data import TensorData

Floats = npt.NDArray[np.float64]

_SEED = 20_261_127  # public
_HIDDEN = 12  # numbers of a record, where its inputs are at least as many
_ERROR = 0.1  # of the best guess of a class from the hidden numbers
_TRIED = 20_000  # records that the classes are set apart with
_AT_ONCE = 4096  # records
_MOST = 1 << 28  # numbers of all inputs: a gibibyte
_TOPICS = 16  # of tokens
_SIGNAL = 0.9  # correlation of a number that is predicted with its best prediction
_MOMENTS = 512  # different dates
_PIXELS = "pixels"


def from_spec(spec: Mapping[str, Any], get: Callable[[Any], Task]) -> Task:
    """Return the task that ``{type: stand-in, of: TASK}`` describes, of the task that ``get`` returns."""
    if set(spec) != {"type", "of"}:
        raise InvalidInputError("task", sorted(map(str, spec)), "a stand-in takes of: TASK alone")
    return stand_in(get(spec["of"]))


def stand_in(task: Task) -> Task:
    """Return a task of the same public facts whose records are generated, and so public.

    Of more than 2²⁸ input numbers all splits are made smaller in proportion; so are then its declared sizes.

    Raises:
        InvalidInputError: If the facts do not say what records could be.

    Example:
        >>> from privtune.tasks import get_task
        >>> made = stand_in(get_task("iris-logistic"))
        >>> made.name, made.benchmark, made.train_records, tuple(made.load().train.x.shape)
        ('stand-in for iris-logistic', True, 90, (90, 4))
    """
    like = task.like
    if why := _refusal(task):
        raise InvalidInputError(
            "task",
            task.name,
            f"has no stand-in: {why}",
            "Rehearse on a task of public records instead: --on TASK.",
        )
    sizes = {f"{name}_records": getattr(task, f"{name}_records") for name in SPLITS}
    numbers = sum(sizes.values()) * math.prod(
        task.input_shape if like is None else like[0].shape[1:]
    )
    if numbers > _MOST:
        sizes = {name: max(min(n, 1), n * _MOST // numbers) for name, n in sizes.items()}
    made = replace(task, **sizes)
    return replace(
        made,
        name=f"stand-in for {task.name}",
        description=f"generated records with the public facts of {task.name}",
        load=_Generator(made).load,
        check=_nothing,
        header=_nothing,
        examine=None,
        code=None,
        benchmark=True,
    )


def _nothing() -> None:
    """Check nothing: there is no file."""


def _refusal(task: Task) -> str:
    """Return why nothing sensible can be generated; empty where it can."""
    if task.like is None:
        return ""
    x, y = task.like
    if not x.is_floating_point() and task.tokens is None:
        return "its inputs are whole numbers, and nothing says which of them there are"
    if not y.is_floating_point() and (task.classes is None or (y.ndim > 1 and not task.unit)):
        return (
            "its targets are whole numbers, and no classes are declared"
            if task.classes is None
            else "each of its records has several targets, as of a language model"
        )
    return ""


@dataclass(frozen=True)
class _Generator:
    """Generates the records of a task."""

    task: Task

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row's input."""
        like, shape = self.task.like, self.task.input_shape
        shape = shape if like is None else tuple(like[0].shape[1:])
        return shape[1:] if self.task.unit else shape

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of a table whose cells are generated; none of other tasks."""
        rows = self.task.raw
        projected = isinstance(rows, TableRows) and isinstance(rows.projection, int)
        return rows.features if isinstance(rows, TableRows) and not projected else ()

    @cached_property
    def hidden(self) -> int:
        """How many hidden numbers a record has."""
        return max(1, min(_HIDDEN, len(self.columns) or math.prod(self.shape)))

    @cached_property
    def centres(self) -> Floats:
        """Mean hidden numbers of each class, ``[C, k]``: so far apart that one guess in ten is wrong."""
        classes = self.task.classes
        if classes is None:
            return np.zeros((1, self.hidden))
        rng = np.random.default_rng([_SEED, 1])
        centres = rng.standard_normal((classes, self.hidden))
        centres -= centres.mean(axis=0)
        if self.hidden == 1:
            centres = np.linspace(-1.0, 1.0, classes)[:, None]
        tried, noise = (
            rng.integers(classes, size=_TRIED),
            rng.standard_normal((_TRIED, self.hidden)),
        )
        low, high = 0.0, 100.0 * classes
        for _ in range(30):
            far = 0.5 * (low + high) * centres
            x = far[tried] + noise
            guess = (x @ far.T - 0.5 * np.square(far).sum(axis=1)).argmax(axis=1)
            low, high = (
                (low, 0.5 * (low + high))
                if float((guess != tried).mean()) < _ERROR
                else (0.5 * (low + high), high)
            )
        return high * centres

    def shown(self, places: int) -> Floats:
        """Return how so many numbers show the hidden ones, ``[k, places]``: each varies by 1 over records."""
        rng = np.random.default_rng([_SEED, 2])
        if self.columns or self.task.tokens is not None or len(self.shape) < 2:
            found = rng.standard_normal((self.hidden, places))
        else:  # pictures: neighbours look alike
            found = _smooth(rng, self.hidden, self.shape)
        centres = self.centres
        spread = np.cov(centres.T, bias=True).reshape(self.hidden, self.hidden)
        varies = np.einsum("kp,kl,lp->p", found, spread + np.eye(self.hidden), found)
        shown: Floats = found / np.sqrt(varies)
        return shown

    def load(self) -> TaskData:
        """Generate the splits."""
        from privtune.training.mechanism.data import TensorData

        found: dict[str, TensorData] = {}
        task, sealed = self.task, self.task.partition not in ("fixed", "given")
        for place, name in enumerate(SPLITS):
            size = getattr(task, f"{name}_records")
            rng = np.random.default_rng([_SEED, 3, place])
            parts = [
                self.records(rng, min(_AT_ONCE, size - n)) for n in range(0, size, _AT_ONCE)
            ] or [self.records(rng, 1)]
            x, y = (_tensor(np.concatenate(part)) for part in zip(*parts, strict=True))
            if task.like is not None:
                x, y = x.to(task.like[0].dtype), y.to(task.like[1].dtype)
            found[name] = TensorData(
                x,
                y,
                sealed_size=sealed,
                unusable=None if size else _tensor(np.ones(1, dtype=bool)),
                groups=_tensor(np.arange(len(y)) + 10**9 * place) if task.unit else None,
                unit=task.unit,
                tree=task.tree,
            )
        return TaskData(**found)

    def records(self, rng: np.random.Generator, n: int) -> tuple[Any, Any]:
        """Generate records: inputs and targets."""
        most = self.task.rows
        if most is None:
            return self.rows(rng, n)
        counts = 1 + rng.binomial(most - 1, 0.5, size=n)
        there = np.arange(most) < counts[:, None]
        own = rng.standard_normal((n, self.hidden))
        rows, targets = self.rows(rng, int(counts.sum()), np.repeat(own, counts, axis=0))
        x = np.zeros((n, most, *rows.shape[1:]), rows.dtype)
        y = np.full((n, most), math.nan if targets.dtype.kind == "f" else -1, targets.dtype)
        x[there], y[there] = rows, targets
        return x, y

    def rows(self, rng: np.random.Generator, n: int, own: Floats | None = None) -> tuple[Any, Any]:
        """Generate rows; those of one unit share a part of their noise, ``own``, and so are alike."""
        task = self.task
        labels = self.labels(rng, n)
        noise = rng.standard_normal((n, self.hidden))
        if own is not None:
            noise = 0.5 * own + math.sqrt(0.75) * noise
        hidden = self.centres[labels] + noise
        if task.classes is not None:
            return self.inputs(rng, hidden), labels.astype(np.int64)
        shape = () if task.like is None or task.unit else tuple(task.like[1].shape[1:])
        ways = np.random.default_rng([_SEED, 4]).standard_normal((self.hidden, math.prod(shape)))
        y = _SIGNAL * hidden @ (ways / np.linalg.norm(ways, axis=0))
        y += math.sqrt(1.0 - _SIGNAL**2) * rng.standard_normal(y.shape)
        if task.target_range is not None:
            low, high = task.target_range
            y = 0.5 * (low + high) + 0.5 * (high - low) * np.clip(0.4 * y, -1.0, 1.0)
        return self.inputs(rng, hidden), y.reshape(n, *shape).astype(np.float32)

    def labels(self, rng: np.random.Generator, n: int) -> Any:
        """Return classes, equally frequent but for a declared rarest one: the last, the positive of two."""
        classes = self.task.classes or 1
        rarest = self.task.rarest_share
        if rarest is None or classes < 2:
            return rng.integers(classes, size=n)
        others = (1.0 - rarest) / (classes - 1)
        return rng.choice(classes, size=n, p=[*[others] * (classes - 1), rarest])

    def inputs(self, rng: np.random.Generator, hidden: Floats) -> Any:
        """Return inputs that show hidden numbers ``[n, k]``."""
        task, n = self.task, len(hidden)
        if task.tokens is not None:
            return self.tokens(rng, hidden, task.tokens)
        if self.columns:
            return self.table(rng, hidden)
        z = (hidden @ self.shown(math.prod(self.shape))).astype(np.float32)
        z += 0.3 * rng.standard_normal(z.shape, dtype=np.float32)
        if isinstance(
            task.raw, TextRows
        ):  # directions that have one in common, as those of encoders
            z += 1.0
            z /= np.linalg.norm(z, axis=1, keepdims=True)
        elif _PIXELS in task.bounds:  # half of them black
            z = np.clip(0.4 * z, 0.0, 1.0)
        elif task.like is None:
            z = np.clip(0.4 * z, -1.0, 1.0)
        return z.reshape(n, *self.shape).astype(np.float32)

    def tokens(self, rng: np.random.Generator, hidden: Floats, tokens: int) -> Any:
        """Return bags of tokens: each is one of a topic, and hidden numbers make topics more frequent."""
        topics, places = min(_TOPICS, tokens), math.prod(self.shape)
        liking = (hidden @ self.shown(topics))[:, None, :] + rng.gumbel(
            size=(len(hidden), places, topics)
        )
        share = tokens // topics
        found = liking.argmax(axis=2) + topics * rng.integers(share, size=(len(hidden), places))
        return found.reshape(len(hidden), *self.shape)

    def table(self, rng: np.random.Generator, hidden: Floats) -> Any:
        """Return features of generated cells, as the columns make them of the user's own."""
        from privtune.tasks._columns import Category, Paid

        rows: Any = self.task.raw
        many = [len(c.values) if isinstance(c, Category) else 1 for c in self.columns]
        z = hidden @ self.shown(sum(many))
        ends = np.cumsum(many)
        cells = {
            column.name: _cells(column, z[:, end - width : end], rng)
            for column, end, width in zip(self.columns, ends, many, strict=True)
        }
        x, start = rows.of(cells)[0], 0
        for column, end in zip(self.columns, ends, strict=True):
            if isinstance(column, Paid):  # what it will be once its bounds are released
                x[:, start] = np.clip(0.4 * z[:, end - 1], -1.0, 1.0)
            start += column.width
        return rows.projected(x)


def _cells(column: Column, z: Floats, rng: np.random.Generator) -> Any:
    """Return cells of a column, from standard numbers ``[n, values]`` that say what is in them."""
    import pyarrow as pa
    from scipy.special import ndtr

    from privtune.tasks._cells import column_of
    from privtune.tasks._columns import Category, Date, Number, Ordinal

    if isinstance(column, Category):
        return column_of(column.values).take(
            pa.array((z + rng.gumbel(scale=0.5, size=z.shape)).argmax(axis=1))
        )
    z = z[:, 0] + 0.3 * rng.standard_normal(len(z))
    if isinstance(column, Ordinal):
        levels = column_of(column.levels)
        return levels.take(pa.array((ndtr(z) * len(levels)).astype(int).clip(0, len(levels) - 1)))
    if isinstance(column, Date):
        step = (column.high - column.low) / _MOMENTS
        moments = column_of([column.written(column.low + n * step) for n in range(_MOMENTS)])
        return moments.take(pa.array((ndtr(z) * _MOMENTS).astype(int).clip(0, _MOMENTS - 1)))
    if isinstance(column, Number):
        middle, half = 0.5 * (column.low + column.high), 0.5 * (column.high - column.low)
        z = middle + half * np.clip(0.4 * z, -1.0, 1.0)
    return pa.array(z)


def _smooth(rng: np.random.Generator, many: int, shape: tuple[int, ...]) -> Floats:
    """Return random fields of a shape, ``[many, numbers]``, smooth along its last two axes."""
    *rest, height, width = shape
    found = rng.standard_normal((many, *rest, 4, 4))
    for axis, size in ((-2, height), (-1, width)):
        at = np.linspace(0.0, 3.0, size)
        low = np.minimum(at.astype(int), 2)
        weight = (at - low).reshape(-1, *(1,) * (-axis - 1))
        found = found.take(low, axis) * (1.0 - weight) + found.take(low + 1, axis) * weight
    return found.reshape(many, -1)


def _tensor(values: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(values)
