"""The optimizer that a loop hands over: what it may be, and what it steps along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.mechanism.clipping import Clipping

__all__ = ["UserOptimizer", "checked", "in_one_piece"]


@dataclass(frozen=True)
class UserOptimizer:
    """Steps of the loop's own optimizer along noisy clipped mean gradients.

    Args:
        optimizer: Over exactly the trainable parameters.
        clipping: Fixed for the whole run.
        noise_multiplier: Noise standard deviation over the clipping's sensitivity.
    """

    optimizer: torch.optim.Optimizer
    clipping: Clipping
    noise_multiplier: float


def checked(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, if it holds exactly the trainable parameters."""
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != trainable:
        raise InvalidInputError(
            "optimizer",
            f"{len(held)} parameters",
            f"must hold exactly the {len(trainable)} trainable parameters of the model",
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise InvalidInputError(
            "optimizer",
            type(optimizer).__name__,
            "must step along the gradient that it is given, but asks for more of them",
            "Use SGD, Adam, or another one whose step() needs no closure.",
        )
    return optimizer


@contextmanager
def in_one_piece(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.Tensor],
    flat: torch.Tensor,
    gradient: torch.Tensor,
) -> Iterator[None]:
    """Let an optimizer step along a flat gradient, each of its groups as one tensor.

    What it does to a tensor, it does to every number of it by itself: so the numbers are the same, and
    a step costs a call a group. Afterwards its groups and states are as if it had stepped each parameter.

    Args:
        optimizer: One of torch's that looks at every number by itself.
        params: What it steps, in the order of ``flat``.
        flat: Their memory, shape ``[P]``.
        gradient: What each step is along: written before it, shape ``[P]``.
    """
    ends = list(accumulate(p.numel() for p in params))
    place = {id(p): i for i, p in enumerate(params)}
    before: list[tuple[dict[str, Any], list[torch.Tensor], nn.Parameter | None]] = []
    try:
        for group in optimizer.param_groups:
            own = group["params"]
            places = [place[id(p)] for p in own]
            in_order = places == list(range(places[0], places[0] + len(own))) if own else False
            if in_order and not any(p in optimizer.state for p in own):
                start, end = ends[places[0]] - own[0].numel(), ends[places[-1]]
                piece = nn.Parameter(flat[start:end])
                piece.grad = gradient[start:end]
                before.append((group, own, piece))
                group["params"] = [piece]
                continue
            before.append((group, own, None))
            for p in own:
                stop = ends[place[id(p)]]
                p.grad = gradient[stop - p.numel() : stop].view_as(p)
        yield
    finally:
        for group, own, whole in before:
            group["params"] = own
            if whole is not None:
                _take_apart(optimizer, whole, own)
            for p in own:
                p.grad = None


def _take_apart(
    optimizer: torch.optim.Optimizer, whole: nn.Parameter, own: Sequence[torch.Tensor]
) -> None:
    """Give each parameter its part of the state of all."""
    state = optimizer.state.pop(whole, {})
    parts: list[dict[str, Any]] = [{} for _ in own]
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == whole.shape:
            split = torch.split(value, [p.numel() for p in own])
            each: Sequence[Any] = [
                part.view_as(p).clone() for part, p in zip(split, own, strict=True)
            ]
        elif isinstance(value, torch.Tensor):
            each = [value.clone() for _ in own]
        else:
            each = [value for _ in own]
        for part, one in zip(parts, each, strict=True):
            part[name] = one
    if state:
        optimizer.state.update(zip(own, parts, strict=True))
