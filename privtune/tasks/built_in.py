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
_DIGITS_ARE = "scikit-learn's 1,797 handwritten digits (bundled)"
_MNIST_IS = "MNIST (--data FILE.npz, or OpenML)"
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


def _pictures(name: str, what: str, shape: tuple[int, ...], model: ModelOf) -> Task:
    """Return a task of pictures: scikit-learn's digits, or MNIST."""
    digits = name.startswith("digits")
    return Task(
        name=name,
        description=f"{what} on {_DIGITS_ARE if digits else _MNIST_IS}",
        **(_DIGITS if digits else _MNIST).declared(),
        input_shape=shape,
        load=partial(_load_digits if digits else _load_mnist, *shape),
        model=model,
        bounds={"pixels": (0.0, _GREY if digits else _BYTE)},
        check=_check_digits if digits else _mnist,
        **_IMAGES,
    )


def _logistic(
    name: str,
    *,
    data: str,
    shape: tuple[int, int],
    sizes: Sizes,
    load: Callable[[], TaskData],
    bounds: Mapping[str, tuple[float, float]],
    check: Callable[[], object] = lambda: None,
) -> Task:
    """Return a task of multinomial logistic regression from zero weights, on features in [-1, 1]."""
    features, classes = shape
    return Task(
        name=name,
        description=f"logistic regression on {data}",
        **sizes.declared(),
        input_shape=(features,),
        load=load,
        model=ModelOf("linear", (features, classes)),
        constants=softmax_constants(float(features), classes),
        bounds=bounds,
        check=check,
        **{**_IMAGES, "classes": classes},
    )


def _scaled(source: str, highs: tuple[float, ...], sizes: Sizes) -> TaskData:
    """Return a table of scikit-learn's, scaled from [0, its bound] to [-1, 1]."""
    x, y = getattr(_BUNDLED(), source)(return_X_y=True)
    return split(2.0 * np.clip(x / np.array(highs), 0.0, 1.0) - 1.0, y, sizes)


def _load_synthetic() -> TaskData:
    rng = np.random.default_rng(7)
    x = np.clip(rng.standard_normal((sum(vars(_SYNTHETIC).values()), 20)) / 3.0, -1.0, 1.0)
    weights = 6.0 * rng.standard_normal(20)
    y = (rng.random(len(x)) < 1.0 / (1.0 + np.exp(-x @ weights))).astype(int)
    return split(x, y, _SYNTHETIC)


def _scaled_logistic(
    name: str, *, data: str, sizes: Sizes, source: str, classes: int, highs: Mapping[str, float]
) -> Task:
    """Return a task of a table of scikit-learn's."""
    return _logistic(
        name,
        data=f"scikit-learn's {data} (bundled)",
        shape=(len(highs), classes),
        sizes=sizes,
        load=partial(_scaled, source, tuple(highs.values()), sizes),
        bounds={feature: (0.0, high) for feature, high in highs.items()},
        check=_BUNDLED,
    )


_NUCLEI = {
    f"{kind} {name}": high
    for kind, highs in (("mean", _NUCLEUS), ("error of", _ERRORS), ("largest", _NUCLEUS))
    for name, high in zip(_QUANTITIES, highs, strict=True)
}
_CNN = "two convolutions of the DP-SGD literature"
_FLOWERS = dict(zip(_LEAVES, _PETALS, strict=True))
_MAKERS: Mapping[str, Callable[[str], Task]] = {
    "digits-mlp": partial(_pictures, what="MLP 64-64-10", model=ModelOf("relu_mlp", (64,)), shape=(64,)),
    "digits-cnn": partial(
        _pictures, what="two 3x3 convolutions", model=ModelOf("digits_cnn"), shape=(1, 8, 8)
    ),
    "breast-cancer-logistic": partial(
        _scaled_logistic, data="569 breast cancer records", sizes=_CANCER, classes=2, highs=_NUCLEI,
        source="load_breast_cancer",
    ),
    "iris-logistic": partial(
        _scaled_logistic, data="150 iris flowers", sizes=_IRIS, classes=3, highs=_FLOWERS,
        source="load_iris",
    ),
    "synthetic-logistic": partial(
        _logistic, data="6,000 records drawn from a logistic model of 20 features", shape=(20, 2),
        sizes=_SYNTHETIC, load=_load_synthetic, bounds={"every feature": (-1.0, 1.0)},
    ),
    "mnist-mlp": partial(_pictures, what="MLP 784-64-10", model=ModelOf("relu_mlp", (784,)), shape=(784,)),
    "mnist-cnn": partial(_pictures, what=_CNN, model=ModelOf("mnist_cnn"), shape=(1, 28, 28)),
    "mnist-logistic": partial(
        _logistic, data=_MNIST_IS, shape=(784, 10), sizes=_MNIST, load=partial(_load_mnist, 784),
        bounds={"pixels": (0.0, _BYTE)}, check=_mnist,
    ),
}  # fmt: skip
TASKS: Mapping[str, Callable[[], Task]] = {name: partial(of, name) for name, of in _MAKERS.items()}
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
            or a description: ``{type: tabular | images | text | own | fine-tuning | stand-in, ...}``.

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
        if kind == "stand-in":
            from privtune.tasks import stand_in

            return stand_in.from_spec(name, get_task)
        if not isinstance(kind, str) or kind not in _DESCRIBED:
            known = ", ".join(_DESCRIBED)
            raise InvalidInputError(
                "task.type", kind, f"must be one of {known}, fine-tuning, stand-in"
            )
        return _DESCRIBED[kind](name)
    if name in TASKS:
        return replace(TASKS[name](), benchmark=True)
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
