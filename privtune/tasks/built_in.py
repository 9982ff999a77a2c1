"""The built-in tasks, and how a task is found: by its name, its path, or its description in a spec.

Features are scaled by public bounds, those of a format or round ones written down here from what is known of
the measured quantities; no mean, variance, minimum or maximum of the records is used.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from privtune.errors import InvalidInputError
from privtune.files import regular_file
from privtune.imports import ByName, find_extra, find_function, users_code
from privtune.tasks._facts import TaskDataError
from privtune.tasks._fine_tuning import from_spec
from privtune.tasks._partition import Sizes, places, split
from privtune.tasks._task import ModelOf, Task, TaskData, classification_loss, softmax_constants

DATA_VARIABLE = "PRIVTUNE_DATA"
"""Environment variable with the path of MNIST; ``--data PATH`` sets it."""

_DIGITS, _MNIST = Sizes(1_077, 360, 360), Sizes(55_000, 5_000, 10_000)
_CANCER, _IRIS, _SYNTHETIC = Sizes(341, 114, 114), Sizes(90, 30, 30), Sizes(4_000, 1_000, 1_000)
_GREY, _BYTE = 16.0, 255.0  # the formats' bounds of a pixel, not the data's maxima
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
# Upper bounds of the ten measured quantities of a cell nucleus, of their standard errors, and of a flower's.
_NUCLEUS = (40.0, 50.0, 260.0, 4500.0, 0.25, 1.2, 1.4, 0.4, 0.8, 0.3)
_ERRORS = (4.0, 6.0, 25.0, 600.0, 0.04, 0.2, 0.5, 0.08, 0.1, 0.04)
_PETALS = (8.0, 5.0, 7.0, 3.0)  # centimetres
_QUANTITIES = (
    "radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity",
    "concave points", "symmetry", "fractal dimension",
)  # fmt: skip
_LEAVES = ("sepal length", "sepal width", "petal length", "petal width")
_BUNDLED = partial(find_extra, "sklearn.datasets", extra="demo", what="This task")
_IMAGES: dict[str, Any] = {
    "classes": 10,
    "loss": classification_loss,
    "public_test": True,
    "partition": "content",
}


def _digits_file() -> Path | None:
    """Return the library's file, which is read as it is: importing the library takes longer."""
    found = importlib.util.find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():
            return file
    return None


def _check_digits() -> None:
    if _digits_file() is None:
        find_extra("sklearn.datasets", extra="demo", what="Task digits-mlp")


def _digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the images, a row each, and their labels."""
    file = _digits_file()
    if file is not None:
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels


def _load_digits(*shape: int) -> TaskData:
    images, labels = _digits()
    return split(images.reshape(-1, *shape) / _GREY, labels, _DIGITS)


def digits_mlp() -> Task:
    """Return the task ``digits-mlp``: an MLP 64-64-10 on scikit-learn's digits."""
    return Task(
        name="digits-mlp",
        description="MLP 64-64-10 on scikit-learn's 1,797 handwritten digits (bundled)",
        **_DIGITS.declared(),
        input_shape=(64,),
        load=partial(_load_digits, 64),
        model=ModelOf("relu_mlp", (64,)),
        bounds={"pixels": (0.0, _GREY)},
        check=_check_digits,
        **_IMAGES,
    )


def digits_cnn() -> Task:
    """Return the task ``digits-cnn``: two small convolutions on the same records and split."""
    return replace(
        digits_mlp(),
        name="digits-cnn",
        description="two 3x3 convolutions on scikit-learn's 1,797 handwritten digits (bundled)",
        input_shape=(1, 8, 8),
        load=partial(_load_digits, 1, 8, 8),
        model=ModelOf("digits_cnn"),
    )


def _mnist() -> tuple[Any, Any, Any, Any]:
    """Return training and test images ``[N, 28, 28]`` and labels, as they were published."""
    where = os.environ.get(DATA_VARIABLE)
    if where is None:
        datasets = find_extra(
            "sklearn.datasets", extra="demo", what="MNIST without --data FILE.npz"
        )
        try:
            x, y = datasets.fetch_openml("mnist_784", version=1, return_X_y=True, as_frame=False)
        except OSError as error:
            raise TaskDataError(
                f"MNIST could not be fetched from OpenML ({type(error).__name__}). Give a file: "
                "--data mnist.npz with x_train, y_train, x_test and y_test."
            ) from error
        x, y = x.reshape(-1, 28, 28), y.astype(int)
        return x[:60_000], y[:60_000], x[60_000:], y[60_000:]
    try:
        with regular_file(Path(where)).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            if missing := [name for name in _ARRAYS if name not in file]:
                raise TaskDataError(f"{where} lacks {', '.join(missing)}; MNIST's file holds them.")
            x, y, x_test, y_test = (file[name] for name in _ARRAYS)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise TaskDataError(f"{where} cannot be read as MNIST's .npz file ({error}).") from error
    for images, labels in ((x, y), (x_test, y_test)):
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            raise TaskDataError(f"{where} must hold images [N, 28, 28] and their labels [N].")
    return x, y, x_test, y_test


def _load_mnist(*shape: int) -> TaskData:
    """Split the published training records by content; the published test records are public."""
    import torch

    from privtune.training.mechanism.data import TensorData

    x, y, x_test, y_test = _mnist()

    def tensors(images: Any, labels: Any, *, sealed_size: bool) -> TensorData:
        inputs = torch.as_tensor(images, dtype=torch.float32).reshape(-1, *shape) / _BYTE
        return TensorData(inputs, torch.as_tensor(labels, dtype=torch.int64), sealed_size)

    drawn = torch.from_numpy(places(x, y, (_MNIST.train, _MNIST.validation)))
    private = tensors(x, y, sealed_size=True)
    train, validation = (
        private.part((drawn == number).nonzero().squeeze(1), sealed_size=True)
        for number in range(2)
    )
    return TaskData(train, validation, tensors(x_test, y_test, sealed_size=False))


def mnist_mlp() -> Task:
    """Return the task ``mnist-mlp``: an MLP 784-64-10."""
    return Task(
        name="mnist-mlp",
        description="MLP 784-64-10 on MNIST (--data FILE.npz, or OpenML)",
        **_MNIST.declared(),
        input_shape=(784,),
        load=partial(_load_mnist, 784),
        model=ModelOf("relu_mlp", (784,)),
        bounds={"pixels": (0.0, _BYTE)},
        check=_mnist,
        **_IMAGES,
    )


def mnist_cnn() -> Task:
    """Return the task ``mnist-cnn``: the small network of the DP-SGD literature (26,010 weights)."""
    return replace(
        mnist_mlp(),
        name="mnist-cnn",
        description="two convolutions of the DP-SGD literature on MNIST (--data FILE.npz, or OpenML)",
        input_shape=(1, 28, 28),
        load=partial(_load_mnist, 1, 28, 28),
        model=ModelOf("mnist_cnn"),
    )


def mnist_logistic() -> Task:
    """Return the task ``mnist-logistic``: multinomial logistic regression."""
    return _logistic(
        "mnist-logistic",
        "logistic regression on MNIST (--data FILE.npz, or OpenML)",
        (784, 10),
        _MNIST,
        partial(_load_mnist, 784),
        bounds={"pixels": (0.0, _BYTE)},
        check=_mnist,
    )


def _logistic(
    name: str,
    description: str,
    shape: tuple[int, int],
    sizes: Sizes,
    load: Callable[[], TaskData],
    **fields: Any,
) -> Task:
    """Return a task of multinomial logistic regression from zero weights, on features in [-1, 1]."""
    features, classes = shape
    known = {**_IMAGES, "classes": classes, **fields}
    return Task(
        name=name,
        description=description,
        **sizes.declared(),
        input_shape=(features,),
        load=load,
        model=ModelOf("linear", (features, classes)),
        constants=softmax_constants(float(features), classes),
        **known,
    )


def _scaled(source: str, highs: tuple[float, ...], sizes: Sizes) -> TaskData:
    """Return a table of scikit-learn's, scaled from [0, its bound] to [-1, 1]."""
    x, y = getattr(_BUNDLED(), source)(return_X_y=True)
    return split(2.0 * np.clip(x / np.array(highs), 0.0, 1.0) - 1.0, y, sizes)


def breast_cancer_logistic() -> Task:
    """Return the task ``breast-cancer-logistic``: 569 records, 30 features, two classes."""
    kinds = {"mean": _NUCLEUS, "error of": _ERRORS, "largest": _NUCLEUS}
    bounds = {
        f"{kind} {name}": (0.0, high)
        for kind, highs in kinds.items()
        for name, high in zip(_QUANTITIES, highs, strict=True)
    }
    return _logistic(
        "breast-cancer-logistic",
        "logistic regression on scikit-learn's 569 breast cancer records (bundled)",
        (30, 2),
        _CANCER,
        partial(_scaled, "load_breast_cancer", (*_NUCLEUS, *_ERRORS, *_NUCLEUS), _CANCER),
        bounds=bounds,
        check=_BUNDLED,
    )


def iris_logistic() -> Task:
    """Return the task ``iris-logistic``: 150 records, 4 features, three classes."""
    return _logistic(
        "iris-logistic",
        "logistic regression on scikit-learn's 150 iris flowers (bundled)",
        (4, 3),
        _IRIS,
        partial(_scaled, "load_iris", _PETALS, _IRIS),
        bounds={name: (0.0, high) for name, high in zip(_LEAVES, _PETALS, strict=True)},
        check=_BUNDLED,
    )


def _load_synthetic() -> TaskData:
    rng = np.random.default_rng(7)
    x = np.clip(rng.standard_normal((sum(vars(_SYNTHETIC).values()), 20)) / 3.0, -1.0, 1.0)
    weights = 6.0 * rng.standard_normal(20)
    y = (rng.random(len(x)) < 1.0 / (1.0 + np.exp(-x @ weights))).astype(int)
    return split(x, y, _SYNTHETIC)


def synthetic_logistic() -> Task:
    """Return the task ``synthetic-logistic``: 6,000 made-up records of a logistic model."""
    return _logistic(
        "synthetic-logistic",
        "logistic regression on 6,000 records drawn from a logistic model of 20 features",
        (20, 2),
        _SYNTHETIC,
        _load_synthetic,
        bounds={"every feature": (-1.0, 1.0)},
    )


TASKS: Mapping[str, Callable[[], Task]] = {
    "digits-mlp": digits_mlp,
    "digits-cnn": digits_cnn,
    "breast-cancer-logistic": breast_cancer_logistic,
    "iris-logistic": iris_logistic,
    "synthetic-logistic": synthetic_logistic,
    "mnist-mlp": mnist_mlp,
    "mnist-cnn": mnist_cnn,
    "mnist-logistic": mnist_logistic,
}
"""The built-in tasks, by name."""

_DESCRIBED: Mapping[str, Callable[[Mapping[str, Any]], Task]] = ByName(
    {
        "tabular": "privtune.tasks.tabular:tabular",
        "images": "privtune.tasks.described:images",
        "text": "privtune.tasks.described:text",
        "own": "privtune.tasks.own:from_spec",
    }
)
"""Tasks that are described in a spec, by type."""


def get_task(name: str | Mapping[str, Any]) -> Task:
    """Return the task of a name; its data is not touched.

    Args:
        name: A built-in name; ``package.module:factory`` of a function that returns a :class:`Task`;
            or a description: ``{type: tabular | images | text | own | fine-tuning, ...}``.

    Raises:
        InvalidInputError: If there is no such task, or the factory returns something else.

    Example:
        >>> get_task("digits-mlp").description
        "MLP 64-64-10 on scikit-learn's 1,797 handwritten digits (bundled)"
        >>> get_task("digits")
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: task = 'digits': must be one of ...
    """
    if isinstance(name, Mapping):
        kind = name.get("type")
        if kind == "fine-tuning":
            return from_spec(name, get_task)
        if not isinstance(kind, str) or kind not in _DESCRIBED:
            known = ", ".join(_DESCRIBED)
            raise InvalidInputError("task.type", kind, f"must be one of {known}, fine-tuning")
        return _DESCRIBED[kind](name)
    if name in TASKS:
        return TASKS[name]()
    factory = find_function(
        "task",
        name,
        allowed=f"must be one of {', '.join(sorted(TASKS))}, or package.module:factory",
        must="must name a function that returns a task",
    )
    with users_code("task", name, "its function failed, called without arguments"):
        task = factory()
    if not isinstance(task, Task):
        raise InvalidInputError(
            "task", name, f"must return a privtune.tasks.Task, not {type(task).__name__}"
        )
    return task
