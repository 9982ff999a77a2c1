"""A task and an objective that processes elsewhere import."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

import privtune
from privtune.tasks import Task
from tests.toy import blobs

BREAK = "PRIVTUNE_TEST_BREAK_TRAINING"
VALIDATION = privtune.Validation(records=60)


def fragile() -> Task:
    """Return a task whose training fails where the environment says so."""
    return replace(blobs(), loss=_loss)


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if os.environ.get(BREAK):
        raise RuntimeError(os.environ[BREAK])
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def objective(trial: privtune.Trial) -> float:
    """Train a linear model."""
    rate = trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
    data, model = blobs().load(), nn.Linear(6, 3)
    private = trial.make_private(model, torch.optim.SGD(model.parameters(), rate), data.train)
    private.fit(lambda model, x, y: nn.functional.cross_entropy(model(x), y, reduction="none"))
    return trial.score(model, data.validation)


def reporting(trial: privtune.Trial) -> float:
    """Train a linear model on what hangs on a choice, and report scores that are public."""
    rate = trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
    heavy = trial.suggest_categorical("heavy", [True, False])
    momentum = trial.suggest_float("momentum", 0.1, 0.9) if heavy else 0.0
    data, model = blobs().load(), nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum)
    private = trial.make_private(model, optimizer, data.train)
    private.fit(lambda model, x, y: nn.functional.cross_entropy(model(x), y, reduction="none"))
    score = trial.score(model, data.validation)
    trial.report(score, step=1)
    return score
