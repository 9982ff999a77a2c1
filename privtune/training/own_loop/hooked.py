"""Clipped sums from losses that a loop computed by itself, through Opacus' hooks on its model."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine.opacus_adapter import (
    clipped_sum,
    has_exact_hook,
    hook,
    per_sample_gradients,
    quiet_hooks,
)
from privtune.training.mechanism.clipping import Clipping
from privtune.training.mechanism.kernel import Layout
from privtune.training.own_loop.replay import Recording
from privtune.training.own_loop.weights import LoopError

__all__ = ["HookedModel"]

_TOLERANCE = 1e-3

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
            self.module = hook(model.train())
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
        self,
        losses: torch.Tensor,
        mask: torch.Tensor,
        clipping: Clipping,
        *,
        recording: Recording | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Return the clipped sum of the gradients of losses, shape ``[P]``, and how many were bad.

        Args:
            losses: Shape ``[B]``, computed by :attr:`module` on one batch.
            mask: Shape ``[B]``: 1 for records that count.
            clipping: Bounds each.
            recording: How the losses were computed, where the way back is to be checked, too.
            generator: Chooses the records of that check.

        Raises:
            LoopError: If gradients of records are coupled on their way back, or the losses read a
                parameter that is not the model's.
            InvalidInputError: If the losses reach a parameter by another way than through its own
                module, or a layer saw something else than one row a record.
        """
        self._refuse_other_ways(losses, recording)
        self.clear()  # gradients of the loop's own, accumulated or not, are no part of a release
        half = None if generator is None else self._half(losses, generator)
        self._backward(losses, torch.ones_like(losses))
        rounding = self._rounding()
        gradients = per_sample_gradients(self.module, self._params, len(losses))
        self._forget()
        self._refuse_incomplete(gradients, rounding)
        if half is not None:
            _refuse_coupled_gradients(gradients, *half)
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

    def _backward(
        self, losses: torch.Tensor, weights: torch.Tensor, *, again: bool = False
    ) -> None:
        """Run the way back from weighted losses; keep it where it is to be run again."""
        quiet_hooks()
        try:
            torch.autograd.backward(losses, weights, retain_graph=again)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise _unhookable(self.module._module, error) from error

    def _half(
        self, losses: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which half of the records was taken, and the gradients of their losses alone."""
        taken = torch.zeros(len(losses))
        taken[torch.randperm(len(losses), generator=generator)[: -(-len(losses) // 2)]] = 1.0
        # A backward pass uses up the activations that the hooks have kept, and this one is a check:
        # they are copied and put back for the pass that counts.
        noted = [
            (part, {k: v for k, v in vars(part).items() if k in ("activations", "max_batch_len")})
            for part in self.module.modules()
        ]
        noted = [
            (p, {k: v[:] if k == "activations" else v for k, v in kept.items()})
            for p, kept in noted
        ]
        counts = {p: getattr(p, "_forward_counter", 0) for p in self._params.values()}
        self._backward(losses, taken.to(losses), again=True)
        gradients = per_sample_gradients(self.module, self._params, len(losses))
        for part, kept in noted:
            vars(part).update(kept)
        for parameter, count in counts.items():
            cast(Any, parameter)._forward_counter = count
        self.clear()
        return taken.to(gradients.device) > 0, gradients

    def _refuse_other_ways(self, losses: torch.Tensor, recording: Recording | None) -> None:
        """Refuse losses that reach a parameter other than once a call of its own module."""
        reached, leaves = _edges(losses)
        own_ids = {id(p) for p in self._params.values()}
        for leaf in leaves:
            if id(leaf) not in own_ids and (
                isinstance(leaf, nn.Parameter)
                or (recording is not None and not recording.made(leaf))
            ):
                raise LoopError(
                    "The losses reach a tensor with gradients that is no parameter of the model (a "
                    "temperature, centers of classes, a head beside it): its gradients would be "
                    "neither clipped nor noised. Make it a part of the model, or detach it."
                )
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

    def _rounding(self) -> float:
        """Return what the coarsest gradients that the hooks left are rounded by, as by autocast."""
        left = (cast(Any, p).grad_sample for p in self._params.values())
        return max((torch.finfo(g.dtype).eps for g in left if g is not None), default=0.0)

    def _refuse_incomplete(self, gradients: torch.Tensor, rounding: float) -> None:
        """Check once that per-sample gradients add up to what autograd says."""
        if self._checked or not bool(gradients.isfinite().all()):
            return
        self._checked = True
        plain = self._layout.flatten(
            {n: p.new_zeros(p.shape) if p.grad is None else p.grad for n, p in self._params.items()}
        )
        size = float(gradients.norm(dim=1).sum()) + 1e-12
        if float((gradients.sum(dim=0) - plain).norm()) > max(1e-3, 4.0 * rounding) * size:
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


def _refuse_coupled_gradients(
    whole: torch.Tensor, taken: torch.Tensor, alone: torch.Tensor
) -> None:
    """Refuse gradients that change with the losses of other records.

    Args:
        whole: Of every record, shape ``[B, P]``.
        taken: Which records' losses the other pass had, shape ``[B]``.
        alone: What it gave, shape ``[B, P]``.
    """
    expected = whole * taken.unsqueeze(1)
    known = whole.isfinite().all(dim=1) & alone.isfinite().all(dim=1)
    apart = (alone - expected)[known].norm(dim=1)
    sizes = whole[known].norm(dim=1)
    if bool((apart > _TOLERANCE * (sizes + sizes.mean() + 1e-12)).any()):
        raise LoopError(
            "The gradient of a record changes with the losses of other records, so one record moves "
            "a step by more than its plan charges. Likely: a hook or an autograd function that "
            "normalises gradients by their batch. Hand the loss over record by record: "
            "private.step(batch, loss_of)."
        )


def _edges(losses: torch.Tensor) -> tuple[Counter[int], list[torch.Tensor]]:
    """Count how often the graph behind ``losses`` uses each leaf, by its ``id``; list the leaves."""
    reached: Counter[int] = Counter()
    leaves: dict[int, torch.Tensor] = {}
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
                leaves[id(variable)] = variable
            else:
                waiting.append(following)
    return reached, list(leaves.values())
