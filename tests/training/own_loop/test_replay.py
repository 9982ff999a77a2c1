"""Whether losses are functions of their own records: found through whatever they go."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from privtune.training.own_loop.coupling import refuse_coupled
from privtune.training.own_loop.replay import Recording, storage_of
from privtune.training.own_loop.weights import LoopError

RECORDS = 12


def ce(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none")


def check(losses_of, *, tokens=False, earlier=()):
    torch.manual_seed(0)
    x = torch.randint(0, 6, (RECORDS, 5)) if tokens else torch.randn(RECORDS, 8)
    y = torch.randint(0, 3, (RECORDS,))
    recording = Recording(x, y)
    recording.start()
    try:
        losses = losses_of(x, y)
    finally:
        recording.stop()
    generator = torch.Generator().manual_seed(1)
    refuse_coupled(recording, losses, earlier=[storage_of(t) for t in earlier], generator=generator)


torch.manual_seed(1)
MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
TABLE, HEAD = nn.Embedding(6, 4), nn.Linear(4, 3)
LAYER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
LSTM = nn.LSTM(8, 4, batch_first=True)
WEIGHTS = torch.tensor([1.0, 2.0, 30.0])
OWN = torch.Generator().manual_seed(2)


def penalised(x, y):
    x = x.clone().requires_grad_()
    losses = ce(MODEL(x), y)
    (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + slope.square().sum(1)


HONEST = {
    "dropout": lambda x, y: ce(MODEL(x), y),
    "noise": lambda x, y: ce(MODEL(x + torch.randn_like(x)), y),
    "noise of its own": lambda x, y: ce(MODEL(x + torch.randn(x.shape, generator=OWN)), y),
    "in place": lambda x, y: ce(MODEL(x.clone().mul_(2.0)), y),
    "class weights": lambda x, y: WEIGHTS[y] * ce(MODEL(x), y),
    "embedding": lambda x, y: ce(HEAD(TABLE(x).mean(1)), y),
    "transformer": lambda x, y: ce(LAYER(x.view(-1, 1, 8))[:, 0, :3], y),
    "lstm": lambda x, y: ce(LSTM(x.view(-1, 1, 8))[0][:, 0, :3], y),
    "gradient penalty": penalised,
    "constant for some": lambda x, y: ce(MODEL(x), y) * (y > 0),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_losses_pass(name):
    check(HONEST[name], tokens=name == "embedding")


def mixed(x, y):
    return ce(MODEL(0.7 * x + 0.3 * x[torch.randperm(len(x))]), y)


def relative(x, y):
    losses = ce(MODEL(x), y)
    return losses / losses.detach().sum()


def contrastive(x, y):
    features = MODEL(x)
    return ce(features @ features.T, torch.arange(len(x)))


def running():
    mean = torch.zeros(8)

    def losses_of(x, y):
        mean.mul_(0.99).add_(0.01 * x.mean(0))
        return ce(MODEL(x - mean), y)

    return losses_of


def running_view():
    table = torch.zeros(3, 8)

    def losses_of(x, y):
        table[1].add_(x.mean(0))
        return ce(MODEL(x - table[1]), y)

    return losses_of


def without_autograd(x, y):
    with torch.no_grad():
        scale = x.abs().max()
    return ce(MODEL(x / scale), y)


def smoothed(x, y):
    share = F.one_hot(y, 3).float().mean(0)
    return -(0.9 * F.one_hot(y, 3) + 0.1 * share).mul(torch.log_softmax(MODEL(x), 1)).sum(1)


def hardest(x, y):
    losses = ce(MODEL(x), y)
    return losses * (losses.detach() > losses.detach().median())


COUPLED = {
    "batch_norm": lambda x, y: ce(MODEL(F.batch_norm(x, None, None, training=True)), y),
    "softmax over records": lambda x, y: F.nll_loss(
        torch.log_softmax(MODEL(x), 0), y, reduction="none"
    ),
    "standardised": lambda x, y: ce(MODEL((x - x.mean(0)) / x.std(0)), y),
    "mixup": mixed,
    "detached sum": relative,
    "contrastive": contrastive,
    "running mean": running(),
    "running mean in a view": running_view(),
    "largest without autograd": without_autograd,
    "smoothed by the batch": smoothed,
    "tokens": lambda x, y: ce(HEAD(TABLE(x).mean(1) - TABLE(x).mean((0, 1))), y),
    "sorted": lambda x, y: ce(MODEL(x.sort(dim=0).values), y),
    "hard examples": hardest,
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_losses_are_refused(name):
    with pytest.raises(LoopError, match="changes with the other records"):
        check(COUPLED[name], tokens=name == "tokens")


def test_losses_of_another_batch_are_refused():
    old, labels = torch.randn(RECORDS, 8), torch.zeros(RECORDS, dtype=torch.long)
    with pytest.raises(LoopError, match="not computed from the batch"):
        check(lambda x, y: ce(MODEL(old), labels))
    with pytest.raises(
        LoopError, match="records that this step does not charge: of an earlier batch"
    ):
        check(lambda x, y: ce(MODEL(x + 0.1 * old), y), earlier=[old])


def test_a_recording_changes_nothing():
    """Neither results nor buffers nor generators are other ones for having been watched."""
    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        x, y, mean = torch.randn(RECORDS, 8), torch.randint(0, 3, (RECORDS,)), torch.zeros(8)
        recording = Recording(x, y)
        if watched:
            recording.start()
        mean.add_(0.5)
        losses = ce(MODEL(x - mean), y)
        recording.stop()
        if watched:
            refuse_coupled(recording, losses, earlier=(), generator=torch.Generator())
        found.append((losses.detach(), mean, torch.rand(2)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)
