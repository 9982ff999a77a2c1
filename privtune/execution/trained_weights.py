"""Refuses trainings that would not train: the losses of made-up records must reach what is trained.

A loss reaches a weight that is a part of its graph; the gradient itself may be 0, as that of a layer behind
one that is 0 at first, or of a row of an embedding that a record does not have.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.fine_tuned import losses_of
from privtune.training.engine.compute import check_device
from privtune.training.engine.train import choose_kernel
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import (
    REACHED_RECORDS,
    SAME_SHAPE,
    Layout,
    add_reach,
    describe_shapes,
    flatten_params,
    fresh,
)
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

if TYPE_CHECKING:
    from privtune.training.engine.train import Made
    from privtune.training.mechanism.kernel import Kernel, LossOf

_COMPARED = 4  # made-up records whose losses a weight may change
_POINTS = 3  # random weights at which a gradient that is 0 at the first ones is looked at
_NAMED = 3  # weights that a message names
_SPREAD = 0.3  # of random weights
_ROUNDING = 1e-5  # of the clipping norm: gradients below are rounding errors, or drown in the noise
_OFFSET = (
    "Let labels begin at 0 in the data where the loss subtracts an offset: torch ignores -100. "
)
_STANDS = 1e-7  # of the size of weights: a training that moves none by more leaves them as they are


class NothingTrainedError(PrivTuneError):
    """A training would leave weights as they are, or let noise alone move them."""


class UntrainedWeightsWarning(UserWarning):
    """Some weights have no part in the loss, or no slope: noise alone would move them."""


def check_trained(
    model: nn.Module,
    loss_of: LossOf,
    data: TensorData,
    *,
    device: str,
    precision: str = "float32",
    norm: float | None = None,
) -> None:
    """Refuse a model whose trained weights have no effect on the losses of made-up records.

    What is asked is the kernel that trains the model, since it runs a copy: what reaches the weights of the
    model itself may miss those of the copy.

    Args:
        model: The model with its first weights, as ``build`` made it.
        loss_of: The loss of one record.
        data: Made-up records, of a domain that the loss accepts.
        device: Where to train.
        precision: In what numbers to train.
        norm: The clipping norm that the noise is scaled to; None where gradients are normalised, or where the
            norm adapts.

    Raises:
        NothingTrainedError: If no training could change what the model says, some weights are used without a
            gradient, or all gradients are tiny beside ``norm``.
    """
    _check_shape(model, loss_of, data)
    place = torch.device(check_device(device))
    kernel = choose_kernel(model, loss_of, data.to(place), place, precision=precision)
    first = flatten_params(model).to(place)
    reach = kernel.reach(first)
    trained = list(kernel.layout.shapes)
    missed = [name for name in trained if name not in reach]
    if missed:
        _refuse_missed(model, loss_of, data, missed, trained)
    largest = _largest_gradients(kernel, first, reach, enough=_ROUNDING * (norm or 0.0))
    idle = not any(largest.values())
    if idle and _has_finite_losses(model, loss_of, data):
        offset = "" if data.y.is_floating_point() else _OFFSET
        raise NothingTrainedError(
            "What is trained of the model does not reach its loss, so no training changes what it says: "
            "the gradient of every made-up record is 0, or no number. Leave out what has no slope: round, "
            "sign, argmax, a comparison, a softmax over the axis of records, and losses that compare records "
            f"(Cox, ranking, contrastive), since each record is alone. {offset}Nothing was charged."
        )
    if not idle:
        _check_sizes(largest, norm)


def check_moved(
    first: torch.Tensor, last: torch.Tensor, made: Made, *, steps: int, of: int
) -> None:
    """Refuse a candidate whose steps are too short to move its weights in all of a training.

    Methods that find their own rates begin with short steps, so they are left alone.

    Args:
        first: The first weights, shape ``[P]``.
        last: Those after a few steps, noise included.
        made: The candidate.
        steps: How many steps were taken.
        of: How many steps the training has.

    Raises:
        NothingTrainedError: If weights would stay as they are.
    """
    known = made.optimizer is not None or {"learning_rate", "max_grad_norm"} <= made.values.keys()
    paced = made.scheduler is not None or "schedule" in made.values or "warmup" in made.values
    if not known or paced or not bool(last.isfinite().all()):
        return
    size = max(float(first.abs().max()), Layout(made.model).usual_size)
    moved = float((last - first).abs().max()) * of / steps
    if moved <= _STANDS * size:
        norm = made.values.get("max_grad_norm")
        bound = "" if norm is None else f"max_grad_norm = {norm:g}, "
        raise NothingTrainedError(
            f"All {of} steps of a training would move no weight by more than {moved:.1g}, where weights are "
            f"as large as {size:.1g}: a step is as long as the clipping norm ({bound}for each record) times "
            "the learning rate. Raise one of them. Nothing was charged."
        )


def _check_sizes(largest: Mapping[str, float], norm: float | None) -> None:
    """Refuse gradients that are tiny beside the clipping norm; warn of weights of which all are 0."""
    size = math.hypot(*largest.values())
    if norm is not None and size < _ROUNDING * norm:
        raise NothingTrainedError(
            f"No gradient of a made-up record is larger than {size:.2g}, but noise is scaled to "
            f"max_grad_norm = {norm:g}, so noise alone would move the model: let the loss grow as the model "
            "gets worse (a softmax over all outputs adds up to 1 whatever it says), or choose a "
            "max_grad_norm about as large as gradients are. Nothing was charged."
        )
    if still := [name for name, each in largest.items() if each == 0.0]:
        warnings.warn(
            f"The gradient of every made-up record in {_list(still)} is 0, at first and at random weights: "
            "if it is 0 for yours, too, noise alone moves them. Leave out what has no slope (round, sign, a "
            "factor of 0), or call requires_grad_(False).",
            UntrainedWeightsWarning,
            stacklevel=4,
        )


def _check_shape(model: nn.Module, loss_of: LossOf, data: TensorData) -> None:
    """Refuse a loss that has more axes than that of records, as one whose targets are broadcast."""
    few = data.to(next(model.parameters()).device)
    x, y = (part[0] for part in data.domain.draw(*few.like, (1, 1), few.x.device))
    copied, copied_loss = fresh(model, loss_of)
    try:
        with GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]), torch.enable_grad():
            shape = tuple(copied_loss(copied, x, y).shape)
    except Exception:  # the kernel says of whatever is raised that it is raised
        return
    if len(shape) > 1:
        shapes, unlike = describe_shapes(model, x, y)
        raise InvalidInputError(
            "loss",
            shape,
            f"must be one number for one record, a tensor of shape (1,), with {shapes}",
            SAME_SHAPE
            if unlike
            else 'Sum or average over the other axes; use reduction="none" of losses.',
        )


def _has_finite_losses(model: nn.Module, loss_of: LossOf, data: TensorData) -> bool:
    """Say whether the losses of made-up records are finite; if not, real ones tell more."""
    few = data.to(next(model.parameters()).device)
    return bool(losses_of(loss_of, fresh(model)[0], _made_up(few)).isfinite().all())


def _made_up(data: TensorData) -> TensorData:
    """Return a few made-up records like those of ``data``."""
    x, y = data.domain.draw(*data.like, (1, _COMPARED), data.x.device)
    return TensorData(x[0], y[0])


def _largest_gradients(
    kernel: Kernel, first: torch.Tensor, reach: Mapping[str, float], *, enough: float
) -> dict[str, float]:
    """Return the largest norm of the gradient in each parameter, at first and at random weights.

    Random weights are looked at only until no norm is 0, and all together are ``enough``. Where a loss raises
    at random weights, parameters are left out whose gradient is 0 at the others: of these nothing is known.

    Args:
        kernel: What computes gradients.
        first: The first weights, shape ``[P]``.
        reach: What the losses reach there, from :meth:`Kernel.reach`.
        enough: A norm of all parameters.
    """
    largest = dict(reach)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_POINTS):
        if all(largest.values()) and math.hypot(*largest.values()) >= enough:
            break
        point = _SPREAD * torch.randn(first.shape, generator=generator, dtype=first.dtype)
        try:
            moved = kernel.reach(point.to(first))
        except Exception:  # such as a spread below 0, or a matrix without an inverse
            return {name: norm for name, norm in largest.items() if norm > 0.0}
        for name, norm in moved.items():
            largest[name] = max(largest.get(name, 0.0), norm)
    return largest


def _refuse_missed(
    model: nn.Module,
    loss_of: LossOf,
    data: TensorData,
    missed: Sequence[str],
    trained: Sequence[str],
) -> None:
    """Refuse weights that no loss reaches; warn of some that have no part in it."""
    few = data.to(next(model.parameters()).device)
    apart = [name for name in missed if name in _reach_of_itself(model, loss_of, few)]
    if apart:
        raise NothingTrainedError(
            f"The loss reaches {_list(apart)} of the model that build returned, but not of a copy of it, and "
            "a copy is trained: a closure, a global variable or a compiled function holds the model itself. "
            "Use the model that the loss is given, and self inside its methods. Nothing was charged."
        )
    used = _used_without_gradient(model, loss_of, few, missed)
    if used:
        raise NothingTrainedError(
            f"The loss of a record has no gradient in {_list(used)}, though it uses them, so noise alone "
            "would move them: torch.no_grad, detach, copy.deepcopy, NumPy or a comparison cuts them off. "
            "Compute the loss with torch, from the model that it is given; call requires_grad_(False) on "
            "what shall stay as it is. Nothing was charged."
        )
    if len(missed) == len(trained):
        raise NothingTrainedError(
            f"What is trained of the model, {_list(missed)}, does not reach its loss, so no training changes "
            "what it says: the loss does not use the model that it is given, or other parts of it. Compute "
            "the loss from its first argument, and train the parts that it uses. Nothing was charged."
        )
    warnings.warn(
        f"The loss of made-up records does not use {_list(missed)}: noise alone moves them. Call "
        "requires_grad_(False) on what the loss does not need, or leave it out of target_modules.",
        UntrainedWeightsWarning,
        stacklevel=4,
    )


def _reach_of_itself(model: nn.Module, loss_of: LossOf, data: TensorData) -> Mapping[str, float]:
    """Return which weights the loss reaches of the model itself, in the place of a copy."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    x, y = data.domain.draw(*data.like, (1, REACHED_RECORDS), data.x.device)
    reach: dict[str, float] = {}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]), torch.enable_grad():
        for b in range(REACHED_RECORDS):
            loss = loss_of(model, x[0, b : b + 1], y[0, b : b + 1]).sum()
            if loss.requires_grad:
                parts = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
                add_reach(reach, named, parts)
    for buffer, before in buffers:
        buffer.data.copy_(before)
    return reach


def _used_without_gradient(
    model: nn.Module, loss_of: LossOf, data: TensorData, names: Iterable[str]
) -> list[str]:
    """Return the weights, of some that no loss reaches, whose values change a loss."""
    copied, _ = fresh(model, trained=True)
    named = dict(copied.named_parameters())
    records = _made_up(data)
    before = losses_of(loss_of, copied, records)
    used = []
    generator = torch.Generator().manual_seed(0)
    for name in names:
        weight = named[name]
        stood = weight.detach().clone()
        step = torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight)
        weight.data.copy_(stood + _SPREAD * step)
        if not torch.equal(losses_of(loss_of, copied, records).nan_to_num(), before.nan_to_num()):
            used.append(name)
        weight.data.copy_(stood)
    return used


def _list(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    first = ", ".join(names[:_NAMED])
    more = len(names) - _NAMED
    return f"{first} and {more} more" if more > 0 else first
