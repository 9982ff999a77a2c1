"""Tells models of torch's own layers alone, and what two of them share if they differ in numbers alone.

What a user writes is tried on made-up records for each model anew: whether it keeps something of a record,
which numbers it accepts, what it computes. Where all that a pass runs is torch's and PrivTune's own code, the
answer is the same for all models of one structure, and is kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

_LAYERS = nn.Linear.__module__.rpartition(".")[0] + "."
_FOLDER = str(Path(str(sys.modules[nn.Linear.__module__].__file__)).parent) + os.sep
_PLAIN = (type(None), bool, int, float, str)
_TENSORS = (torch.Tensor, nn.Parameter)


def structure_of(model: nn.Module) -> Hashable | None:
    """Return what a pass of a model hangs on beside numbers; None unless all its code is torch's own.

    Of each layer its class, its plain attributes, and shapes and types of its tensors. A class of the user's,
    a hook, a function or a list among the attributes, a layer whose ``forward`` was replaced: each may do
    anything, and gives None.

    Args:
        model: It is left as it was.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        >>> structure_of(net) == structure_of(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
        True
        >>> class Mine(nn.Linear):
        ...     pass
        >>> structure_of(nn.Sequential(Mine(3, 4), nn.ReLU())) is None
        True
    """
    if _has_global_hooks():
        return None
    first: dict[int, int] = {}  # by the id of a tensor or a layer: where it came first
    structure: list[Hashable] = []
    for name, part in model.named_modules(remove_duplicate=False):
        kind = type(part)
        if not _is_torchs(kind):
            return None
        structure.append((name, kind, first.setdefault(id(part), len(first))))
        for key, value in vars(part).items():
            if key == "_modules":
                facts: Hashable = tuple(value)
            elif key in ("_parameters", "_buffers"):
                facts = _facts_of(value, first)
            else:
                facts = _plain(value)
            if facts is None:
                return None
            structure.append((key, facts))
    return tuple(structure)


def made_up_like(model: nn.Module) -> nn.Module:
    """Return a copy of a model with made-up numbers for all of its weights and buffers, always the same.

    Args:
        model: Of torch's own layers alone; it is left as it was.
    """
    copy = deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*copy.parameters(), *copy.buffers()):
            if tensor.is_floating_point():
                # Small, and above 0: a variance may be among them.
                numbers = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(0.01 + 0.09 * numbers)
    return copy


def _has_global_hooks() -> bool:
    """Return whether a hook is registered for all modules at once, which torch keeps in ``_global_...``."""
    variables = vars(sys.modules[nn.Module.__module__])
    for name, value in variables.items():
        if name.startswith("_global_") and isinstance(value, Mapping) and value:
            return True
    return False


def _is_torchs(kind: type[nn.Module]) -> bool:
    """Return whether a class is a layer of torch's own that is called and computed as torch wrote it."""
    if not kind.__module__.startswith(_LAYERS):
        return False
    if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        return False
    code = getattr(kind.forward, "__code__", None)
    is_as_written = code is not None and code.co_filename.startswith(_FOLDER)
    return is_as_written and kind.__call__ is nn.Module.__call__


def _facts_of(tensors: Mapping[str, Any], first: dict[int, int]) -> Hashable | None:
    """Return names, shapes and types of a layer's tensors; None if one is of a class of its own, or hooked.

    Args:
        tensors: Parameters or buffers by name, None where there is none.
        first: Where each tensor of the model came first, by its id; tensors are added to it.
    """
    facts: list[Hashable] = []
    for name, tensor in tensors.items():
        if tensor is None:
            facts.append(name)
            continue
        if type(tensor) not in _TENSORS or tensor.layout != torch.strided:
            return None
        if tensor._backward_hooks or vars(tensor):
            return None
        place = first.setdefault(id(tensor), len(first))
        shape = tuple(tensor.shape)
        facts.append((name, shape, tensor.dtype, tensor.device, tensor.requires_grad, place))
    return tuple(facts)


def _plain(value: Any) -> Hashable | None:
    """Return a layer's attribute with its type; None unless it is plain, a tuple or set of such, or empty."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, tuple | set):
        if all(type(part) in _PLAIN for part in value):
            return kind, frozenset(value) if kind is set else tuple(value)
        return None
    if isinstance(value, Mapping | list) and not value:
        return kind, ()
    return None
