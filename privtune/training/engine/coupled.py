"""Layers that mix the records of a batch, and losses that keep something of the records that they see."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine.graph.intercept import Intercept
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.fresh import fresh
from privtune.training.mechanism.kernel import LossOf
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

__all__ = ["refuse_coupling", "refuse_memory"]


def refuse_memory(module: nn.Module, loss_of: LossOf, x: torch.Tensor, y: torch.Tensor) -> None:
    """Refuse a loss that gives another number when a record is evaluated again: it has kept something.

    A model that keeps something is no concern: each record meets a copy that has met none.

    Args:
        module: The model.
        loss_of: The loss of one record.
        x: Inputs of some records, for shape and type alone; may be none.
        y: Targets of some records, likewise.

    Raises:
        InvalidInputError: If it keeps something of the records that it sees.
    """
    device = next(p.device for p in module.parameters())
    inputs, targets = synthetic(x, y, (1, 2), device)
    found, drawn = [], (random.getstate(), np.random.get_state())
    for record in (slice(0, 1), slice(1, 2), slice(0, 1)):
        copied, _ = fresh(module)
        with GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.random.manual_seed(0)
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])
            try:
                with Intercept(None, deterministic=True):
                    loss = loss_of(copied, inputs[0, record], targets[0, record])
                found.append(loss.detach().clone())
            except Exception:  # whatever a user's code raises: the kernel says what is wrong
                return
    if not torch.equal(found[0].nan_to_num(), found[2].nan_to_num()):
        raise InvalidInputError(
            "loss",
            getattr(loss_of, "__name__", type(loss_of).__name__),
            "must be a function of one record and the weights, but gives another number when the same "
            "record is evaluated again: it keeps something of the records that it sees",
            "Leave out running means and lists that it writes to.",
        )


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
