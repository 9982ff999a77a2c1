"""What would see all records at once on the way back, where no ``vmap`` is left around it.

The way forward runs under ``vmap`` and sees one record. The way back is run on what lies behind:
tensors of all candidates and records. Formulas of torch's own treat each by itself. A hook, or the
``backward`` of an autograd function of the user's, is handed all of them, and what it makes of one
may hang on the others: a gradient that is shortened where the norm of all is above 50 shows on no
record that is made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import disable_saved_tensors_hooks

from privtune.training.engine.graph.traced import traced
from privtune.training.mechanism.apart import Apart

_OURS = "privtune."


@contextmanager
def apart() -> Iterator[None]:
    """Run a model under ``vmap`` where nothing but torch's own code may see all records at once.

    Hooks on saved tensors, which are handed what autograd keeps for the way back, raise.
    """
    with traced(), Apart(), disable_saved_tensors_hooks("what is saved holds all records"):
        yield


def refuse_batched_backward(module: nn.Module, losses: torch.Tensor) -> None:
    """Refuse what a user has put on the way back, unless torch takes it record by record.

    Hooks on tensors are refused where they are put, as the pass is watched.

    Args:
        module: The model.
        losses: What its pass came to, with the graph behind it.

    Raises:
        RuntimeError: Says what was found.
    """
    tables = vars(nn.modules.module)
    hooked = [tables["_global_backward_hooks"], tables["_global_backward_pre_hooks"]]
    hooked += [t for m in module.modules() for t in (m._backward_hooks, m._backward_pre_hooks)]
    if any(hooked):
        raise RuntimeError("a module's backward hook would see all records at once")
    waiting, seen = [losses.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            made: Any = type(node)._forward_cls
            by_record = made.__module__.startswith(_OURS) or made.generate_vmap_rule
            if not by_record:
                raise RuntimeError(
                    f"the backward of {made.__name__} would see all records at once; "
                    "generate_vmap_rule = True has torch take them one by one"
                )
        waiting += [following for following, _ in node.next_functions]
