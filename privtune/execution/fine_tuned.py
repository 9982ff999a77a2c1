"""Trainings of a part of a model: on features where the head alone is trained, and saved whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from privtune.errors import PrivTuneError
from privtune.strategies import TrialResult
from privtune.tasks._task import made_up_inputs

if TYPE_CHECKING:
    import torch

    from privtune.tasks import Task
    from privtune.training.engine.fine_tuning import FrozenPart
    from privtune.training.mechanism.data import TensorData

__all__ = ["AdapterError", "check_saved", "reduced"]

_RECORDS = 4  # made-up records that a check looks at


class AdapterError(PrivTuneError):
    """What would be released of a model is not what was trained."""


@dataclass(frozen=True)
class _Head:
    """Makes the head of a task's model; equal for equal models, so that a capture of it is kept."""

    whole: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    tokens: int | None

    def __call__(self) -> torch.nn.Module:
        part = _part(self.whole, self.shape, self.tokens)
        model = self.whole()
        return model if part is None else part.model(model)


def reduced(
    task: Task, data: TensorData
) -> tuple[Callable[[], torch.nn.Module], Callable[[TensorData], TensorData]]:
    """Return what is trained of a task's model, and what makes its inputs of the records.

    Where the head alone is trained, the rest is computed once a record. It is a function of that
    record alone, and so changes nothing about the guarantee.

    Args:
        task: The task.
        data: Records as it will be trained on.
    """
    if task.trainable == "head" and data.x.is_floating_point() == (task.tokens is None):
        part = _part(task.model, task.input_shape, task.tokens)
        if part is not None:
            return _Head(task.model, task.input_shape, task.tokens), part.reduce
    return task.model, lambda records: records


@lru_cache(maxsize=2)
def _part(
    make: Callable[[], torch.nn.Module], shape: tuple[int, ...], tokens: int | None
) -> FrozenPart | None:
    from privtune.training.engine.fine_tuning import part_of_model

    return part_of_model(make(), made_up_inputs(_RECORDS, shape, tokens))


def check_saved(task: Task, weights: torch.Tensor, data: TensorData) -> None:
    """Hold what is saved of a model against what was trained, on made-up records.

    Args:
        task: The task.
        weights: What a rehearsal trained, flat.
        data: Made-up records.

    Raises:
        AdapterError: If the saved weights, loaded anew into the task's model, give other losses than
            the trained model, or the same as the untrained one.
    """
    import torch

    from privtune.execution.files import pack_result, unpack_result
    from privtune.training.engine.train import losses_of
    from privtune.training.mechanism.kernel import flatten_params, load_params

    if not bool(weights.isfinite().all()):
        return
    few = data.part(torch.arange(min(_RECORDS, len(data))), sealed_size=True)
    make, reduce = reduced(task, few)
    saved = pack_result(TrialResult(index=0, params={}, weights=weights, score=None))
    model = task.model()
    before = flatten_params(model)
    losses = []
    for flat in (unpack_result(saved).weights, before):
        load_params(model, flat)
        with torch.no_grad():
            losses.append(task.loss(model.eval()(few.x), few.y))
    trained = losses_of(make, task.loss, reduce(few), weights)
    if not torch.allclose(trained, losses[0], rtol=1e-3, atol=1e-4):
        raise AdapterError(
            f"What task {task.name!r} saves of a model, loaded anew, is another model than the one "
            "that was trained: its factory must make the same model every time, the frozen part "
            "included. Nothing was charged."
        )
    if torch.equal(losses[0], losses[1]) and not torch.equal(weights, before):
        raise AdapterError(
            f"What is trained of the model of task {task.name!r} does not reach its outputs, so no "
            "training changes what it says. Name other target_modules. Nothing was charged."
        )
