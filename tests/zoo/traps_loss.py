"""Traps in losses and scores: functions of a record that are meant for a batch, remember, or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import privtune
from tests.zoo.trap import Make, Net, T, Toy, Trap, candidate, entering, kept, linear, plain

LOSSES: list[Trap] = []
SCORES: list[Trap] = []
_loss, _score = entering(LOSSES, "loss"), entering(SCORES, "score", selects=True)


def ce(outputs: T, y: T) -> T:
    return functional.cross_entropy(outputs, y, reduction="none")


def beside(make: Callable[[Toy], Any], use: Callable[..., Any]) -> Make:
    """Return a loss that has something beside the record."""
    return kept("loss", make, use)


# Habits of papers and of Kaggle that read the whole batch, one expression each.


_loss("harmless", "A batch of one record has nothing to couple with.", {
    "inputs standardised by the batch": lambda m, x, y: ce(
        m((x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5)), y
    ),
    "mixup": lambda m, x, y: ce(m(0.7 * x + 0.3 * x.flip(0)), y),
    "in-batch contrastive": lambda m, x, y: ce(m(x) @ m(x).T, torch.zeros_like(y)) + plain(m, x, y),
    "losses over their largest": lambda m, x, y: plain(m, x, y).square() / plain(m, x, y).detach().max(),
    "messages passed between records": lambda m, x, y: ce(torch.softmax(x @ x.T, 1) @ m(x), y),
    "the size of the batch": lambda m, x, y: plain(m, x, y) / len(x),
    "a mean over the batch": lambda m, x, y: functional.cross_entropy(m(x), y),
    "a sum, expanded": lambda m, x, y: plain(m, x, y).sum().expand(len(x)),
})  # fmt: skip


# Shapes and gradients.


def gradless(m: Any, x: T, y: T) -> T:
    with torch.no_grad():
        return plain(m, x, y)


_loss("refused", "shape|one loss|must have a loss on a made-up record", {
    "two losses of one record": lambda m, x, y: plain(m, x, y).repeat(2),
    "no loss at all": lambda m, x, y: None,
    "a number in a loss' place": lambda m, x, y: float(plain(m, x, y).sum()),
    "batch_norm in functional form": lambda m, x, y: ce(
        functional.batch_norm(m(x), None, None, training=True), y
    ),
})  # fmt: skip
_loss("refused", "does not reach its loss", {
    "log_softmax over the axis of records": lambda m, x, y: functional.nll_loss(
        torch.log_softmax(m(x), 0), y, reduction="none"
    ),
    "a loss that leaves the model out": lambda m, x, y: x.square().sum(1) + 0.0 * m(x).sum(1),
})  # fmt: skip
_loss("refused", "has no gradient", {
    "torch.no_grad inside": gradless,
    "a loss that is detached": lambda m, x, y: plain(m, x, y).detach(),
    "a loss computed by NumPy": lambda m, x, y: torch.from_numpy(np.square(m(x).detach().numpy())).sum(1),
})  # fmt: skip


# One record that fails, or that decides by its values.


def raising(m: Any, x: T, y: T) -> T:
    if x.abs().max() > 1e3:
        raise ValueError("an outlier")
    return plain(m, x, y)


def lengthened(m: Any, x: T, y: T) -> T:
    for _ in range(int(x.abs().sum().clamp(max=3.0))):
        x = 0.9 * x
    return plain(m, x, y)


def autocast(m: Any, x: T, y: T) -> T:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(m, x, y).float()


_loss("harmless", "It looks at its own record alone; one that has no loss contributes nothing.", {
    "a loss that raises for an outlier": raising,
    "a logarithm below zero": lambda m, x, y: plain(m, x, y) + (x[:, 0] + 2.0).log() * m(x)[:, 0],
    "a division by zero": lambda m, x, y: plain(m, x, y) / x.abs().sum(1),
    "as many steps as the record says": lengthened,
    "a loss without a bound": lambda m, x, y: 1e6 * plain(m, x, y).exp(),
    "a branch on the label": lambda m, x, y: plain(m, x, y) * (2.0 if int(y) == 1 else 1.0),
    "evaluation mode in the loss": lambda m, x, y: plain(m.eval(), x, y),
    "autocast in the loss": autocast,
})  # fmt: skip


# Memory, counters, and other numbers of the program's.


def remembering(memory: list[Any], m: Any, x: T, y: T) -> T:
    memory.append(x.detach().mean())
    return plain(m, x - 0.1 * torch.stack(memory[-9:]).mean(), y)


def counting(calls: list[int], m: Any, x: T, y: T) -> T:
    calls.append(1)
    return plain(m, x, y) / len(calls)


def scaled(source: Any, m: Any, x: T, y: T) -> T:
    return plain(m, x * source.uniform(0.9, 1.1), y)


def writing(m: Any, x: T, y: T) -> T:
    with torch.no_grad():
        m.weight.mul_(0.9)
    return plain(m, x, y)


def logged(history: list[float], m: Any, x: T, y: T) -> T:
    losses = plain(m, x, y)
    history.append(float(losses.detach().sum()))
    return losses


_loss("refused", "must be a function of one record|changes from call to call|outlives the call", {
    "a loss that remembers records": beside(lambda toy: [], remembering),
    "a loss that counts its calls": beside(lambda toy: [], counting),
    "random numbers of NumPy": beside(lambda toy: np.random, scaled),
    "weights written in the loss": lambda toy: {"loss": writing},
    "the training loss kept in a list": beside(lambda toy: [], logged),
}, made=True)  # fmt: skip
_loss("harmless", "They are constants: nothing trains them.", {
    "weights of another model in the loss": beside(
        lambda toy: linear(), lambda other, m, x, y: ce(m(x) + 0.1 * other(x), y)
    ),
    "a temperature beside the model": beside(
        lambda toy: nn.Parameter(torch.ones(())), lambda warmth, m, x, y: ce(m(x) * warmth, y)
    ),
}, made=True)  # fmt: skip


# Data in the loss: nothing can see it.


def taught(toy: Toy) -> nn.Module:
    teacher = linear()
    plain(teacher, *toy.train).mean().backward()
    torch.optim.SGD(teacher.parameters(), 1.0).step()
    return teacher.requires_grad_(False)


def by_a_global(toy: Toy) -> dict[str, Any]:
    state = {"smooth": 0.0}

    def build(trial: Any) -> Any:
        state["smooth"] += 0.1
        return candidate()

    return {
        "build": build,
        "loss": lambda m, x, y: plain(m, x, y) + state["smooth"] * m(x).square().sum(1),
    }


for _says, _make in {
    "other records in the loss": beside(
        lambda toy: toy.train[0][:1], lambda other, m, x, y: ce(m(0.7 * x + 0.3 * other), y)
    ),
    "class weights": beside(
        lambda toy: 1.0 / toy.train[1].bincount(),
        lambda weights, m, x, y: plain(m, x, y) * weights[y],
    ),
    "teacher": beside(taught, lambda teacher, m, x, y: (m(x) - teacher(x)).square().sum(1)),
    "a global that changes": by_a_global,
}.items():
    _loss("on the page", _says, {_says: _make}, made=True)


# Scores.


def scores(outcome: Any, says: str, functions: dict[str, Callable[..., Any]]) -> None:
    """Enter scores with the bound 1."""
    _score(outcome, says, {n: privtune.Score(f, bound=1.0) for n, f in functions.items()})


def scoring(make: Callable[[Toy], Any], use: Callable[..., Any]) -> Make:
    """Return a score that has something beside the record."""
    return lambda toy: {"score": privtune.Score(kept("loss", make, use)(toy)["loss"], bound=1.0)}


def two_faced(trial: Any) -> Any:
    return candidate(Net(lambda m, x: m.inner(x) if m.training else -m.inner(x), inner=linear()))


scores("harmless", "Each record's score is clipped to the bound.", {
    "a score without a bound": lambda m, x, y: 1e9 * plain(m, x, y),
    "a score that is no number": lambda m, x, y: plain(m, x, y) + (x[:, 0] + 2.0).log(),
    "a score that raises for an outlier": raising,
    "a score that couples records": lambda m, x, y: ce(m(x - x.mean(0)), y) * len(x),
    "a score that looks at the mode": lambda m, x, y: plain(m, x, y) + (100.0 if m.training else 0.0),
    "a score that changes the mode": lambda m, x, y: plain(m.train(), x, y),
    "a score of truth values": lambda m, x, y: (m(x).argmax(1) != y),
})  # fmt: skip
_score("refused", "outlives the call", {
    "scores kept in a list": scoring(lambda toy: [], logged),
}, made=True)  # fmt: skip
scores("refused", "shape", {
    "a score of every class": lambda m, x, y: m(x),
    "a mean of scores": lambda m, x, y: plain(m, x, y).mean(),
    "a number in a score's place": lambda m, x, y: float(plain(m, x, y).mean()),
})  # fmt: skip
_score("refused", "metric", {"a metric that nobody knows": "balanced_accuracy_of_mine"})
for _says, _make in {
    "other records in the score": scoring(
        lambda toy: toy.train, lambda other, m, x, y: plain(m, x, y) * plain(m, *other).mean()
    ),
    "answers otherwise in evaluation": lambda toy: {"build": two_faced},
}.items():
    _score("on the page", _says, {_says: _make}, made=True)
