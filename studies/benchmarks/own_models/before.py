"""The programs of version 817b7f9, whose users wrote the loop. Runs with that version alone.

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
    def loss_of(model, x, y):
        return cross_entropy(model(x), y, reduction="none")

    def objective(trial):
        rate = trial.suggest_float("rate", 0.05, 5, log=True)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), rate)
        private = trial.make_private(model, optimizer, (x[:1077], y[:1077]), max_grad_norm=1.0)
        private.fit(loss_of)
        return trial.score(model, (x[1077:1437], y[1077:1437]))

    loop = privtune.DPSGD(records=1077, epochs=10, expected_batch_size=64)
    split = privtune.Validation(records=360)
    release = study.optimize(objective, strategy=STRATEGY, training=loop, validation=split)
    trained = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    trained.load_state_dict(release.state_dict())
    # end
    return release, trained


def cnn(study: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, nn.Module]:
    # user
    def loss_of(model, x, y):
        return cross_entropy(model(x), y, reduction="none")

    def objective(trial):
        rate = trial.suggest_float("rate", 0.05, 2, log=True)
        model = CNN(8)
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.5)
        private = trial.make_private(model, optimizer, (x[:4000], y[:4000]), max_grad_norm=1.0)
        private.fit(loss_of)
        return trial.score(model, (x[4000:5000], y[4000:5000]))

    loop = privtune.DPSGD(records=4000, epochs=4, expected_batch_size=128)
    split = privtune.Validation(records=1000)
    release = study.optimize(objective, strategy=STRATEGY, training=loop, validation=split)
    trained = CNN(8)
    trained.load_state_dict(release.state_dict())
    # end
    return release, trained


def gru(study: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, nn.Module]:
    # user
    def loss_of(model, x, y):
        return cross_entropy(model(x), y, reduction="none")

    def objective(trial):
        rate = trial.suggest_float("rate", 1e-3, 0.1, log=True)
        model = GRU(32)
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        private = trial.make_private(model, optimizer, (x[:1000], y[:1000]), max_grad_norm=1.0)
        private.fit(loss_of)
        return trial.score(model, (x[1000:1500], y[1000:1500]))

    loop = privtune.DPSGD(records=1000, epochs=2, expected_batch_size=100)
    split = privtune.Validation(records=500)
    release = study.optimize(objective, strategy=STRATEGY, training=loop, validation=split)
    trained = GRU(32)
    trained.load_state_dict(release.state_dict())
    # end
    return release, trained


def encoder(study: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, nn.Module]:
    # user
    class Lora(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            self.down = nn.Parameter(torch.randn(8, layer.in_features) / layer.in_features**0.5)
            self.up = nn.Parameter(torch.zeros(layer.out_features, 8))

        def forward(self, x):
            return self.layer(x) + x @ self.down.T @ self.up.T

    def make():
        model = Encoder()
        model.body.requires_grad_(False)
        for block in model.body.encoder.layer:
            for part in (
                block.attention.self,
                block.attention.output,
                block.intermediate,
                block.output,
            ):
                for name, layer in list(part.named_children()):
                    if isinstance(layer, nn.Linear):
                        setattr(part, name, Lora(layer))
        return model

    def loss_of(model, x, y):
        return cross_entropy(model(x), y, reduction="none")

    def objective(trial):
        rate = trial.suggest_float("rate", 1e-3, 0.1, log=True)
        model = make()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
        private = trial.make_private(model, optimizer, (x[:2000], y[:2000]), max_grad_norm=1.0)
        private.fit(loss_of)
        return trial.score(model, (x[2000:2500], y[2000:2500]))

    loop = privtune.DPSGD(records=2000, epochs=2, expected_batch_size=100)
    split = privtune.Validation(records=500)
    release = study.optimize(objective, strategy=STRATEGY, training=loop, validation=split)
    trained = make()
    trained.load_state_dict(release.state_dict(), strict=False)
    # end
    return release, trained


PROGRAMS = dict(zip(WORKS, (mlp, cnn, gru, encoder), strict=True))
