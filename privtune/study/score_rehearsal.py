"""The score of a declared mechanism is tried on made-up records, before anything is charged.

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
_OF_ANY_OUTPUT = (NameError, ImportError, ZeroDivisionError)
"""Errors of a program that no output could avoid."""


def models_of(frame: FrameType | None, end: str) -> list[nn.Module]:
    """Return the models with weights that the functions of a call hold, up to one of the file ``end``."""
    from torch import nn

    models: dict[int, nn.Module] = {}
    while frame is not None and frame.f_code.co_filename != end:
        named = [frame.f_globals.get(name) for name in frame.f_code.co_names]
        for value in (*frame.f_locals.values(), *named):
            if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
                models[id(value)] = value
        frame = frame.f_back
    return list(models.values())


def rehearse_score(
    score: ScorePlan,
    data: TensorData,
    function: Callable[..., Any] | None,
    models: Sequence[nn.Module],
) -> None:
    """Refuse a score that cannot run.

    Args:
        score: How trials are scored.
        data: The validation records, of which shapes and types alone are used.
        function: A score function of the user's, of a model and packed records; None for a metric by name.
        models: Models that the objective holds.

    Raises:
        InvalidInputError: If no model could be scored so.
    """
    made_up = _made_up(data)
    asked: list[bool] = []
    shapes = _shapes(made_up)
    if function is None:
        shapes = [_shape_for(score, made_up)]
    errors: list[Exception] = []
    for model in (*models, *(_stand_in(shape, asked) for shape in shapes)):
        error = _error_of(score, model, made_up, function)
        if error is None:
            return
        errors.append(error)
    by_stand_ins = errors[len(models) :]
    if function is None:
        raise _refusal(by_stand_ins[0])
    if not asked:
        raise _refusal(by_stand_ins[0])
    if models:
        raise _refusal(errors[0])
    for error in by_stand_ins:
        if isinstance(error, (*_OF_ANY_OUTPUT, InvalidInputError)):
            raise _refusal(error)
    # Shapes stand in the text of an error about shapes; one of types is the same for all of them.
    texts = {str(error) for error in by_stand_ins}
    if len(texts) == 1 and all(type(error) is RuntimeError for error in by_stand_ins):
        raise _refusal(by_stand_ins[0])


def _error_of(
    score: ScorePlan, model: nn.Module, data: TensorData, function: Callable[..., Any] | None
) -> Exception | None:
    """Return what a score of a model fails with."""
    from privtune.training.mechanism import scoring

    loss: Any = scoring.cross_entropy if function is None else scoring.OfRecords(function)
    for weights in model.parameters():  # a module in float64 refuses records in float32
        if data.x.is_floating_point() and weights.is_floating_point():
            data = replace(data, x=data.x.to(weights.dtype))
        break
    try:
        scoring.score(score, model, data, rng=np.random.default_rng(0), loss=loss)
    except Exception as error:
        return error
    return None


def _refusal(error: Exception) -> InvalidInputError:
    """Return the error of a score that failed on made-up records."""
    if isinstance(error, InvalidInputError):
        remedy = f"{error.remedy} Nothing was charged.".strip()
        refusal = InvalidInputError(error.name, error.value, error.allowed, remedy)
    else:
        said = " ".join(str(error).split()).rstrip(".")
        refusal = InvalidInputError(
            "score",
            f"{type(error).__name__}: {said}",
            "is what scoring a made-up record ends with, so no trial could be scored",
            "A Score function takes a model and the parts of one validation record, and returns shape [1]. "
            "Nothing was charged.",
        )
    refusal.__cause__ = error
    return refusal


def _made_up(data: TensorData) -> TensorData:
    """Return a few made-up records of the same shapes and types."""
    import torch

    x, y = data.domain.draw(*data.like, (1, _RECORDS), torch.device("cpu"))
    return replace(data, x=x[0], y=y[0], unusable=None, groups=None)


def _shape_for(score: ScorePlan, data: TensorData) -> tuple[int, ...]:
    """Return the shape of the outputs that a metric takes of one record, or of one row of a unit."""
    from privtune.training.mechanism.metrics import METRICS

    kind = METRICS.get(score.metric)
    takes = "classes" if kind is None else kind.takes
    outputs = {"numbers": (), "two": (2,)}.get(takes, (10,))
    rows = tuple(data.y.shape[1:2]) if data.unit else ()
    return (*rows, *outputs)


def _shapes(data: TensorData) -> list[tuple[int, ...]]:
    """Return the usual shapes of the outputs of one record."""
    inputs, targets = tuple(data.x.shape[1:]), tuple(data.y.shape[1:])
    shapes: list[tuple[int, ...]] = [(), *((classes,) for classes in _CLASSES)]
    shapes += [targets, *((*targets, classes) for classes in _CLASSES), inputs]
    return list(dict.fromkeys(shapes))


def _stand_in(shape: tuple[int, ...], asked: list[bool]) -> nn.Module:
    """Return a model with outputs of a shape, which notes that it was asked for anything."""
    import torch
    from torch import nn

    class StandIn(nn.Module):
        def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
            asked.append(True)
            first = next(_tensors((*inputs, *named.values())), torch.zeros(1))
            return torch.full((len(first), *shape), 0.5)

        def __getattr__(self, name: str) -> Any:
            asked.append(True)
            return super().__getattr__(name)

    return StandIn()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among some values."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim:
            yield value
