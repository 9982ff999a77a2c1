"""Tasks whose records are everything about one person, hospital or household.

What a training samples, clips and scores is a record of its task. So the unit of privacy is made the
record: the rows of a unit, at most a declared number of them, lie in one record, its loss is the sum of
theirs, and its score their mean. Every kernel, method and strategy then protects units as it
protects records, at the units' sampling rate, for the same event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from privtune.errors import InvalidInputError
from privtune.ledger import check_unit
from privtune.tasks._constants import summed
from privtune.tasks._facts import SPLITS
from privtune.tasks._partition import Sizes
from privtune.tasks._task import Task, TaskData, TaskDataError

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.data import TensorData

Groups = Callable[[], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"]
_MOST = 4096


def by_unit(
    task: Task, *, unit: str, most: int, sizes: Sizes, groups: Groups | None = None
) -> Task:
    """Return the task whose records are units: user-level privacy for whatever is done with it.

    Args:
        task: A task of rows.
        unit: What one unit is, in a word: ``person``, ``hospital``; the unit of its budget.
        most: The most rows of a unit that count, declared in public; of more, the first.
        sizes: Declared number of units in each split.
        groups: Reads, for the rows of training, validation and test in the order in which the task
            loads them, the number of each row's unit: whole numbers ``[N]``. Called when the data is.
            None where the data that the task loads says so (``TensorData.groups``).

    Returns:
        The task. Its data is padded to ``[units, most, ...]``. A unit whose rows are in several
        splits stays in one of them: in a public one, else in the training records.

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
    rows = len(task.input_shape)

    def load() -> TaskData:
        data = task.load()
        public = {"validation": task.public_validation, "test": task.public_test}
        ids = dict(zip(SPLITS, _groups_of(data) if groups is None else groups(), strict=True))
        # What is public does not hang on who is in the training records: so those give way.
        order = sorted(SPLITS, key=lambda name: not public.get(name, False))
        there: set[int] = set()
        found = {}
        for name in order:
            rows_there = getattr(data, name)
            wrong = (
                ~rows_there.y.isfinite()
                if task.classes is None
                else (rows_there.y < 0) | (rows_there.y >= task.classes)
            )
            known = rows_there.marked(wrong)
            found[name] = unit_records(known, ids[name], most=most, unit=unit, without=there)
            there |= set(ids[name].tolist())
        return TaskData(**found)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from privtune.training.mechanism.data import rows_of

        rows, known, there = rows_of(outputs, targets)
        return (task.loss(rows, known) * there).view(targets.shape).sum(dim=-1)

    def model() -> torch.nn.Module:
        from privtune.training.mechanism.data import OfUnits

        return OfUnits(task.model(), rows)

    return replace(
        task,
        **sizes.declared(),
        input_shape=(most, *task.input_shape),
        load=load,
        model=model,
        loss=loss,
        unit=unit,
        examine=task.examine if groups is None else None,
        constants=summed(task.constants, most),
    )


def _groups_of(data: TaskData) -> list[torch.Tensor]:
    found = [getattr(data, name).groups for name in SPLITS]
    if any(one is None for one in found):
        raise TaskDataError("The task's data does not say which unit each row is of: give groups.")
    return found


def unit_records(
    data: TensorData,
    groups: torch.Tensor,
    *,
    most: int,
    unit: str,
    without: set[int] | None = None,
) -> TensorData:
    """Return one record for each unit: its first rows, filled up to a common number.

    Fillers have the class -1, or the target NaN; they add nothing to losses and scores.

    Args:
        data: Rows: inputs ``[N, ...]``, one target each ``[N]``; the unusable are left out.
        groups: The number of each row's unit, whole numbers ``[N]``.
        most: The most rows of a unit.
        unit: What one unit is, in a word.
        without: Units to leave out.

    Returns:
        Inputs ``[U, most, ...]``, targets ``[U, most]``; how many units there are is private.

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
