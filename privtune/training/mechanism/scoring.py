"""Scores of trained models: a bounded metric, summed record by record, noised as the plan has it.

Each record is evaluated by itself, as a batch of one. A model that mixes the records of a batch, in
evaluation as well, then mixes nothing, and a record changes the sum by no more than its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from privtune.errors import InvalidInputError
from privtune.training.mechanism import tails
from privtune.training.mechanism.data import TensorData, synthetic
from privtune.training.mechanism.kernel import Loss
from privtune.training.mechanism.records import blames_records, find_facts, find_raising

__all__ = ["ScoreTerms", "cross_entropy", "score"]

_CHUNK = 512  # records that are evaluated at once, each by itself
_One = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ScoreTerms(Protocol):
    """What a score is, and costs: a ``ScorePlan``."""

    @property
    def records(self) -> int:
        """Declared number of validation records, which the sum is divided by."""
        ...

    @property
    def metric(self) -> str:
        """``accuracy`` or ``loss``."""
        ...

    @property
    def bound(self) -> float:
        """The most that a record adds to the sum."""
        ...

    @property
    def mechanism(self) -> str:
        """``gaussian`` or ``laplace``."""
        ...

    @property
    def standard_deviation(self) -> float:
        """Scale of the noise on the mean; 0 for a split that is declared public."""
        ...


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each record."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def score(
    plan: ScoreTerms,
    model: nn.Module,
    data: TensorData,
    *,
    rng: np.random.Generator,
    loss: Loss = cross_entropy,
) -> float:
    """Return the score of a model, noise included; higher is better.

    Args:
        plan: Metric, bound, noise, and the declared number of records.
        model: The trained model; evaluated in evaluation mode, and left as it was.
        data: The validation records; whole-number targets ``[N]`` for the accuracy.
        rng: Source of the noise, used for this score alone.
        loss: Loss of each record, for the metric ``loss``.

    Returns:
        The mean, over the declared number of records, of what each contributes: for ``accuracy`` 1
        if it is classified correctly, for ``loss`` its loss clipped to ``[0, bound]``, of which one
        that is not a number counts as the bound. −∞ for weights that are not finite.

    Raises:
        InvalidInputError: If outputs or targets have another shape than the metric takes.

    **Guarantee**: a record changes the mean by at most ``bound / records``, whatever model and loss
    do with the others, and not at all if it breaks public facts or raises by itself.
    """
    if not all(bool(p.isfinite().all()) for p in model.parameters() if p.is_floating_point()):
        return -math.inf
    with _evaluating(model), torch.no_grad():
        value = float(_contributions(plan, model, data, loss).sum()) / plan.records
    value = -value if plan.metric == "loss" else value
    draw = tails.gaussian if plan.mechanism == "gaussian" else tails.laplace
    return value + float(draw(rng.random, 1)[0]) * plan.standard_deviation


def _contributions(
    plan: ScoreTerms, model: nn.Module, data: TensorData, loss: Loss
) -> torch.Tensor:
    """Return what each record adds to the sum, in float64."""
    device = next((p.device for p in model.parameters()), data.x.device)
    accuracy = plan.metric == "accuracy"

    def outputs_of(x: torch.Tensor) -> torch.Tensor:
        # On a copy of the buffers: what a forward pass writes there (running statistics) must not
        # reach the next record.
        own = {name: buffer.clone() for name, buffer in model.named_buffers()}
        outputs: torch.Tensor = functional_call(model, own, (x,))
        return outputs

    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs, targets = outputs_of(x.unsqueeze(0)), y.unsqueeze(0)
        if accuracy:
            right = (outputs.argmax(dim=-1) == targets) & ~outputs.isnan().any(dim=-1)
            return right.squeeze(0).double()
        return _clipped(loss(outputs, targets).squeeze(0), plan.bound)

    made_up = tuple(part[0] for part in synthetic(*data.like, (1, 2), device))
    _check_shapes(outputs_of(made_up[0][:1]), made_up[1][:1], accuracy, loss)
    facts = find_facts(
        lambda x, y: outputs_of(x) if accuracy else loss(outputs_of(x), y),
        *data.like,
        device=device,
    )
    data = data.to(device).held_to(facts)
    together = _vmapped(one, *made_up)
    parts = []
    for index in torch.split(torch.arange(len(data), device=device), _CHUNK):
        x, y, lost = data.fetch(index)
        found = together(x, y) if together is not None else _one_by_one(one, x, y)
        parts.append(found if lost is None else found.masked_fill(lost, 0.0))
    return torch.cat(parts)


def _check_shapes(outputs: torch.Tensor, y: torch.Tensor, accuracy: bool, loss: Loss) -> None:
    whole = not y.is_floating_point()
    if whole and y.ndim != 1:
        raise InvalidInputError(
            "targets",
            ("N", *y.shape[1:]),
            "must be one whole number a record, shape (N,)",
            "Drop the other axes, as y.squeeze(1) does.",
        )
    if accuracy and not whole:
        raise InvalidInputError(
            "targets", str(y.dtype), "must be whole numbers, the classes that an accuracy counts"
        )
    if (accuracy or whole) and (outputs.ndim != 2 or len(outputs) != 1):
        raise InvalidInputError(
            "outputs",
            ("N", *outputs.shape[1:]),
            "must be one number a class for each record, shape (N, classes)",
        )
    if not accuracy and (shape := loss(outputs, y).shape) != (1,):
        raise InvalidInputError(
            "loss",
            tuple(shape),
            "must be one number a record: shape (1,) for one record",
            'Use reduction="none".',
        )


def _clipped(losses: torch.Tensor, bound: float) -> torch.Tensor:
    """Clip to [0, bound]; what is not a number counts as the worst, so that the bound holds."""
    return losses.double().nan_to_num(nan=bound, posinf=bound).clamp(0.0, bound)


def _vmapped(one: _One, x: torch.Tensor, y: torch.Tensor) -> _One | None:
    """Return ``one`` over many records at once; None where made-up ones then give other values."""
    many = torch.vmap(one, randomness="different")
    try:
        alone = torch.stack([one(x[i], y[i]) for i in range(len(x))])
        if not torch.allclose(many(x, y), alone, rtol=1e-4, atol=1e-6):
            return None
    except Exception as error:
        if not blames_records(error):
            raise
        return None

    def together(own: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        try:
            return many(own, targets)
        except Exception as error:

            def only(kept: torch.Tensor) -> torch.Tensor:
                kept = kept.to(own.device)
                return many(_where(kept, own, x), _where(kept, targets, y))

            lost = find_raising(error, len(own), only)
        return only(~lost).masked_fill(lost.to(own.device), 0.0)

    return together


def _one_by_one(one: _One, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    values = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for i in range(len(x)):
        try:
            values[i] = one(x[i], y[i])
        except Exception as error:
            if not blames_records(error):
                raise
    return values


def _where(kept: torch.Tensor, values: torch.Tensor, made_up: torch.Tensor) -> torch.Tensor:
    return torch.where(kept.view(-1, *(1 for _ in values.shape[1:])), values, made_up[:1])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every module of it back into its own."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
