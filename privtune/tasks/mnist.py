"""MNIST: 70,000 handwritten digits of 28x28 pixels, from a file or from OpenML."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from privtune.files import regular_file
from privtune.imports import find_extra
from privtune.tasks._data import classification_loss, logistic
from privtune.tasks._partition import Sizes, places
from privtune.tasks._task import Task, TaskData, TaskDataError

if TYPE_CHECKING:
    import torch

DATA_VARIABLE = "PRIVTUNE_DATA"
"""Environment variable with the path of the data; ``--data PATH`` sets it."""

_SIZES = Sizes(55_000, 5_000, 10_000)
_MAX_PIXEL = 255.0
_BOUNDS = {"pixels": (0.0, _MAX_PIXEL)}
_NAMES = ("x_train", "y_train", "x_test", "y_test")


def _published() -> tuple[Any, Any]:
    """Return all images ``[70000, 784]`` and labels from OpenML, or as they were fetched before."""
    datasets = find_extra("sklearn.datasets", extra="demo", what="MNIST without --data FILE.npz")
    try:
        x, y = datasets.fetch_openml("mnist_784", version=1, return_X_y=True, as_frame=False)
    except OSError as error:
        raise TaskDataError(
            f"MNIST could not be fetched from OpenML ({type(error).__name__}). Give a file: "
            "--data mnist.npz with x_train, y_train, x_test and y_test."
        ) from error
    return x, y


def _file(where: str) -> tuple[Any, Any, Any, Any]:
    """Read a file that holds what MNIST's does."""
    import numpy as np

    try:
        with regular_file(Path(where)).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            if missing := [name for name in _NAMES if name not in file]:
                raise TaskDataError(f"{where} lacks {', '.join(missing)}; MNIST's file holds them.")
            x, y, x_test, y_test = (file[name] for name in _NAMES)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise TaskDataError(f"{where} cannot be read as MNIST's .npz file ({error}).") from error
    for images, labels in ((x, y), (x_test, y_test)):
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            raise TaskDataError(f"{where} must hold images [N, 28, 28] and their labels [N].")
    return x, y, x_test, y_test


def _arrays() -> tuple[Any, Any, Any, Any]:
    """Return training and test images ``[N, 28, 28]`` and labels, as they were published."""
    where = os.environ.get(DATA_VARIABLE)
    if where is None:
        x, y = _published()
        x, y = x.reshape(-1, 28, 28), y.astype(int)
        return x[:60_000], y[:60_000], x[60_000:], y[60_000:]
    return _file(where)


def _load(*shape: int) -> TaskData:
    import torch

    from privtune.training.mechanism.data import TensorData

    x, y, x_test, y_test = _arrays()

    def tensors(images: Any, labels: Any, *, sealed_size: bool) -> TensorData:
        inputs = torch.as_tensor(images, dtype=torch.float32).reshape(-1, *shape) / _MAX_PIXEL
        targets = torch.as_tensor(labels, dtype=torch.int64)
        return TensorData(inputs, targets, sealed_size)

    drawn = torch.from_numpy(places(x, y, (_SIZES.train, _SIZES.validation)))
    private = tensors(x, y, sealed_size=True)
    train, validation = (
        private.part((drawn == number).nonzero().squeeze(1), sealed_size=True)
        for number in range(2)
    )
    test = tensors(x_test, y_test, sealed_size=False)
    return TaskData(train=train, validation=validation, test=test)


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

    Each record of the published training set falls by a keyed hash of its content into training
    (declared as 55,000) or validation (5,000, private records of the same people); the published
    test set is declared public. Pixels are divided by 255, the format's bound.
    """
    return Task(
        name="mnist-mlp",
        description="MLP 784-64-10 on MNIST (--data FILE.npz, or OpenML)",
        **_SIZES.declared(),
        input_shape=(784,),
        classes=10,
        load=partial(_load, 784),
        model=_mlp,
        loss=classification_loss,
        public_test=True,
        partition="content",
        bounds=_BOUNDS,
        check=_arrays,
    )


def mnist_cnn() -> Task:
    """Return the task ``mnist-cnn``: the small network of the DP-SGD literature (26,010 weights)."""
    return replace(
        mnist_mlp(),
        name="mnist-cnn",
        description="two convolutions of the DP-SGD literature on MNIST (--data FILE.npz, or OpenML)",
        input_shape=(1, 28, 28),
        load=partial(_load, 1, 28, 28),
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
        load=partial(_load, 784),
        bounds=_BOUNDS,
        check=_arrays,
    )
