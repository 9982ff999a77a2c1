"""Checks that losses of made-up records depend on the trained weights, and that steps move these.

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
from privtune.names import first_names
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
    from privtune.training.engine.train import TrainableCandidate
    from privtune.training.mechanism.kernel import Kernel, LossOf

_COMPARED = 4  # made-up records whose losses a weight may change
_POINTS = 3  # random weights at which a gradient that is 0 at the first ones is looked at
_SPREAD = 0.3  # of random weights
_ROUNDING = 1e-5  # of the clipping norm: gradients below are rounding errors, or drown in the noise
_OFFSET = (
    "Let labels begin at 0 in the data where the loss subtracts an offset: torch ignores -100. "
)
_STANDS = 1e-7  # of the size of weights: a training that moves none by more leaves them as they are


class NothingTrainedError(PrivTuneError):
    """A training would leave weights as they are, or let noise alone move them."""


class UntrainedWeightsWarning(UserWarning):
    """Some weights have no effect on the loss, or a slope of 0: noise alone would move them."""


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
    names = list(kernel.layout.shapes)
    missed = [name for name in names if name not in reach]
    if missed:
        _refuse_missed(model, loss_of, data, missed, names)
    enough = _ROUNDING * (norm or 0.0)
    largest = _largest_gradients(kernel, first, reach, enough=enough)
    idle = not any(largest.values())
    if idle and _has_finite_losses(model, loss_of, data):
        offset = "" if data.y.is_floating_point() else _OFFSET
        raise NothingTrainedError(
            "What is trained of the model does not reach its loss, so no training changes what it says: "
            "the gradient of every made-up record is 0, or no number. Leave out what has no slope: round, "
            "sign, argmax, a comparison, a softmax over the axis of records, and losses that compare records "
            "(Cox, ranking, contrastive), since each record is alone. A cross entropy needs an output for "
            f"each class. {offset}Nothing was charged."
        )
    if not idle:
        _check_sizes(largest, norm)


def check_moved(
    first: torch.Tensor, last: torch.Tensor, candidate: TrainableCandidate, *, steps: int, of: int
) -> None:
    """Refuse a candidate whose steps are too short to move its weights in all of a training.

    Methods that find their own rates begin with short steps, so they are left alone.

    Args:
        first: The first weights, shape ``[P]``.
        last: Those after a few steps, noise included.
        candidate: What was trained.
        steps: How many steps were taken.
        of: How many steps the training has.

    Raises:
        NothingTrainedError: If weights would stay as they are.
    """
    values = candidate.values
    has_rate = {"learning_rate", "max_grad_norm"} <= values.keys()
    if candidate.optimizer is None and not has_rate:
        return
    # A schedule may begin with short steps, too.
    if candidate.scheduler is not None or "schedule" in values or "warmup" in values:
        return
    if not bool(last.isfinite().all()):
        return
    usual_size = Layout(candidate.model).usual_size
    size = max(_largest_entry(first), usual_size)
    moved = _largest_entry(last - first) * of / steps
    if moved <= _STANDS * size:
        norm = values.get("max_grad_norm")
        bound = "" if norm is None else f"max_grad_norm = {norm:g}, "
        raise NothingTrainedError(
            f"All {of} steps of a training would move no weight by more than {moved:.1g}, where weights are "
            f"as large as {size:.1g}: a step is as long as the clipping norm ({bound}for each record) times "
            "the learning rate. Raise one of them. Nothing was charged."
        )


def _largest_entry(weights: torch.Tensor) -> float:
    """Return the largest absolute value of some weights."""
    return float(weights.abs().max())


def _check_sizes(largest: Mapping[str, float], norm: float | None) -> None:
    """Refuse gradients that are tiny beside the clipping norm; warn of parameters with gradients of 0."""
    size = math.hypot(*largest.values())
    if norm is not None and size < _ROUNDING * norm:
        raise NothingTrainedError(
            f"No gradient of a made-up record is larger than {size:.2g}, but noise is scaled to "
            f"max_grad_norm = {norm:g}, so noise alone would move the model: let the loss grow as the model "
            "gets worse (a softmax over all outputs adds up to 1 whatever it says), or choose a "
            "max_grad_norm about as large as gradients are. Nothing was charged."
        )
    still = [name for name, gradient in largest.items() if gradient == 0.0]
    if still:
        warnings.warn(
            f"The gradient of every made-up record in {first_names(still)} is 0, at first and at random "
            "weights: if it is 0 for yours, too, noise alone moves them. Leave out what has no slope (round, "
            "sign, a factor of 0), or call requires_grad_(False).",
            UntrainedWeightsWarning,
            stacklevel=4,
        )


def _check_shape(model: nn.Module, loss_of: LossOf, data: TensorData) -> None:
    """Refuse a loss of one record that has more than one axis, as if its targets were broadcast."""
    one = _draw_records(_beside(model, data), 1)
    x = one.x
    y = one.y
    copied, copied_loss = fresh(model, loss_of)
    try:
        with GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]), torch.enable_grad():
            loss = copied_loss(copied, x, y)
            shape = tuple(loss.shape)
    except Exception:  # the kernel says of whatever is raised that it is raised
        return
    if len(shape) <= 1:
        return
    shapes, unlike = describe_shapes(model, x, y)
    remedy = 'Sum or average over the other axes; use reduction="none" of losses.'
    if unlike:
        remedy = SAME_SHAPE
    raise InvalidInputError(
        "loss",
        shape,
        f"must be one number for one record, a tensor of shape (1,), with {shapes}",
        remedy,
    )


def _has_finite_losses(model: nn.Module, loss_of: LossOf, data: TensorData) -> bool:
    """Return whether the losses of made-up records are finite."""
    few = _draw_records(_beside(model, data), _COMPARED)
    copied, _ = fresh(model)
    losses = losses_of(loss_of, copied, few)
    return bool(losses.isfinite().all())


def _beside(model: nn.Module, data: TensorData) -> TensorData:
    """Return data moved to the device of a model."""
    weight = next(model.parameters())
    return data.to(weight.device)


def _draw_records(data: TensorData, count: int) -> TensorData:
    """Return ``count`` made-up records with the shapes and types of ``data``, drawn from its domain."""
    x, y = data.domain.draw(*data.like, (1, count), data.x.device)
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
        norms = largest.values()
        if all(norms) and math.hypot(*norms) >= enough:
            break
        direction = torch.randn(first.shape, generator=generator, dtype=first.dtype)
        point = _SPREAD * direction
        try:
            reach_there = kernel.reach(point.to(first))
        except Exception:  # such as a spread below 0, or a matrix without an inverse
            return {name: norm for name, norm in largest.items() if norm > 0.0}
        for name, norm in reach_there.items():
            before = largest.get(name, 0.0)
            largest[name] = max(before, norm)
    return largest


def _refuse_missed(
    model: nn.Module,
    loss_of: LossOf,
    data: TensorData,
    missed: Sequence[str],
    names: Sequence[str],
) -> None:
    """Refuse weights that are used without a gradient, or if all are unused; warn of some unused ones.

    Args:
        model: The model with its first weights.
        loss_of: The loss of one record.
        data: Made-up records.
        missed: The weights that no loss of the kernel's copy reaches, at least one.
        names: All weights that are trained.
    """
    few = _beside(model, data)
    reach = _reach_of_itself(model, loss_of, few)
    apart = [name for name in missed if name in reach]
    if apart:
        raise NothingTrainedError(
            f"The loss reaches {first_names(apart)} of the model that build returned, but not of a copy of "
            "it, and a copy is trained: a closure, a global variable or a compiled function holds the model "
            "itself. Use the model that the loss is given, and self inside its methods. Nothing was charged."
        )
    used = _used_without_gradient(model, loss_of, few, missed)
    if used:
        raise NothingTrainedError(
            f"The loss of a record has no gradient in {first_names(used)}, though it uses them, so noise "
            "alone would move them: torch.no_grad, detach, copy.deepcopy, NumPy or a comparison cuts them "
            "off. Compute the loss with torch, from the model that it is given; call requires_grad_(False) "
            "on what shall stay as it is. Nothing was charged."
        )
    if len(missed) == len(names):
        raise NothingTrainedError(
            f"What is trained of the model, {first_names(missed)}, does not reach its loss, so no training "
            "changes what it says: the loss does not use the model that it is given, or other parts of it. "
            "Compute the loss from its first argument, and train the parts that it uses. Nothing was charged."
        )
    warnings.warn(
        f"The loss of made-up records does not use {first_names(missed)}: noise alone moves them. Call "
        "requires_grad_(False) on what the loss does not need, or leave it out of target_modules.",
        UntrainedWeightsWarning,
        stacklevel=4,
    )


def _reach_of_itself(
    model: nn.Module,
    loss_of: LossOf,
    data: TensorData,
) -> Mapping[str, float]:
    """Return by name the weights that the loss reaches in the model itself, where training uses a copy.

    Buffers that the loss changes are put back: the model is the user's, and is trained after this.
    """
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    records = _draw_records(data, REACHED_RECORDS)
    reach: dict[str, float] = {}
    weights = list(parameters.values())
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]), torch.enable_grad():
        for record in range(REACHED_RECORDS):
            x = records.x[record : record + 1]
            y = records.y[record : record + 1]
            loss = loss_of(model, x, y).sum()
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
                add_reach(reach, parameters, gradients)
    for buffer, before in buffers:
        buffer.data.copy_(before)
    return reach


def _used_without_gradient(
    model: nn.Module, loss_of: LossOf, data: TensorData, names: Iterable[str]
) -> list[str]:
    """Return the parameters that change a loss when they are moved, though no gradient reaches them.

    Each is moved by a random step, alone, and the losses are compared.
    """
    copied, _ = fresh(model, trained=True)
    parameters = dict(copied.named_parameters())
    records = _draw_records(data, _COMPARED)
    losses_before = losses_of(loss_of, copied, records).nan_to_num()
    used = []
    generator = torch.Generator().manual_seed(0)
    for name in names:
        weight = parameters[name]
        value = weight.detach().clone()
        direction = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        step = _SPREAD * direction.to(weight)
        weight.data.copy_(value + step)
        losses = losses_of(loss_of, copied, records).nan_to_num()
        if not torch.equal(losses, losses_before):
            used.append(name)
        weight.data.copy_(value)
    return used
