"""Per-sample gradients by Opacus, one candidate at a time. The only module that imports opacus.

Only the hooks of Opacus are used: they give per-sample gradients. Sampling, clipping, noise and the
account stay PrivTune's own, so none of Opacus' loaders, optimizers and accountants can disagree with
the plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine.coupled import refuse_coupling
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.mechanism.kernel import Layout, say_once

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping

__all__ = [
    "ClippedSum",
    "clipped_sum",
    "has_exact_hook",
    "hook",
    "layer_of_opacus",
    "per_sample_gradients",
    "quiet_hooks",
]

_REMARK = "Full backward hook is firing"
ClippedSum = tuple[torch.Tensor, torch.Tensor, int]
"""Clipped sum; halves, +1/2 for an unclipped record and -1/2 for a clipped one; bad records."""


def hook(module: nn.Module) -> Any:
    """Wrap a module with Opacus' hooks, for losses that are summed.

    Args:
        module: In training mode.

    Raises:
        InvalidInputError: If Opacus cannot take the module: names every problem.
    """
    from opacus.grad_sample import GradSampleModule
    from opacus.validators import ModuleValidator

    refuse_coupling(module)
    problems = ModuleValidator.validate(module, strict=False)
    if problems:
        raise InvalidInputError("model", type(module).__name__, "; ".join(str(p) for p in problems))
    without = sorted(
        {type(m).__name__ for m in module.modules() if _trains(m) and not has_exact_hook(m)}
    )
    if without:
        say_once(
            f"Opacus has no formula for the layers {', '.join(without)} of {type(module).__name__}: "
            "their per-sample gradients are computed by functorch, which is slower."
        )
    try:
        return GradSampleModule(module, batch_first=True, loss_reduction="sum")
    except NotImplementedError as error:
        raise InvalidInputError("model", type(module).__name__, str(error)) from None


def layer_of_opacus(name: str) -> type[nn.Module]:
    """Return one of Opacus' own layers, such as ``DPLSTM``."""
    from opacus import layers

    found: type[nn.Module] = getattr(layers, name)
    return found


def has_exact_hook(module: nn.Module) -> bool:
    """Say whether Opacus has a formula of its own for a layer, which sees one use a call."""
    from opacus.grad_sample import GradSampleModule

    return type(module) in GradSampleModule.GRAD_SAMPLERS


def per_sample_gradients(
    module: nn.Module, params: Mapping[str, nn.Parameter], records: int
) -> torch.Tensor:
    """Return what the hooks left after a backward pass, shape ``[records, P]``.

    In the parameters' type: under autocast the hooks leave fewer digits, of which no norm or sum is made.

    Args:
        module: The model with the hooks.
        params: Its trainable parameters, in the order of the result.
        records: Records of the batch.

    Raises:
        InvalidInputError: If a layer saw something else than one row a record.
    """
    for table in _padded_tables(module):
        sample = getattr(table.weight, "grad_sample", None)
        if sample is not None:
            sample[:, table.padding_idx] = 0.0
    rows = []
    for name, parameter in params.items():
        sample = cast(Any, parameter).grad_sample
        if sample is None:
            sample = parameter.new_zeros(records, *parameter.shape)
        if len(sample) != records:
            raise InvalidInputError(
                "model",
                f"{name}: {len(sample)} rows for {records} records",
                "must give every layer one row of inputs a record",
                "Expand what the records share to the batch: for the positions of a transformer, "
                "pass position_ids=torch.arange(length).expand(len(x), -1).",
            )
        rows.append(sample.reshape(records, parameter.numel()).to(parameter.dtype))
    return torch.cat(rows, dim=1)


def clipped_sum(
    gradients: torch.Tensor,
    clipping: Clipping,
    layout: Layout,
    *,
    mask: torch.Tensor | None = None,
    row: int = 0,
    candidates: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the clipped sum of per-sample gradients of one candidate, however they were computed.

    Args:
        gradients: Shape ``[B, P]``.
        clipping: Bounds each record.
        layout: Where parameters lie.
        mask: Shape ``[B]``: 1 for records that count; None for all.
        row: The candidate's place in its stack.
        candidates: How many the stack holds.

    Returns:
        The sum, shape ``[P]``; +1/2 for each record that counts and was not clipped and -1/2 for
        each other that counts; how many of them were not finite.
    """
    counted = torch.ones_like(gradients[:, 0], dtype=torch.bool) if mask is None else mask > 0
    if isinstance(clipping, CoordinateTransform):
        gradients = (gradients - clipping.center[row]) / clipping.scale[row]
    groups = [(0, layout.size)]
    if clipping.by_layer:
        layers = layout.layers.values()
        groups = [(layout.spans[n[0]][0], layout.spans[n[-1]][1]) for n in layers]
    norms = torch.stack([gradients[:, start:end].norm(dim=1) for start, end in groups])
    finite = norms.isfinite().all(dim=0)
    usable = finite & counted
    gradients = gradients.masked_fill(~usable.unsqueeze(1), 0.0)
    coefficients, halves = _for_one(clipping, norms, usable, row, candidates)
    total = torch.cat(
        [c @ gradients[:, s:e] for c, (s, e) in zip(coefficients, groups, strict=True)]
    )
    return total, halves, int((~finite & counted).sum())


def quiet_hooks() -> None:
    """Silence torch's remark that a backward hook fires although the input needs no gradient.

    For good: filters belong to the process, and trials in other threads run backward passes, too.
    """
    if not any(known[1] is not None and known[1].pattern == _REMARK for known in warnings.filters):
        warnings.filterwarnings("ignore", message=_REMARK)


def _for_one(
    clipping: Clipping, norms: torch.Tensor, kept: torch.Tensor, k: int, candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return candidate k's coefficients ``[G, B]`` and its count of halves over the kept records."""
    stacked = norms.unsqueeze(1).expand(-1, candidates, -1)
    coefficients = clipping.coefficients(stacked)[:, k] * kept
    return coefficients, ((clipping.unclipped(stacked)[k].to(norms) - 0.5) * kept).sum()


def _trains(module: nn.Module) -> bool:
    """Say whether a layer has trainable parameters of its own."""
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _padded_tables(module: nn.Module) -> list[nn.Embedding]:
    """Return the tables with a row that is never trained, of which Opacus' formula knows nothing."""
    return [
        m for m in module.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None
    ]
