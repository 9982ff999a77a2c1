"""Watching a model run on one record, and routing what it does with its parameters.

The model runs under two nested ``vmap``: over candidates and over records. That is its meaning: it
sees one record, as a batch of one, so that records cannot touch each other. This mode catches the
operations that use a parameter in a known way and computes them on the physical tensors of all
candidates and records, with the parameter cut off from autograd; what went in and what came out
goes onto a tape. Everything else runs as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from privtune.training.engine.graph.draws import DRAWS
from privtune.training.engine.graph.operations import OPERATIONS
from privtune.training.engine.graph.tape import Watching

# What reads values without a call that a recording would see.
_READ = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})

_TRAINED, _MADE_BY = torch.Tensor.requires_grad, torch.Tensor.grad_fn

# Activations, and where their argument ``inplace`` stands.
_IN_PLACE: Mapping[Any, int] = {
    functional.relu: 1,
    functional.relu6: 1,
    functional.selu: 1,
    functional.silu: 1,
    functional.mish: 1,
    functional.hardswish: 1,
    functional.hardsigmoid: 1,
    functional.elu: 2,
    functional.celu: 2,
    functional.leaky_relu: 2,
    functional.hardtanh: 3,
    functional.threshold: 3,
}


@dataclass(eq=False)
class Intercept(Watching):
    """Catches uses of parameters and draws while a model runs on one record."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Route one call; anything without a handler, or not in a known form, runs as it is."""
        kwargs = kwargs or {}
        if self.levels is not None:
            if func is torch.Tensor.register_hook:
                raise RuntimeError("a hook on a gradient would see all records at once")
            read = getattr(func, "__self__", None)
            if read is _MADE_BY:  # under vmap there is none, and a hook on it would be left out
                raise RuntimeError("what reads grad_fn would see all records at once")
            if read is _TRAINED and len(args) == 1:
                # Under vmap no tensor says so, and what a model does only if it is would be left out.
                return id(args[0]) in self.names or self.levels.physical(args[0]).requires_grad
        if func in _READ and self.levels is not None:
            torch.equal(args[0], args[0])  # tells a recording that a value is read
        if func in _IN_PLACE and self.generator is None:
            args, kwargs = _out_of_place(args, kwargs, _IN_PLACE[func])
        handler = OPERATIONS.get(func) or DRAWS.get(func)
        if handler is not None:
            result = handler(self, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _out_of_place(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Turn ``inplace`` off: an output on the tape must stay what the operation gave."""
    if len(args) > place:
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, "inplace": False}
