"""Checks that another library trains on the declared records and on no validation records."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_COMPARED_ITEMS = 64
_FEWEST_SHARED = 5  # fewer records may be equal by chance
_SHARE_OF_A_COPY = 0.9


def is_same_data(declared: Any, other: Any) -> bool:
    """Return whether two data sets hold equal records in the same order, as far as a sample of them shows.

    Tensors are compared whole. Of other data sets up to 64 items are compared, spread evenly; items that are
    augmented at random differ from themselves, and say nothing.
    """
    if declared is other:
        return True
    if len(declared) != len(other):
        return False
    tensors = getattr(declared, "tensors", None)
    others = getattr(other, "tensors", None)
    if tensors is not None and others is not None:
        return is_same_item(tensors, others)
    stride = max(1, len(declared) // _COMPARED_ITEMS)
    for place in range(0, len(declared), stride):
        if is_same_item(declared[place], other[place]):
            continue
        if is_same_item(declared[place], declared[place]):
            return False
    return True


def is_same_item(one: Any, other: Any) -> bool:
    """Return whether two items of data sets are equal, part by part."""
    import numpy as np
    import torch

    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return False
        return all(is_same_item(part, other[name]) for name, part in one.items())
    if _is_sequence(one) and _is_sequence(other):
        if len(one) != len(other):
            return False
        return all(map(is_same_item, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _is_sequence(item: object) -> bool:
    return isinstance(item, (list, tuple))


def holds_validation(data: object, inputs: torch.Tensor) -> bool:
    """Return whether a training data set contains the validation records.

    Only records that are unique in both are counted: of a few categories, equal records are not
    the same one. Data sets other than tensors, their subsets and their concatenations are not read.

    Args:
        data: The training data set.
        inputs: Inputs of the validation records, shape ``[n, ...]``.
    """
    training_inputs = _inputs_of(data)
    if training_inputs is None:
        return False
    if training_inputs.shape[1:] != inputs.shape[1:]:
        return False
    validation_rows = _unique_rows(inputs)
    shared = validation_rows & _unique_rows(training_inputs)
    fewest = max(_FEWEST_SHARED, _SHARE_OF_A_COPY * len(validation_rows))
    return len(shared) >= fewest


def _inputs_of(data: object) -> torch.Tensor | None:
    """Return the first tensor of a data set; None for a data set that is not made of tensors."""
    import torch
    from torch.utils.data import ConcatDataset, Subset, TensorDataset

    if isinstance(data, TensorDataset):
        return data.tensors[0]
    if isinstance(data, Subset):
        inputs = _inputs_of(data.dataset)
        if inputs is None:
            return None
        places = torch.as_tensor(list(data.indices))
        return inputs[places]
    if isinstance(data, ConcatDataset):
        parts: list[torch.Tensor] = []
        for each in data.datasets:
            part = _inputs_of(each)
            if part is None:
                return None
            if parts and part.shape[1:] != parts[0].shape[1:]:
                return None
            parts.append(part)
        return torch.cat(parts)
    return None


def _unique_rows(inputs: torch.Tensor) -> set[bytes]:
    """Return the records that are there exactly once, as bytes.

    As doubles: a record that one data set holds in float32 and the other in float64 is one record.
    """
    table = inputs.detach().cpu().double().reshape(len(inputs), -1)
    counts = Counter(row.tobytes() for row in table.numpy())
    return {row for row, count in counts.items() if count == 1}
