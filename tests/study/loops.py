"""A loop of the user's own, for tests of several processes: they import it."""

from __future__ import annotations

import torch
from torch import nn

import privtune
from tests.toy import blobs

DATA = blobs().load()
LOOP = privtune.DPSGD(records=240, epochs=1, expected_batch_size=24)


def objective(trial: privtune.Trial) -> float:
    """Train a linear model in a loop of one's own."""
    model = nn.Linear(6, 3)
    private = trial.make_private(model, torch.optim.SGD(model.parameters(), 0.5), DATA.train)
    for x, y in private.batches():
        private.step(nn.functional.cross_entropy(private.model(x), y, reduction="none"))
    return trial.score(model, DATA.validation)
