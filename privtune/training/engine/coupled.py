"""Layers that mix the records of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    pass

__all__ = ["refuse_coupling"]


def refuse_coupling(module: nn.Module) -> None:
    """Refuse layers that mix the records of a batch: no per-sample gradient exists for them.

    Raises:
        InvalidInputError: Names every such layer at once.
    """
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    coupled = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if (isinstance(part, _BatchNorm) and not isinstance(part, _InstanceNorm))
        or (isinstance(part, _InstanceNorm) and part.track_running_stats)
    ]
    if coupled:
        raise InvalidInputError(
            "model",
            ", ".join(coupled),
            "must treat each record by itself",
            "Use GroupNorm or LayerNorm in place of batch statistics.",
        )
    changing = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and (part.max_norm is not None or part.scale_grad_by_freq)
    ]
    if changing:
        raise InvalidInputError(
            "model",
            ", ".join(changing),
            "must not have max_norm, which changes the rows that occur, nor scale_grad_by_freq, "
            "which counts words across records",
            "Leave both options off; clipping bounds each record.",
        )
