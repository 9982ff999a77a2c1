"""Traps in the loop that nothing can see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from privtune.study.trial import Trial
from tests.zoo.trap import Toy, Trap, begin, entering, linear, plain, sgd

__all__ = ["UNSEEN"]

T = torch.Tensor
UNSEEN: list[Trap] = []
_trap = entering(UNSEEN)

LATE = 2  # a step that is not replayed under the zoo's seeds


def _undecidable(name: str, severity: str, why: str, **options: Any) -> Callable[[Any], Any]:
    return _trap("undecidable", name, why, severity=severity, **options)


@_undecidable("weights initialised from records", "critical", "They were so when they were given.")
def _prototypes(trial: Trial, data: Toy) -> float:
    model = nn.Linear(6, 3)
    x, y = data.train
    with torch.no_grad():
        model.weight.copy_(torch.stack([x[y == c].mean(0) for c in range(3)]))
    _, _, private = begin(trial, data, model)
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable("pretrained on the private records", "critical", "They were so when they were given.")
def _warm(trial: Trial, data: Toy) -> float:
    model = linear()
    own = sgd(model)
    for _ in range(3):
        own.zero_grad()
        plain(model, *data.train).mean().backward()
        own.step()
    _, _, private = begin(trial, data, model, optimizer=sgd(model))
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable(
    "a teacher trained on the private records", "critical", "Its weights look like any others."
)
def _teacher(trial: Trial, data: Toy) -> float:
    teacher = linear()
    own = sgd(teacher)
    for _ in range(3):
        own.zero_grad()
        plain(teacher, *data.train).mean().backward()
        own.step()
    teacher.requires_grad_(False)
    model, _, private = begin(trial, data)
    private.fit(lambda m, x, y: (m(x) - teacher(x)).square().sum(1))
    return trial.score(model, data.validation)


class _Mixing(torch.utils.data.Dataset[Any]):
    """Mixes each record with another one when it is fetched."""

    def __init__(self, pair: Any) -> None:
        self.x, self.y = pair

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return 0.7 * self.x[index] + 0.3 * self.x[0], self.y[index]


@_undecidable("a dataset that mixes records", "critical", "What a dataset returns is a record.")
def _mixing(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data, train=_Mixing(data.train))
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable(
    "records repeated to balance classes", "critical", "Equal rows may be different persons'."
)
def _balanced(trial: Trial, data: Toy) -> float:
    x, y = data.train
    rows = torch.cat([(y == c).nonzero().flatten().repeat(9)[:20] for c in range(3)])
    model, _, private = begin(trial, data, train=(x[rows], y[rows]))
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable(
    "inputs standardised by the training set", "critical", "The columns look like any others."
)
def _standardised(trial: Trial, data: Toy) -> float:
    x, y = data.train
    model, _, private = begin(trial, data, train=((x - x.mean(0)) / x.std(0), y))
    private.fit(plain)
    return trial.score(model, data.validation)


@_undecidable(
    "class weights counted in the training set", "high", "They are numbers like any others."
)
def _weighted(trial: Trial, data: Toy) -> float:
    weights = 1.0 / torch.bincount(data.train[1], minlength=3)
    model, _, private = begin(trial, data)
    private.fit(lambda m, x, y: weights[y] * plain(m, x, y))
    return trial.score(model, data.validation)


@_undecidable(
    "a number of the batches that is used later", "critical", "A rehearsal takes two steps."
)
def _number(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    scale = 1.0
    for number, (x, y) in enumerate(private.batches()):
        losses = plain(private.model, x, y)
        private.step(losses / scale if number == LATE else losses)
        scale = 0.9 * scale + 0.1 * float(losses.mean())
    return trial.score(model, data.validation)


@_undecidable("losses coupled in a later step", "critical", "Few steps are replayed.")
def _late(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for number, (x, y) in enumerate(private.batches()):
        private.step(plain(private.model, x - x.mean(0) if number == LATE else x, y))
    return trial.score(model, data.validation)


@_undecidable(
    "a learning rate that falls with the training loss", "high", "It is a number of the loop's."
)
def _plateau(trial: Trial, data: Toy) -> float:
    model, optimizer, private = begin(trial, data)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        private.step(losses)
        scheduler.step(float(losses.mean()))
    return trial.score(model, data.validation)


@_undecidable("training records overwritten through NumPy", "critical", "NumPy leaves no trace.")
def _by_array(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for batch in private.batches():
        private.step(batch, plain)
        data.train[0].numpy()[1:] = data.train[0].numpy()[:1]
    return trial.score(model, data.validation)


@_undecidable("the training loss printed", "high", "Whoever sees the output sees un-noised data.")
def _printed(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    shown: list[str] = []
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        private.step(losses)
        shown.append(f"loss {float(losses.mean()):.3f}")
    return trial.score(model, data.validation)
