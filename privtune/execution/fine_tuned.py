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
    from privtune.training.mechanism.kernel import LossOf

_NAMED = 3  # parts of a model that a message names
_RECORDS = 4  # made-up records that a check looks at


class AdapterError(PrivTuneError):
    """The weights that would be released do not give the model that was trained."""


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
    """Return the maker of the trained part of a task's model, and the function from records to its inputs."""
    # Features are a function of their record alone, so computing them once changes no guarantee.
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


def check_loaded(
    task: Task,
    trained: torch.nn.Module,
    anew: torch.nn.Module,
    result: TrialResult,
    data: TensorData,
) -> None:
    """Load what would be released of a ``build``'s model into one made anew, and compare their losses."""
    import torch

    from privtune.strategies.release import split
    from privtune.training.mechanism.kernel import load_params, unlike_fixed

    if not bool(result.weights.isfinite().all()):
        return
    device = next(trained.parameters()).device
    few = data.part(torch.arange(min(_RECORDS, len(data))), sealed_size=True).to(device)

    def losses(model: torch.nn.Module) -> torch.Tensor:
        return losses_of(task.record_loss, model, few)

    anew = anew.to(device)
    for tensor in (*anew.parameters(), *anew.buffers()):
        tensor.data = tensor.detach().clone()  # a table may lie in memory of the user's own
    load_params(trained, result.weights.to(device))
    expected = losses(trained)
    _check_steady(losses(trained), expected)
    try:
        left = anew.load_state_dict(split(result.weights, result.shapes), strict=False)
        same = not left.unexpected_keys and torch.allclose(
            losses(anew), expected, rtol=1e-3, atol=1e-4, equal_nan=True
        )
    except RuntimeError:  # of other shapes
        same = False
    if not same:
        unlike = sorted(unlike_fixed(trained, anew))
        named = f" (not so: {', '.join(unlike[:_NAMED])})" if unlike else ""
        raise AdapterError(
            "What would be released of the model, loaded into the model that build makes anew, is another "
            f"model than the one that was trained: what is not trained must be the same every time{named}. "
            "Load it from a file, or call torch.manual_seed before it is made. Nothing was charged."
        )


def check_remembers_nothing(loss_of: LossOf, model: torch.nn.Module, data: TensorData) -> None:
    """Refuse a loss that is another number the second time; one that raises is for others to explain."""
    from privtune.training.mechanism.kernel import fresh

    try:
        # Of copies: what a model keeps in buffers of its own has a refusal of its own.
        once, again = (losses_of(loss_of, fresh(model)[0], data) for _ in range(2))
    except Exception:
        return
    _check_steady(once, again)


def losses_of(loss_of: LossOf, model: torch.nn.Module, data: TensorData) -> torch.Tensor:
    """Return the loss of each record, each time with the same random numbers."""
    import torch

    from privtune.training.mechanism.scoring import evaluating
    from privtune.training.mechanism.streams import GLOBAL_GENERATOR

    device = next(model.parameters()).device
    forked = [device] if device.type == "cuda" else []
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=forked), evaluating(model):
        torch.manual_seed(0)
        pairs = zip(torch.split(data.x, 1), torch.split(data.y, 1), strict=True)
        return torch.cat([loss_of(model, x, y).reshape(1) for x, y in pairs])


def _check_steady(once: torch.Tensor, again: torch.Tensor) -> None:
    import torch

    if not torch.allclose(once, again, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise AdapterError(
            "The loss of the same record changes from call to call. Draw random numbers with torch, "
            "inside the loss, augment or the model, and keep nothing between calls. Nothing was charged."
        )
