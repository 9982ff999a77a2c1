"""A task and an objective that processes elsewhere import."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

import privtune
from privtune.tasks import Task, TaskData
from tests.toy import blobs

BREAK = "PRIVTUNE_TEST_BREAK_LOADING"
VALIDATION = privtune.Validation(records=60)


def fragile() -> Task:
    """Return a task whose data cannot be read where the environment says so."""
    return replace(blobs(), load=_load)


def _load() -> TaskData:
    if os.environ.get(BREAK):
        raise RuntimeError(os.environ[BREAK])
    return blobs().load()


def objective(trial: privtune.Trial) -> float:
    """Train a linear model."""
    rate = trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
    data, model = blobs().load(), nn.Linear(6, 3)
    private = trial.make_private(model, torch.optim.SGD(model.parameters(), rate), data.train)
    private.fit(lambda model, x, y: nn.functional.cross_entropy(model(x), y, reduction="none"))
    return trial.score(model, data.validation)
