"""Reading of arrays, datasets, data frames, and dicts and tuples of these, as tensors in memory.

A frame is read by its columns, a dict or tuple of arrays part by part, a dataset record by record. What a
record is made of is read from the first one, and is public from then on; a record that differs is
unusable, and stops no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privtune.errors import InvalidInputError
from privtune.tasks.task import IGNORED
from privtune.training.mechanism.data import (
    Leaves,
    RecordTree,
    TensorData,
    blames_records,
    plain_tree,
    target_name,
)

_KINDS = (
    "must be a pair of tensors or arrays, a dict or tuple of such, one tensor alone, TensorData, a "
    "map-style dataset, a DataFrame or a Hugging Face dataset with declared columns, or "
    "package.module:function that returns one of these"
)
_PAD = "Pass pad_to=N: the first axis is then filled with zeros, or cut, to N of every record."
_NUMBERS = "biuf"  # kinds of numpy's types that are numbers, and
_OBJECTS = "OUST"  # those of objects and texts, which are read one by one
_TWICE = 3  # first records that are read twice
_AGAIN = 32  # records that are read again in another order once all were read

Columns = Mapping[str, Any]
"""Names of columns as the user declares them: ``{"inputs": [names], "target": name}``."""


@dataclass(frozen=True, eq=False)
class Records:
    """Records in memory, with a public description of each.

    Attributes:
        data: The records.
        target: Whether each has a target that a metric can be computed of.
        alone: Whether each is one tensor, without a target.
        parts: What each is made of, in words.
        columns: Of a frame, whose numbers are the inputs.
    """

    data: TensorData
    target: bool
    alone: bool
    parts: str
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Part:
    """One part of all records, such as their inputs, with marks of the records that lack it.

    Attributes:
        values: Its numbers, ``[N, ...]``; zeros where a record has none.
        unusable: Which records have none, ``[N]``.
    """

    values: Tensor
    unusable: Tensor


def read_records(
    data: Any,
    *,
    field: str = "data",
    pad_to: int | None = None,
    columns: Columns | None = None,
    classes: int | None = None,
) -> Records:
    """Return records of any supported kind as tensors, with unreadable ones marked as unusable.

    Args:
        data: What the user has: see ``_KINDS``.
        field: Where it was given, as an error names it.
        pad_to: The length that the first axis of each record's parts is brought to.
        columns: Of a frame or a dataset of columns: which are inputs, and which is the target.
        classes: The number of declared classes.

    Raises:
        InvalidInputError: If it is no kind of records, or these are of no common shape and type.
    """
    if isinstance(data, TensorData):
        words = _words({"inputs": data.x, "target": data.y})
        return Records(_finite(data), target=True, alone=False, parts=words)
    if type(data) is TensorDataset:
        data = data.tensors
    is_frame = hasattr(data, "columns") and hasattr(data, "dtypes")
    has_columns = is_frame or hasattr(data, "column_names")
    may_have_columns = has_columns or isinstance(data, Mapping)
    if columns is not None and not may_have_columns:
        raise InvalidInputError(
            "columns",
            columns,
            "go with a DataFrame, a dict or a dataset of columns",
        )
    if is_frame:
        return _of_frame(data, field, columns, pad_to, classes)
    if columns is not None or has_columns:
        return _of_dataset(data, field, columns, pad_to)
    branches: Any
    if isinstance(data, Mapping | tuple):
        branches = _each_part(plain_tree(data), field, pad_to)
    elif _is_array(data):
        part = _read_part(data, field, pad_to)
        branches = (part,)
    else:
        _check_dataset(data, field)
        branches = _of_items(data, field, pad_to)
    return _of_tree(branches)


def _check_dataset(data: Any, field: str) -> None:
    """Refuse an object without numbered records, or a list that was meant as a pair of arrays."""
    is_dataset = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not is_dataset or isinstance(data, str):
        remedy = "Pass the dataset, not its loader." if hasattr(data, "__iter__") else ""
        raise InvalidInputError(field, type(data).__name__, _KINDS, remedy)
    if isinstance(data, list) and _is_pair_of_arrays(data):
        raise InvalidInputError(
            field,
            "a list of arrays",
            "is a list of records",
            "Pass a tuple, (x, y), or torch.stack of the records.",
        )


def _is_pair_of_arrays(data: list[Any]) -> bool:
    """Return whether a list holds whole arrays, such as inputs and targets, in the place of records."""
    if len(data) not in (2, 3):
        return False
    if not all(map(_is_array, data)):
        return False
    lengths = {np.shape(part)[:1] for part in data}
    is_as_long = len(lengths) == 1 and () not in lengths
    # Two records of two numbers may be meant as they are.
    return is_as_long and len(data[0]) > len(data)


def _is_array(data: Any) -> bool:
    """Return whether numpy can read a value as an array, or it is a tensor."""
    return isinstance(data, Tensor) or hasattr(data, "__array__")


def _each_part(branches: Any, field: str, pad_to: int | None) -> Any:
    """Read every array or list in nested dicts and tuples as one part of the records."""
    leaves = Leaves.of(branches, lists_are_leaves=True)
    entries = zip(leaves.names, leaves.values, leaves.is_target, strict=True)
    parts = []
    for name, values, is_target in entries:
        path = f"{field}.{name}"
        part = _read_part(values, path, pad_to, is_target=is_target)
        parts.append(part)
    return leaves.rebuild(parts)


def _of_frame(
    data: Any,
    field: str,
    columns: Columns | None,
    pad_to: int | None,
    classes: int | None,
) -> Records:
    """Return a DataFrame's input columns as one vector for each record, and its target column if any.

    A record with a cell that is no number is unusable as a whole: a model takes all of its inputs.
    """
    names, target = _inputs_and_target(data, field, columns, is_frame=True)
    parts: dict[Any, _Part] = {}
    for name in _with_target(names, target):
        cells = data[name].to_numpy()
        path = f"{field}.{name}"
        part = _read_part(cells, path, pad_to)
        if part.values.ndim > 1:
            raise InvalidInputError("columns", name, "must hold one number in every cell")
        parts[name] = part
    x = _side_by_side([parts[name] for name in names])
    branches: tuple[_Part, ...] = (x,)
    if target is not None:
        y = parts[target]
        if classes is not None:
            y = _labels(y)
        branches = (x, y)
    records = _of_tree(branches)
    input_names = tuple(map(str, names))
    return replace(records, columns=input_names)


def _side_by_side(columns: Sequence[_Part]) -> _Part:
    """Return columns ``[N]`` stacked to ``[N, columns]``, unusable where any column is."""
    number = torch.get_default_dtype()
    numbers = [column.values.to(number) for column in columns]
    marks = [column.unusable for column in columns]
    values = torch.stack(numbers, dim=1)
    unusable = torch.stack(marks).any(dim=0)
    return _Part(values, unusable)


def _labels(target: _Part) -> _Part:
    """Return class numbers as integers, with missing and fractional ones marked as unusable."""
    numbers = target.values
    if not numbers.is_floating_point():
        return target
    is_whole = numbers == numbers.floor()
    is_label = numbers.isfinite() & is_whole
    labels = numbers.masked_fill(~is_label, -1)
    unusable = target.unusable | ~is_label
    return _Part(labels.long(), unusable)


def _of_dataset(
    data: Any,
    field: str,
    columns: Columns | None,
    pad_to: int | None,
) -> Records:
    """Return the columns of a dataset or a dict as records, whose inputs are a dict of parts."""
    names, target = _inputs_and_target(data, field, columns, is_frame=False)
    parts = {}
    for name in _with_target(names, target):
        values = data[name]
        is_read = _is_array(values) or isinstance(values, list)
        if not is_read:
            values = values[:]  # a column of Hugging Face's that is read when it is asked for
        parts[name] = _read_part(
            values,
            f"{field}.{name}",
            pad_to,
            is_target=name == target,
        )
    return _of_tree(parts, target)


def _with_target(names: Sequence[str], target: str | None) -> list[str]:
    """Return the names of the columns to read: the inputs, then the target if there is one."""
    if target is None:
        return [*names]
    return [*names, target]


def _inputs_and_target(
    data: Any,
    field: str,
    columns: Columns | None,
    *,
    is_frame: bool,
) -> tuple[list[str], str | None]:
    """Return the columns that are inputs, and the one that is the target.

    Args:
        data: The frame, the dataset or the dict.
        field: Where it was given, for an error.
        columns: As the user declares them; None for all of a dataset.
        is_frame: Whether it is a DataFrame, of which not every column is a feature.

    Raises:
        InvalidInputError: If a column is absent or named twice, or a frame's are not declared.
    """
    labels = data.columns if is_frame else getattr(data, "column_names", data)
    names = list(labels)
    if columns is None and is_frame:
        raise InvalidInputError(
            field,
            "a DataFrame",
            "must come with the columns to take, since an index or a name is no feature",
            'Pass columns={"inputs": ["age", ...], "target": "outcome"}.',
        )
    if columns is None:
        last = target_name(names)
        others = [name for name in names if name != last]
        return others, last
    inputs = None
    target = None
    if isinstance(columns, Mapping) and not set(columns) - {"inputs", "target"}:
        inputs = columns.get("inputs")
        target = columns.get("target")
    is_list = isinstance(inputs, Sequence) and not isinstance(inputs, str)
    if not is_list or not inputs:
        raise InvalidInputError("columns", columns, 'must be {"inputs": [names], "target": name}')
    inputs = list(inputs)
    absent = [name for name in _with_target(inputs, target) if name not in names]
    if absent:
        all_names = ", ".join(map(str, names))
        raise InvalidInputError("columns", absent, f"must be of {all_names}")
    distinct = {*inputs, target}  # a target that is left out is None, and one more
    if len(distinct) <= len(inputs):
        raise InvalidInputError("columns", columns, "must name every column once")
    return inputs, target


def _read_part(
    values: Any,
    name: str,
    pad_to: int | None,
    *,
    is_target: bool = False,
) -> _Part:
    """Return one part of all records, given as a tensor, an array or a list.

    Args:
        values: One value or block a record.
        name: Of the part, for an error.
        pad_to: The length of the first axis of each, where lengths differ.
        is_target: Whether losses skip what is filled in.
    """
    if isinstance(values, Tensor):
        _check_dense(values, name)
        return _usable_part(values.detach())
    if _is_array(values):
        values = np.asarray(values)
        kind = values.dtype.kind if values.ndim else ""
        if kind and kind in _NUMBERS:
            numbers = _tensor(values)
            return _usable_part(numbers)
        if kind and kind in _OBJECTS:
            values = list(values)
    if not isinstance(values, list):
        raise InvalidInputError(
            name,
            type(values).__name__,
            "must be a tensor, an array or a list",
        )
    items = [_item(value) for value in values]
    return _stacked(items, name, pad_to, is_target=is_target)


def _check_dense(values: Tensor, name: str) -> None:
    """Refuse a sparse, nested or complex tensor, or one without an axis of records."""
    is_dense = values.layout is torch.strided and not values.is_nested
    if not is_dense or values.ndim == 0:
        raise InvalidInputError(name, str(values.layout), "must be dense, one row a record")
    if values.is_complex():
        remedy = "Pass torch.view_as_real of them."
        raise InvalidInputError(
            name,
            str(values.dtype),
            "must be real numbers",
            remedy,
        )


def _usable_part(values: Tensor) -> _Part:
    """Return a part that is usable in every record."""
    nowhere = torch.zeros(len(values), dtype=torch.bool)
    return _Part(values, nowhere)


def _tensor(values: np.ndarray[Any, Any]) -> Tensor:
    """Return an array as a tensor, with floats of 64 bits or more in torch's default type."""
    kind = values.dtype.kind
    size = values.dtype.itemsize
    if kind == "f" and size >= 8:
        # Longer than 64 bits torch reads none.
        doubles = values.astype(np.float64)
        number = torch.get_default_dtype()
        return torch.tensor(doubles).to(number)
    if kind == "u" and size > 1:  # torch indexes by signed ones
        values = values.astype(np.int64)
    # torch reads no bytes in the order of other machines, and warns of arrays that are not writable.
    native = values.dtype.newbyteorder("=")
    numbers = values.astype(native, copy=False)
    numbers = np.require(numbers, requirements=["C", "W"])
    return torch.from_numpy(numbers)


def _item(value: Any) -> Tensor | None:
    """Return a record's value as a tensor, or None if it is not numeric."""
    try:
        if isinstance(value, Tensor):
            is_dense = value.layout is torch.strided and not value.is_nested
            if not is_dense or value.is_complex():
                return None
            return value.detach()
        numbers = np.asarray(value)
        if numbers.dtype.kind not in _NUMBERS:
            return None
        return _tensor(numbers)
    except Exception as error:  # whatever one record is must not stop the others
        if not blames_records(error):
            raise
        return None


def _stacked(
    items: list[Tensor | None],
    name: str,
    pad_to: int | None,
    *,
    is_target: bool = False,
) -> _Part:
    """Return one part stacked from the values of all records, in the type of the first readable one.

    Args:
        items: The part of each record; None where it has none that can be read.
        name: Of the part, as an error names it.
        pad_to: The length of the first axis, where lengths differ.
        is_target: Whether losses skip what is filled in.

    Raises:
        InvalidInputError: If no record has it, or shapes or types differ.
    """
    tensors = [item for item in items if item is not None]
    if not tensors:
        raise InvalidInputError(
            name,
            "of no record a number",
            "must be numbers, or lists of numbers, of one length",
            "Encode texts and categories first, or leave them out with columns=.",
        )
    like = tensors[0]
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) > 1:
        length = _common_length(tensors, name, pad_to)
        is_whole = not like.is_floating_point() and like.dtype != torch.bool
        fill = IGNORED if is_target and is_whole else 0
        items = [None if item is None else _padded(item, length, fill) for item in items]
        like = _padded(like, length, fill)
    rows = []
    unusable = []
    for item in items:
        if item is None:
            rows.append(torch.zeros_like(like))
        else:
            rows.append(_cast(item, like, name))
        unusable.append(item is None)
    return _Part(torch.stack(rows), torch.tensor(unusable))


def _common_length(tensors: Sequence[Tensor], name: str, pad_to: int | None) -> int:
    """Return ``pad_to`` if parts differ in the length of their first axis alone, or refuse their shapes."""
    ends = {(tensor.ndim, tensor.shape[1:]) for tensor in tensors}
    has_axis = tensors[0].ndim > 0
    if pad_to is not None and has_axis and len(ends) == 1:
        return pad_to
    remedy = "Bring them to one shape, also beyond the first axis."
    if len(ends) == 1:
        remedy = _PAD
    shapes = sorted({str(tuple(tensor.shape)) for tensor in tensors})
    raise InvalidInputError(
        name,
        " and ".join(shapes[:3]),
        "must be of one shape in every record",
        remedy,
    )


def _cast(item: Tensor, like: Tensor, name: str) -> Tensor:
    """Return a record's part in the type of the first record's, refusing to round to whole numbers."""
    cast = item.to(like.dtype)
    if like.is_floating_point():
        return cast
    back = cast.to(item.dtype)
    if not torch.equal(back, item):
        raise InvalidInputError(
            name,
            f"{like.dtype} and {item.dtype}",
            "must be of one type in every record",
            "Convert all to the floating one.",
        )
    return cast


def _padded(item: Tensor, length: int, fill: int) -> Tensor:
    """Return a part whose first axis is filled, or cut, to a length."""
    shape = (length, *item.shape[1:])
    padded = item.new_full(shape, fill)
    padded[: len(item)] = item[:length]
    return padded


def _of_items(data: Any, field: str, pad_to: int | None) -> Any:
    """Return the records of a map-style dataset or a list, read one by one, as a tree of parts.

    Raises:
        InvalidInputError: If there is none that can be read, or a record differs from one reading to the
            next: its split and its gradient would not be its own.
    """
    size = len(data)
    if size == 0:
        raise InvalidInputError(field, type(data).__name__, "must hold at least one record")
    _refuse_random(data, field)
    orders: dict[Any, list[Any]] = {}
    records = [_read_record(data, number, orders) for number in range(size)]
    _refuse_memory(data, field, records, orders)
    if len(data) != size:
        raise InvalidInputError(
            field,
            f"{size} and then {len(data)} records",
            "must have one length each time",
        )
    like = _most_frequent(records)
    if like is None:
        raise InvalidInputError(
            field,
            type(data).__name__,
            "must be readable as pairs of tensors, or as dicts or tuples of tensors and numbers",
            "Leave texts out and tokenize them before.",
        )
    entries = zip(like.names, like.is_target, strict=True)
    parts = []
    for place, (name, is_target) in enumerate(entries):
        items: list[Tensor | None] = []
        for record in records:
            if record is None or record.structure != like.structure:
                items.append(None)
            else:
                items.append(record.values[place])
        path = ".".join(filter(None, (field, name)))
        part = _stacked(items, path, pad_to, is_target=is_target)
        parts.append(part)
    return like.rebuild(parts)


def _most_frequent(records: Sequence[Leaves | None]) -> Leaves | None:
    """Return the first record of the most frequent structure, or None if no record can be read."""
    kinds: list[list[Leaves]] = []
    for record in records:
        if record is None:
            continue
        for kind in kinds:
            if kind[0].structure == record.structure:
                kind.append(record)
                break
        else:
            kinds.append([record])
    if not kinds:
        return None
    return max(kinds, key=len)[0]


def _read_record(data: Any, number: int, orders: dict[Any, list[Any]]) -> Leaves | None:
    """Return the leaves of one record, or None if it cannot be read as numbers.

    Args:
        data: The dataset.
        number: Of the record.
        orders: The order of the names of a dict, by the set of these: dicts of the same names are brought
            to that of the first, or a dataset that builds them in another order would mix its parts.
    """
    try:
        record = data[number]
    except Exception as error:  # a record that cannot be read contributes nothing
        if not blames_records(error):
            raise
        return None
    if isinstance(record, list):
        record = tuple(record)
    record = plain_tree(record)
    if isinstance(record, dict):
        names = frozenset(record)
        order = orders.setdefault(names, list(record))
        record = {name: record[name] for name in order}
    elif not isinstance(record, tuple):
        record = (record,)
    leaves = Leaves.of(record, lists_are_leaves=True)
    items = [_item(value) for value in leaves.values]
    if all(item is None for item in items):
        return None
    return replace(leaves, values=items)


def _refuse_random(data: Any, field: str) -> None:
    """Refuse a dataset that returns another record when an index is read twice."""
    for number in range(min(_TWICE, len(data))):
        record = _read_record(data, number, {})
        again = _read_record(data, number, {})
        if record is None or again is None:
            continue
        if not _is_same_record(record, again):
            raise InvalidInputError(
                field,
                type(data).__name__,
                "must return the same record for an index every time",
                "Augment at random inside of loss, or of the model in training mode.",
            )


def _refuse_memory(
    data: Any,
    field: str,
    records: Sequence[Leaves | None],
    orders: dict[Any, list[Any]],
) -> None:
    """Refuse a dataset whose record for an index depends on which records were read before."""
    step = max(1, len(records) // _AGAIN)
    # Backwards: what hangs on the record that was read before has another one before it now.
    for number in range(len(records) - 1, -1, -step):
        again = _read_record(data, number, orders)
        if not _is_same_record(records[number], again):
            raise InvalidInputError(
                field,
                type(data).__name__,
                "must return the same record for an index whatever was read before, and remembers others",
                "Let __getitem__ keep nothing between calls: no counter, running mean or cache of records.",
            )


def _is_same_record(record: Leaves | None, again: Leaves | None) -> bool:
    """Return whether two readings of a record are equal, counting NaN as equal to NaN."""
    if record is None or again is None:
        return record is again
    if len(record.values) != len(again.values):
        return False
    return all(map(_is_same_item, record.values, again.values))


def _is_same_item(item: Tensor | None, again: Tensor | None) -> bool:
    """Return whether two readings of one part of a record are equal, or both unreadable."""
    if item is None or again is None:
        return item is again
    numbers = item.nan_to_num()
    numbers_again = again.nan_to_num()
    return torch.equal(numbers, numbers_again)


def _of_tree(branches: Any, target: Any = None) -> Records:
    """Return a tree of parts as records: inputs in one tensor, and a target.

    Args:
        branches: A dict or tuple of parts.
        target: The key of the target, where the user has named it.

    Raises:
        InvalidInputError: If parts are of several numbers of records, or of none.
    """
    leaves = Leaves.of(branches)
    sizes = {len(part.values) for part in leaves.values}
    if len(sizes) != 1 or sizes == {0}:
        words = ", ".join(map(str, sorted(sizes)))
        raise InvalidInputError(
            "data",
            words or "nothing",
            "must hold as many records in every part, at least one",
        )
    marks = [part.unusable for part in leaves.values]
    is_unusable = torch.stack(marks).any(dim=0)
    unusable = is_unusable if bool(is_unusable.any()) else None
    values = [part.values for part in leaves.values]
    tensors = leaves.rebuild(values)
    is_single = isinstance(tensors, tuple) and len(tensors) == 1
    if is_single and isinstance(tensors[0], Tensor):
        (x,) = tensors
        no_target = torch.zeros(len(x))
        return Records(
            _finite(TensorData(x, no_target, unusable=unusable)),
            target=False,
            alone=True,
            parts=_words({"inputs": x}),
        )
    tree, x, y = RecordTree.split(tensors, target)
    if not y.is_floating_point():
        y = y.long()
    if tree is None:
        parts = {"inputs": x, "target": y}
        has_target = True
    else:
        parts = dict(zip(leaves.names, values, strict=True))
        has_target = target is not None or tree.names_target
    data = TensorData(x, y, unusable=unusable, tree=tree)
    return Records(_finite(data), target=has_target, alone=False, parts=_words(parts))


def _finite(data: TensorData) -> TensorData:
    """Return the data with records that hold NaN or infinity marked as unusable."""
    parts = [data.x]
    if not data.unit:  # a unit's missing rows have the target NaN
        parts.append(data.y)
    for part in parts:
        if not part.is_floating_point():
            continue
        rows = part.reshape(len(part), -1)
        is_finite = rows.isfinite().all(dim=1)
        if not bool(is_finite.all()):
            data = data.marked(~is_finite)
    return data


def _words(parts: Mapping[str, Tensor]) -> str:
    """Return names, shapes and types of a record's parts."""
    words = []
    for name, part in parts.items():
        sizes = map(str, part.shape[1:])
        shape = " x ".join(sizes) or "a number"
        number = str(part.dtype).removeprefix("torch.")
        words.append(f"{name} {shape} ({number})")
    return ", ".join(words)
