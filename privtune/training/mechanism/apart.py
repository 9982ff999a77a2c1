"""Records under ``vmap`` that cannot meet: what a user's own rule would make of all at once is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode


class Apart(TorchFunctionMode):
    """Refuses rules for ``vmap`` that are not torch's own, and would be handed all records.

    Such a rule may divide by the largest of them where that is above 100: on records that are made up
    it agrees with records taken one by one.

    Example:
        >>> with Apart():
        ...     torch.vmap(torch.sin)(torch.zeros(2))
        tensor([0., 0.])
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let a call pass, unless a user wrote what it means for many records.

        Raises:
            RuntimeError: If a user did.
        """
        if func is custom_function_call:
            if args[0].vmap is not torch.autograd.Function.vmap:
                raise RuntimeError(f"{args[0].__name__}.vmap would see all records at once")
        elif isinstance(func, torch._ops.OpOverload):
            known = OPDEFS.get(func._schema.name)
            if known is not None and known._vmap_fn is not None:
                raise RuntimeError(f"the rule of {func} for vmap would see all records at once")
        return func(*args, **(kwargs or {}))


def by_record(
    one: Callable[..., torch.Tensor], *, randomness: str = "error"
) -> Callable[..., torch.Tensor]:
    """Return a function of one record as one of many: ``torch.vmap``, with nothing of a user's own."""
    many = torch.vmap(one, randomness=randomness)

    def called(*records: torch.Tensor) -> torch.Tensor:
        with Apart():
            found: torch.Tensor = many(*records)
        return found

    return called
