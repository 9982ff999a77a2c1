"""Scores of trained models: bounded vectors, summed record by record, noised as the plan has it.

Each record is evaluated by itself, as a batch of one. A model that mixes the records of a batch, in
evaluation as well, then mixes nothing, and a record changes the sum by no more than its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from privtune.errors import InvalidInputError
from privtune.training.mechanism import data as records
from privtune.training.mechanism import noise as noises
from privtune.training.mechanism.estimates import ScoreEstimate
from privtune.training.mechanism.kernel import Largest, Loss, LossOf, by_record, fresh, unwritten
from privtune.training.mechanism.memory import MemoryCheck, remembering_nothing, values_of
from privtune.training.mechanism.metrics import Floats, Metric

_CHUNK = 512  # records that are evaluated at once at most, each by itself
_NO_GRADIENT = "does not require grad"
"""Of the message of ``torch.autograd.grad``, where gradients are switched off."""
_One = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Weights = dict[str, torch.Tensor]
_Terms: TypeAlias = Any  # a ScorePlan of `strategies`, from which nothing is imported here


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each record."""
    return functional.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True)
class OfRecords:
    """A loss that is given a model and a record, as the loops of users define theirs."""

    loss_of: LossOf


@dataclass(frozen=True)
class Scored:
    """A score as candidates are compared by it, and as it is shown.

    Args:
        score: Higher is better; it may lie beyond what the metric can be, where candidates would tie.
        estimate: The metric with its interval; None for weights that are not finite.
    """

    score: float
    estimate: ScoreEstimate | None = None


def score(
    plan: _Terms,
    model: nn.Module,
    data: records.TensorData,
    *,
    rng: np.random.Generator,
    loss: Loss | OfRecords = cross_entropy,
) -> Scored:
    """Return the score of a model, noise included; −∞ for weights that are not finite.

    ``rng`` is the source of the noise, used for this score alone; ``loss`` is that of the metric ``loss``.

    **Guarantee**: a record changes the sums by a vector of at most ``sensitivity``, whatever model, loss
    and metric do with the others, and not at all if it breaks public facts or raises by itself. What
    is made of the noised sums looks at nothing else.
    """
    released = released_sums(plan, model, data, rng, loss)
    if released is None:
        return Scored(-math.inf)
    metric = plan.make_metrics()[0]
    value = metric.choice(released[0], plan.noises[0])
    (estimate,) = plan.estimates(released).values()
    return Scored(-value if metric.lower_is_better else value, estimate)


def measure_each(
    plan: _Terms,
    model: nn.Module,
    data: records.TensorData,
    *,
    rng: np.random.Generator,
    loss: Loss | OfRecords = cross_entropy,
) -> dict[str, ScoreEstimate]:
    """Return every metric of a plan with its interval, by name; none for weights that are not finite.

    **Guarantee**: that of :func:`score`; the metrics share the noise multiplier, as ``plan.noises`` says.
    """
    released = released_sums(plan, model, data, rng, loss)
    return {} if released is None else dict(plan.estimates(released))


def released_sums(
    plan: _Terms,
    model: nn.Module,
    data: records.TensorData,
    rng: np.random.Generator,
    loss: Loss | OfRecords = cross_entropy,
) -> list[Floats] | None:
    """Return the noised sums of each metric, all that a score releases; None for weights not finite."""
    if not all(bool(p.isfinite().all()) for p in model.parameters() if p.is_floating_point()):
        return None
    law = noises.exact_gaussian if plan.mechanism == "gaussian" else noises.exact_laplace
    draw = partial(law, rng.random)
    released = []
    for metric, noise in zip(plan.make_metrics(), plan.noises, strict=True):
        with evaluating(model), torch.no_grad(), unwritten(model):
            sums = _sums(metric, model, data, loss)
        released.append(metric.release(sums, noise, draw, records=plan.records))
    return released


def _sums(
    metric: Metric, model: nn.Module, data: records.TensorData, loss: Loss | OfRecords
) -> Floats:
    """Return the sums of what each record adds, in float64, shape ``[d]``."""
    device = next((p.device for p in model.parameters()), data.x.device)
    units = bool(data.unit)
    first = data.domain.draw(*data.like, (1, 1), device)[0][0]
    outputs_of, loss_of = _passes(metric, model, loss, first)

    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return what a record adds; of a unit, the mean over its rows."""
        outputs, targets = outputs_of(x.unsqueeze(0)), y.unsqueeze(0)
        if metric.takes == "any":
            there = torch.ones(1, dtype=torch.bool, device=x.device)
        elif units:
            outputs, targets, there = records.rows_of(outputs, targets)
        elif metric.takes == "numbers":
            there = targets.isfinite()
        else:
            there = (targets >= 0) & (targets < outputs.shape[1])
        parts = metric.parts(outputs, targets, loss_of)
        return _tallied(parts, there) if metric.is_tally else _added(metric, parts, there)

    domain = records.find_domain(lambda x, y: one(x[0], y[0]), data, device=device)
    drawn = domain.draw(*data.like, (1, 2), device)
    made_up = tuple(part[0] for part in drawn)
    x, y = (part[:1] for part in made_up)
    if isinstance(loss, OfRecords):
        _check_losses(metric, x, y, loss_of)
    else:
        _check_shapes(outputs_of(x), y, metric, loss, units=units)
    facts = records.find_facts(
        lambda x, y: one(x[0], y[0]), *data.like, device=device, domain=domain
    )
    data = data.to(device).held_to(facts)
    together = _vmapped(one, *made_up)
    with Largest() as seen:
        of_one = torch.zeros_like(one(x[0], y[0]))
    collected: list[torch.Tensor] = []
    check = _memory_check(metric, model, loss, (outputs_of, one), made_up)
    with remembering_nothing(check):
        for index in torch.split(torch.arange(len(data), device=device), seen.at_once(_CHUNK)):
            x, y, unusable = data.fetch(index)
            parts = _one_by_one(one, x, y, of_one) if together is None else together(x, y)
            if unusable is not None:
                parts = parts.masked_fill(unusable.unsqueeze(1), 0.0)
            collected.append(parts.cpu() if metric.is_tally else parts.sum(dim=0).cpu())
    if metric.is_tally:
        return _tally(torch.cat(collected) if collected else of_one.cpu().unsqueeze(0)[:0])
    sums: Floats = torch.stack([of_one.cpu(), *collected]).sum(dim=0).numpy()
    return sums


def _added(metric: Metric, parts: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rows there are of the vectors that they add, shape ``[d]``."""
    # Whatever the metric says of itself, this is what is charged.
    order = 1 if metric.mechanism == "laplace" else 2
    lengths = torch.linalg.vector_norm(parts, ord=order, dim=1, keepdim=True)
    held = parts * (metric.norm / lengths.clamp(min=metric.norm))
    total: torch.Tensor = held.where(there.unsqueeze(1), 0.0).sum(dim=0)
    return total / there.sum().clamp(min=1)


def _tallied(parts: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return the number and the class of each row, then its weight, shape ``[3 rows]``.

    The weights of a record add up to 1 at most, whatever the metric says of itself.
    """
    weights = there.double() / there.sum().clamp(min=1)
    numbers = parts[:, 0].double().where(there, 0.0)
    return torch.cat([numbers, parts[:, 1].double(), weights])


def _tally(parts: torch.Tensor) -> Floats:
    """Return the different numbers of rows, and the weights of each class that have them, ``[3, M]``."""
    numbers, classes, weights = (part.flatten().numpy() for part in parts.double().chunk(3, dim=1))
    counted = weights > 0.0
    different, places = np.unique(numbers[counted], return_inverse=True)
    rows = [different]
    for number in (1.0, 0.0):
        of_class = weights[counted] * (classes[counted] == number)
        rows.append(np.bincount(places, of_class, minlength=len(different)))
    return np.stack(rows)


def _memory_check(
    metric: Metric,
    model: nn.Module,
    loss: Loss | OfRecords,
    passes: tuple[Callable[[torch.Tensor], torch.Tensor], _One],
    made_up: tuple[torch.Tensor, ...],
) -> MemoryCheck:
    """Return the check that a score keeps nothing: it gives made-up records the same before and after."""
    outputs_of, one = passes

    def run(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        # Outputs have more digits than what a metric counts of them.
        return [outputs_of(x), one(x[0], y[0])]

    inputs, targets = (torch.split(part, 1) for part in made_up)
    evaluate = partial(values_of, run, list(zip(inputs, targets, strict=True)))
    function = loss.loss_of if isinstance(loss, OfRecords) else loss
    return MemoryCheck("The score", (function, model, *metric.functions), evaluate)


def _passes(
    metric: Metric, model: nn.Module, loss: Loss | OfRecords, x: torch.Tensor
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Loss]:
    """Return what gives the outputs of records, and the loss of these; each sees a copy of the model."""

    def passed(x: torch.Tensor, weights: _Weights) -> torch.Tensor:
        # On a copy: what a forward pass writes (running statistics, a largest value) must not reach
        # the next record.
        copied, _ = fresh(model)
        outputs = functional_call(copied, weights, (x,)) if weights else copied(x)
        if not isinstance(outputs, torch.Tensor):
            raise InvalidInputError(
                "outputs",
                type(outputs).__name__,
                f"must be a tensor for metric {metric.name}",
                "Return the logits from forward, or score by a function: privtune.Score(function).",
            )
        if metric.takes in ("classes", "two") and outputs.ndim >= 2 and outputs.shape[-1] == 1:
            # One logit as two, of which a softmax is the sigmoid of the one.
            outputs = torch.cat([torch.zeros_like(outputs), outputs], dim=-1)
        return outputs

    if isinstance(loss, OfRecords):
        given = loss.loss_of

        def of_record(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            copied, own = fresh(model, given)
            try:
                value: torch.Tensor = own(copied, x, y)
            except RuntimeError as error:
                if _NO_GRADIENT not in str(error):
                    raise
                copied, own = fresh(model, given)
                with torch.enable_grad():  # a loss that takes gradients of its own
                    value = own(copied, x, y).detach()
            if not isinstance(value, torch.Tensor):
                raise InvalidInputError(
                    "score",
                    type(value).__name__,
                    "must return a tensor of shape (1,) for one record",
                )
            return value

        # The inputs stand for outputs: the loss passes them through the model by itself.
        return torch.Tensor.clone, of_record
    return partial(passed, weights=_channels_last(model, partial(passed, x))), loss


def _channels_last(model: nn.Module, outputs: Callable[[_Weights], torch.Tensor]) -> _Weights:
    """Return the weights of plain convolutions on CPU with channels last, which pool nine times faster."""
    found = {}
    for name, part in model.named_modules():
        if type(part) is nn.Conv2d and part.weight.device.type == "cpu":
            weight = part.weight.detach().contiguous(memory_format=torch.channels_last)
            _, channels, height, width = weight.shape
            if channels == 1:  # both layouts are one, and strides say which is meant
                weight = weight.as_strided(weight.shape, (height * width, 1, width, 1))
            found[f"{name}.weight" if name else "weight"] = weight
    if not found:
        return {}
    plain = outputs({})
    try:
        same = torch.allclose(outputs(found), plain, rtol=1e-3, atol=1e-4, equal_nan=True)
    except Exception:
        return {}  # a view asks for channels first
    return found if same else {}


def _check_shapes(
    outputs: torch.Tensor, y: torch.Tensor, metric: Metric, loss: Loss, *, units: bool
) -> None:
    if units:
        if metric.takes == "any":
            return
        outputs, y = outputs[:, 0], y[:, 0]
    whole = not y.is_floating_point()
    of_classes = metric.takes in ("classes", "two")
    shape = ("N", *outputs.shape[1:])
    if (of_classes or whole) and y.ndim != 1:
        raise InvalidInputError(
            "targets",
            ("N", *y.shape[1:]),
            "must be one whole number a record, shape (N,)",
            "Drop the other axes, as y.squeeze(1) does.",
        )
    if of_classes and not whole:
        raise InvalidInputError(
            "targets",
            str(y.dtype),
            f"must be whole numbers, the classes that metric {metric.name} counts",
        )
    if metric.takes == "numbers":
        if y.ndim != 1 or outputs.numel() != len(y):
            raise InvalidInputError("outputs", shape, "must be one number a record, as targets are")
        return
    if (of_classes or whole) and (outputs.ndim != 2 or len(outputs) != 1):
        raise InvalidInputError(
            "outputs", shape, "must be one number a class for each record, shape (N, classes)"
        )
    if metric.takes == "two" and outputs.shape[1] != 2:
        raise InvalidInputError(
            "outputs", shape, f"must be of two classes, shape (N, 2), for metric {metric.name}"
        )
    if metric.takes == "any":
        _check_losses(metric, outputs, y, loss)


def _check_losses(metric: Metric, outputs: torch.Tensor, y: torch.Tensor, loss: Loss) -> None:
    # A mean adds a vector for each number: the last axis is of the vector.
    *numbers, _ = metric.parts(outputs, y, loss).shape
    if numbers != [1]:
        own = metric.name in ("cost", "value")
        raise InvalidInputError(
            "score" if own else "loss",
            tuple(numbers),
            "must be one number a record: shape (1,) for one record",
            "Return it without a mean or sum over records." if own else 'Use reduction="none".',
        )


def _vmapped(one: _One, x: torch.Tensor, y: torch.Tensor) -> _One | None:
    """Return ``one`` over many records at once; None where made-up ones then give other values."""
    many = by_record(one, randomness="different")
    try:
        alone = torch.stack([one(x[i], y[i]) for i in range(len(x))])
        if not torch.allclose(many(x, y), alone, rtol=1e-4, atol=1e-6):
            return None
    except Exception as error:
        if not records.blames_records(error):
            raise
        return None

    def together(own: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        def only(kept: torch.Tensor) -> torch.Tensor:
            kept = kept.to(own.device)
            return many(records.where(kept, own, x[:1]), records.where(kept, targets, y[:1]))

        try:
            return many(own, targets)
        except Exception as error:
            unusable = records.find_unusable(error, len(own), only)
        return only(~unusable).masked_fill(unusable.to(own.device).unsqueeze(1), 0.0)

    return together


def _one_by_one(one: _One, x: torch.Tensor, y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what each record adds, shape ``[N, d]``; nothing where a record raises."""
    found = torch.zeros(len(x), *like.shape, dtype=like.dtype, device=like.device)
    for row, own, target in zip(found, x, y, strict=True):
        try:
            row.copy_(one(own, target))
        except Exception as error:
            if not records.blames_records(error):
                raise
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every module of it back into its own."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
