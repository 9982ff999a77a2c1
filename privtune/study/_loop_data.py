"""What a trial takes from an objective: a fresh model, records, a bound on gradients."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping
    from privtune.training.mechanism.data import TensorData
    from privtune.training.methods import Method

__all__ = ["SealedTrialError", "clipping_of", "in_memory", "records_of", "refuse_used", "to_score"]


class SealedTrialError(PrivTuneError):
    """Something inside a sealed trial would show it to others, or was never charged."""


_USED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models that trials of this process have trained."""


def refuse_used(model: Any) -> None:
    """Refuse a model that an earlier trial has trained: this one would start from its weights."""
    if model in _USED:
        raise SealedTrialError(
            "make_private was given a model that an earlier trial, or the rehearsal, has trained, so "
            "this trial would start from weights that are sealed. Make the model, and its optimizer, "
            "inside the objective."
        )
    _USED.add(model)


def records_of(data: Any, part: str) -> Any:
    """Return the records of a dataset; as they are where a training sees all of them."""
    from torch.utils.data import Dataset

    if part == "all" and isinstance(data, Dataset) and _whole(data) is data:
        from privtune.training.mechanism.data import DatasetData

        return DatasetData(data)
    return in_memory(data)


def _whole(data: Any) -> Any:
    """Return the tensors that a ``TensorDataset`` is; a class of one's own is what its items are."""
    from torch.utils.data import TensorDataset

    return data.tensors if type(data) is TensorDataset else data


def in_memory(data: Any) -> Any:
    """Return records in memory; one that cannot be read contributes nothing.

    Raises:
        InvalidInputError: If it is no dataset of pairs or trees of tensors.
    """
    import torch

    from privtune.training.mechanism.data import DatasetData, TensorData
    from privtune.training.mechanism.packing import RecordTree

    if isinstance(data, TensorData):
        return data
    whole = _whole(data)
    several = isinstance(whole, tuple) and len(whole) > 1
    if several and len(whole) == 2 and not isinstance(whole[0], Mapping | tuple):
        try:
            x, y = map(torch.as_tensor, whole)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InvalidInputError(
                "dataset",
                " and ".join(type(part).__name__ for part in whole),
                "must be a pair of tensors or arrays, or a dict or tuple of tensors",
            ) from error
        return TensorData(x, y)
    if several or isinstance(whole, Mapping):
        tree, x, y = RecordTree.split(whole)
        return TensorData(x, y, tree=tree)
    if isinstance(whole, tuple) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InvalidInputError(
            "dataset",
            type(data).__name__,
            "must be inputs and targets: a pair of tensors, a dict or tuple of them, TensorData, or a "
            "map-style dataset of such records",
            "Pass the dataset, not its loader.",
        )
    read = DatasetData(data)
    x, y, lost = read.fetch(torch.arange(len(data)))
    return TensorData(x, y, tree=read.tree).marked(lost)


def to_score(data: Any) -> TensorData:
    """Return validation records in memory, as ``in_memory`` does, where it is said what the target is.

    Raises:
        InvalidInputError: If a dict has no ``labels`` and no ``label``, or a tuple more than two parts.
    """
    from privtune.training.mechanism.packing import TARGETS

    found: TensorData = in_memory(data)
    tree, whole = found.tree, _whole(data)
    names = tree.names if tree else tuple(whole) if isinstance(whole, Mapping) else ()
    if (names and not set(names) & set(TARGETS)) or (tree and not names and tree.size > 2):
        raise InvalidInputError(
            "validation",
            ", ".join(names) or "a tuple of several tensors",
            "must say which part is the target: a dict's 'labels' or 'label', or the second of a pair",
            "Name it so, or put the inputs together: (inputs, target).",
        )
    return found


def clipping_of(method: Method[Any], max_grad_norm: float) -> Clipping:
    """Return how gradients are clipped for an optimizer of the loop's own.

    Raises:
        InvalidInputError: If the method does more than release gradients for an optimizer.
    """
    from privtune.training.methods import AutomaticClipping, FixedDPSGD

    try:
        max_grad_norm = float(max_grad_norm)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            "max_grad_norm",
            type(max_grad_norm).__name__,
            "must be one number, which bounds the gradient of a record as a whole",
        ) from error
    if isinstance(method, AutomaticClipping) and not (method.momentum or method.weight_decay):
        return method.normalise(method.stabilizer)
    if isinstance(method, FixedDPSGD) and not (method.momentum or method.weight_decay):
        return method.clip(max_grad_norm)
    raise InvalidInputError(
        "optimizer",
        "one of your own",
        f"must be None: method {method.name!r} of this arm steps by itself, with its own options",
        "Pass optimizer=None; methods dpsgd and automatic-clipping, without momentum or weight decay "
        "of their own, take any optimizer.",
    )
