"""Twelve tasks that no rule of this project was read off.

They were fixed and committed before any arm was run on one of them. Their records come with packages
(scikit-learn, statsmodels), from MNIST, changed as no other study changes it, or from generators that no
other study has. Features are scaled to [-1, 1] by round public bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn import datasets
from torch import nn

from privtune.tasks import Sizes, Task
from studies.auto.tasks import Arrays, Made, between, of_statsmodels, pictures
from studies.two_factors.six import small_cnn

Floats = npt.NDArray[np.float64]
SIDE = 14  # of a picture of MNIST, in pixels


def overconfidence(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return by record (1 + confidence - hit) / 2: above a half in the mean where a model is too sure.

    Args:
        outputs: Logits, shape ``[records, classes]``.
        targets: Classes, shape ``[records]``.
    """
    confidence = outputs.softmax(-1).max(-1).values
    hits = (outputs.argmax(-1) == targets).to(confidence)
    return 0.5 * (1.0 + confidence - hits)


def _marriages() -> Arrays:
    """Whether a woman of Redbook's survey of 1974 calls her marriage very good."""
    data = of_statsmodels("fair")
    x = data.drop(columns="rate_marriage").to_numpy()
    low = (15, 0, 0, 1, 8, 1, 1, 0)
    high = (50, 30, 6, 4, 20, 6, 6, 10)
    return between(x, low, high), (data["rate_marriage"] == 5).to_numpy().astype(int)


def _illness() -> Arrays:
    """Whether a person of RAND's Health Insurance Experiment has more than ten chronic diseases."""
    data = of_statsmodels("randhie")
    columns = ["mdvis", "lncoins", "idp", "lpi", "fmde", "physlm", "hlthg", "hlthf", "hlthp"]
    high = (20, 5, 1, 8, 9, 1, 1, 1, 1)
    return between(data[columns].to_numpy(), 0.0, high), (data["disea"] > 10).to_numpy().astype(int)


def _parties() -> Arrays:
    """Whether an American of 1996 is for the Democrats, for no party, or for the Republicans."""
    data = of_statsmodels("anes96")
    columns = ["TVnews", "selfLR", "ClinLR", "DoleLR", "age", "educ", "income", "logpopul"]
    low, high = (0, 1, 1, 1, 18, 1, 1, -3), (7, 7, 7, 7, 95, 7, 24, 9)
    side = np.digitize(data["PID"].to_numpy(), (2.5, 3.5))
    return between(data[columns].to_numpy(), low, high), side


def _lookalikes() -> Arrays:
    """Return scikit-learn's digits 3, 5, 8 and 9."""
    x, y = datasets.load_digits(return_X_y=True)
    chosen = np.isin(y, (3, 5, 8, 9))
    return between(x[chosen], 0.0, 16.0), np.unique(y[chosen], return_inverse=True)[1]


def _squares(first: int) -> tuple[Floats, npt.NDArray[Any]]:
    """Return 10,000 pictures of MNIST as squares of values in [-1, 1], and their digits."""
    x, y = pictures(first)
    return x.reshape(-1, SIDE, SIDE), y


def _edges() -> Arrays:
    """Return where pictures get brighter to the right and downwards, and the digits."""
    squares, y = _squares(0)
    across = np.diff(squares, axis=2, prepend=-1.0)
    down = np.diff(squares, axis=1, prepend=-1.0)
    changes = np.clip(0.5 * (across + down), -1.0, 1.0)
    return changes.reshape(len(y), -1), y


def _ink() -> Arrays:
    """Return pictures, and whether they have little, middling or much ink."""
    squares, _ = _squares(10_000)
    ink = (0.5 + 0.5 * squares).mean(axis=(1, 2))
    return squares.reshape(len(ink), -1), np.digitize(ink, (0.11, 0.15))


def _overlaid() -> Arrays:
    """Return digits that lie over others of three fifths of the brightness, and the brighter digit."""
    squares, y = _squares(20_000)
    behind = 0.6 * (1.0 + np.roll(squares, 1, axis=0)) - 1.0
    return np.maximum(squares, behind).reshape(len(y), -1), y


def _erased() -> Arrays:
    """Return pictures without a square of five pixels at a random place, and the digits."""
    squares, y = _squares(40_000)
    erased = squares.copy()
    corners = np.random.default_rng(31).integers(0, SIDE - 4, size=(len(y), 2))
    for picture, (row, column) in zip(erased, corners, strict=True):
        picture[row : row + 5, column : column + 5] = -1.0
    return erased.reshape(len(y), -1), y


def _checkers() -> Arrays:
    """Return points on a board of three by three fields, three noises, and the colour of the field."""
    draw = np.random.default_rng(32)
    x = draw.uniform(-1.0, 1.0, size=(8_000, 5))
    fields = np.floor(1.5 * (x[:, :2] + 1.0)).astype(int)
    return x, fields.sum(axis=1) % 2


def _cubic() -> Arrays:
    """Return eight uniform numbers, and the sign of a random polynomial of degree three of them."""
    draw = np.random.default_rng(33)
    x = draw.uniform(-1.0, 1.0, size=(12_000, 8))
    terms = draw.integers(0, 9, size=(20, 3))  # number 8 is the constant
    padded = np.hstack([x, np.ones((len(x), 1))])
    values = padded[:, terms].prod(axis=2) @ draw.standard_normal(20)
    return x, (values > np.median(values)).astype(int)


def _tailed() -> Arrays:
    """Return six clusters of Student's t with two degrees of freedom in thirty dimensions."""
    draw = np.random.default_rng(34)
    y = draw.integers(6, size=22_000)
    centres = 1.5 * draw.standard_normal((6, 30))
    x = centres[y] + draw.standard_t(2.0, size=(len(y), 30))
    return between(x, -6.0, 6.0), y


def _flipped() -> Arrays:
    """Return two hundred signs, and a sum of twenty of them above 0, every tenth answer wrong."""
    draw = np.random.default_rng(35)
    x = draw.choice((-1.0, 1.0), size=(14_000, 200))
    weights = np.zeros(200)
    weights[:20] = draw.uniform(0.5, 1.5, size=20)
    y = (x @ weights > 0.0).astype(int)
    wrong = draw.random(len(y)) < 0.1
    return x, np.where(wrong, 1 - y, y)


def _cnn() -> nn.Module:
    """Return the network of the halved pictures of MNIST, for pictures as rows of pixels."""
    return nn.Sequential(nn.Unflatten(1, (1, SIDE, SIDE)), *small_cnn())


def _made(load: Callable[[], Arrays], sizes: Sizes, *layers: int) -> Made:
    """Return a task whose epochs and batch the study's plan chooses."""
    return Made(load, sizes, layers, epochs=0, batch=0)


@dataclass(frozen=True)
class New:
    """One of the twelve tasks.

    Attributes:
        made: Its records and its network.
        passes: Passes over the records that one training may spend.
        model: Makes its network where that is no perceptron.
    """

    made: Made
    passes: int
    model: Callable[[], nn.Module] | None = None

    def task(self, name: str) -> Task:
        """Return the task, whose test records are public. Reads nothing."""
        task = self.made.task(name)
        return task if self.model is None else replace(task, model=self.model)


SMALL_PICTURES = Sizes(8_000, 1_000, 1_000)
TWELVE: dict[str, New] = {
    "marriages": New(_made(_marriages, Sizes(4_400, 966, 1_000), 8, 32, 2), 20),
    "illness": New(_made(_illness, Sizes(14_000, 3_000, 3_190), 9, 2), 10),
    "parties": New(_made(_parties, Sizes(600, 144, 200), 8, 3), 20),
    "lookalikes": New(_made(_lookalikes, Sizes(430, 144, 145), 64, 32, 4), 20),
    "edges": New(_made(_edges, SMALL_PICTURES, 196, 64, 10), 20),
    "ink": New(_made(_ink, SMALL_PICTURES, 196, 3), 20),
    "overlaid": New(_made(_overlaid, SMALL_PICTURES, 196, 64, 10), 20),
    "erased": New(_made(_erased, SMALL_PICTURES, 196, 10), 10, _cnn),
    "checkers": New(_made(_checkers, Sizes(6_000, 1_000, 1_000), 5, 64, 2), 20),
    "cubic": New(_made(_cubic, Sizes(10_000, 1_000, 1_000), 8, 64, 2), 20),
    "tailed": New(_made(_tailed, Sizes(20_000, 1_000, 1_000), 30, 6), 10),
    "flipped": New(_made(_flipped, Sizes(12_000, 1_000, 1_000), 200, 2), 10),
}
"""Fixed and committed before an arm was run on one of them."""


def __getattr__(name: str) -> Callable[[], Task]:
    """Return the factory of one of the twelve, named as in a spec."""
    if name not in TWELVE:
        raise AttributeError(name)
    return partial(TWELVE[name].task, name)
