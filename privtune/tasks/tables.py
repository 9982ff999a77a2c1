"""Logistic regression on small tables: two that scikit-learn bundles, and one that is made up.

Features are scaled by round public bounds, written down here from what is known of the measured
quantities; no mean, variance, minimum or maximum of the records is used.
"""

from __future__ import annotations

from functools import partial

from privtune.imports import find_extra
from privtune.tasks._data import logistic
from privtune.tasks._partition import Sizes, split
from privtune.tasks._task import Task, TaskData

# Upper bounds of the ten measured quantities of a cell nucleus.
_NUCLEUS = (40.0, 50.0, 260.0, 4500.0, 0.25, 1.2, 1.4, 0.4, 0.8, 0.3)
# Their standard errors are smaller; the largest values are bounded like the means.
_ERRORS = (4.0, 6.0, 25.0, 600.0, 0.04, 0.2, 0.5, 0.08, 0.1, 0.04)
_PETALS = (8.0, 5.0, 7.0, 3.0)  # centimetres
_QUANTITIES = (
    "radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity",
    "concave points", "symmetry", "fractal dimension",
)  # fmt: skip
_LEAVES = ("sepal length", "sepal width", "petal length", "petal width")
_BUNDLED = partial(find_extra, "sklearn.datasets", extra="demo", what="This task")
_CANCER, _IRIS, _SYNTHETIC = Sizes(341, 114, 114), Sizes(90, 30, 30), Sizes(4_000, 1_000, 1_000)


def _load_cancer() -> TaskData:
    import numpy as np
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    bounds = np.array((*_NUCLEUS, *_ERRORS, *_NUCLEUS))
    return split(2.0 * np.clip(x / bounds, 0.0, 1.0) - 1.0, y, _CANCER)


def _load_iris() -> TaskData:
    import numpy as np
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True)
    return split(2.0 * np.clip(x / np.array(_PETALS), 0.0, 1.0) - 1.0, y, _IRIS)


def _load_synthetic() -> TaskData:
    import numpy as np

    rng = np.random.default_rng(7)
    total = _SYNTHETIC.train + _SYNTHETIC.validation + _SYNTHETIC.test
    x = np.clip(rng.standard_normal((total, 20)) / 3.0, -1.0, 1.0)
    weights = 6.0 * rng.standard_normal(20)
    y = (rng.random(total) < 1.0 / (1.0 + np.exp(-x @ weights))).astype(int)
    return split(x, y, _SYNTHETIC)


def breast_cancer_logistic() -> Task:
    """Return the task ``breast-cancer-logistic``: 569 records, 30 features, two classes."""
    return logistic(
        "breast-cancer-logistic",
        "logistic regression on scikit-learn's 569 breast cancer records (bundled)",
        features=30,
        classes=2,
        sizes=_CANCER,
        load=_load_cancer,
        bounds={
            f"{kind} {name}": (0.0, high)
            for kind, highs in (("mean", _NUCLEUS), ("error of", _ERRORS), ("largest", _NUCLEUS))
            for name, high in zip(_QUANTITIES, highs, strict=True)
        },
        check=_BUNDLED,
    )


def iris_logistic() -> Task:
    """Return the task ``iris-logistic``: 150 records, 4 features, three classes."""
    return logistic(
        "iris-logistic",
        "logistic regression on scikit-learn's 150 iris flowers (bundled)",
        features=4,
        classes=3,
        sizes=_IRIS,
        load=_load_iris,
        bounds={name: (0.0, high) for name, high in zip(_LEAVES, _PETALS, strict=True)},
        check=_BUNDLED,
    )


def synthetic_logistic() -> Task:
    """Return the task ``synthetic-logistic``: 6,000 made-up records of a logistic model."""
    return logistic(
        "synthetic-logistic",
        "logistic regression on 6,000 records drawn from a logistic model of 20 features",
        features=20,
        classes=2,
        sizes=_SYNTHETIC,
        load=_load_synthetic,
        bounds={"every feature": (-1.0, 1.0)},
    )
