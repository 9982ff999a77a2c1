"""The optimizer that a loop hands over: what it may be, and what it steps along."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter, signature

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.mechanism.clipping import Clipping

__all__ = ["UserOptimizer", "checked"]


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
