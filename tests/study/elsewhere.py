"""A task, and a build with its loss and data, that other processes import."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import privtune
from privtune.tasks import Task
from tests.toy import blobs

BREAK = "PRIVTUNE_TEST_BREAK_TRAINING"
DATA = blobs().load()
TRAIN, VALIDATION = (DATA.train.x, DATA.train.y), (DATA.validation.x, DATA.validation.y)


def fragile() -> Task:
    """Return a task whose training fails where the environment says so."""
    return replace(blobs(), loss=_loss)


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if os.environ.get(BREAK):
        raise RuntimeError(os.environ[BREAK])
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of one record."""
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def records() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 300 private records of six numbers and three classes."""
    return torch.cat([TRAIN[0], VALIDATION[0]]), torch.cat([TRAIN[1], VALIDATION[1]])


def simple(trial: privtune.Trial) -> privtune.Candidate:
    """Build a linear model, with nothing to suggest."""
    model = nn.Linear(6, 3)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), 0.5))


def linear(trial: privtune.Trial) -> privtune.Candidate:
    """Build a linear model."""
    rate = trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
    model = nn.Linear(6, 3)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate))


def plain(trial: privtune.Trial) -> privtune.Candidate:
    """Build a linear model that the arm's method steps."""
    trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
    trial.suggest_float("max_grad_norm", 0.1, 10.0, log=True)
    return privtune.Candidate(nn.Linear(6, 3))


def conditional(trial: privtune.Trial) -> privtune.Candidate:
    """Build one of two architectures, stepped by one of two optimizers."""
    rate = trial.suggest_float("rate", 0.1, 2.0, log=True)
    if trial.suggest_categorical("deep", [True, False]):
        width = trial.suggest_int("width", 4, 8)
        model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    else:
        model = nn.Sequential(nn.Linear(6, 3))
    heavy = trial.suggest_float("momentum", 0.1, 0.9) if rate < 0.5 else 0.0
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate, heavy))


OWN: dict[str, Any] = {"loss": loss, "train": TRAIN, "validation": VALIDATION}
"""Arguments of ``privtune.make_task`` for fixed splits of 240 and 60 records."""

PATHS: dict[str, Any] = {
    "loss": "tests.study.elsewhere:loss",
    "data": "tests.study.elsewhere:records",
    "split": {"train": 240, "validation": 60},
}
"""The same, which processes elsewhere can import."""

TERMS: dict[str, Any] = {"epochs": 1, "expected_batch_size": 24}
"""Arguments of ``study.optimize`` for them."""


def optimize_own(study: Any, build: Any, **arguments: Any) -> Any:
    """Run an arm by arguments of ``privtune.make_task`` and of ``study.optimize``, whichever they are."""
    names = inspect.signature(privtune.make_task).parameters
    task = {name: arguments.pop(name) for name in [*arguments] if name in names}
    return study.optimize(privtune.make_task(build, **task), **arguments)


def own_task() -> Task:
    """Return the task of ``conditional``, for specs that name it."""
    return privtune.make_task(conditional, loss=loss, train=TRAIN, validation=VALIDATION)


def plain_task() -> Task:
    """Return the task of ``plain``, for specs that name it."""
    return privtune.make_task(plain, loss=loss, train=TRAIN, validation=VALIDATION)
