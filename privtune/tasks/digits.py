"""Scikit-learn's handwritten digits: 1,797 images of 8x8 pixels, bundled with the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.tasks._task import Task, TaskData

if TYPE_CHECKING:
    import torch

__all__ = ["digits_mlp"]

_SPLIT_SEED = 20_241_107  # public and fixed: the split is part of the task's definition
_TRAIN, _VALIDATION, _TEST = 1_077, 360, 360
_MAX_PIXEL = 16.0  # the format's bound, not the data's maximum


def _load() -> TaskData:
    import numpy as np
    import torch
    from sklearn.datasets import load_digits

    from privtune.training.engine import TensorData

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    x = torch.as_tensor(images[order] / _MAX_PIXEL, dtype=torch.float32)
    y = torch.as_tensor(labels[order], dtype=torch.int64)
    validation, test = _TRAIN, _TRAIN + _VALIDATION
    return TaskData(
        train=TensorData(x[:validation], y[:validation]),
        validation=TensorData(x[validation:test], y[validation:test]),
        test=TensorData(x[test:], y[test:]),
    )


def _model() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, targets, reduction="none")


def digits_mlp() -> Task:
    """Return the task ``digits-mlp``: an MLP 64-64-10 on scikit-learn's digits.

    The 1,797 records are split once, with a fixed public seed, into 1,077 for training, 360 for
    validation (private records of the same people) and 360 for testing (declared public).
    Pixels are divided by 16, the format's bound: no statistic of the data is used.
    """
    return Task(
        name="digits-mlp",
        description="MLP 64-64-10 on scikit-learn's 1,797 handwritten digits (bundled)",
        train_records=_TRAIN,
        validation_records=_VALIDATION,
        test_records=_TEST,
        input_shape=(64,),
        classes=10,
        load=_load,
        model=_model,
        loss=_loss,
        public_test=True,
    )
