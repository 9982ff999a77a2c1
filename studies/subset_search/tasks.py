"""Digits, a table and MNIST, learnt by a network of which a trial suggests four hyperparameters."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

import privtune
from privtune.tasks import Task, TaskData, get_task
from privtune.training.mechanism.data import TensorData

_HALVED = 14 * 14  # grey values of a picture

Records = tuple[torch.Tensor, torch.Tensor]


def _joined(data: TaskData) -> Records:
    """Return all records of a task: its splits, one after the other."""
    splits = (data.train, data.validation, data.test)
    return torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits])


@cache
def _records(name: str) -> Records:
    """Return all records of a built-in task."""
    return _joined(get_task(name).load())


@cache
def _pictures(data: str) -> TaskData:  # noqa: ARG001 (what they are known by)
    """Return MNIST's pictures, halved in height and width, as vectors."""
    whole = get_task("mnist-mlp").load()

    def halved(part: TensorData) -> TensorData:
        pictures = F.avg_pool2d(part.x.view(-1, 1, 28, 28), 2)
        return TensorData(pictures.flatten(1), part.y, part.sealed_size)

    return TaskData(halved(whole.train), halved(whole.validation), halved(whole.test))


def _mnist() -> TaskData:
    return _pictures(os.environ["PRIVTUNE_DATA"])


def _perceptron() -> nn.Module:
    """Return a network with 64 hidden units."""
    return nn.Sequential(nn.Linear(_HALVED, 64), nn.ReLU(), nn.Linear(64, 10))


def mnist_task() -> Task:
    """Return MNIST with pictures of 14x14 and a network of 64 hidden units, read once a run."""
    return replace(
        get_task("mnist-mlp"),
        name="mnist-mlp-halved",
        input_shape=(_HALVED,),
        model=_perceptron,
        load=_mnist,
        check=lambda: None,
        benchmark=True,
    )


def digits() -> Records:
    """Return scikit-learn's digits as vectors of 64 grey values."""
    return _records("digits-mlp")


def mnist() -> Records:
    """Return MNIST's pictures of handwritten digits as vectors of 196 grey values."""
    return _joined(_mnist())


def table() -> Records:
    """Return records of 20 features and two classes, drawn from a logistic model."""
    return _records("synthetic-logistic")


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of one record."""
    return F.cross_entropy(model(x), y, reduction="none")


def _candidate(trial: privtune.Trial, inputs: int, outputs: int) -> privtune.Candidate:
    """Return a network with one hidden layer, and its optimizer, from four suggestions."""
    rate = trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
    norm = trial.suggest_float("max_grad_norm", 0.1, 10.0, log=True)
    decay = trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True)
    width = trial.suggest_categorical("width", [16, 64, 256])
    model = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))
    optimizer = torch.optim.SGD(model.parameters(), rate, weight_decay=decay)
    return privtune.Candidate(model, optimizer, max_grad_norm=norm)


def digits_network(trial: privtune.Trial) -> privtune.Candidate:
    """Build a network on the digits."""
    return _candidate(trial, 64, 10)


def table_network(trial: privtune.Trial) -> privtune.Candidate:
    """Build a network on the table."""
    return _candidate(trial, 20, 2)


def mnist_network(trial: privtune.Trial) -> privtune.Candidate:
    """Build a network on MNIST."""
    return _candidate(trial, _HALVED, 10)
