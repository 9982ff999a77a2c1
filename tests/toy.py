"""A small task made of random blobs, so that studies run in a second."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from privtune.study import Study
from privtune.tasks import Task, TaskData
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.estimates import ScoreEstimate

LOADS: list[str] = []
"""Every load of the data, so that tests can see whether data was touched."""


def curated(study: Study) -> Study:
    """The same study, opened by its curator."""
    return Study(study.name, study.storage, curator=True)


def _load() -> TaskData:
    LOADS.append("blobs")
    generator = torch.Generator().manual_seed(7)
    y = torch.randint(3, (360,), generator=generator)
    centers = 2.0 * torch.eye(3, 6)
    x = centers[y] + 0.6 * torch.randn((360, 6), generator=generator)
    cut = [slice(0, 240), slice(240, 300), slice(300, 360)]
    return TaskData(*(TensorData(x[c], y[c]) for c in cut))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def blobs() -> Task:
    return Task(
        name="blobs",
        description="three blobs",
        train_records=240,
        validation_records=60,
        test_records=60,
        input_shape=(6,),
        classes=3,
        load=_load,
        model=_model,
        loss=_loss,
        public_test=True,
    )


def linear_blobs() -> Task:
    """The same, by a linear model whose weights begin at 0."""

    def model() -> nn.Module:
        layer = nn.Linear(6, 3)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    return replace(blobs(), name="linear-blobs", model=model)


def wrong_size() -> Task:
    task = blobs()
    return Task(
        **{**{f: getattr(task, f) for f in task.__dataclass_fields__}, "train_records": 250}
    )


def private_blobs() -> Task:
    """The same, its test split private."""
    return replace(blobs(), public_test=False)


def public_blobs() -> Task:
    return replace(blobs(), name="public-blobs", public_validation=True)


def benchmark_blobs() -> Task:
    """The same, every record of it public."""
    return replace(blobs(), name="benchmark-blobs", benchmark=True)


def exact_score(value: float) -> ScoreEstimate:
    """A score that is known exactly, of a metric that can be anything."""
    return ScoreEstimate(value, value, value, -math.inf, math.inf)
