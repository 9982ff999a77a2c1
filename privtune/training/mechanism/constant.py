"""Scores of the best constant answer, by metric: a model must be better to have learnt anything.

Importing this module does not import torch.
"""

from __future__ import annotations

import numpy as np

from privtune.training.mechanism.estimates import ConstantAnswer, Floats
from privtune.training.mechanism.metrics import find_metric


def constant_answer(metric: str, targets: Floats, *, of_classes: bool) -> ConstantAnswer | None:
    """Return the score of the best constant answer to the targets; None if the metric has none.

    Args:
        metric: The metric's name, as ``accuracy``.
        targets: Numbers, or classes from 0, shape ``[N]``; missing ones are not finite, or below 0.
        of_classes: Whether they are classes.

    Example:
        >>> targets = np.array([0.0, 0.0, -1.0, 0.0, 1.0])
        >>> constant_answer("accuracy", targets, of_classes=True).value
        0.75
    """
    is_there = np.isfinite(targets)
    if of_classes:
        is_there &= targets >= 0.0
    values = targets[is_there]
    if len(values) == 0:
        return None
    return find_metric(metric).constant_answer(values)


def declared_constant(metric: str, *, classes: int | None, rarest: float | None) -> float | None:
    """Return the score of the best constant answer by declared facts alone; None if they do not give it.

    Args:
        metric: The metric's name.
        classes: How many classes there are; None for numbers.
        rarest: The declared share of the rarest class, if there is one.

    Example:
        >>> declared_constant("balanced_accuracy", classes=4, rarest=None)
        0.25
        >>> declared_constant("accuracy", classes=2, rarest=0.08)
        0.92
    """
    return find_metric(metric).declared_constant(classes=classes, rarest=rarest)
