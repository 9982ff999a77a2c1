"""Layers that mix the records of a batch."""

from __future__ import annotations

from torch import nn

from privtune.errors import InvalidInputError


def _is_fixed(norm: nn.Module) -> bool:
    """Say whether a normalisation works by numbers that no record changes: those of evaluation mode."""
    return not norm.training and norm.running_mean is not None


def refuse_coupling(module: nn.Module) -> None:
    """Refuse layers that mix the records of a batch: no per-sample gradient exists for them.

    A BatchNorm in evaluation mode normalises each record by the same fixed numbers, and mixes nothing.

    Raises:
        InvalidInputError: Names every such layer at once.
    """
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    coupled = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if (
            isinstance(part, _BatchNorm)
            and not isinstance(part, _InstanceNorm)
            and not _is_fixed(part)
        )
        or (isinstance(part, _InstanceNorm) and part.track_running_stats and part.training)
    ]
    if coupled:
        raise InvalidInputError(
            "model",
            ", ".join(coupled),
            "must treat each record by itself",
            "Use GroupNorm or LayerNorm in place of batch statistics, or leave it in evaluation mode: "
            "module.eval().",
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
