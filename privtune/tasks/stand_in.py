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
from privtune.facts import SPLITS
from privtune.tables.raw_rows import TableRows, TextRows
from privtune.tasks.task import Task, TaskData

if TYPE_CHECKING:
    import torch

    from privtune.tables.columns import Column, Date
    from privtune.training.mechanism.data import TensorData

Floats = npt.NDArray[np.float64]
Generator = np.random.Generator

_SEED = 20_261_127  # public
_HIDDEN = 12  # numbers of a record, where its inputs are at least as many
_ERROR = 0.1  # of the best guess of a class from the hidden numbers
_TRIALS = 20_000  # records that the classes are set apart with
_HALVINGS = 30  # of the interval in which the distance of the classes is searched
_BATCH = 4096  # records that are generated at a time
_MOST = 1 << 28  # numbers of all inputs: a gibibyte
_TOPICS = 16  # of tokens
_SIGNAL = 0.9  # correlation of a number that is predicted with its best prediction
_SHARED_NOISE = 0.5  # of a row's noise, the part that all rows of its unit share
_STEEPNESS = 0.4  # standard numbers times this fill half of a range and are rarely clipped
_MOMENTS = 512  # different dates
_PIXELS = "pixels"


def from_spec(spec: Mapping[str, Any], get: Callable[[Any], Task]) -> Task:
    """Return the stand-in that ``{type: stand-in, of: TASK}`` describes, getting TASK by ``get``."""
    if set(spec) != {"type", "of"}:
        names = sorted(map(str, spec))
        raise InvalidInputError("task", names, "a stand-in takes of: TASK alone")
    task = get(spec["of"])
    return stand_in(task)


def stand_in(task: Task) -> Task:
    """Return a task of the same public facts whose records are generated, and so public.

    Of more than 2²⁸ input numbers all splits are made smaller in proportion; so are then its declared sizes.

    Args:
        task: The task that is rehearsed; its records are not read.

    Raises:
        InvalidInputError: If the facts do not say what records could be.

    Example:
        >>> from privtune.tasks import get_task
        >>> task = stand_in(get_task("iris-logistic"))
        >>> task.name, task.benchmark, task.train_records, tuple(task.load().train.x.shape)
        ('stand-in for iris-logistic', True, 90, (90, 4))
    """
    refusal = _refusal(task)
    if refusal:
        raise InvalidInputError(
            "task",
            task.name,
            f"has no stand-in: {refusal}",
            "Rehearse on a task of public records instead: --on TASK.",
        )
    smaller = _fit_into_memory(task)
    generator = _Generator(smaller)
    return replace(
        smaller,
        name=f"stand-in for {task.name}",
        description=f"generated records with the public facts of {task.name}",
        load=generator.load,
        check=_check_nothing,
        header=_check_nothing,
        examine=None,
        code=None,
        benchmark=True,
    )


def _fit_into_memory(task: Task) -> Task:
    """Return the task, with smaller splits if its inputs would take more than a gibibyte.

    A split that has records keeps at least one, since a study cannot score on none.
    """
    records = task.train_records + task.validation_records + task.test_records
    shape = _input_shape(task)
    numbers = records * math.prod(shape)
    if numbers <= _MOST:
        return task

    def smaller(size: int) -> int:
        fewest = min(size, 1)
        return max(fewest, size * _MOST // numbers)

    return replace(
        task,
        train_records=smaller(task.train_records),
        validation_records=smaller(task.validation_records),
        test_records=smaller(task.test_records),
    )


def _input_shape(task: Task) -> tuple[int, ...]:
    """Return the shape of one record's input, from ``task.like`` where the task has it."""
    if task.like is None:
        return task.input_shape
    x, _ = task.like
    return tuple(x.shape[1:])


def _check_nothing() -> None:
    """Do nothing: generated records come from no file that could be checked."""


def _refusal(task: Task) -> str:
    """Return why no records can be generated for a task, or an empty text if they can."""
    if task.like is None:
        return ""
    x, y = task.like
    if not x.is_floating_point() and task.tokens is None:
        return "its inputs are whole numbers, and nothing says which of them there are"
    if y.is_floating_point():
        return ""
    if task.classes is None:
        return "its targets are whole numbers, and no classes are declared"
    if y.ndim > 1 and not task.unit:
        return "each of its records has several targets, as of a language model"
    return ""


@dataclass(frozen=True)
class _Generator:
    """Generator of the records of a task's stand-in.

    Below, ``n`` counts records or rows, ``k`` hidden numbers, and ``C`` classes.
    """

    task: Task

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row's input."""
        shape = _input_shape(self.task)
        if self.task.unit:
            return shape[1:]
        return shape

    @property
    def columns(self) -> tuple[Column, ...]:
        """Feature columns of a table's stand-in, none of another task's.

        Nor of a table whose directions no stage has released: there is nothing to project cells on.
        """
        rows = self.task.raw
        if not isinstance(rows, TableRows) or isinstance(rows.projection, int):
            return ()
        return rows.features

    @cached_property
    def hidden(self) -> int:
        """Count of a record's hidden numbers, at most the size of its input."""
        inputs = len(self.columns) or math.prod(self.shape)
        hidden = min(_HIDDEN, inputs)
        return max(1, hidden)

    @cached_property
    def centres(self) -> Floats:
        """Mean hidden numbers of each class, ``[C, k]``, at a distance where one guess in ten is wrong.

        A rehearsal on classes that are told apart always, or never, would show no difference between
        hyperparameters. The distance is found by halving: errors fall as it rises.
        """
        classes = self.task.classes
        if classes is None:
            return np.zeros((1, self.hidden))
        rng = np.random.default_rng([_SEED, 1])
        directions = rng.standard_normal((classes, self.hidden))
        directions -= directions.mean(axis=0)
        if self.hidden == 1:  # drawn ones could fall together
            places = np.linspace(-1.0, 1.0, classes)
            directions = places[:, None]
        labels = rng.integers(classes, size=_TRIALS)
        noise = rng.standard_normal((_TRIALS, self.hidden))
        low = 0.0
        high = 100.0 * classes
        for _ in range(_HALVINGS):
            distance = 0.5 * (low + high)
            error = _guess_error(distance * directions, labels, noise)
            if error < _ERROR:
                high = distance
            else:
                low = distance
        return high * directions

    def views(self, places: int) -> Floats:
        """Return weights ``[k, places]`` from a record's hidden numbers to inputs, which get variance 1."""
        rng = np.random.default_rng([_SEED, 2])
        k = self.hidden
        if (
            self._is_of_pictures
        ):  # neighbours look alike, or convolutions would have nothing to find
            weights = _smooth_fields(rng, k, self.shape)
        else:
            weights = rng.standard_normal((k, places))
        # Of one class it is a number without axes.
        between = np.cov(self.centres.T, bias=True)
        within = np.eye(k)
        covariance = between.reshape(k, k) + within
        variances = np.einsum("kp,kl,lp->p", weights, covariance, weights)
        scaled: Floats = weights / np.sqrt(variances)
        return scaled

    @property
    def _is_of_pictures(self) -> bool:
        """Whether inputs are pictures: with height and width, other than table cells and tokens."""
        if self.columns or self.task.tokens is not None:
            return False
        return len(self.shape) >= 2

    def load(self) -> TaskData:
        """Generate the records of all three splits."""
        splits: dict[str, TensorData] = {}
        for place, name in enumerate(SPLITS):
            size = getattr(self.task, f"{name}_records")
            splits[name] = self.split(place, size)
        return TaskData(**splits)

    def split(self, place: int, size: int) -> TensorData:
        """Generate the records of one split in batches, which bounds the memory for noise.

        A split without records holds an unusable one, since a tensor of none has no first record to look
        at.

        Args:
            place: Of the split among training, validation and test: each has its own seed and units.
            size: How many records it has.
        """
        from privtune.training.mechanism.data import TensorData

        task = self.task
        rng = np.random.default_rng([_SEED, 3, place])
        inputs = []
        targets = []
        records = max(size, 1)
        for start in range(0, records, _BATCH):
            rest = records - start
            x, y = self.records(rng, min(_BATCH, rest))
            inputs.append(x)
            targets.append(y)
        x = _tensor(np.concatenate(inputs))
        y = _tensor(np.concatenate(targets))
        if task.like is not None:
            like_x, like_y = task.like
            x = x.to(like_x.dtype)
            y = y.to(like_y.dtype)
        unusable = None
        if size == 0:
            unusable = _tensor(np.ones(1, dtype=bool))
        groups = None
        if task.unit:
            first = 10**9 * place  # no two splits may share a unit
            numbers = np.arange(first, first + len(y))
            groups = _tensor(numbers)
        return TensorData(
            x,
            y,
            sealed_size=task.partition not in ("fixed", "given"),
            unusable=unusable,
            groups=groups,
            unit=task.unit,
            tree=task.tree,
        )

    def records(self, rng: Generator, n: int) -> tuple[Any, Any]:
        """Generate records: inputs ``[n, ...]`` and targets; pad units to the largest number of rows.

        Fillers have the class -1, or the target NaN, as those of the user's units have.
        """
        most = self.task.rows
        if most is None:
            return self.rows(rng, n)
        further_rows = rng.binomial(most - 1, 0.5, size=n)
        counts = 1 + further_rows
        unit_noise = rng.standard_normal((n, self.hidden))
        row_noise = np.repeat(unit_noise, counts, axis=0)
        rows, targets = self.rows(rng, len(row_noise), row_noise)
        places = np.arange(most)
        is_row = places < counts[:, None]
        x = _padded(rows, is_row, filler=0)
        if targets.dtype.kind == "f":
            y = _padded(targets, is_row, filler=math.nan)
        else:
            y = _padded(targets, is_row, filler=-1)
        return x, y

    def rows(
        self,
        rng: Generator,
        n: int,
        unit_noise: Floats | None = None,
    ) -> tuple[Any, Any]:
        """Generate the inputs and targets of ``n`` rows.

        Args:
            rng: Draws the noise.
            n: How many rows.
            unit_noise: What rows of one unit share of their noise, ``[n, k]``: so they are alike.
        """
        labels = self.labels(rng, n)
        noise = rng.standard_normal((n, self.hidden))
        if unit_noise is not None:  # the variance stays 1
            alone = math.sqrt(1.0 - _SHARED_NOISE**2)
            noise = _SHARED_NOISE * unit_noise + alone * noise
        hidden = self.centres[labels] + noise
        if self.task.classes is not None:
            targets = labels.astype(np.int64)
        else:
            targets = self.numbers(rng, hidden)  # before the inputs: both draw from one generator
        inputs = self.inputs(rng, hidden)
        return inputs, targets

    def numbers(self, rng: Generator, hidden: Floats) -> Any:
        """Return targets of a regression: a linear function of hidden numbers ``[n, k]``, and noise."""
        task = self.task
        shape: tuple[int, ...] = ()
        if task.like is not None and not task.unit:
            _, targets = task.like
            shape = tuple(targets.shape[1:])
        y = _SIGNAL * hidden @ self._directions(math.prod(shape))
        deviation = math.sqrt(1.0 - _SIGNAL**2)  # the variance of a target is 1, too
        noise = rng.standard_normal(y.shape)
        y += deviation * noise
        if task.target_range is not None:
            y = _within(task.target_range, y)
        numbers = y.reshape(len(hidden), *shape)
        return numbers.astype(np.float32)

    def _directions(self, count: int) -> Floats:
        """Return unit vectors ``[k, count]`` that map hidden numbers to targets."""
        public = np.random.default_rng([_SEED, 4])
        directions = public.standard_normal((self.hidden, count))
        lengths = np.linalg.norm(directions, axis=0)
        of_length_one: Floats = directions / lengths
        return of_length_one

    def labels(self, rng: Generator, n: int) -> Any:
        """Return ``n`` class numbers, equally frequent but for the last where its share is declared."""
        classes = self.task.classes or 1
        rarest = self.task.rarest_share
        if rarest is None or classes < 2:
            return rng.integers(classes, size=n)
        others = classes - 1
        share = (1.0 - rarest) / others
        shares = [share] * others
        return rng.choice(classes, size=n, p=[*shares, rarest])

    def inputs(self, rng: Generator, hidden: Floats) -> Any:
        """Return inputs computed from hidden numbers ``[n, k]``, within the task's public bounds."""
        task = self.task
        if task.tokens is not None:
            return self.tokens(rng, hidden, task.tokens)
        if self.columns:
            return self.table(rng, hidden)
        size = math.prod(self.shape)
        views = self.views(size)
        signal = hidden @ views
        z = signal.astype(np.float32)
        noise = rng.standard_normal(z.shape, dtype=np.float32)
        z += 0.3 * noise
        z = self._in_bounds(z)
        inputs = z.reshape(len(hidden), *self.shape)
        return inputs.astype(np.float32)

    def _in_bounds(self, z: Any) -> Any:
        """Return standard normal numbers ``[n, numbers]`` in the range of the inputs, or of length 1."""
        task = self.task
        if isinstance(task.raw, TextRows):
            z += 1.0  # directions that have one in common, as those of encoders
            lengths = np.linalg.norm(z, axis=1, keepdims=True)
            z /= lengths
            return z
        if _PIXELS in task.bounds:
            return np.clip(_STEEPNESS * z, 0.0, 1.0)  # half of them black
        if task.like is not None:
            return z
        bounds = task.input_range or (-1.0, 1.0)
        return _within(bounds, z)

    def tokens(self, rng: Generator, hidden: Floats, tokens: int) -> Any:
        """Return generated tokens ``[n, ...]``, whose topics depend on the record's hidden numbers."""
        n = len(hidden)
        places = math.prod(self.shape)
        topics = min(_TOPICS, tokens)
        views = self.views(topics)
        likings = hidden @ views
        # The largest of numbers with Gumbel noise falls on each as often as softmax says.
        noise = rng.gumbel(size=(n, places, topics))
        noised = likings[:, None, :] + noise
        topic = noised.argmax(axis=2)
        tokens_of_topic = tokens // topics
        place_in_topic = rng.integers(tokens_of_topic, size=(n, places))
        bags = topic + topics * place_in_topic
        return bags.reshape(n, *self.shape)

    def table(self, rng: Generator, hidden: Floats) -> Any:
        """Return the features that the task's columns compute from generated cells."""
        from privtune.tables.columns import Category, PaidColumn

        rows: Any = self.task.raw
        widths = []
        for column in self.columns:
            if isinstance(column, Category):
                widths.append(len(column.values))
            else:
                widths.append(1)
        views = self.views(sum(widths))
        z = hidden @ views
        ends = np.cumsum(widths)
        numbers = np.split(z, ends[:-1], axis=1)
        cells = {}
        paid_features = {}
        start = 0
        for column, column_numbers in zip(self.columns, numbers, strict=True):
            cells[column.name] = _cells(column, column_numbers, rng)
            if isinstance(column, PaidColumn):  # what it will be once its bounds are released
                only = column_numbers[:, 0]
                paid_features[start] = _within((-1.0, 1.0), only)
            start += column.width
        x, _ = rows.of(cells)
        for place, feature in paid_features.items():
            x[:, place] = feature
        return rows.projected(x)


def _padded(rows: Any, is_row: npt.NDArray[np.bool_], *, filler: float) -> Any:
    """Return rows grouped by unit, ``[n, most, ...]``, with a filler in empty places.

    Args:
        rows: One unit's after another's.
        is_row: Which places hold a row, ``[n, most]``.
        filler: What stands in the others.
    """
    n, most = is_row.shape
    shape = rows.shape[1:]
    by_unit = np.full((n, most, *shape), filler, rows.dtype)
    by_unit[is_row] = rows
    return by_unit


def _guess_error(
    centres: Floats,
    labels: npt.NDArray[np.int64],
    noise: Floats,
) -> float:
    """Return the share of noisy records whose class is not that of the nearest centre.

    Args:
        centres: ``[C, k]``.
        labels: The true classes, ``[n]``.
        noise: ``[n, k]``.
    """
    x = centres[labels] + noise
    # The nearest centre: |x - c|² without |x|², which is the same for all classes.
    squares = np.square(centres).sum(axis=1)
    closeness = x @ centres.T - 0.5 * squares
    guesses = closeness.argmax(axis=1)
    is_wrong = guesses != labels
    return float(is_wrong.mean())


def _within(bounds: tuple[float, float], z: Any) -> Any:
    """Return standard normal numbers scaled and clipped to a range, of which they fill the middle half."""
    low, high = bounds
    middle = 0.5 * (low + high)
    half = 0.5 * (high - low)
    share = np.clip(_STEEPNESS * z, -1.0, 1.0)
    return middle + half * share


def _cells(column: Column, z: Floats, rng: Generator) -> Any:
    """Return cells of a column, generated from standard normal numbers ``[n, values]``.

    They are written as the user's cells are (dates, for one, in the declared format): so a rehearsal reads
    them by the code that will read those.
    """
    import pyarrow as pa

    from privtune.tables.cells import column_of
    from privtune.tables.columns import Category, Date, Number, Ordinal

    if isinstance(column, Category):
        noise = rng.gumbel(scale=0.5, size=z.shape)
        likings = z + noise
        most_liked = pa.array(likings.argmax(axis=1))
        return column_of(column.values).take(most_liked)
    noise = rng.standard_normal(len(z))
    numbers = z[:, 0] + 0.3 * noise
    if isinstance(column, Ordinal):
        levels = column_of(column.levels)
        ranks = _ranks(numbers, len(levels))
        return levels.take(ranks)
    if isinstance(column, Date):
        ranks = _ranks(numbers, _MOMENTS)
        return _moments_of(column).take(ranks)
    if isinstance(column, Number):
        bounds = (column.low, column.high)
        numbers = _within(bounds, numbers)
    return pa.array(numbers)


def _moments_of(column: Date) -> Any:
    """Return the cells of 512 equally spaced moments of a date column, from its lower bound on."""
    from privtune.tables.cells import column_of

    step = (column.high - column.low) / _MOMENTS
    cells = []
    for n in range(_MOMENTS):
        moment = column.low + n * step
        cells.append(column.written(moment))
    return column_of(cells)


def _ranks(numbers: Floats, count: int) -> Any:
    """Return which of ``count`` equally probable intervals each standard normal number is in, from 0."""
    import pyarrow as pa
    from scipy.special import ndtr

    shares = ndtr(numbers)
    ranks = (shares * count).astype(int)
    ranks_or_last = ranks.clip(0, count - 1)
    return pa.array(ranks_or_last)


def _smooth_fields(rng: Generator, count: int, shape: tuple[int, ...]) -> Floats:
    """Return random fields of a shape, ``[count, numbers]``, smooth along its last two axes.

    Each is a grid of 4 x 4 random numbers, interpolated linearly: along its height, then its width.
    """
    *rest, height, width = shape
    fields = rng.standard_normal((count, *rest, 4, 4))
    fields = _interpolated(fields, height, axis=-2)
    fields = _interpolated(fields, width, axis=-1)
    return fields.reshape(count, -1)


def _interpolated(fields: Floats, size: int, *, axis: int) -> Floats:
    """Return fields whose 4 values along an axis are interpolated linearly to ``size``."""
    positions = np.linspace(0.0, 3.0, size)
    whole_positions = positions.astype(int)
    lower = np.minimum(whole_positions, 2)
    further_axes = [1] * (-axis - 1)
    weight = (positions - lower).reshape(-1, *further_axes)
    below = fields.take(lower, axis)
    above = fields.take(lower + 1, axis)
    interpolated: Floats = below * (1.0 - weight) + above * weight
    return interpolated


def _tensor(values: Any) -> torch.Tensor:
    """Return an array as a tensor; torch is imported only once records are generated."""
    import torch

    return torch.from_numpy(values)
