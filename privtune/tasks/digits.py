"""Scikit-learn's handwritten digits: 1,797 images of 8x8 pixels, bundled with the library."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from privtune.imports import find_extra
from privtune.tasks._data import classification_loss
from privtune.tasks._partition import Sizes, split
from privtune.tasks._task import Task, TaskData

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_SIZES = Sizes(1_077, 360, 360)
_MAX_PIXEL = 16.0  # the format's bound, not the data's maximum


def _file() -> Path | None:
    """Return the library's file, which is read as it is: importing the library takes longer."""
    found = importlib.util.find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():
            return file
    return None


def _check() -> None:
    if _file() is None:
        find_extra("sklearn.datasets", extra="demo", what="Task digits-mlp")


def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the images, a row each, and their labels."""
    file = _file()
    if file is not None:
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels


def _load(*shape: int) -> TaskData:
    images, labels = _digits()
    return split(images.reshape(-1, *shape) / _MAX_PIXEL, labels, _SIZES)


def _mlp() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _cnn() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def digits_mlp() -> Task:
    """Return the task ``digits-mlp``: an MLP 64-64-10 on scikit-learn's digits.

    Each of the 1,797 records falls by a keyed hash of its content into one of three splits, declared
    as 1,077 for training, 360 for validation (private records of the same people) and 360 for testing
    (declared public): those are the expectations, and what plans and scores divide by.
    Pixels are divided by 16, the format's bound: no statistic of the data is used.
    """
    return Task(
        name="digits-mlp",
        description="MLP 64-64-10 on scikit-learn's 1,797 handwritten digits (bundled)",
        **_SIZES.declared(),
        input_shape=(64,),
        classes=10,
        load=partial(_load, 64),
        model=_mlp,
        loss=classification_loss,
        public_test=True,
        partition="content",
        bounds={"pixels": (0.0, _MAX_PIXEL)},
        check=_check,
    )


def digits_cnn() -> Task:
    """Return the task ``digits-cnn``: two small convolutions on the same records and split."""
    return replace(
        digits_mlp(),
        name="digits-cnn",
        description="two 3x3 convolutions on scikit-learn's 1,797 handwritten digits (bundled)",
        input_shape=(1, 8, 8),
        load=partial(_load, 1, 8, 8),
        model=_cnn,
    )
