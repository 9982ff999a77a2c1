"""What the built-in tasks share: losses, models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from privtune.tasks._constants import of_softmax
from privtune.tasks._partition import Sizes
from privtune.tasks._task import Task, TaskData

if TYPE_CHECKING:
    import torch

__all__ = ["classification_loss", "logistic"]


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
    bounds: Mapping[str, tuple[float, float]],
    partition: str = "content",
    check: Callable[[], object] = lambda: None,
) -> Task:
    """Return a task of multinomial logistic regression from zero weights, on features in [-1, 1]."""

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
        partition=partition,
        bounds=bounds,
        check=check,
        constants=of_softmax(float(features), classes),
    )
