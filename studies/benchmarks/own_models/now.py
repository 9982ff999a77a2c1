"""The programs of this version, whose users declare: the engine trains.

Between ``# user`` and ``# end`` stands what a user writes; those lines are counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from works import CNN, GRU, WORKS, Encoder

import privtune

STRATEGY = privtune.strategies.PapernotSteinke(law="binomial", mean_runs=8, n=8)


def mlp(study: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, nn.Module]:
    # user
    def build(trial):
        rate = trial.suggest_float("rate", 0.05, 5, log=True)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), rate)
        return privtune.Candidate(model, optimizer, max_grad_norm=1.0)

    def loss(model, x, y):
        return cross_entropy(model(x), y, reduction="none")

    train, validation = (x[:1077], y[:1077]), (x[1077:1437], y[1077:1437])
    records = {"train": train, "validation": validation, "epochs": 10, "expected_batch_size": 64}
    release = study.optimize(build, loss=loss, strategy=STRATEGY, **records)
    # end
    return release, release.model


def cnn(study: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, nn.Module]:
    # user
    def build(trial):
        rate = trial.suggest_float("rate", 0.05, 2, log=True)
        model = CNN(8)
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.5)
        return privtune.Candidate(model, optimizer, max_grad_norm=1.0)

    def loss(model, x, y):
        return cross_entropy(model(x), y, reduction="none")

    train, validation = (x[:4000], y[:4000]), (x[4000:5000], y[4000:5000])
    records = {"train": train, "validation": validation, "epochs": 4, "expected_batch_size": 128}
    release = study.optimize(build, loss=loss, strategy=STRATEGY, **records)
    # end
    return release, release.model


def gru(study: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, nn.Module]:
    # user
    def build(trial):
        rate = trial.suggest_float("rate", 1e-3, 0.1, log=True)
        model = GRU(32)
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        return privtune.Candidate(model, optimizer, max_grad_norm=1.0)

    def loss(model, x, y):
        return cross_entropy(model(x), y, reduction="none")

    train, validation = (x[:1000], y[:1000]), (x[1000:1500], y[1000:1500])
    records = {"train": train, "validation": validation, "epochs": 2, "expected_batch_size": 100}
    release = study.optimize(build, loss=loss, strategy=STRATEGY, **records)
    # end
    return release, release.model


def encoder(study: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, nn.Module]:
    # user
    def build(trial):
        rate = trial.suggest_float("rate", 1e-3, 0.1, log=True)
        model = Encoder()
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        return privtune.Candidate(model, optimizer, max_grad_norm=1.0, trainable="lora:8")

    def loss(model, x, y):
        return cross_entropy(model(x), y, reduction="none")

    train, validation = (x[:2000], y[:2000]), (x[2000:2500], y[2000:2500])
    records = {"train": train, "validation": validation, "epochs": 2, "expected_batch_size": 100}
    release = study.optimize(build, loss=loss, strategy=STRATEGY, **records)
    # end
    return release, release.model


PROGRAMS = dict(zip(WORKS, (mlp, cnn, gru, encoder), strict=True))
