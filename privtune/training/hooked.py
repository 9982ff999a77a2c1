"""Clipped sums from losses that a loop computed by itself, through Opacus' hooks on its model."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.clipping import Clipping
from privtune.training.kernel import Layout
from privtune.training.opacus_adapter import (
    clipped_sum,
    has_exact_hook,
    hook,
    per_sample_gradients,
    quiet_hooks,
)

__all__ = ["HookedModel"]

_WAY_OUT = (
    "Or hand the loss over record by record, which takes any use: private.step(batch, loss_of)."
)


class HookedModel:
    """A model with Opacus' hooks on it.

    Not ghost mode: its second backward pass runs over the whole batch, where a record that is not
    finite cannot be taken out (0 * inf is NaN), and dropping its batch is no bound.

    Args:
        model: The model; it is put into training mode, without which the hooks sleep.
        layout: Where its trainable parameters lie.

    Raises:
        InvalidInputError: If Opacus cannot take the model: names every problem.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        try:
            self.module = hook(model.train(), "hooks", sequences=True)
        except InvalidInputError as error:
            raise _unhookable(model, error) from error
        self._layout = layout
        self._params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._checked = False

    def remove(self) -> None:
        """Take the hooks off again."""
        self.clear()
        self.module.remove_hooks()

    def clear(self) -> None:
        """Forget all gradients, whoever computed them."""
        for parameter in self._params.values():
            parameter.grad = None
            cast(Any, parameter).grad_sample = None

    def clipped_sum(
        self, losses: torch.Tensor, mask: torch.Tensor, clipping: Clipping
    ) -> tuple[torch.Tensor, int]:
        """Return the clipped sum of the gradients of losses, shape ``[P]``, and how many were bad.

        Args:
            losses: Shape ``[B]``, computed by :attr:`module` on one batch.
            mask: Shape ``[B]``: 1 for records that count.
            clipping: Bounds each.

        Raises:
            InvalidInputError: If the losses reach a parameter by another way than through its own
                module, or a layer saw something else than one row a record.
        """
        self._refuse_other_ways(losses)
        self.clear()  # gradients of the loop's own, accumulated or not, are no part of a release
        quiet_hooks()
        try:
            torch.autograd.backward(losses.sum())
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise _unhookable(self.module._module, error) from error
        gradients = per_sample_gradients(self.module, self._params, len(losses))
        self._forget()
        self._refuse_incomplete(gradients)
        self.clear()
        total, _, bad = clipped_sum(gradients, clipping, self._layout, mask=mask)
        return total, bad

    def _forget(self) -> None:
        """Forget the calls whose outputs no loss used: the next step has calls of its own."""
        for part in self.module.modules():
            part.__dict__.pop("activations", None)
            part.__dict__.pop("max_batch_len", None)
        for parameter in self._params.values():
            cast(Any, parameter)._forward_counter = 0

    def _refuse_other_ways(self, losses: torch.Tensor) -> None:
        """Refuse losses that reach a parameter other than once a call of its own module."""
        reached = _edges(losses)
        for owner_name, owner in self.module.named_modules():
            own = [p for p in owner.parameters(recurse=False) if p.requires_grad]
            calls = len(getattr(owner, "activations", ()))
            for parameter in own:
                edges = reached[id(parameter)]
                exact = has_exact_hook(owner)
                if (edges not in (0, calls)) if exact else (edges > 0 and calls == 0):
                    raise InvalidInputError(
                        "losses",
                        f"{owner_name or type(owner).__name__}: {edges} uses in {calls} calls",
                        "must reach every parameter through calls of its own module alone",
                        "Keep regularisers out of the loss (use the optimizer's weight decay), do "
                        f"not use a module's weights by hand, and stay in training mode. {_WAY_OUT}",
                    )

    def _refuse_incomplete(self, gradients: torch.Tensor) -> None:
        """Check once that per-sample gradients add up to what autograd says."""
        if self._checked or not bool(gradients.isfinite().all()):
            return
        self._checked = True
        plain = self._layout.flatten(
            {n: p.new_zeros(p.shape) if p.grad is None else p.grad for n, p in self._params.items()}
        )
        size = float(gradients.norm(dim=1).sum()) + 1e-12
        if float((gradients.sum(dim=0) - plain).norm()) > 1e-3 * size:
            raise InvalidInputError(
                "model",
                "per-sample gradients",
                "must add up to the gradient of the summed losses",
                _WAY_OUT,
            )


def _unhookable(model: nn.Module, error: Exception) -> InvalidInputError:
    return InvalidInputError(
        "model",
        type(model).__name__,
        f"must be computable by Opacus' hooks, which say: {error}",
        _WAY_OUT,
    )


def _edges(losses: torch.Tensor) -> Counter[int]:
    """Count how often the graph behind ``losses`` uses each leaf, by the leaf's ``id``."""
    reached: Counter[int] = Counter()
    seen: set[Any] = set()
    waiting: list[Any] = [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None:
                reached[id(variable)] += 1
            else:
                waiting.append(following)
    return reached
