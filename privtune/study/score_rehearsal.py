"""Rehearsal of a declared mechanism's score on made-up records, before anything is charged.

The trained model is not there yet: what follows ``trial.plan`` may touch the data. So a score is tried with
the models that the objective holds when it reads its plan, and with stand-ins whose outputs have the usual
shapes. It is refused where no model could make it run, or where its error hangs on no output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from privtune.strategies import ScorePlan
    from privtune.training.mechanism.data import TensorData

_RECORDS = 2
_CLASSES = (1, 2, 10)
"""How many outputs the stand-ins have a record: of one number, of two classes, of several."""
_OF_ANY_OUTPUT = (NameError, ImportError, ZeroDivisionError)
"""Errors of a program that no output could avoid."""


def models_of(frame: FrameType | None, end: str) -> list[nn.Module]:
    """Return the models with weights that the functions on a call stack hold, up to the file ``end``.

    Args:
        frame: Of the innermost function.
        end: Path of the file whose functions, and those that called them, are PrivTune's.
    """
    from torch import nn

    models: dict[int, nn.Module] = {}
    while frame is not None and frame.f_code.co_filename != end:
        names = frame.f_code.co_names
        global_values = [frame.f_globals.get(name) for name in names]
        for value in (*frame.f_locals.values(), *global_values):
            if not isinstance(value, nn.Module):
                continue
            has_weights = any(True for _ in value.parameters())
            if has_weights:
                models[id(value)] = value
        frame = frame.f_back
    return list(models.values())


def rehearse_score(
    score: ScorePlan,
    data: TensorData,
    function: Callable[..., Any] | None,
    models: Sequence[nn.Module],
) -> None:
    """Refuse a score that no model could make run on made-up records.

    Args:
        score: How trials are scored.
        data: The validation records, of which shapes and types alone are used.
        function: A score function of the user's, of a model and packed records; None for a metric by name.
        models: Models that the objective holds.

    Raises:
        InvalidInputError: If no model could be scored so.
    """
    records = _make_up(data)
    uses: list[bool] = []
    shapes = _shapes(records)
    if function is None:
        shapes = [_shape_for(score, records)]
    stand_ins = [_stand_in(shape, uses) for shape in shapes]
    errors: list[Exception] = []
    for model in (*models, *stand_ins):
        error = _error_of(score, model, records, function)
        if error is None:
            return
        errors.append(error)
    of_stand_ins = errors[len(models) :]
    # A metric by name takes one shape, and a function that asks no model for anything fails with any.
    if function is None or not uses:
        raise _refusal(of_stand_ins[0])
    if models:
        raise _refusal(errors[0])
    for error in of_stand_ins:
        if isinstance(error, (*_OF_ANY_OUTPUT, InvalidInputError)):
            raise _refusal(error)
    # Shapes stand in the text of an error about shapes; one of types is the same for all of them.
    texts = {str(error) for error in of_stand_ins}
    are_of_torch = all(type(error) is RuntimeError for error in of_stand_ins)
    if are_of_torch and len(texts) == 1:
        raise _refusal(of_stand_ins[0])


def _error_of(
    score: ScorePlan, model: nn.Module, data: TensorData, function: Callable[..., Any] | None
) -> Exception | None:
    """Return the error with which scoring a model fails; None if it succeeds."""
    from privtune.training.mechanism import scoring

    loss: Any = scoring.cross_entropy
    if function is not None:
        loss = scoring.LossOfRecords(function)
    weights = next(iter(model.parameters()), None)
    if weights is not None and data.x.is_floating_point() and weights.is_floating_point():
        # A module in float64 refuses records in float32.
        data = replace(data, x=data.x.to(weights.dtype))
    rng = np.random.default_rng(0)
    try:
        scoring.score(score, model, data, rng=rng, loss=loss)
    except Exception as error:
        return error
    return None


def _refusal(error: Exception) -> InvalidInputError:
    """Return the refusal of a score that failed on made-up records, with its error as the cause."""
    if isinstance(error, InvalidInputError):
        remedy = f"{error.remedy} Nothing was charged.".strip()
        refusal = InvalidInputError(error.name, error.value, error.allowed, remedy)
    else:
        # On one line: torch's messages have several.
        text = " ".join(str(error).split()).rstrip(".")
        refusal = InvalidInputError(
            "score",
            f"{type(error).__name__}: {text}",
            "is what scoring a made-up record ends with, so no trial could be scored",
            "A Score function takes a model and the parts of one validation record, and returns shape [1]. "
            "Nothing was charged.",
        )
    refusal.__cause__ = error
    return refusal


def _make_up(data: TensorData) -> TensorData:
    """Return a few made-up records of the same shapes and types.

    What tells of real records goes: which of them are unusable, and whose they are.
    """
    import torch

    cpu = torch.device("cpu")
    # One batch of a few records: the first dimension goes.
    x, y = data.domain.draw(*data.like, (1, _RECORDS), cpu)
    return replace(data, x=x[0], y=y[0], unusable=None, groups=None)


def _shape_for(score: ScorePlan, data: TensorData) -> tuple[int, ...]:
    """Return the shape of outputs that a metric takes for one record, or for the rows of one unit."""
    from privtune.training.mechanism.metrics import find_metric

    outputs: tuple[int, ...]
    match find_metric(score.metric).takes:
        case "numbers":
            outputs = ()
        case "two":
            outputs = (2,)
        case _:
            outputs = (10,)
    if not data.unit:
        return outputs
    rows = tuple(data.y.shape[1:2])
    return (*rows, *outputs)


def _shapes(data: TensorData) -> list[tuple[int, ...]]:
    """Return usual output shapes for one record: the target's, several numbers of classes, the input's."""
    inputs = tuple(data.x.shape[1:])
    targets = tuple(data.y.shape[1:])
    shapes: list[tuple[int, ...]] = []
    for start in ((), targets):
        shapes.append(start)
        shapes.extend((*start, classes) for classes in _CLASSES)
    shapes.append(inputs)
    return list(dict.fromkeys(shapes))


def _stand_in(shape: tuple[int, ...], uses: list[bool]) -> nn.Module:
    """Return a model that answers 0.5 in a given shape, and appends to ``uses`` at every use."""
    import torch
    from torch import nn

    class StandIn(nn.Module):
        def forward(self, *inputs: object, **options: object) -> torch.Tensor:
            uses.append(True)
            tensors = _tensors((*inputs, *options.values()))
            first = next(tensors, torch.zeros(1))
            return torch.full((len(first), *shape), 0.5)

        def __getattr__(self, name: str) -> Any:
            uses.append(True)
            return super().__getattr__(name)

    return StandIn()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of at least one dimension among some values."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim:
            yield value
