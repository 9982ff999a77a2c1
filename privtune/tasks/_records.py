"""Records of the user's own, of whatever kind they are, as tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import TensorDataset

from privtune.errors import InvalidInputError
from privtune.tasks._task import IGNORED
from privtune.training.mechanism.data import TARGETS, RecordTree, TensorData, blames_records

_TWICE = 3  # first records that are read twice
_KINDS = (
    "must be a pair of tensors or arrays, a dict or tuple of such, one tensor alone, TensorData, a "
    "map-style dataset, a DataFrame or a Hugging Face dataset with declared columns, or "
    "package.module:function that returns one of these"
)
_PAD = "Pass pad_to=N: the first axis is then filled with zeros, or cut, to N of every record."


@dataclass(frozen=True, eq=False)
class Records:
    """Records in memory, and what is public about each.

    Args:
        data: The records.
        target: Whether each has a target that a metric can be computed of.
        alone: Whether each is one tensor, without a target.
        parts: What each is made of, in words.
    """

    data: TensorData
    target: bool
    alone: bool
    parts: str


@dataclass(frozen=True)
class _Column:
    """One part of all records: values ``[N, ...]``, and which of them are none."""

    values: torch.Tensor
    unusable: torch.Tensor


def read_records(
    data: Any,
    *,
    field: str = "data",
    pad_to: int | None = None,
    columns: Mapping[str, Any] | None = None,
    classes: int | None = None,
) -> Records:
    """Return records of any kind in memory; one that cannot be read contributes nothing.

    Args:
        data: Tensors, arrays, dicts and tuples of them, a dataset, a frame.
        field: What they were given as.
        pad_to: How long the first axis of every ragged part is made.
        columns: Of a frame or a dataset of columns, ``inputs`` and ``target``.
        classes: How many classes there are: a frame's target is then a whole number.

    Raises:
        InvalidInputError: If they are of no known kind, or of several shapes or types.
    """
    if isinstance(data, TensorData):
        y = data.y
        words = _words({"inputs": data.x, "target": y})
        return Records(_finite(data), target=True, alone=False, parts=words)
    data = data.tensors if type(data) is TensorDataset else data
    frame = hasattr(data, "columns") and hasattr(data, "dtypes")
    table = frame or hasattr(data, "column_names")
    if columns is not None and not (table or isinstance(data, Mapping)):
        raise InvalidInputError(
            "columns", columns, "go with a DataFrame, a dict or a dataset of columns"
        )
    if columns is not None or table:
        inputs, target = _declared(data, field, columns, frame=frame)
        names = [*inputs, *([] if target is None else [target])]
        if frame:
            parts = {
                name: _whole(data[name].to_numpy(), f"{field}.{name}", pad_to) for name in names
            }
            return _of_frame(parts, inputs, target, classes)
        parts = {name: _column(data, name, field, pad_to, target) for name in names}
        return _of_tree(parts, target)
    if isinstance(data, Mapping | tuple):
        return _of_tree(_parts(_plain(data), field, pad_to, _target_of(data)))
    if isinstance(data, torch.Tensor) or _is_array(data):
        return _of_tree((_whole(data, field, pad_to),))
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, str):
        remedy = "Pass the dataset, not its loader." if hasattr(data, "__iter__") else ""
        raise InvalidInputError(field, type(data).__name__, _KINDS, remedy)
    few = isinstance(data, list) and len(data) in (2, 3) and all(map(_is_block, data))
    if few and len({len(part) for part in data}) == 1 and len(data[0]) > len(data):
        remedy = "Pass a tuple, (x, y), or torch.stack of the records."
        raise InvalidInputError(field, "a list of arrays", "is a list of records", remedy)
    return _of_tree(_of_items(data, field, pad_to))


def _is_array(data: Any) -> bool:
    return hasattr(data, "__array__")


def _is_block(data: Any) -> bool:
    return (isinstance(data, torch.Tensor) or _is_array(data)) and getattr(data, "ndim", 0) > 0


def _plain(data: Any) -> Any:
    """Return dicts and tuples of whatever class as plain ones."""
    if isinstance(data, Mapping):
        return {name: _plain(part) for name, part in data.items()}
    return tuple(map(_plain, data)) if isinstance(data, tuple) else data


def _target_of(data: Any) -> Any:
    """Return the name, or the place, of the target of a dict or tuple."""
    if len(data) < 2:
        return None
    if isinstance(data, Mapping):
        return next((name for name in TARGETS if name in data), list(data)[-1])
    return len(data) - 1


def _declared(
    data: Any, field: str, columns: Mapping[str, Any] | None, *, frame: bool
) -> tuple[list[str], str | None]:
    """Return the columns that are inputs, and the one that is the target."""
    known = list(data.columns if frame else getattr(data, "column_names", data))
    if columns is None and frame:
        raise InvalidInputError(
            field,
            "a DataFrame",
            "must come with the columns to take, since an index or a name is no feature",
            'Pass columns={"inputs": ["age", ...], "target": "outcome"}.',
        )
    if columns is None:
        target = next((name for name in TARGETS if name in known), known[-1])
        return [name for name in known if name != target], target
    form = 'must be {"inputs": [names], "target": name}'
    if not isinstance(columns, Mapping) or set(columns) - {"inputs", "target"}:
        raise InvalidInputError("columns", columns, form)
    inputs, target = columns.get("inputs"), columns.get("target")
    if not isinstance(inputs, Sequence) or isinstance(inputs, str) or not inputs:
        raise InvalidInputError("columns", columns, form)
    inputs = list(inputs)
    if absent := [n for n in (*inputs, target) if n is not None and n not in known]:
        raise InvalidInputError("columns", absent, f"must be of {', '.join(map(str, known))}")
    if len({*inputs, target}) <= len(inputs):
        raise InvalidInputError("columns", columns, "must name every column once")
    return inputs, target


def _column(data: Any, name: str, field: str, pad_to: int | None, target: str | None) -> _Column:
    values = data[name]
    if not (isinstance(values, torch.Tensor | list) or _is_array(values)):
        values = values[:]  # a column of Hugging Face's that is read when it is asked for
    return _whole(values, f"{field}.{name}", pad_to, target=name == target)


def _of_frame(
    parts: Mapping[str, _Column], inputs: list[str], target: str | None, classes: int | None
) -> Records:
    """Return the columns of a frame as one vector of inputs, and a target."""
    for name, part in parts.items():
        if part.values.ndim > 1:
            raise InvalidInputError("columns", name, "must hold one number in every cell")
    floating = torch.get_default_dtype()
    x = torch.stack([parts[name].values.to(floating) for name in inputs], dim=1)
    unusable = torch.stack([parts[name].unusable for name in inputs]).any(dim=0)
    if target is None:
        return _of_tree((_Column(x, unusable),))
    y = parts[target]
    if classes is not None and y.values.is_floating_point():  # as a missing label makes all of them
        wrong = ~y.values.isfinite() | (y.values != y.values.floor())
        y = _Column(y.values.masked_fill(wrong, -1).long(), y.unusable | wrong)
    return _of_tree((_Column(x, unusable), y))


def _parts(whole: Any, field: str, pad_to: int | None, target: Any) -> Any:
    """Return a tree of arrays and lists as one of columns."""
    leaves, tree = tree_flatten(whole, is_leaf=lambda part: isinstance(part, list))
    names = _names(whole, field)
    labels = _labels(whole, target)
    found = [
        _whole(leaf, name, pad_to, target=label)
        for leaf, name, label in zip(leaves, names, labels, strict=True)
    ]
    return tree_unflatten(found, tree)


def _names(whole: Any, name: str) -> list[str]:
    """Return the path of every leaf."""
    if isinstance(whole, dict | tuple):
        items = whole.items() if isinstance(whole, dict) else enumerate(whole)
        return [path for key, part in items for path in _names(part, f"{name}.{key}")]
    return [name]


def _labels(whole: Any, target: Any) -> list[bool]:
    """Say which leaves are the target."""
    if not isinstance(whole, dict | tuple):
        return [False]
    items = whole.items() if isinstance(whole, dict) else enumerate(whole)
    return [key == target for key, part in items for _ in _names(part, "")]


def _whole(values: Any, name: str, pad_to: int | None, *, target: bool = False) -> _Column:
    """Return one part of all records, given as a tensor, an array or a list."""
    if isinstance(values, torch.Tensor):
        if values.layout is not torch.strided or values.is_nested or values.ndim == 0:
            raise InvalidInputError(name, str(values.layout), "must be dense, one row a record")
        if values.is_complex():
            remedy = "Pass torch.view_as_real of them."
            raise InvalidInputError(name, str(values.dtype), "must be real numbers", remedy)
        return _Column(values.detach(), torch.zeros(len(values), dtype=torch.bool))
    if _is_array(values):
        values = np.asarray(values)
        if values.ndim and values.dtype.kind in "biuf":
            made = _tensor(values)
            return _Column(made, torch.zeros(len(made), dtype=torch.bool))
        values = list(values) if values.ndim and values.dtype.kind in "OUST" else values
    if not isinstance(values, list):
        raise InvalidInputError(name, type(values).__name__, "must be a tensor, an array or a list")
    return _stacked([_item(value) for value in values], name, pad_to, target=target)


def _tensor(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array as a tensor: floating numbers in torch's default type, as models are."""
    if values.dtype.kind == "f" and values.dtype.itemsize >= 8:
        return torch.tensor(values.astype(np.float64)).to(torch.get_default_dtype())
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def _item(value: Any) -> torch.Tensor | None:
    """Return one value of one record; None where it is no number, nor a block of them."""
    try:
        if isinstance(value, torch.Tensor):
            dense = value.layout is torch.strided and not value.is_nested
            return value.detach() if dense and not value.is_complex() else None
        found = np.asarray(value)
        return _tensor(found) if found.dtype.kind in "biuf" else None
    except Exception as error:  # whatever one record is must not stop the others
        if not blames_records(error):
            raise
        return None


def _stacked(
    items: list[torch.Tensor | None], name: str, pad_to: int | None, *, target: bool = False
) -> _Column:
    """Return one part of all records, given one by one; the first that is a number says the type.

    Raises:
        InvalidInputError: If none is a number, or they are of several types, or of several shapes
            that ``pad_to`` does not make one.
    """
    there = [item for item in items if item is not None]
    if not there:
        raise InvalidInputError(
            name,
            "of no record a number",
            "must be numbers, or lists of numbers, of one length",
            "Encode texts and categories first, or leave them out with columns=.",
        )
    like = there[0]
    if len({item.shape for item in there}) > 1:
        axes = {(item.ndim, item.shape[1:]) for item in there}
        if pad_to is None or like.ndim == 0 or len(axes) > 1:
            shapes = sorted({str(tuple(item.shape)) for item in there})
            raise InvalidInputError(
                name,
                " and ".join(shapes[:3]),
                "must be of one shape in every record",
                _PAD if len(axes) == 1 else "Bring them to one shape, also beyond the first axis.",
            )
        whole = not like.is_floating_point() and like.dtype != torch.bool
        fill = IGNORED if target and whole else 0
        items = [None if item is None else _padded(item, pad_to, fill) for item in items]
        like = _padded(like, pad_to, fill)
    zero = torch.zeros_like(like)
    made = torch.stack([zero if item is None else _as(item, like, name) for item in items])
    return _Column(made, torch.tensor([item is None for item in items]))


def _padded(item: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    found = item.new_full((length, *item.shape[1:]), fill)
    found[: len(item)] = item[:length]
    return found


def _as(item: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    """Return a value in the type of the first record's; refuse one that it does not hold."""
    found = item.to(like.dtype)
    if not like.is_floating_point() and not torch.equal(found.to(item.dtype), item):
        raise InvalidInputError(
            name,
            f"{like.dtype} and {item.dtype}",
            "must be of one type in every record",
            "Convert all to the floating one.",
        )
    return found


def _of_items(data: Any, field: str, pad_to: int | None) -> Any:
    """Return the records of a map-style dataset or a list, read one by one."""
    if len(data) == 0:
        raise InvalidInputError(field, type(data).__name__, "must hold at least one record")
    _refuse_random(data, field)
    size, orders = len(data), dict[Any, list[Any]]()
    read = [_leaves(data, number, orders) for number in range(size)]
    if len(data) != size:
        raise InvalidInputError(
            field, f"{size} and then {len(data)} records", "must have one length each time"
        )
    first = _usual([found for found in read if found is not None])
    if first is None:
        raise InvalidInputError(
            field,
            type(data).__name__,
            "must be readable as pairs of tensors, or as dicts or tuples of tensors and numbers",
            "Leave texts out and tokenize them before.",
        )
    _, tree, names, target = first
    known = [found if found is not None and found[1] == tree else None for found in read]
    columns = [
        _stacked(
            [None if found is None else found[0][place] for found in known],
            ".".join((field, *filter(None, [name.strip(".")]))),
            pad_to,
            target=target[place],
        )
        for place, name in enumerate(names)
    ]
    return tree_unflatten(columns, tree)


def _usual(read: list[Any]) -> Any:
    """Return the first of those of the most frequent structure: one odd record must not decide."""
    kinds: list[list[Any]] = []
    for found in read:
        own = next((kind for kind in kinds if kind[0][1] == found[1]), None)
        if own is None:
            kinds.append(own := [])
        own.append(found)
    return max(kinds, key=len)[0] if kinds else None


def _leaves(data: Any, number: int, orders: dict[Any, list[Any]]) -> Any:
    """Return values, tree, names and targets of one record; None if it has none.

    Entries of dicts of the same names come in the order of the first, which ``orders`` keeps.
    """
    try:
        record = data[number]
    except Exception as error:  # a record that cannot be read contributes nothing
        if not blames_records(error):
            raise
        return None
    record = _plain(tuple(record) if isinstance(record, list) else record)
    if isinstance(record, dict):
        record = {key: record[key] for key in orders.setdefault(frozenset(record), list(record))}
    elif not isinstance(record, tuple):
        record = (record,)
    leaves, tree = tree_flatten(record, is_leaf=lambda part: isinstance(part, list))
    found = [_item(leaf) for leaf in leaves]
    if not found or all(item is None for item in found):
        return None
    return found, tree, _names(record, ""), _labels(record, _target_of(record))


def _refuse_random(data: Any, field: str) -> None:
    """Refuse a dataset whose records differ each time: a record would change its split."""
    for number in range(min(_TWICE, len(data))):
        one, other = _leaves(data, number, {}), _leaves(data, number, {})
        if one is None or other is None:
            continue
        same = len(one[0]) == len(other[0]) and all(
            (a is None) == (b is None)
            and (a is None or torch.equal(a.nan_to_num(), b.nan_to_num()))
            for a, b in zip(one[0], other[0], strict=True)
        )
        if not same:
            raise InvalidInputError(
                field,
                type(data).__name__,
                "must return the same record for an index every time",
                "Augment at random inside of loss, or of the model in training mode.",
            )


def _of_tree(parts: Any, target: Any = None) -> Records:
    """Return a tree of columns as records: inputs in one tensor, and a target."""
    columns, tree = tree_flatten(parts, is_leaf=lambda part: isinstance(part, _Column))
    sizes = {len(column.values) for column in columns}
    if len(sizes) != 1 or sizes == {0}:
        raise InvalidInputError(
            "data",
            ", ".join(map(str, sorted(sizes))) or "nothing",
            "must hold as many records in every part, at least one",
        )
    whole = tree_unflatten([column.values for column in columns], tree)
    alone = isinstance(whole, tuple) and len(whole) == 1 and isinstance(whole[0], torch.Tensor)
    if alone:
        made, x, y = None, whole[0], torch.zeros(len(whole[0]))
    else:
        made, x, y = RecordTree.split(whole, target)
    if not y.is_floating_point():
        y = y.long()
    unusable = torch.stack([column.unusable for column in columns]).any(dim=0)
    data = TensorData(x, y, unusable=unusable if bool(unusable.any()) else None, tree=made)
    if made is None:
        words = _words({"inputs": x} if alone else {"inputs": x, "target": y})
    else:
        words = _words(dict(zip(_names(whole, ""), tree_flatten(whole)[0], strict=True)))
    is_target = not alone and (
        made is None
        or target is not None
        or (bool(set(made.names) & set(TARGETS)) if made.names else made.size == 2)
    )
    return Records(_finite(data), target=is_target, alone=alone, parts=words)


def _finite(data: TensorData) -> TensorData:
    """Return the data, of which records that hold anything but numbers are unusable."""
    parts = [data.x] if data.unit else [data.x, data.y]  # a unit's missing rows have the target NaN
    wrong = [
        ~part.reshape(len(part), -1).isfinite().all(dim=1)
        for part in parts
        if part.is_floating_point()
    ]
    unusable = torch.stack(wrong).any(dim=0) if wrong else None
    return data if unusable is None or not bool(unusable.any()) else data.marked(unusable)


def _words(parts: Mapping[str, torch.Tensor]) -> str:
    """Return names, shapes and types of a record's parts."""
    return ", ".join(
        f"{name.strip('.')} {' x '.join(map(str, part.shape[1:])) or 'a number'} "
        f"({str(part.dtype).removeprefix('torch.')})"
        for name, part in parts.items()
    )
