"""MNIST: 70,000 handwritten digits of 28x28 pixels, from a file or from OpenML."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.tasks._data import Sizes, classification_loss, logistic
from privtune.tasks._task import Task, TaskData, TaskDataError

if TYPE_CHECKING:
    import torch

__all__ = ["DATA_VARIABLE", "mnist_cnn", "mnist_logistic", "mnist_mlp"]

DATA_VARIABLE = "PRIVTUNE_DATA"
"""Environment variable with the path of the data; ``--data PATH`` sets it."""

_SIZES = Sizes(55_000, 5_000, 10_000)
_MAX_PIXEL = 255.0
_NAMES = ("x_train", "y_train", "x_test", "y_test")


def _arrays() -> tuple[Any, Any, Any, Any]:
    """Return training and test images ``[N, 28, 28]`` and labels, as they were published."""
    import numpy as np

    where = os.environ.get(DATA_VARIABLE)
    if where is None:
        from sklearn.datasets import fetch_openml

        try:
            x, y = fetch_openml("mnist_784", version=1, return_X_y=True, as_frame=False)
        except OSError as error:
            raise TaskDataError(
                f"MNIST could not be fetched from OpenML ({type(error).__name__}). Give a file: "
                "--data mnist.npz with x_train, y_train, x_test and y_test."
            ) from error
        x, y = x.reshape(-1, 28, 28), y.astype(int)
        return x[:60_000], y[:60_000], x[60_000:], y[60_000:]
    try:
        with np.load(Path(where), allow_pickle=False) as file:
            if missing := [name for name in _NAMES if name not in file]:
                raise TaskDataError(f"{where} lacks {', '.join(missing)}; MNIST's file holds them.")
            x, y, x_test, y_test = (file[name] for name in _NAMES)
    except (OSError, ValueError) as error:
        raise TaskDataError(f"{where} cannot be read as MNIST's .npz file ({error}).") from error
    return x, y, x_test, y_test


def _loader(shape: tuple[int, ...]) -> Callable[[], TaskData]:
    def load() -> TaskData:
        import torch

        from privtune.training.data import TensorData

        x, y, x_test, y_test = _arrays()

        def split(images: Any, labels: Any) -> TensorData:
            inputs = torch.as_tensor(images, dtype=torch.float32).reshape(-1, *shape) / _MAX_PIXEL
            return TensorData(inputs, torch.as_tensor(labels, dtype=torch.int64))

        first = _SIZES.train
        return TaskData(
            train=split(x[:first], y[:first]),
            validation=split(x[first:], y[first:]),
            test=split(x_test, y_test),
        )

    return load


def _mlp() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def _cnn() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def mnist_mlp() -> Task:
    """Return the task ``mnist-mlp``: an MLP 784-64-10.

    The published training set is split in its published order: 55,000 for training, 5,000 for
    validation (private records of the same people); its test set is declared public. Pixels are
    divided by 255, the format's bound.
    """
    return Task(
        name="mnist-mlp",
        description="MLP 784-64-10 on MNIST (--data FILE.npz, or OpenML)",
        train_records=_SIZES.train,
        validation_records=_SIZES.validation,
        test_records=_SIZES.test,
        input_shape=(784,),
        classes=10,
        load=_loader((784,)),
        model=_mlp,
        loss=classification_loss,
        public_test=True,
    )


def mnist_cnn() -> Task:
    """Return the task ``mnist-cnn``: the small network of the DP-SGD literature (26,010 weights)."""
    return replace(
        mnist_mlp(),
        name="mnist-cnn",
        description="two convolutions of the DP-SGD literature on MNIST (--data FILE.npz, or OpenML)",
        input_shape=(1, 28, 28),
        load=_loader((1, 28, 28)),
        model=_cnn,
    )


def mnist_logistic() -> Task:
    """Return the task ``mnist-logistic``: multinomial logistic regression."""
    return logistic(
        "mnist-logistic",
        "logistic regression on MNIST (--data FILE.npz, or OpenML)",
        features=784,
        classes=10,
        sizes=_SIZES,
        load=_loader((784,)),
    )
