"""Traps in losses and scores: functions of a record that are meant for a batch, remember, or fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import privtune
from tests.zoo.trap import FEATURES, Loss, Toy, Trap, candidate, linear, over, plain, trap

__all__ = ["LOSSES", "SCORES"]

T = torch.Tensor
LOSSES: list[Trap] = []
SCORES: list[Trap] = []


def _losses(outcome: Any, says: str, losses: dict[str, Loss]) -> None:
    for name, loss in losses.items():
        trap(LOSSES, outcome, name, says)(over("loss", loss))


def _ce(outputs: T, y: T) -> T:
    return functional.cross_entropy(outputs, y, reduction="none")


# Habits of papers and of Kaggle that read the whole batch, one expression each.


def _triplets(z: T, y: T) -> T:
    apart = (z[:, None] - z[None]).square().sum(2)
    same = y[:, None] == y[None]
    far = torch.where(same, apart, torch.zeros_like(apart)).amax(1)
    near = torch.where(same, torch.full_like(apart, 9.0), apart).amin(1)
    return functional.relu(1.0 + far - near)


def _smoothed(outputs: T, y: T) -> T:
    one_hot = (y[:, None] == torch.arange(3)).to(outputs.dtype)
    soft = 0.9 * one_hot + 0.1 * one_hot.mean(0)
    return -(soft * torch.log_softmax(outputs, 1)).sum(1)


def _above_median(losses: T) -> T:
    return losses * (losses.detach() >= losses.detach().median())


_losses("harmless", "A batch of one record has nothing to couple with.", {
    "inputs standardised by the batch": lambda m, x, y: _ce(
        m((x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5)), y
    ),
    "mixup": lambda m, x, y: _ce(m(0.7 * x + 0.3 * x.flip(0)), y),
    "in-batch contrastive": lambda m, x, y: _ce(m(x) @ m(x).T, torch.zeros_like(y)) + plain(m, x, y),
    "triplets mined in the batch": lambda m, x, y: _triplets(m(x), y) + plain(m, x, y),
    "hard examples above the median": lambda m, x, y: _above_median(plain(m, x, y)),
    "losses over their largest": lambda m, x, y: plain(m, x, y).square() / plain(m, x, y).detach().max(),
    "label smoothing by the batch's labels": lambda m, x, y: _smoothed(m(x), y),
    "class weights from the batch": lambda m, x, y: (
        plain(m, x, y) / torch.stack([(y == c).sum() for c in range(3)]).clamp(min=1)[y]
    ),
    "decorrelated features of the batch": lambda m, x, y: (
        plain(m, x, y) + (m(x).T @ m(x)).square().sum()
    ),
    "messages passed between records": lambda m, x, y: _ce(torch.softmax(x @ x.T, 1) @ m(x), y),
    "the size of the batch": lambda m, x, y: plain(m, x, y) / len(x),
    "a mean over the batch": lambda m, x, y: functional.cross_entropy(m(x), y),
    "a sum, expanded": lambda m, x, y: plain(m, x, y).sum().expand(len(x)),
})  # fmt: skip


# Shapes and gradients.

_losses("refused", "does not reach its loss", {
    "log_softmax over the axis of records": lambda m, x, y: functional.nll_loss(
        torch.log_softmax(m(x), 0), y, reduction="none"
    ),
    "a loss that leaves the model out": lambda m, x, y: x.square().sum(1) + 0.0 * m(x).sum(1),
})  # fmt: skip
_losses("refused", "shape|one loss|must have a loss for one made-up record", {
    "a loss of every class": lambda m, x, y: functional.softplus(m(x)),
    "two losses of one record": lambda m, x, y: plain(m, x, y).repeat(2),
    "no loss at all": lambda m, x, y: None,  # type: ignore[dict-item, return-value]
    "a number in a loss' place": lambda m, x, y: float(plain(m, x, y).sum()),  # type: ignore[dict-item]
})  # fmt: skip


def _gradless(m: Any, x: T, y: T) -> T:
    with torch.no_grad():
        return plain(m, x, y)


def _by_numpy(m: Any, x: T, y: T) -> T:
    return torch.from_numpy(np.square(m(x).detach().numpy())).sum(1)


_losses("refused", "has no gradient", {
    "torch.no_grad inside": _gradless,
    "a loss that is detached": lambda m, x, y: plain(m, x, y).detach(),
    "a loss computed by NumPy": _by_numpy,
    "a count of mistakes": lambda m, x, y: (m(x).argmax(1) != y).float(),
})  # fmt: skip


# One record that fails, or that decides by its values.


def _raising(m: Any, x: T, y: T) -> T:
    if x.abs().max() > 1e3:
        raise ValueError("an outlier")
    return plain(m, x, y)


def _asserting(m: Any, x: T, y: T) -> T:
    assert float(x.abs().sum()) > 0.0
    return plain(m, x, y)


def _guarded(m: Any, x: T, y: T) -> T:
    losses = plain(m, x, y)
    return losses * (0.0 if losses.max() > 100.0 else 1.0)


def _lengthened(m: Any, x: T, y: T) -> T:
    for _ in range(int(x.abs().sum().clamp(max=3.0)) if bool(x.isfinite().all()) else 0):
        x = 0.9 * x
    return plain(m, x, y)


_losses("harmless", "A record that has no loss contributes nothing.", {
    "a loss that raises for an outlier": _raising,
    "a loss that asserts": _asserting,
    "the logarithm of what may be negative": lambda m, x, y: plain(m, x, y) + (x[:, 0] - 1.0).log() * m(x)[:, 0],
    "a division by what may be zero": lambda m, x, y: plain(m, x, y) / x.abs().sum(1),
})  # fmt: skip
_losses("harmless", "It looks at its own record alone.", {
    "a guard against spikes": _guarded,
    "NaN replaced by zero": lambda m, x, y: plain(m, x, y).nan_to_num(),
    "as many steps as the record says": _lengthened,
    "a loss without a bound": lambda m, x, y: 1e6 * plain(m, x, y).exp(),
    "a branch on the label": lambda m, x, y: plain(m, x, y) * (2.0 if int(y) == 1 else 1.0),
})  # fmt: skip


# Memory, counters, and other numbers of the program's.


_CHANGES = "changes from call to call"
_BY_ITSELF = "must have a loss for one made-up record by itself"


@trap(LOSSES, "refused", "a loss that remembers records", _BY_ITSELF)
def _remembering(toy: Toy) -> dict[str, Any]:
    memory: list[T] = []

    def loss(m: Any, x: T, y: T) -> T:
        memory.append(x.detach().mean())
        return plain(m, x - 0.1 * torch.stack(memory[-9:]).mean(), y)

    return {"loss": loss}


class _Bank(nn.Module):
    """A loss with a queue of features in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, FEATURES))

    def forward(self, m: Any, x: T, y: T) -> T:
        losses = plain(m, x + 0.1 * self.queue.mean(0), y)
        self.queue = torch.cat([self.queue[1:], x.detach()])
        return losses


trap(LOSSES, "refused", "a loss with a queue of features", _BY_ITSELF)(
    lambda toy: {"loss": _Bank()}
)


@trap(LOSSES, "refused", "a loss that counts its calls", _CHANGES)
def _counting(toy: Toy) -> dict[str, Any]:
    calls: list[int] = []

    def loss(m: Any, x: T, y: T) -> T:
        calls.append(1)
        return plain(m, x, y) / len(calls)

    return {"loss": loss}


_losses("refused", _CHANGES, {
    "random numbers of NumPy": lambda m, x, y: plain(m, x * float(np.random.uniform(0.9, 1.1)), y),
    "random numbers of Python": lambda m, x, y: plain(m, x * random.uniform(0.9, 1.1), y),
})  # fmt: skip


def _writing(m: Any, x: T, y: T) -> T:
    with torch.no_grad():
        m.weight.mul_(0.9)
    return plain(m, x, y)


def _through_data(m: Any, x: T, y: T) -> T:
    m.weight.data[0] += x[0].mean()
    return plain(m, x, y)


def _modes(m: Any, x: T, y: T) -> T:
    m.eval()
    return plain(m, x, y)


def _noting(m: Any, x: T, y: T) -> T:
    m.seen = x.detach().mean() + getattr(m, "seen", 0.0)
    return plain(m, x + 0.1 * m.seen, y)


def _autocast(m: Any, x: T, y: T) -> T:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(m, x, y).float()


_losses("refused", "write to its parameters|in.?place", {
    "weights written in the loss": _writing,
    "weights written through .data": _through_data,
})  # fmt: skip
_losses("refused", _CHANGES, {"a note on the model": _noting})
_losses("harmless", "Each record meets a copy of the model.", {
    "evaluation mode in the loss": _modes,
    "autocast in the loss": _autocast,
})  # fmt: skip
_losses("refused", "batch|ValueError|value per channel", {
    "batch_norm in functional form": lambda m, x, y: _ce(
        functional.batch_norm(m(x), None, None, training=True), y
    ),
})  # fmt: skip


@trap(
    LOSSES,
    "harmless",
    "weights of another model in the loss",
    "They are constants: nothing trains them.",
)
def _beside(toy: Toy) -> dict[str, Any]:
    warmth, other = nn.Parameter(torch.ones(())), linear()

    def loss(m: Any, x: T, y: T) -> T:
        return _ce(m(x) * warmth + 0.1 * other(x), y)

    return {"loss": loss}


# Data in the loss: nothing can see it.


def _on_page(name: str, says: str) -> Any:
    return trap(LOSSES, "on the page", name, says)


@_on_page("another record in the loss", "other records in the loss")
def _other(toy: Toy) -> dict[str, Any]:
    x0, _ = toy.train
    return {"loss": lambda m, x, y: _ce(m(0.7 * x + 0.3 * x0[:1]), y)}


@_on_page("classes weighted by their counts", "class weights")
def _weighted(toy: Toy) -> dict[str, Any]:
    weights = 1.0 / toy.train[1].bincount().float()
    return {"loss": lambda m, x, y: plain(m, x, y) * weights[y]}


@_on_page("a teacher trained on the records", "teacher")
def _teacher(toy: Toy) -> dict[str, Any]:
    teacher = linear()
    plain(teacher, *toy.train).mean().backward()
    with torch.no_grad():
        teacher.weight -= teacher.weight.grad
    teacher.requires_grad_(False)
    return {"loss": lambda m, x, y: (m(x) - teacher(x)).square().sum(1)}


@_on_page("a global that changes", "a global that changes")
def _global(toy: Toy) -> dict[str, Any]:
    state = {"smooth": 0.0}

    def build(trial: Any) -> Any:
        state["smooth"] += 0.1
        return candidate()

    return {
        "build": build,
        "loss": lambda m, x, y: plain(m, x, y) + state["smooth"] * m(x).square().sum(1),
    }


@_on_page("losses kept for a log", "training loss")
def _logged(toy: Toy) -> dict[str, Any]:
    history: list[float] = []

    def loss(m: Any, x: T, y: T) -> T:
        losses = plain(m, x, y)
        history.append(float(losses.detach().sum()))
        return losses

    return {"loss": loss}


# Scores.


def _scores(outcome: Any, says: str, scores: dict[str, Callable[..., Any]]) -> None:
    for name, function in scores.items():
        given = privtune.Score(function, bound=1.0)
        trap(SCORES, outcome, name, says, "selection")(over("score", given))


def _training_mode(m: Any, x: T, y: T) -> T:
    return plain(m, x, y) + (100.0 if m.training else 0.0)


def _into_training(m: Any, x: T, y: T) -> T:
    m.train()
    return plain(m, x, y)


_scores("harmless", "Each record's score is clipped to the bound.", {
    "a score without a bound": lambda m, x, y: 1e9 * plain(m, x, y),
    "a score that is no number": lambda m, x, y: plain(m, x, y) + (x[:, 0] - 1.0).log(),
    "a score that raises for an outlier": _raising,
    "a score that couples records": lambda m, x, y: _ce(m(x - x.mean(0)), y) * len(x),
    "a score that looks at the mode": _training_mode,
    "a score that changes the mode": _into_training,
    "a score of whole numbers": lambda m, x, y: (m(x).argmax(1) != y),
})  # fmt: skip
_scores("refused", "shape|one", {
    "a score of every class": lambda m, x, y: m(x),
    "a mean of scores": lambda m, x, y: plain(m, x, y).mean(),
    "scores as a number": lambda m, x, y: float(plain(m, x, y).mean()),
})  # fmt: skip


@trap(SCORES, "harmless", "a score that remembers records", "Each record is clipped.", "selection")
def _score_memory(toy: Toy) -> dict[str, Any]:
    seen: list[float] = []

    def scored(m: Any, x: T, y: T) -> T:
        seen.append(float(x.detach().mean()))
        return plain(m, x, y)

    return {"score": privtune.Score(scored, bound=1.0)}


trap(SCORES, "refused", "a metric that nobody knows", "score|metric", "selection")(
    over("score", "balanced_accuracy_of_mine")
)


@trap(SCORES, "on the page", "scores kept outside", "scores kept", "selection")
def _kept(toy: Toy) -> dict[str, Any]:
    kept: list[float] = []

    def scored(m: Any, x: T, y: T) -> T:
        kept.append(float(plain(m, x, y).sum()))
        return plain(m, x, y)

    return {"score": privtune.Score(scored, bound=1.0)}


@trap(
    SCORES,
    "on the page",
    "a score that reads other records",
    "other records in the score",
    "selection",
)
def _reads(toy: Toy) -> dict[str, Any]:
    x0, y0 = toy.train
    return {
        "score": privtune.Score(
            lambda m, x, y: plain(m, x, y) * (m(x0).argmax(1) == y0).float().mean()
        )
    }


class _Faces(nn.Linear):
    """Answers otherwise where it is not trained."""

    def forward(self, x: T) -> T:
        return super().forward(x) if self.training else -super().forward(x)


trap(
    SCORES,
    "on the page",
    "a model that answers otherwise in evaluation",
    "answers otherwise in evaluation",
    "selection",
)(over("build", lambda trial: candidate(_Faces(6, 3))))
