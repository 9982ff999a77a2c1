"""A model that has met no record: what it keeps of one must not reach the next."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn

__all__ = ["fresh"]


def fresh(model: nn.Module, beside: Any = None) -> tuple[nn.Module, Any]:
    """Return a copy of a model that shares its parameters and nothing else that a pass may write.

    Attributes, lists and buffers that a pass changes change in the copy alone. What no copy can be
    made of (a lock, a handle of a library) is shared.

    Args:
        model: The model.
        beside: What may refer to it or keep something too, such as its loss; copied along.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> copied, _ = fresh(model)
        >>> copied.seen = 3
        >>> copied.weight is model.weight, hasattr(model, "seen")
        (True, False)
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    parts = list(model.modules())
    compiled = [part for part in parts if isinstance(part, torch.jit.ScriptModule)]
    memo |= {id(part): part for part in compiled}  # a copy of such would bring weights of its own
    parts = [part for part in parts if id(part) not in memo]
    for part in parts:
        memo[id(part)] = cast(Any, nn.Module).__new__(type(part))
    for part in parts:
        vars(memo[id(part)]).update({n: _copied(held, memo) for n, held in vars(part).items()})
    return _copied(model, memo), _copied(beside, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy, or what was given."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        value = value.detach()  # what a pass has left, as a weight norm does
    try:
        return deepcopy(value, memo)
    except Exception:  # whatever a class of a user's makes of it
        return value
