"""What the built-in tasks share: losses, models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from privtune.tasks._constants import of_softmax
from privtune.tasks._partition import Sizes
from privtune.tasks._task import Task, TaskData

if TYPE_CHECKING:
    import torch


def classification_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each record."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, targets, reduction="none")


def linear(features: int, outputs: int) -> torch.nn.Module:
    """Return a linear model from zero weights."""
    from privtune.tasks import _models

    return _models.linear(features, outputs)


def logistic(
    name: str,
    description: str,
    *,
    features: int,
    classes: int,
    sizes: Sizes,
    load: Callable[[], TaskData],
    bounds: Mapping[str, tuple[float, float]],
    check: Callable[[], object] = lambda: None,
) -> Task:
    """Return a task of multinomial logistic regression from zero weights, on features in [-1, 1]."""
    return Task(
        name=name,
        description=description,
        **sizes.declared(),
        input_shape=(features,),
        classes=classes,
        load=load,
        model=partial(linear, features, classes),
        loss=classification_loss,
        public_test=True,
        partition="content",
        bounds=bounds,
        check=check,
        constants=of_softmax(float(features), classes),
    )
