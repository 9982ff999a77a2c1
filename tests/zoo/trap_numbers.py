"""Traps that leave torch: numbers, choices and arrays that are made of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from privtune.study.trial import Trial
from tests.zoo.trap import Toy, Trap, begin, entering, plain

__all__ = ["NUMBERS"]

T = torch.Tensor
NUMBERS: list[Trap] = []
_trap = entering(NUMBERS)

_LEFT = "What has left torch is followed by no replay: one record moves the others' gradients."


def _ce(outputs: T, y: T) -> T:
    return functional.cross_entropy(outputs, y, reduction="none")


def _by_losses(loss: Callable[[Any, T, T], T]) -> Any:
    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data)
        for x, y in private.batches():
            private.step(loss(private.model, x, y))
        return trial.score(model, data.validation)

    return objective


def _by_record(read: Callable[[T, T], Any], loss: Callable[[Any, T, T, Any], T]) -> Any:
    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data)
        for batch in private.batches():
            found = read(*batch)
            private.step(batch, lambda m, x, y, found=found: loss(m, x, y, found))
        return trial.score(model, data.validation)

    return objective


def _longest(x: T) -> int:
    return max(1, int(x.abs().amax()))


def _scaled(x: T) -> T:
    """Return what a scaler of scikit-learn's makes of a batch."""
    rows = x.numpy()
    return torch.from_numpy((rows - rows.mean(0)) / (rows.std(0) + 1e-3))


def _in_place(m: Any, x: T, y: T) -> T:
    rows = x.numpy()
    rows -= rows.mean(0)
    return plain(m, x, y)


def _shares(y: T) -> T:
    return torch.from_numpy(np.bincount(y.numpy(), minlength=3).astype("float32"))


_LOSSES: dict[str, Callable[[Any, T, T], T]] = {
    "losses over a count of the batch": lambda m, x, y: (
        plain(m, x, y) / max(1, int((y == 1).sum()))
    ),
    "losses over a mean and one": lambda m, x, y: plain(m, x, y) / (1.0 + float(x.abs().mean())),
    "cut to the longest of the batch": lambda m, x, y: _ce(
        m(functional.pad(x[:, : _longest(x)], (0, 6))[:, :6]), y
    ),
    "a loss chosen by the batch": lambda m, x, y: (
        plain(m, x, y) * (2.0 if float(x.mean()) > 0.0 else 1.0)
    ),
    "a batch scaled by NumPy": lambda m, x, y: _ce(m(_scaled(x)), y),
    "a batch centred in place by NumPy": _in_place,
    "a batch centred by a list": lambda m, x, y: _ce(m(x - torch.tensor(x.mean(0).tolist())), y),
    "classes counted by NumPy": lambda m, x, y: plain(m, x, y) * _shares(y)[y],
}

for _name, _loss in _LOSSES.items():
    _trap("refused", f"{_name}: losses", _LEFT)(_by_losses(_loss))

_READ: dict[str, tuple[Callable[[T, T], Any], Callable[[Any, T, T, Any], T]]] = {
    "losses over a count of the batch": (
        lambda x, y: 1 + int((y == 1).sum()),
        lambda m, x, y, found: plain(m, x, y) / found,
    ),
    "losses over a mean and one": (
        lambda x, y: 1.0 + float(x.abs().mean()),
        lambda m, x, y, found: plain(m, x, y) / found,
    ),
    "a batch centred by NumPy": (
        lambda x, y: torch.from_numpy(x.numpy().mean(0)),
        lambda m, x, y, found: _ce(m(x - found), y),
    ),
}

for _name, (_read, _of) in _READ.items():
    _trap("refused", f"{_name}: by record", _LEFT)(_by_record(_read, _of))


@_trap("refused", "a running number of the batches in Python", _LEFT)
def _running(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    scale = 1.0
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        scale = 0.9 * scale + 0.1 * float(losses.mean())
        private.step(losses / scale)
    return trial.score(model, data.validation)


@_trap("refused", "a learning rate that is a number of the batch", "It follows un-noised data.")
def _rate(trial: Trial, data: Toy) -> float:
    model, optimizer, private = begin(trial, data)
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        optimizer.param_groups[0]["lr"] = 0.1 * float(losses.mean())
        private.step(losses)
    return trial.score(model, data.validation)


_LAST: dict[str, T] = {}


@_trap("refused", "a batch of another trial's", "A step reads records that it does not charge.")
def _kept(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    before = _LAST.get("x")
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        private.step(losses if before is None else losses * (1.0 + before.abs().mean()))
        _LAST["x"] = x
    return trial.score(model, data.validation)


@_trap("harmless", "losses logged through NumPy", "No loss reads them.", like="by losses")
def _logged(trial: Trial, data: Toy) -> float:
    seen: list[Any] = []
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        seen += [losses.tolist(), float(losses.mean()), int((y == 1).sum()), y.numpy().mean()]
        private.step(losses)
    return trial.score(model, data.validation)


_HALVED = "Each record is changed by itself."


@_trap("harmless", "records changed in place, each by itself", _HALVED, like="by losses")
def _changed(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        x.mul_(0.5)
        x.mul_(2.0)
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)
