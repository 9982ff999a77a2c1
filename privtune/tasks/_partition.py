"""Splits by a keyed hash of each record: adding or removing one record moves no other. Units as records.

A permutation of N records moves nearly all of them when N changes by one, so that neighbours would
differ in far more than a record. Here the split of a record is a function of the record alone. How
many records a split then holds is random and as private as the records: plans, rates, averages and
noise rest on the declared numbers, which are the expectations.

What a training samples, clips and scores is a record of its task. So where a person, hospital or household
is protected, all its rows, at most a declared number of them, are made one record: its loss is the sum of
theirs, its score their mean. Whatever protects records then protects units, at the units' sampling rate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from privtune.errors import InvalidInputError
from privtune.ledger.values import check_unit
from privtune.tasks._facts import SPLITS, TaskDataError
from privtune.tasks._task import Task, TaskData, contents

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.data import TensorData

KEY = "privtune"
"""The public key of the hash, unless a task says another."""

Groups = Callable[[], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"]
_MOST = 4096  # rows of a unit


@dataclass(frozen=True)
class Sizes:
    """Sizes of the three splits, declared public: what each is expected to hold.

    Args:
        train, validation, test: Expected records, at least 1.

    Raises:
        InvalidInputError: If a size is below 1.

    Example:
        >>> Sizes(train=1000, validation=100, test=100).declared()
        {'train_records': 1000, 'validation_records': 100, 'test_records': 100}
    """

    train: int
    validation: int
    test: int

    def __post_init__(self) -> None:
        for name in SPLITS:
            if getattr(self, name) < 1:
                raise InvalidInputError(name, getattr(self, name), "must be declared as at least 1")

    def declared(self) -> dict[str, Any]:
        """Return the fields of a task that say so."""
        return {f"{name}_records": size for name, size in vars(self).items()}


def places(
    x: Any, y: Any, shares: Sequence[int], *, ids: Sequence[str] | None = None, key: str = KEY
) -> npt.NDArray[np.int64]:
    """Return the number of the split that each record falls into."""
    # Of the record, the shares and the key alone: another record must not move it to another split.
    total = sum(shares)
    secret = hashlib.blake2b(key.encode(), digest_size=32).digest()
    records: Iterable[bytes] = (
        contents(x, y) if ids is None else (i.encode(errors="surrogatepass") for i in ids)
    )
    drawn = np.fromiter(
        (
            # The top of 64 uniform bits, scaled to 0 ... total - 1 in whole numbers.
            int.from_bytes(hashlib.blake2b(r, digest_size=8, key=secret).digest(), "big") * total
            >> 64
            for r in records
        ),
        dtype=np.int64,
        count=len(y),
    )
    return np.searchsorted(np.cumsum(shares), drawn, side="right")


def split(
    x: Any,
    y: Any,
    sizes: Sizes,
    *,
    ids: Sequence[str] | None = None,
    key: str = KEY,
    numbers: bool = False,
    groups: bool = False,
) -> TaskData:
    """Return training, validation and test records, split by a keyed hash; their true sizes are sealed.

    Args:
        x: Inputs, shape ``[N, ...]``, scaled by public constants.
        y: Class numbers, or the targets of a regression, shape ``[N]``.
        sizes: What each split is expected to hold: records fall into them in proportion.
        ids: What each record is known by; records of one id share a split. None to go by content.
        key: The public key of the hash.
        numbers: Whether targets are those of a regression, not classes.
        groups: Whether records of one id are those of one unit, as :func:`by_unit` takes them.

    Example:
        >>> import numpy as np
        >>> x, y = np.arange(1200.0)[:, None], np.zeros(1200)
        >>> data = split(x, y, Sizes(train=1000, validation=100, test=100))
        >>> len(data.train), len(data.validation), len(data.test)
        (990, 122, 88)
        >>> fewer = split(x[1:], y[1:], Sizes(train=1000, validation=100, test=100))
        >>> bool(np.isin(fewer.train.x, data.train.x).all())  # one record less moved no other
        True
    """
    return split_read(
        [(x, np.asarray(y), ids)],
        most=len(y),
        shape=np.shape(x)[1:],
        sizes=sizes,
        key=key,
        numbers=numbers,
        groups=groups,
    )


def split_read(
    batches: Iterable[tuple[Any, Any, Sequence[str] | None]],
    *,
    most: int,
    shape: tuple[int, ...],
    sizes: Sizes,
    key: str = KEY,
    numbers: bool = False,
    groups: bool = False,
    made: Callable[[Any], Any] = lambda x: x,
) -> TaskData:
    """Split batches of inputs, targets and ids (or None) as :func:`split` does: each record is held once."""
    import torch

    from privtune.training.mechanism.data import TensorData

    kind = np.float32 if numbers else np.int64
    most = max(most, 1)
    # Pages that nothing is written to take no memory: so each split has room for all records.
    rooms = [(np.empty((most, *shape), dtype=np.float32), np.empty(most, kind)) for _ in range(3)]
    owners: list[list[str]] = [[], [], []]
    used = [0, 0, 0]
    for x, y, ids in batches:
        drawn = places(x, y, list(vars(sizes).values()), ids=ids, key=key)
        kept = np.asarray(made(x))
        for number, (inputs, targets) in enumerate(rooms):
            own = np.flatnonzero(drawn == number)
            start, end = used[number], used[number] + len(own)
            inputs[start:end], targets[start:end] = kept[own], y[own]
            used[number] = end
            if groups and ids is not None:
                owners[number] += [ids[place] for place in own.tolist()]
    numbered = {name: n for n, name in enumerate(sorted({i for owner in owners for i in owner}))}
    found = {}
    for name, (inputs, targets), count, owner in zip(SPLITS, rooms, used, owners, strict=True):
        if count == 0:  # one that cannot be used stands for none
            inputs[:1], targets[:1] = 0, 0
        n = max(count, 1)
        found[name] = TensorData(
            torch.from_numpy(inputs[:n]),
            torch.from_numpy(targets[:n]),
            sealed_size=True,
            unusable=None if count else torch.ones(1, dtype=torch.bool),
            groups=torch.tensor([numbered[i] for i in owner] or [-1]) if groups else None,
        )
    return TaskData(**found)


def by_unit(
    task: Task, *, unit: str, most: int, sizes: Sizes, groups: Groups | None = None
) -> Task:
    """Return the task whose records are units: user-level privacy for whatever is done with it.

    Its data is padded to ``[units, most, ...]``. A unit whose rows are in several splits stays in one of
    them: in a public one, else in the training records.

    Args:
        task: A task of rows.
        unit: What one unit is, in a word: ``person``, ``hospital``; the unit of its budget.
        most: The most rows of a unit that count, declared in public; of more, the first.
        sizes: Declared number of units in each split.
        groups: Reads the number of each row's unit, whole numbers ``[N]``, for training, validation and
            test. None where the task's data says so (``TensorData.groups``).

    Raises:
        InvalidInputError: If the task has units already, or an argument is outside its domain.

    **Guarantee**: adding or removing a unit adds or removes one record of one split.

    Example:
        >>> import torch
        >>> from privtune.tasks import Sizes, by_unit, get_task
        >>> rows = get_task("synthetic-logistic")
        >>> def patients():  # four rows each, here in the order of the rows
        ...     splits = rows.load()
        ...     return tuple(torch.arange(len(s)) // 4 + n * 10**6
        ...                  for n, s in enumerate((splits.train, splits.validation, splits.test)))
        >>> task = by_unit(rows, unit="patient", most=4, sizes=Sizes(500, 250, 250), groups=patients)
        >>> task.facts.to_dict()["a record"]
        'all rows of one patient, at most 4 of them'
        >>> task.load().train.x.shape[1:]
        torch.Size([4, 20])
    """
    if task.unit:
        raise InvalidInputError("task", task.name, f"has records of one {task.unit} each already")
    check_unit(unit)
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= _MOST:
        raise InvalidInputError("most", most, f"must be a whole number from 1 to {_MOST}")
    units = _Units(task, unit, most, groups)
    return replace(
        task,
        **sizes.declared(),
        input_shape=(most, *task.input_shape),
        load=units.load,
        model=units.model,
        loss=units.loss,
        unit=unit,
        examine=task.examine if groups is None else None,
        # The loss of a unit is a sum of at most so many.
        constants={name: most * value for name, value in task.constants.items()},
    )


@dataclass(frozen=True)
class _Units:
    """Data, model and loss of units, from those of rows."""

    rows: Task
    unit: str
    most: int
    groups: Groups | None

    def load(self) -> TaskData:
        """Return the units of each split; one that is in several is in a public one, else in training."""
        task, data = self.rows, self.rows.load()
        ids = (
            [getattr(data, name).groups for name in SPLITS]
            if self.groups is None
            else self.groups()
        )
        if any(one is None for one in ids):
            raise TaskDataError(
                "The task's data does not say which unit each row is of: give groups."
            )
        known = dict(zip(SPLITS, ids, strict=True))
        public = {"validation": task.public_validation, "test": task.public_test}
        there: set[int] = set()
        found = {}
        # What is public does not hang on who is in the training records: so those give way.
        for name in sorted(SPLITS, key=lambda name: not public.get(name, False)):
            rows = getattr(data, name)
            wrong = ~rows.y.isfinite()
            if task.classes is not None:
                wrong = (rows.y < 0) | (rows.y >= task.classes)
            found[name] = unit_records(
                rows.marked(wrong), known[name], most=self.most, unit=self.unit, without=there
            )
            there |= set(known[name].tolist())
        return TaskData(**found)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of each unit's rows."""
        from privtune.training.mechanism.data import rows_of

        rows, known, there = rows_of(outputs, targets)
        return (self.rows.loss(rows, known) * there).view(targets.shape).sum(dim=-1)

    def model(self) -> torch.nn.Module:
        """Return the model of rows, called on units."""
        from privtune.training.mechanism.data import OfUnits

        return OfUnits(self.rows.model(), len(self.rows.input_shape))


def unit_records(
    data: TensorData, groups: torch.Tensor, *, most: int, unit: str, without: set[int] | None = None
) -> TensorData:
    """Return one record for each unit: its first rows, filled up to a common number.

    Fillers have the class -1, or the target NaN; they add nothing to losses and scores.

    Args:
        data: Rows: inputs ``[N, ...]``, one target each ``[N]``; the unusable are left out.
        groups: The number of each row's unit, whole numbers ``[N]``.
        most: The most rows of a unit.
        unit: What one unit is, in a word.
        without: Units to leave out.

    Raises:
        TaskDataError: If there is not one group, and one target, for each row.

    Example:
        >>> import torch
        >>> from privtune.training.mechanism.data import TensorData
        >>> rows = TensorData(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 1]))
        >>> people = unit_records(rows, torch.tensor([7, 5, 7]), most=2, unit="person")
        >>> people.y.tolist(), people.groups.tolist()
        ([[1, -1], [0, 1]], [5, 7])
    """
    import torch

    from privtune.training.mechanism.data import FILLER, TensorData

    if data.y.ndim != 1:
        raise TaskDataError("Units need one target for each row: targets of shape (N,).")
    if groups.shape != (len(data),) or groups.is_floating_point():
        raise TaskDataError("Units need one whole number for each row: groups of shape (N,).")
    keep = torch.ones(len(data), dtype=torch.bool)
    if data.unusable is not None:
        keep &= ~data.unusable.cpu()
    if without:
        keep &= ~torch.isin(groups.cpu(), torch.tensor(sorted(without)))
    x, y, ids = data.x[keep], data.y[keep], groups.cpu()[keep]
    units, number = torch.unique(ids, return_inverse=True)
    order = torch.argsort(number, stable=True)
    number, x, y = number[order], x[order], y[order]
    sizes = torch.bincount(number)
    place = torch.arange(len(number)) - (sizes.cumsum(0) - sizes)[number]
    first = place < most
    shape = (max(1, len(sizes)), most)
    inputs = x.new_zeros((*shape, *x.shape[1:]))
    targets = y.new_full(shape, FILLER[y.is_floating_point()])
    inputs[number[first], place[first]] = x[first]
    targets[number[first], place[first]] = y[first]
    known = units if len(units) else units.new_full((1,), -1)
    return TensorData(inputs, targets, sealed_size=True, groups=known, unit=unit)
