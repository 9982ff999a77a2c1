"""Two tables with a rare class, as risk scores have them: made up, so nobody's."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from privtune.tasks import Sizes, Task, TaskData
from privtune.tasks._models import linear
from privtune.training.mechanism.data import TensorData
from studies.harness import cross_entropy

_SIZES = Sizes(4_000, 1_000, 2_000)
_COLUMNS = 20
_RARE, _UNCOMMON = -2.7, -1.2  # the intercepts: about 8 and 29 of a hundred say yes


@cache
def _drawn(intercept: float, strength: float) -> TaskData:
    rng = np.random.default_rng(0)
    weights = strength * rng.standard_normal(_COLUMNS) / np.sqrt(_COLUMNS)
    parts = []
    for records in (_SIZES.train, _SIZES.validation, _SIZES.test):
        x = rng.standard_normal((records, _COLUMNS))
        chance = 1.0 / (1.0 + np.exp(-(intercept + x @ weights)))
        y = (rng.random(records) < chance).astype(np.int64)
        parts.append(TensorData(torch.tensor(x, dtype=torch.float32), torch.tensor(y)))
    return TaskData(*parts)


def _table(name: str, intercept: float, strength: float) -> Task:
    return Task(
        name=name,
        description="made-up records of 20 numbers, of which few say yes",
        **_SIZES.declared(),
        input_shape=(_COLUMNS,),
        classes=2,
        load=lambda: _drawn(intercept, strength),
        model=lambda: linear(_COLUMNS, 2),
        loss=cross_entropy,
        public_test=True,
        benchmark=True,
    )


def rare() -> Task:
    """Return a table of which one record in twelve says yes, and its columns tell something."""
    return _table("rare", _RARE, 1.2)


def uncommon() -> Task:
    """Return a table of which three records in ten say yes, and its columns hardly tell which."""
    return _table("uncommon", _UNCOMMON, 0.5)
