"""Splits of records by a keyed hash, so that adding one moves no other, and units as records.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from privtune.errors import InvalidInputError
from privtune.facts import SPLITS, TaskDataError
from privtune.ledger.values import check_unit
from privtune.tasks.task import Task, TaskData, contents

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.data import TensorData

KEY = "privtune"
"""The public key of the hash, unless a task says another."""

Groups = Callable[[], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"]
_MOST = 4096  # rows of a unit

Batch = tuple[Any, Any, Sequence[str] | None]
"""Some records: inputs ``[n, ...]``, targets ``[n]``, and ids, or None."""


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
            size = getattr(self, name)
            if size < 1:
                raise InvalidInputError(name, size, "must be declared as at least 1")

    def declared(self) -> dict[str, Any]:
        """Return the sizes by the names of a task's fields, such as ``train_records``."""
        return {f"{name}_records": size for name, size in vars(self).items()}


def places(
    x: Any,
    y: Any,
    shares: Sequence[int],
    *,
    ids: Sequence[str] | None = None,
    key: str = KEY,
) -> npt.NDArray[np.int64]:
    """Return the number of the split that each record falls into, ``[N]``.

    Of the record, the shares and the key alone: another record must not move it to another split.

    Args:
        x: Inputs, ``[N, ...]``.
        y: Targets, ``[N]``; with the inputs what a record is known by, where it has no id.
        shares: Expected sizes of the splits, in their order.
        ids: What each record is known by; None to go by content.
        key: The public key of the hash.
    """
    secret = hashlib.blake2b(key.encode(), digest_size=32).digest()
    records: Iterable[bytes]
    if ids is None:
        records = contents(x, y)
    else:
        records = (name.encode(errors="surrogatepass") for name in ids)
    total = sum(shares)
    each_rank = (_rank(record, secret, total) for record in records)
    ranks = np.fromiter(each_rank, dtype=np.int64, count=len(y))
    ends = np.cumsum(shares)
    return np.searchsorted(ends, ranks, side="right")


def _rank(record: bytes, secret: bytes, total: int) -> int:
    """Return a record's keyed hash as a whole number from 0 to ``total`` - 1, nearly uniform."""
    digest = hashlib.blake2b(record, digest_size=8, key=secret).digest()
    number = int.from_bytes(digest, "big")
    # The top of 64 uniform bits, in whole numbers: no rounding may differ from machine to machine.
    return (number * total) >> 64


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
    """Return records split by a keyed hash into training, validation and test, with sealed true sizes.

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
    batch = (x, np.asarray(y), ids)
    return split_read(
        [batch],
        most=len(y),
        shape=np.shape(x)[1:],
        sizes=sizes,
        key=key,
        numbers=numbers,
        groups=groups,
    )


def split_read(
    batches: Iterable[Batch],
    *,
    most: int,
    shape: tuple[int, ...],
    sizes: Sizes,
    key: str = KEY,
    numbers: bool = False,
    groups: bool = False,
    model_inputs: Callable[[Any], Any] = lambda x: x,
) -> TaskData:
    """Split batches of records as :func:`split` does: each record is held in memory once.

    Args:
        batches: Inputs, targets and ids, or None: read one after another.
        most: How many records there are at most.
        shape: Of the inputs of a record as models see it.
        sizes: What each split is expected to hold.
        key: The public key of the hash.
        numbers: Whether targets are those of a regression, not classes.
        groups: Whether records of one id are those of one unit.
        model_inputs: Takes inputs to what models see of them; a split goes by the inputs themselves.
    """
    most_or_one = max(most, 1)
    rooms = [_Room(most_or_one, shape, numbers=numbers) for _ in SPLITS]
    shares = list(vars(sizes).values())
    for x, y, ids in batches:
        split_of = places(x, y, shares, ids=ids, key=key)
        inputs = np.asarray(model_inputs(x))
        for number, room in enumerate(rooms):
            index = np.flatnonzero(split_of == number)
            room.add(inputs[index], y[index])
            if groups and ids is not None:
                room.owners += [ids[place] for place in index.tolist()]
    numbers_of = _numbers_of_owners(rooms) if groups else None
    splits = [room.data(numbers_of) for room in rooms]
    return TaskData(*splits)


def _numbers_of_owners(rooms: Sequence[_Room]) -> dict[str, int]:
    """Return the number of each unit that has rows in any split, by the unit's name."""
    owners: set[str] = set()
    for room in rooms:
        owners.update(room.owners)
    return {owner: number for number, owner in enumerate(sorted(owners))}


class _Room:
    """Preallocated arrays for the records of one split, whose number is known once all are read.

    Pages that nothing is written to take no memory: so each split has room for all records.

    Args:
        most: How many records there are at most.
        shape: Of the inputs of one.
        numbers: Whether targets are numbers, not classes.
    """

    def __init__(self, most: int, shape: tuple[int, ...], *, numbers: bool) -> None:
        target_type = np.float32 if numbers else np.int64
        self.inputs = np.empty((most, *shape), dtype=np.float32)
        self.targets = np.empty(most, dtype=target_type)
        self.owners: list[str] = []
        self.size = 0

    def add(self, inputs: npt.NDArray[Any], targets: npt.NDArray[Any]) -> None:
        """Append a batch of records to the preallocated arrays of their split."""
        start = self.size
        end = start + len(inputs)
        self.inputs[start:end] = inputs
        self.targets[start:end] = targets
        self.size = end

    def data(self, numbers_of: Mapping[str, int] | None) -> TensorData:
        """Return the records that were added, or one unusable record if there are none.

        Args:
            numbers_of: The number of each unit; None where records are no rows of units.
        """
        import torch

        from privtune.training.mechanism.data import TensorData

        unusable = None
        if self.size == 0:
            self.inputs[:1] = 0
            self.targets[:1] = 0
            unusable = torch.ones(1, dtype=torch.bool)
        groups = None
        if numbers_of is not None:
            numbers = [numbers_of[owner] for owner in self.owners]
            groups = torch.tensor(numbers or [-1])
        size = max(self.size, 1)
        return TensorData(
            torch.from_numpy(self.inputs[:size]),
            torch.from_numpy(self.targets[:size]),
            sealed_size=True,
            unusable=unusable,
            groups=groups,
        )


def by_unit(
    task: Task,
    *,
    unit: str,
    most: int,
    sizes: Sizes,
    groups: Groups | None = None,
) -> Task:
    """Return a task whose records are the units of a task of rows, for user-level privacy.

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
    is_whole = isinstance(most, int) and not isinstance(most, bool)
    if not is_whole or not 1 <= most <= _MOST:
        raise InvalidInputError("most", most, f"must be a whole number from 1 to {_MOST}")
    units = _Units(task, unit, most, groups)
    # The loss of a unit is a sum of at most so many.
    constants = {name: most * value for name, value in task.constants.items()}
    return replace(
        task,
        **sizes.declared(),
        input_shape=(most, *task.input_shape),
        load=units.load,
        model=units.model,
        loss=units.loss,
        unit=unit,
        examine=task.examine if groups is None else None,
        constants=constants,
    )


@dataclass(frozen=True)
class _Units:
    """Loader, model and loss of a task of units, made from those of its task of rows.

    Attributes:
        rows: The task of rows.
        unit: What one unit is, in a word.
        most: The most rows of a unit that count.
        groups: Reads the number of each row's unit; None where the data says so.
    """

    rows: Task
    unit: str
    most: int
    groups: Groups | None

    def load(self) -> TaskData:
        """Return the units by split, keeping a unit of several splits in a public one, else in training."""
        task = self.rows
        data = task.load()
        groups = self._read_groups(data)
        public = {"validation": task.public_validation, "test": task.public_test}
        earlier: set[int] = set()
        splits = {}
        # What is public does not hang on who is in the training records: so those give way.
        public_first = sorted(SPLITS, key=lambda name: not public.get(name, False))
        for name in public_first:
            rows = getattr(data, name)
            if task.classes is None:
                unusable = ~rows.y.isfinite()
            else:
                unusable = (rows.y < 0) | (rows.y >= task.classes)
            splits[name] = unit_records(
                rows.marked(unusable),
                groups[name],
                most=self.most,
                unit=self.unit,
                without=earlier,
            )
            earlier.update(groups[name].tolist())
        return TaskData(**splits)

    def _read_groups(self, data: TaskData) -> dict[str, torch.Tensor]:
        """Return the number of each row's unit, ``[N]``, by split."""
        if self.groups is None:
            groups = {name: getattr(data, name).groups for name in SPLITS}
        else:
            groups = dict(zip(SPLITS, self.groups(), strict=True))
        if any(numbers is None for numbers in groups.values()):
            raise TaskDataError(
                "The task's data does not say which unit each row is of: give groups."
            )
        return groups

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each unit, the sum over its rows."""
        from privtune.training.mechanism.data import rows_of

        rows, row_targets, is_row = rows_of(outputs, targets)
        losses = self.rows.loss(rows, row_targets)
        losses_or_zero = losses * is_row
        return losses_or_zero.view(targets.shape).sum(dim=-1)

    def model(self) -> torch.nn.Module:
        """Return the model of rows, wrapped to take units."""
        from privtune.training.mechanism.data import ModelOfUnits

        model = self.rows.model()
        axes = len(self.rows.input_shape)
        return ModelOfUnits(model, axes)


def unit_records(
    data: TensorData,
    groups: torch.Tensor,
    *,
    most: int,
    unit: str,
    without: set[int] | None = None,
) -> TensorData:
    """Return one record for each unit: its first rows, padded to ``most``.

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
    ids = groups.cpu()
    is_used = _rows_in_use(data, ids, without)
    # Rows of one unit after another, each unit's in the order of the data.
    units, number = torch.unique(ids[is_used], return_inverse=True)
    order = torch.argsort(number, stable=True)
    number = number[order]
    x = data.x[is_used][order]
    y = data.y[is_used][order]

    # The place of each row among its unit's, from 0.
    sizes = torch.bincount(number)
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(len(number)) - starts[number]

    count = max(1, len(sizes))
    row_shape = x.shape[1:]
    filler = FILLER[y.is_floating_point()]
    inputs = x.new_zeros((count, most, *row_shape))
    targets = y.new_full((count, most), filler)
    is_first = place < most
    cells = (number[is_first], place[is_first])
    inputs[cells] = x[is_first]
    targets[cells] = y[is_first]
    if len(units) == 0:  # one record of fillers stands for none
        units = units.new_full((1,), -1)
    return TensorData(
        inputs,
        targets,
        sealed_size=True,
        groups=units,
        unit=unit,
    )


def _rows_in_use(
    data: TensorData,
    ids: torch.Tensor,
    without: set[int] | None,
) -> torch.Tensor:
    """Return a mask ``[N]`` of the usable rows, without those of units that are left out.

    Args:
        data: The rows.
        ids: The number of each row's unit, ``[N]``.
        without: Units to leave out.
    """
    import torch

    is_used = torch.ones(len(data), dtype=torch.bool)
    if data.unusable is not None:
        is_used &= ~data.unusable.cpu()
    if without:
        others = torch.tensor(sorted(without))
        is_used &= ~torch.isin(ids, others)
    return is_used
