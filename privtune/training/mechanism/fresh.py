"""A model that has met no record: what it keeps of one must not reach the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn

from privtune.errors import InvalidInputError

_EMPTY = (OrderedDict, dict, list, set)


def fresh(model: nn.Module, beside: Any = None, *, trained: bool = False) -> tuple[nn.Module, Any]:
    """Return a copy of a model that shares its parameters and nothing else that a pass may write.

    Attributes, lists and buffers that a pass changes change in the copy alone. What no copy can be
    made of (a lock, a handle of a library) is shared. What may refer to the model, as its loss does, is
    copied along; of a model that is ``trained``, parameters that require gradients are copied, too.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    if trained:
        own = (p for p in model.parameters() if p.requires_grad)
        memo |= {id(p): nn.Parameter(p.detach().clone()) for p in own}
    parts = list(model.modules())
    compiled = [part for part in parts if isinstance(part, torch.jit.ScriptModule)]
    memo |= {id(part): part for part in compiled}  # a copy of such would bring weights of its own
    parts = [part for part in parts if id(part) not in memo]
    for part in parts:
        memo[id(part)] = cast(Any, nn.Module).__new__(type(part))
    for part in parts:
        vars(memo[id(part)]).update({n: _copied(held, memo) for n, held in vars(part).items()})
    return _copied(model, memo), _copied(beside, memo)


@contextmanager
def unwritten(model: nn.Module) -> Iterator[None]:
    """Let records pass through copies of a model, and see that none has written to what these share.

    Raises:
        InvalidInputError: If a pass changed the model's parameters, or buffers that TorchScript holds;
            they are what they were then.
    """
    shared = [*model.parameters(), *model.buffers()]
    stood = [(part, part.detach(), part.detach().clone()) for part in shared]
    yield
    written = [was for was in stood if not _same(was[0].detach(), was[2])]
    for part, place, before in written:
        place.copy_(before)
        part.data = place
    if written:
        raise InvalidInputError(
            "model",
            type(model).__name__,
            "must not write to its parameters in a pass: they would hold something of every record",
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy, or what was given."""
    if type(value) in _EMPTY and not value:  # as most of what a module holds: its hooks
        return memo.setdefault(id(value), type(value)())
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        value = value.detach()  # what a pass has left, as a weight norm does
    known = len(memo)
    try:
        return deepcopy(value, memo)
    except Exception:  # whatever a class of a user's makes of it
        while len(memo) > known:
            memo.popitem()  # copies that were begun
    own: Any = value
    if type(value) is list:
        memo[id(value)] = own = []
        own.extend(_copied(part, memo) for part in value)
    elif type(value) is dict:
        memo[id(value)] = own = {}
        own.update((name, _copied(part, memo)) for name, part in value.items())
    return own
