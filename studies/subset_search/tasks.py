"""Digits and a table of numbers, learnt by a network of which a trial suggests four hyperparameters."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

import privtune
from privtune.tasks import get_task

Records = tuple[torch.Tensor, torch.Tensor]


@cache
def _records(name: str) -> Records:
    """Return all records of a built-in task: its splits, one after the other."""
    data = get_task(name).load()
    splits = (data.train, data.validation, data.test)
    return torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits])


def digits() -> Records:
    """Return scikit-learn's digits as vectors of 64 grey values."""
    return _records("digits-mlp")


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
