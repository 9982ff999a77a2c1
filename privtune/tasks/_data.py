"""What the built-in tasks share: public splits, losses, models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privtune.tasks._task import Task, TaskData

if TYPE_CHECKING:
    import torch

__all__ = ["Sizes", "classification_loss", "logistic", "split"]

_SPLIT_SEED = 20_241_107  # public and fixed: the split is part of the task's definition


@dataclass(frozen=True)
class Sizes:
    """Sizes of the three splits, declared public."""

    train: int
    validation: int
    test: int


def split(x: Any, y: Any, sizes: Sizes) -> TaskData:
    """Split records once, with a fixed public seed.

    Args:
        x: Inputs, shape ``[N, ...]``, scaled by public constants.
        y: Class numbers, shape ``[N]``.
        sizes: How many records go where; the rest is left out.
    """
    import numpy as np
    import torch

    from privtune.training.data import TensorData

    order = np.random.default_rng(_SPLIT_SEED).permutation(len(y))
    inputs = torch.as_tensor(np.asarray(x)[order], dtype=torch.float32)
    targets = torch.as_tensor(np.asarray(y)[order], dtype=torch.int64)
    first, second = sizes.train, sizes.train + sizes.validation
    last = second + sizes.test
    return TaskData(
        train=TensorData(inputs[:first], targets[:first]),
        validation=TensorData(inputs[first:second], targets[first:second]),
        test=TensorData(inputs[second:last], targets[second:last]),
    )


def classification_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each record."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, targets, reduction="none")


def logistic(
    name: str,
    description: str,
    *,
    features: int,
    classes: int,
    sizes: Sizes,
    load: Callable[[], TaskData],
) -> Task:
    """Return a task of multinomial logistic regression from zero weights."""

    def model() -> torch.nn.Module:
        from torch import nn

        layer = nn.Linear(features, classes)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    return Task(
        name=name,
        description=description,
        train_records=sizes.train,
        validation_records=sizes.validation,
        test_records=sizes.test,
        input_shape=(features,),
        classes=classes,
        load=load,
        model=model,
        loss=classification_loss,
        public_test=True,
    )
