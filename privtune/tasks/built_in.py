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

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.facts import TaskAbsentError, TaskDataError
from privtune.files import regular_file
from privtune.imports import ByName, check_extra, find_extra, find_function, users_code
from privtune.ledger.datasets import Dataset
from privtune.names import refuse_name
from privtune.plugins import Registration, Registry
from privtune.tasks.partition import Sizes, places, split
from privtune.tasks.pretrained import from_spec
from privtune.tasks.task import ModelOf, Task, TaskData, classification_loss, softmax_constants

DATA_VARIABLE = "PRIVTUNE_DATA"
"""Environment variable with the path of MNIST; ``--data PATH`` sets it."""

_DIGITS = Sizes(1_077, 360, 360)
_MNIST = Sizes(55_000, 5_000, 10_000)
_CANCER = Sizes(341, 114, 114)
_IRIS = Sizes(90, 30, 30)
_SYNTHETIC = Sizes(4_000, 1_000, 1_000)
_GREY = 16.0  # of the digits, and
_BYTE = 255.0  # of MNIST: the formats' bounds of a pixel, not the data's maxima
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
_MNIST_ELSE = "MNIST without --data FILE.npz"
_MNIST_IS = "MNIST (--data FILE.npz, or OpenML)"
_IMAGES: dict[str, Any] = {
    "classes": 10,
    "loss": classification_loss,
    "public_test": True,
    "partition": "content",
}


def _digits_file() -> Path | None:
    """Return the path of scikit-learn's digits file (faster to read than the import), or None."""
    library = importlib.util.find_spec("sklearn")
    if library is None:
        return None
    for folder in library.submodule_search_locations or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():
            return file
    return None


def _check_library(name: str) -> None:
    """Refuse a task of scikit-learn's records if the library is missing; it is not imported."""
    check_extra("sklearn", extra="demo", what=f"Task {name}")


def _look_for_mnist() -> None:
    """Check that a file of MNIST is given, or that the library that downloads it is installed.

    Raises:
        TaskAbsentError: If there is neither a file nor the library that fetches one.
    """
    if DATA_VARIABLE in os.environ:
        return
    try:
        check_extra("sklearn", extra="demo", what=_MNIST_ELSE)
    except PrivTuneError as error:
        raise TaskAbsentError(str(error)) from None


def _digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return scikit-learn's digits: pixels ``[N, 64]`` and labels ``[N]``."""
    file = _digits_file()
    if file is not None:
        table = np.loadtxt(file, delimiter=",")
        pixels = table[:, :-1]
        labels = table[:, -1]
        return pixels, labels.astype(np.int64)
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels


def _load_digits(*shape: int) -> TaskData:
    """Return the digits in three splits by content, each picture reshaped to ``shape``."""
    images, labels = _digits()
    pixels = images.reshape(-1, *shape) / _GREY
    return split(pixels, labels, _DIGITS)


def _mnist() -> tuple[Any, Any, Any, Any]:
    """Return MNIST's training images ``[N, 28, 28]`` and labels, then its test images and labels."""
    path = os.environ.get(DATA_VARIABLE)
    if path is None:
        return _fetch_mnist()
    return _read_mnist(path)


def _fetch_mnist() -> tuple[Any, Any, Any, Any]:
    """Return MNIST's arrays from OpenML, whose first 60,000 rows are the training records."""
    datasets = find_extra("sklearn.datasets", extra="demo", what=_MNIST_ELSE)
    try:
        x, y = datasets.fetch_openml(
            "mnist_784",
            version=1,
            return_X_y=True,
            as_frame=False,
        )
    except OSError as error:
        raise TaskDataError(
            f"MNIST could not be fetched from OpenML ({type(error).__name__}). Give a file: "
            "--data mnist.npz with x_train, y_train, x_test and y_test."
        ) from error
    images = x.reshape(-1, 28, 28)
    labels = y.astype(int)
    return images[:60_000], labels[:60_000], images[60_000:], labels[60_000:]


def _read_mnist(path: str) -> tuple[Any, Any, Any, Any]:
    """Return the four arrays of MNIST's ``.npz`` file, or refuse a file with other arrays."""
    try:
        file = regular_file(Path(path))
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            missing = [name for name in _ARRAYS if name not in arrays]
            if missing:
                raise TaskDataError(f"{path} lacks {', '.join(missing)}; MNIST's file holds them.")
            x, y, x_test, y_test = (arrays[name] for name in _ARRAYS)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise TaskDataError(f"{path} cannot be read as MNIST's .npz file ({error}).") from error
    if not _are_pictures(x, y) or not _are_pictures(x_test, y_test):
        raise TaskDataError(f"{path} must hold images [N, 28, 28] and their labels [N].")
    return x, y, x_test, y_test


def _are_pictures(images: Any, labels: Any) -> bool:
    """Return whether arrays are of the shapes of MNIST, ``[N, 28, 28]`` and ``[N]``."""
    count = images.shape[:1]
    size = images.shape[1:]
    return bool(size == (28, 28) and labels.shape == count)


def _load_mnist(*shape: int) -> TaskData:
    """Return MNIST: training and validation records split by content, and the public test records."""
    import torch

    from privtune.training.mechanism.data import TensorData

    x, y, x_test, y_test = _mnist()

    def tensors(images: Any, labels: Any, *, sealed_size: bool) -> TensorData:
        pixels = torch.as_tensor(images, dtype=torch.float32)
        inputs = pixels.reshape(-1, *shape) / _BYTE
        targets = torch.as_tensor(labels, dtype=torch.int64)
        return TensorData(inputs, targets, sealed_size)

    shares = (_MNIST.train, _MNIST.validation)
    split_of = torch.from_numpy(places(x, y, shares))
    private = tensors(x, y, sealed_size=True)

    def part(number: int) -> TensorData:
        index = (split_of == number).nonzero().squeeze(1)
        return private.part(index, sealed_size=True)

    return TaskData(
        train=part(0),
        validation=part(1),
        test=tensors(x_test, y_test, sealed_size=False),
    )


def _pictures(name: str, what: str, shape: tuple[int, ...], model: ModelOf) -> Task:
    """Return the task of a model on scikit-learn's digits or on MNIST.

    Args:
        name: Of the task; that of the digits begins with "digits".
        what: The model, in words.
        shape: Of a picture as the model takes it.
        model: Builds the model.
    """
    if name.startswith("digits"):
        check_library = partial(_check_library, name)
        return Task(
            name=name,
            description=f"{what} on {_DIGITS_ARE}",
            **_DIGITS.declared(),
            input_shape=shape,
            load=partial(_load_digits, *shape),
            model=model,
            bounds={"pixels": (0.0, _GREY)},
            input_range=(0.0, 1.0),
            check=check_library,
            header=check_library,
            **_IMAGES,
        )
    return Task(
        name=name,
        description=f"{what} on {_MNIST_IS}",
        **_MNIST.declared(),
        input_shape=shape,
        load=partial(_load_mnist, *shape),
        model=model,
        bounds={"pixels": (0.0, _BYTE)},
        input_range=(0.0, 1.0),
        check=_mnist,
        header=_look_for_mnist,
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
    input_range: tuple[float, float] = (-1.0, 1.0),
    check: Callable[[], object] = lambda: None,
    header: Callable[[], object] = lambda: None,
) -> Task:
    """Return a task of multinomial logistic regression from zero weights, on features in [-1, 1].

    Args:
        name: Of the task.
        data: Its records, in words.
        shape: Numbers of features and of classes.
        sizes: Declared sizes of the splits.
        load: Reads the records.
        bounds: Public bounds of the features before they were scaled.
        input_range: What they were scaled to.
        check: Checks what holds the records before a charge.
        header: Checks it while planning.
    """
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
        input_range=input_range,
        check=check,
        header=header,
        **{**_IMAGES, "classes": classes},
    )


def _scaled(source: str, highs: tuple[float, ...], sizes: Sizes) -> TaskData:
    """Return a table of scikit-learn's in three splits, features scaled from [0, bound] to [-1, 1]."""
    load = getattr(_BUNDLED(), source)
    x, y = load(return_X_y=True)
    shares = np.clip(x / np.array(highs), 0.0, 1.0)
    scaled = 2.0 * shares - 1.0
    return split(scaled, y, sizes)


def _load_synthetic() -> TaskData:
    """Return generated records of a logistic model, drawn with a public seed."""
    rng = np.random.default_rng(7)
    records = _SYNTHETIC.train + _SYNTHETIC.validation + _SYNTHETIC.test
    numbers = rng.standard_normal((records, 20))
    x = np.clip(numbers / 3.0, -1.0, 1.0)
    weights = 6.0 * rng.standard_normal(20)
    odds_against = np.exp(-x @ weights)
    probabilities = 1.0 / (1.0 + odds_against)
    draws = rng.random(records)
    y = (draws < probabilities).astype(int)
    return split(x, y, _SYNTHETIC)


def _scaled_logistic(
    name: str,
    *,
    data: str,
    sizes: Sizes,
    source: str,
    classes: int,
    highs: Mapping[str, float],
) -> Task:
    """Return a task of logistic regression on a table of scikit-learn's."""
    return _logistic(
        name,
        data=f"scikit-learn's {data} (bundled)",
        shape=(len(highs), classes),
        sizes=sizes,
        load=partial(_scaled, source, tuple(highs.values()), sizes),
        bounds={feature: (0.0, high) for feature, high in highs.items()},
        check=_BUNDLED,
        header=partial(_check_library, name),
    )


def _nuclei() -> Mapping[str, float]:
    """Return an upper bound for each of a cell nucleus's 30 features, by the feature's name."""
    highs: dict[str, float] = {}
    kinds = {
        "mean": _NUCLEUS,
        "error of": _ERRORS,
        "largest": _NUCLEUS,
    }
    for kind, bounds in kinds.items():
        for name, high in zip(_QUANTITIES, bounds, strict=True):
            highs[f"{kind} {name}"] = high
    return highs


_CNN = "two convolutions of the DP-SGD literature"
_FLOWERS = dict(zip(_LEAVES, _PETALS, strict=True))
_MAKERS: Mapping[str, Callable[[str], Task]] = {
    "digits-mlp": partial(
        _pictures,
        what="MLP 64-64-10",
        model=ModelOf("relu_mlp", (64,)),
        shape=(64,),
    ),
    "digits-cnn": partial(
        _pictures,
        what="two 3x3 convolutions",
        model=ModelOf("digits_cnn"),
        shape=(1, 8, 8),
    ),
    "breast-cancer-logistic": partial(
        _scaled_logistic,
        data="569 breast cancer records",
        sizes=_CANCER,
        classes=2,
        highs=_nuclei(),
        source="load_breast_cancer",
    ),
    "iris-logistic": partial(
        _scaled_logistic,
        data="150 iris flowers",
        sizes=_IRIS,
        classes=3,
        highs=_FLOWERS,
        source="load_iris",
    ),
    "synthetic-logistic": partial(
        _logistic,
        data="6,000 records drawn from a logistic model of 20 features",
        shape=(20, 2),
        sizes=_SYNTHETIC,
        load=_load_synthetic,
        bounds={"every feature": (-1.0, 1.0)},
    ),
    "mnist-mlp": partial(
        _pictures,
        what="MLP 784-64-10",
        model=ModelOf("relu_mlp", (784,)),
        shape=(784,),
    ),
    "mnist-cnn": partial(
        _pictures,
        what=_CNN,
        model=ModelOf("mnist_cnn"),
        shape=(1, 28, 28),
    ),
    "mnist-logistic": partial(
        _logistic,
        data=_MNIST_IS,
        shape=(784, 10),
        sizes=_MNIST,
        load=partial(_load_mnist, 784),
        bounds={"pixels": (0.0, _BYTE)},
        input_range=(0.0, 1.0),
        check=_mnist,
        header=_look_for_mnist,
    ),
}


class _TaskRegistry(Registry[Callable[[], Task]]):
    """Registry of functions that make tasks: the built-in ones of ``_MAKERS``, and those of packages."""

    def _built_in(self, name: str) -> Callable[[], Task]:
        """Return the function that makes a built-in task."""
        return partial(_MAKERS[name], name)


def _lacking(factory: object) -> str:
    """Return what is wrong with an installed package's entry for a task, or an empty text."""
    return "" if callable(factory) else "must be a function without arguments that returns a task"


TASKS: Registry[Callable[[], Task]] = _TaskRegistry(
    "task",
    "privtune.tasks",
    dict.fromkeys(_MAKERS, ""),
    lacking=_lacking,
    of_classes=False,
)
"""Functions that make tasks, by the task's name: built in, or registered by an installed package."""


def registered_tasks() -> list[Registration]:
    """Return the task entries of installed packages, faulty ones included, without making any task.

    Example:
        >>> [entry.name for entry in registered_tasks() if entry.problem]
        []
    """
    return list(TASKS.registered())


_DESCRIBED: Mapping[str, Callable[[Mapping[str, Any]], Task]] = ByName(
    {
        "tabular": "privtune.tasks.tabular:tabular",
        "images": "privtune.tasks.described:images",
        "text": "privtune.tasks.described:text",
        "own": "privtune.tasks.own:from_spec",
    }
)
"""Functions that make the tasks described in a spec, by the field ``type``."""


def get_task(name: str | Mapping[str, Any]) -> Task:
    """Return a task by its name, path or description, without reading its data.

    Args:
        name: A built-in name, or one that an installed package registers; ``package.module:factory`` of a
            function that returns a :class:`Task`; or a description: ``{type: tabular | images | text | own |
            fine-tuning | stand-in, ...}``.

    Raises:
        InvalidInputError: If there is no such task, or the factory returns something else.
        EntryPointError: If a package registers the name, and what it registers cannot be used.

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
            refuse_name("task.type", kind, (*_DESCRIBED, "fine-tuning", "stand-in"))
        make = _DESCRIBED[kind]
        return make(name)
    if TASKS.is_built_in(name):
        family = name.rpartition("-")[0]  # several models learn from one dataset
        dataset = Dataset(family, f"built into PrivTune: {family}")
        return replace(TASKS[name](), benchmark=True, dataset=dataset)
    if name in TASKS:
        task = _make(name, TASKS[name])
        if task.name != name:
            allowed = f"must return a task of its own name, not of {task.name!r}"
            raise InvalidInputError("task", name, allowed)
    else:
        task = _make(name, _find_factory(name))
    if task.dataset is not None:
        return task
    return replace(task, dataset=Dataset(task.name))


def _find_factory(name: str) -> Callable[[], Any]:
    """Return the task factory at the path ``package.module:factory``."""
    if ":" not in name:
        refuse_name("task", name, TASKS.names(), also="or package.module:factory")
    factory: Callable[[], Any] = find_function(
        "task",
        name,
        allowed="must be a built-in task (privtune tasks lists them), or package.module:factory",
        must="must name a function that returns a task",
    )
    return factory


def _make(name: str, factory: Callable[[], Any]) -> Task:
    """Return the task that a factory of the user's or of a package makes.

    Raises:
        InvalidInputError: If it fails, or returns something else.
    """
    with users_code("task", name, "its function failed, called without arguments"):
        task = factory()
    if not isinstance(task, Task):
        raise InvalidInputError(
            "task",
            name,
            f"must return a privtune.tasks.Task, not {type(task).__name__}",
        )
    return task
