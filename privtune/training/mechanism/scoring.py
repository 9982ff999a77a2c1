"""Scoring of trained models: each record's bounded vector, summed and noised as the plan says.

Each record is evaluated by itself, as a batch of one. A model that mixes the records of a batch, in
evaluation as well, then mixes nothing, and a record changes the sum by no more than its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from privtune.training.mechanism.estimates import ScoreEstimate, SumNoise
from privtune.training.mechanism.kernel import Largest, Loss, LossOf, by_record, fresh, unwritten
from privtune.training.mechanism.made_up import Domain
from privtune.training.mechanism.memory import MemoryCheck, remembering_nothing, values_of
from privtune.training.mechanism.metrics import OF_CLASSES, Floats, Metric
from privtune.training.mechanism.plain_models import made_up_like, structure_of

_CHUNK = 512  # records that are evaluated at once at most, each by itself
_WAYS = 16  # kinds of scores that are kept
_NO_GRADIENT = "does not require grad"
"""Of the message of ``torch.autograd.grad``, where gradients are switched off."""
_One = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Weights = dict[str, torch.Tensor]
_Terms: TypeAlias = Any  # a ScorePlan of `strategies`, from which nothing is imported here


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each record, shape ``[N]``."""
    return functional.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True)
class LossOfRecords:
    """A marker for a loss that takes a model and a record, in place of outputs and targets.

    A class of its own, since a function of two arguments and one of three cannot be told apart by
    what they are.
    """

    loss_of: LossOf


@dataclass(frozen=True)
class Scored:
    """A score as a number to compare candidates by, and as an estimate to show.

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
    loss: Loss | LossOfRecords = cross_entropy,
) -> Scored:
    """Return the noisy score of a model; −∞ if its weights are not finite.

    ``rng`` is the source of the noise, used for this score alone; ``loss`` is that of the metric ``loss``.

    **Guarantee**: a record changes the sums by a vector of at most ``sensitivity``, whatever model, loss
    and metric do with the others, and not at all if it breaks public facts or raises by itself. What
    is made of the noised sums looks at nothing else.
    """
    released = released_sums(plan, model, data, rng, loss)
    if released is None:
        return Scored(-math.inf)
    metric, *_ = plan.make_metrics()
    value = metric.choice(released[0], plan.noises[0])
    (estimate,) = plan.estimates(released).values()
    if metric.lower_is_better:
        value = -value
    return Scored(value, estimate)


def measure_each(
    plan: _Terms,
    model: nn.Module,
    data: records.TensorData,
    *,
    rng: np.random.Generator,
    loss: Loss | LossOfRecords = cross_entropy,
) -> dict[str, ScoreEstimate]:
    """Return the noisy estimate of every metric of a plan, by name; empty if weights are not finite.

    **Guarantee**: that of :func:`score`; the metrics share the noise multiplier, as ``plan.noises`` says.
    """
    released = released_sums(plan, model, data, rng, loss)
    if released is None:
        return {}
    return dict(plan.estimates(released))


def fit_temperature(
    plan: _Terms,
    model: nn.Module,
    data: records.TensorData,
    *,
    rng: np.random.Generator,
) -> float | None:
    """Return the temperature to divide a model's logits by, from noised sums over held-out records.

    None where the plan asks for none, for weights that are not finite, and where the sums do not tell.

    **Guarantee**: that of :func:`score`, at the plan's ``calibration_noise``: with the metrics of the plan
    it is one release of the noise multiplier.
    """
    metric = plan.calibrator
    if metric is None or not _is_finite(model):
        return None
    noise = plan.calibration_noise
    sums = _released(
        plan,
        metric,
        noise,
        model,
        data,
        rng=rng,
        loss=cross_entropy,
    )
    temperature: float | None = metric.temperature(sums, noise, records=plan.records)
    return temperature


def released_sums(
    plan: _Terms,
    model: nn.Module,
    data: records.TensorData,
    rng: np.random.Generator,
    loss: Loss | LossOfRecords = cross_entropy,
) -> list[Floats] | None:
    """Return the noised sums of each metric of a plan; None if the model's weights are not finite.

    In float64, a vector for each metric, with noise already in it: no caller gets the exact sums.
    """
    if not _is_finite(model):
        return None
    sums = []
    for metric, noise in zip(plan.make_metrics(), plan.noises, strict=True):
        sums.append(_released(plan, metric, noise, model, data, rng=rng, loss=loss))
    return sums


def _is_finite(model: nn.Module) -> bool:
    """Return whether all weights of a model are finite.

    That a training diverged follows from its weights, which are a release: it costs nothing to say
    so.
    """
    floating = (p for p in model.parameters() if p.is_floating_point())
    return all(bool(weight.isfinite().all()) for weight in floating)


def _released(
    plan: _Terms,
    metric: Metric,
    noise: SumNoise,
    model: nn.Module,
    data: records.TensorData,
    *,
    rng: np.random.Generator,
    loss: Loss | LossOfRecords,
) -> Floats:
    """Return the noised sums of one metric.

    Noise is exact in its tails and drawn from the score's own source. The exact sums live in this
    call alone.
    """
    law = noises.exact_gaussian if plan.mechanism == "gaussian" else noises.exact_laplace
    with evaluating(model), torch.no_grad(), unwritten(model):
        sums = _sums(metric, model, data, loss)
    draw = partial(law, rng.random)
    return metric.release(sums, noise, draw, records=plan.records)


def _sums(
    metric: Metric,
    model: nn.Module,
    data: records.TensorData,
    loss: Loss | LossOfRecords,
) -> Floats:
    """Return the exact sums of one metric over the data, in float64, shape ``[d]``.

    The order is: find what numbers the loss accepts, check shapes on made-up records, hold the data
    to public facts, try whether records may pass together, then sum. Private records come last, so
    that an error that a user meets is one of a made-up record and tells nothing.

    A record that raises, or that breaks public facts, adds zeros.

    Args:
        metric: Says what a record adds, and the bound of that.
        model: In evaluation mode.
        data: Records to score.
        loss: Of outputs and targets, or of a model and a record.

    Returns:
        Sums ``[d]``; of a tally, different numbers and the weights of both classes, ``[3, M]``.
    """
    devices = (part.device for part in model.parameters())
    device = next(devices, data.x.device)
    kind = _kind_of(metric, model, data, device)
    passes = _pass_of(metric, model, data, loss, device)
    if kind is None:
        way = _find_way(metric, passes, data, loss, device)
    else:
        way = _known_way(kind, metric, model, data, device)
    made_up = _made_up(way.domain, data, device)
    data = data.to(device).held_to(way.facts)
    if way.is_together:
        add = _together(passes.one, *made_up)
    else:
        add = _one_by_one(passes.one, way.like)
    collected: list[torch.Tensor] = []
    every = torch.arange(len(data), device=device)
    check: AbstractContextManager[None] = nullcontext()
    if kind is None:  # else no user's code is there to keep anything
        check = remembering_nothing(_memory_check(metric, model, loss, passes, made_up))
    with check:
        for index in torch.split(every, way.at_once):
            x, y, unusable = data.fetch(index)
            parts = add(x, y)
            if unusable is not None:
                parts = parts.masked_fill(unusable.unsqueeze(1), 0.0)
            if not metric.is_tally:
                parts = parts.sum(dim=0)
            collected.append(parts.cpu())
    of_one = way.like.cpu()
    if metric.is_tally:
        no_parts = of_one.unsqueeze(0)[:0]
        return _tally(torch.cat(collected) if collected else no_parts)
    total = torch.stack([of_one, *collected]).sum(dim=0)
    sums: Floats = total.numpy()
    return sums


@dataclass(frozen=True, eq=False)
class _Pass:
    """The functions by which records pass through a model.

    Attributes:
        outputs_of: Gives the outputs of records ``[B, ...]``.
        loss_of: Gives the losses of outputs and targets.
        one: Gives the vector that a record adds, ``[d]``; for a unit, the mean over its rows.
    """

    outputs_of: Callable[[torch.Tensor], torch.Tensor]
    loss_of: Loss
    one: _One

    def one_of_batch(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the vector that the single record of a batch adds."""
        return self.one(x[0], y[0])


def _pass_of(
    metric: Metric,
    model: nn.Module,
    data: records.TensorData,
    loss: Loss | LossOfRecords,
    device: torch.device,
) -> _Pass:
    """Return the functions by which records pass through a model; each pass runs a copy of it."""
    units = bool(data.unit)
    inputs_of_one, _ = data.domain.draw(*data.like, (1, 1), device)
    outputs_of, loss_of = _passes(metric, model, loss, inputs_of_one[0])

    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the vector that a record adds, ``[d]``; for a unit, the mean over its rows.

        A target that is no class, or no number, is one that is not there: it adds nothing.
        """
        outputs = outputs_of(x.unsqueeze(0))
        targets = y.unsqueeze(0)
        if metric.takes == "any":
            presence = torch.ones(1, dtype=torch.bool, device=x.device)
        elif units:
            outputs, targets, presence = records.rows_of(outputs, targets)
        elif metric.takes == "numbers":
            presence = targets.isfinite()
        else:
            presence = (targets >= 0) & (targets < outputs.shape[1])
        parts = metric.parts(outputs, targets, loss_of)
        if metric.is_tally:
            return _tallied(parts, presence)
        return _added(metric, parts, presence)

    return _Pass(outputs_of, loss_of, one)


@dataclass(frozen=True, eq=False)
class _Way:
    """How records are scored by one metric, found on made-up records alone.

    Attributes:
        domain: The made-up numbers that model and loss accept.
        facts: The ranges of a record's whole numbers.
        is_together: Whether many records pass at once by vmap.
        at_once: How many records at most.
        like: Zeros of the shape of what a record adds, ``[d]``.
    """

    domain: Domain
    facts: records.RecordFacts
    is_together: bool
    at_once: int
    like: torch.Tensor


_ways: dict[Hashable, _Way] = {}
"""By what a score hangs on beside numbers: candidates of one study are alike, and there are many."""


def _find_way(
    metric: Metric,
    passes: _Pass,
    data: records.TensorData,
    loss: Loss | LossOfRecords,
    device: torch.device,
) -> _Way:
    """Find how records are scored, by trying made-up ones; refuse shapes that the metric cannot take."""
    one = passes.one
    domain = records.find_domain(passes.one_of_batch, data, device=device)
    x, y = _made_up(domain, data, device)
    if isinstance(loss, LossOfRecords):
        _check_losses(metric, x[:1], y[:1], passes.loss_of)
    else:
        _check_shapes(passes.outputs_of(x[:1]), y[:1], metric, loss, units=bool(data.unit))
    facts = records.find_facts(
        passes.one_of_batch,
        *data.like,
        device=device,
        domain=domain,
    )
    is_together = _agrees_by_vmap(one, x, y)
    with Largest() as largest:
        like = torch.zeros_like(one(x[0], y[0]))
    return _Way(domain, facts, is_together, largest.at_once(_CHUNK), like)


def _known_way(
    kind: Hashable,
    metric: Metric,
    model: nn.Module,
    data: records.TensorData,
    device: torch.device,
) -> _Way:
    """Return how records are scored by models of a kind; found once, with weights that are always the same.

    No trained weight has a part in it: else the score of one candidate would hang on another one.
    """
    way = _ways.get(kind)
    if way is None:
        passes = _pass_of(metric, made_up_like(model), data, cross_entropy, device)
        way = _find_way(metric, passes, data, cross_entropy, device)
        for oldest in list(_ways)[: len(_ways) + 1 - _WAYS]:
            _ways.pop(oldest, None)
        _ways[kind] = way
    return way


def _kind_of(
    metric: Metric,
    model: nn.Module,
    data: records.TensorData,
    device: torch.device,
) -> Hashable | None:
    """Return all that scoring hangs on beside numbers of weights and records; None if a user's code is in it.

    Model and metric are torch's and PrivTune's own then, which keep nothing between passes, and the metric
    reads no loss.
    """
    is_ours = type(metric).__module__.startswith("privtune.")
    if metric.reads != "outputs" or metric.functions or not is_ours:
        return None
    structure = structure_of(model)
    if structure is None:
        return None
    x, y = data.like
    shapes = (x.shape, x.dtype, y.shape, y.dtype)
    kind = (structure, type(metric), metric, shapes, data.domain, bool(data.unit), device)
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def _made_up(
    domain: Domain,
    data: records.TensorData,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two made-up records of a domain, inputs ``[2, ...]`` and targets ``[2, ...]``."""
    xs, ys = domain.draw(*data.like, (1, 2), device)
    return xs[0], ys[0]


def _added(metric: Metric, parts: torch.Tensor, presence: torch.Tensor) -> torch.Tensor:
    """Return the mean of the vectors of all present rows, each clipped to the metric's norm, ``[d]``.

    Each vector is scaled down to the metric's norm (L1 for Laplace noise, else L2), and a mean of
    such vectors is no longer than that.
    """
    # Whatever the metric says of itself, this is what is charged.
    order = 1 if metric.mechanism == "laplace" else 2
    lengths = torch.linalg.vector_norm(
        parts,
        ord=order,
        dim=1,
        keepdim=True,
    )
    bounded = parts * (metric.norm / lengths.clamp(min=metric.norm))
    bounded = bounded.where(presence.unsqueeze(1), 0.0)
    total: torch.Tensor = bounded.sum(dim=0)
    rows = presence.sum().clamp(min=1)
    return total / rows


def _tallied(parts: torch.Tensor, presence: torch.Tensor) -> torch.Tensor:
    """Return the sorting number, the class and the weight of each row, joined to shape ``[3 rows]``.

    The weights of a record add up to 1 at most, whatever the metric says of itself.
    """
    rows = presence.sum().clamp(min=1)
    weights = presence.double() / rows
    numbers = parts[:, 0].double().where(presence, 0.0)
    classes = parts[:, 1].double()
    return torch.cat([numbers, classes, weights])


def _tally(parts: torch.Tensor) -> Floats:
    """Return the distinct sorting numbers, and the total weight of each class at each, ``[3, M]``.

    For metrics of order, such as the AUC: ``Metric.release`` adds noise to counts of these.
    """
    thirds = parts.double().chunk(3, dim=1)
    numbers, classes, weights = (third.flatten().numpy() for third in thirds)
    is_row = weights > 0.0
    different, places = np.unique(numbers[is_row], return_inverse=True)
    rows = [different]
    for number in (1.0, 0.0):
        is_of_class = classes[is_row] == number
        of_class = weights[is_row] * is_of_class
        rows.append(np.bincount(places, of_class, minlength=len(different)))
    return np.stack(rows)


def _memory_check(
    metric: Metric,
    model: nn.Module,
    loss: Loss | LossOfRecords,
    passes: _Pass,
    made_up: tuple[torch.Tensor, ...],
) -> MemoryCheck:
    """Return a check that scoring gives the same for made-up records before and after real ones.

    See ``memory``: a score that counts its calls would let one record change what another adds.
    """

    def run(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        # Outputs have more digits than what a metric counts of them.
        return [passes.outputs_of(x), passes.one_of_batch(x, y)]

    inputs = torch.split(made_up[0], 1)
    targets = torch.split(made_up[1], 1)
    pairs = list(zip(inputs, targets, strict=True))
    evaluate = partial(values_of, run, pairs)
    function = loss.loss_of if isinstance(loss, LossOfRecords) else loss
    return MemoryCheck("The score", (function, model, *metric.functions), evaluate)


def _passes(
    metric: Metric,
    model: nn.Module,
    loss: Loss | LossOfRecords,
    x: torch.Tensor,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Loss]:
    """Return a function for the outputs of records and one for their losses, each on model copies.

    Args:
        metric: Says whether outputs are logits of classes.
        model: Copied for each pass.
        loss: If it takes a model, outputs are not computed here.
        x: A made-up record, on which a faster layout is tried.

    Returns:
        Outputs of records ``[B, ...]``, and the loss of outputs and targets.
    """

    def passed(x: torch.Tensor, weights: _Weights) -> torch.Tensor:
        """Return the outputs of records ``[B, ...]``, with ``weights`` in place of the model's if given."""
        # On a copy: what a forward pass writes (running statistics, a largest value) must not reach
        # the next record.
        copied, _ = fresh(model)
        if weights:
            outputs = functional_call(copied, weights, (x,))
        else:
            outputs = copied(x)
        if not isinstance(outputs, torch.Tensor):
            raise InvalidInputError(
                "outputs",
                type(outputs).__name__,
                f"must be a tensor for metric {metric.name}",
                "Return the logits from forward, or score by a function: privtune.Score(function).",
            )
        of_classes = metric.takes in OF_CLASSES
        if of_classes and outputs.ndim >= 2 and outputs.shape[-1] == 1:
            # One logit as two, of which a softmax is the sigmoid of the one.
            zeros = torch.zeros_like(outputs)
            outputs = torch.cat([zeros, outputs], dim=-1)
        return outputs

    if isinstance(loss, LossOfRecords):
        original_loss = loss.loss_of

        def of_record(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            """Return the loss of one record, shape ``[1]``."""
            copied, loss_copy = fresh(model, original_loss)
            try:
                value: torch.Tensor = loss_copy(copied, x, y)
            except RuntimeError as error:
                if _NO_GRADIENT not in str(error):
                    raise
                copied, loss_copy = fresh(model, original_loss)
                with torch.enable_grad():  # a loss that takes gradients of its own
                    value = loss_copy(copied, x, y).detach()
            if not isinstance(value, torch.Tensor):
                raise InvalidInputError(
                    "score",
                    type(value).__name__,
                    "must return a tensor of shape (1,) for one record",
                )
            return value

        # The inputs stand for outputs: the loss passes them through the model by itself.
        return torch.Tensor.clone, of_record
    weights = _channels_last(model, partial(passed, x))
    return partial(passed, weights=weights), loss


def _channels_last(model: nn.Module, outputs: Callable[[_Weights], torch.Tensor]) -> _Weights:
    """Return convolution weights with channels last in memory, which is faster on CPU; empty if unusable.

    Empty where there are none, or where outputs change by more than rounding.
    """
    layouts = {}
    for name, part in model.named_modules():
        if type(part) is not nn.Conv2d or part.weight.device.type != "cpu":
            continue
        weight = part.weight.detach().contiguous(memory_format=torch.channels_last)
        _, channels, height, width = weight.shape
        if channels == 1:  # both layouts are one, and strides say which is meant
            weight = weight.as_strided(weight.shape, (height * width, 1, width, 1))
        key = f"{name}.weight" if name else "weight"
        layouts[key] = weight
    if not layouts:
        return {}
    plain = outputs({})
    try:
        same = torch.allclose(
            outputs(layouts),
            plain,
            rtol=1e-3,
            atol=1e-4,
            equal_nan=True,
        )
    except Exception:
        return {}  # a view asks for channels first
    if same:
        return layouts
    return {}


def _check_shapes(
    outputs: torch.Tensor,
    y: torch.Tensor,
    metric: Metric,
    loss: Loss,
    *,
    units: bool,
) -> None:
    """Refuse outputs or targets of one record that the metric cannot take.

    It looks at made-up outputs only. An output of the wrong shape would often be broadcast and give a
    number.
    """
    if units:
        if metric.takes == "any":
            return
        outputs = outputs[:, 0]
        y = y[:, 0]
    are_integers = not y.is_floating_point()
    of_classes = metric.takes in OF_CLASSES
    shape = ("N", *outputs.shape[1:])
    if (of_classes or are_integers) and y.ndim != 1:
        raise InvalidInputError(
            "targets",
            ("N", *y.shape[1:]),
            "must be one whole number a record, shape (N,)",
            "Drop the other axes, as y.squeeze(1) does.",
        )
    if of_classes and not are_integers:
        raise InvalidInputError(
            "targets",
            str(y.dtype),
            f"must be whole numbers, the classes that metric {metric.name} counts",
        )
    if metric.takes == "numbers":
        if y.ndim != 1 or outputs.numel() != len(y):
            raise InvalidInputError("outputs", shape, "must be one number a record, as targets are")
        return
    if (of_classes or are_integers) and (outputs.ndim != 2 or len(outputs) != 1):
        raise InvalidInputError(
            "outputs",
            shape,
            "must be one number a class for each record, shape (N, classes)",
        )
    if metric.takes == "two" and outputs.shape[1] != 2:
        raise InvalidInputError(
            "outputs",
            shape,
            f"must be of two classes, shape (N, 2), for metric {metric.name}",
        )
    if metric.takes == "any":
        _check_losses(metric, outputs, y, loss)


def _check_losses(
    metric: Metric,
    outputs: torch.Tensor,
    y: torch.Tensor,
    loss: Loss,
) -> None:
    """Refuse a loss or score function that gives more than one number for a record."""
    # A mean adds a vector for each number: the last axis is of the vector.
    *numbers, _ = metric.parts(outputs, y, loss).shape
    if numbers == [1]:
        return
    field = "loss"
    remedy = 'Use reduction="none".'
    if metric.reads == "function":
        field = "score"
        remedy = "Return it without a mean or sum over records."
    raise InvalidInputError(
        field,
        tuple(numbers),
        "must be one number a record: shape (1,) for one record",
        remedy,
    )


def _agrees_by_vmap(one: _One, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether a function of one record has the same values by vmap, on made-up records.

    Args:
        one: What a record adds.
        x: Made-up inputs, two or more.
        y: Their targets.
    """
    many = by_record(one, randomness="different")
    try:
        alone = torch.stack([one(x[i], y[i]) for i in range(len(x))])
        return torch.allclose(many(x, y), alone, rtol=1e-4, atol=1e-6)
    except Exception as error:
        if not records.blames_records(error):
            raise
        return False


def _together(one: _One, x: torch.Tensor, y: torch.Tensor) -> _One:
    """Vectorise a function of one record by vmap.

    Thousands of passes become a few. A record that raises is found by halves and counts as nothing,
    as in a training, so that whether a score is released does not hang on one record.

    Args:
        one: What a record adds.
        x: Made-up inputs, one or more.
        y: Their targets.
    """
    many = by_record(one, randomness="different")

    def together(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return what each record adds, ``[N, d]``, with zeros for records that raise alone."""

        def only(usable: torch.Tensor) -> torch.Tensor:
            """Return what each record adds, with made-up records in place of unusable ones."""
            usable = usable.to(inputs.device)
            inputs_or_made_up = records.where(usable, inputs, x[:1])
            targets_or_made_up = records.where(usable, targets, y[:1])
            return many(inputs_or_made_up, targets_or_made_up)

        try:
            return many(inputs, targets)
        except Exception as error:
            unusable = records.find_unusable(error, len(inputs), only)
        parts = only(~unusable)
        mask = unusable.to(inputs.device).unsqueeze(1)
        return parts.masked_fill(mask, 0.0)

    return together


def _one_by_one(one: _One, like: torch.Tensor) -> _One:
    """Return a function of records, ``[N, d]``, that passes one after the other; zeros for one that raises.

    Args:
        one: What a record adds.
        like: Of the shape of that.
    """

    def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(len(x), *like.shape, dtype=like.dtype, device=like.device)
        for row, inputs, target in zip(rows, x, y, strict=True):
            try:
                row.copy_(one(inputs, target))
            except Exception as error:
                if not records.blames_records(error):
                    raise
        return rows

    return added


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the ``with`` block, then restore every module's own mode."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
