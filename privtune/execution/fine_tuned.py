"""Trainings of a model's head on frozen features, and checks of the models that ``build`` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from privtune.errors import PrivTuneError
from privtune.strategies import TrialResult
from privtune.tasks.task import made_up_inputs

if TYPE_CHECKING:
    import torch

    from privtune.tasks import Task
    from privtune.training.engine.fine_tuning import FrozenPart
    from privtune.training.mechanism.data import TensorData
    from privtune.training.mechanism.kernel import LossOf

_EXAMPLES = 3  # parts of a model that a message names
_RECORDS = 4  # made-up records that a check looks at


class AdapterError(PrivTuneError):
    """The weights that would be released do not give the model that was trained."""


@dataclass(frozen=True)
class _Head:
    """A maker of the head of a task's model; two for the same model are equal, so a capture is reused.

    Attributes:
        make: Makes the model that the head is a part of.
        shape: The shape of one record's input.
        tokens: How many tokens there are, where inputs are texts; else None.
    """

    make: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    tokens: int | None

    def __call__(self) -> torch.nn.Module:
        part = _frozen_part(self.make, self.shape, self.tokens)
        model = self.make()
        if part is None:
            return model
        return part.model(model)


def reduce_task(
    task: Task, data: TensorData
) -> tuple[Callable[[], torch.nn.Module], Callable[[TensorData], TensorData]]:
    """Return a maker of a task model's trained part, and a function from records to the part's inputs.

    Features are a function of their record alone, so computing them once changes no guarantee. It saves the
    pass through the part that is not trained, in every step.
    """
    # Records that are features already have numbers in the place of tokens.
    if task.trainable != "head" or data.x.is_floating_point() != (task.tokens is None):
        return task.model, lambda records: records
    part = _frozen_part(task.model, task.input_shape, task.tokens)
    if part is None:
        return task.model, lambda records: records
    head = _Head(task.model, task.input_shape, task.tokens)
    return head, part.reduce


@lru_cache(maxsize=2)
def _frozen_part(
    make: Callable[[], torch.nn.Module], shape: tuple[int, ...], tokens: int | None
) -> FrozenPart | None:
    """Return the frozen part of a model before its head, or None if there is none."""
    from privtune.training.engine.fine_tuning import part_of_model

    return part_of_model(make(), made_up_inputs(_RECORDS, shape, tokens))


def check_loaded(
    task: Task,
    trained: torch.nn.Module,
    anew: torch.nn.Module,
    result: TrialResult,
    data: TensorData,
) -> None:
    """Check that released weights, loaded into a model that ``build`` makes anew, give the same losses.

    Args:
        task: The task, with its loss.
        trained: The model that was trained, or a copy of it.
        anew: A model that ``build`` made anew, with other random numbers.
        result: What would be released: the weights that were trained, by name.
        data: Made-up records.

    Raises:
        AdapterError: If the two say different things: whoever loads the release would get another model than
            the one that was scored.
    """
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
        parameters = split(result.weights, result.shapes)
        report = anew.load_state_dict(parameters, strict=False)
        is_same = not report.unexpected_keys and _are_close(losses(anew), expected)
    except RuntimeError:  # of other shapes
        is_same = False
    if not is_same:
        unlike = sorted(unlike_fixed(trained, anew))
        example = f" (not so: {', '.join(unlike[:_EXAMPLES])})" if unlike else ""
        raise AdapterError(
            "What would be released of the model, loaded into the model that build makes anew, is another "
            f"model than the one that was trained: what is not trained must be the same every time{example}. "
            "Load it from a file, or call torch.manual_seed before it is made. Nothing was charged."
        )


def check_remembers_nothing(loss_of: LossOf, model: torch.nn.Module, data: TensorData) -> None:
    """Refuse a loss that has another value when it is computed again; ignore one that raises an error."""
    from privtune.training.mechanism.kernel import fresh

    def losses_of_copy() -> torch.Tensor:
        # Of copies: what a model keeps in buffers of its own has a refusal of its own.
        copied, _ = fresh(model)
        return losses_of(loss_of, copied, data)

    try:
        once = losses_of_copy()
        again = losses_of_copy()
    except Exception:
        return
    _check_steady(once, again)


def losses_of(loss_of: LossOf, model: torch.nn.Module, data: TensorData) -> torch.Tensor:
    """Return the loss of each record, shape ``[n]``, each time with the same random numbers."""
    import torch

    from privtune.training.mechanism.scoring import evaluating
    from privtune.training.mechanism.streams import GLOBAL_GENERATOR, seed_global_generator

    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    losses = []
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices), evaluating(model):
        seed_global_generator(0)
        for x, y in zip(torch.split(data.x, 1), torch.split(data.y, 1), strict=True):
            loss = loss_of(model, x, y)
            losses.append(loss.reshape(1))
        return torch.cat(losses)


def _are_close(losses: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether two losses of the same records agree, up to rounding on any device."""
    import torch

    return torch.allclose(losses, others, rtol=1e-3, atol=1e-4, equal_nan=True)


def _check_steady(once: torch.Tensor, again: torch.Tensor) -> None:
    """Refuse losses that differ from call to call: one record could change those of others."""
    if not _are_close(once, again):
        raise AdapterError(
            "The loss of the same record changes from call to call. Draw random numbers with torch, "
            "inside the loss, augment or the model, and keep nothing between calls. Nothing was charged."
        )
