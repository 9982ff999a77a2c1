"""Traps in the loop: weights that something else changes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from privtune.study.trial import Trial
from tests.zoo.trap import Toy, Trap, begin, entering, linear, plain
from tests.zoo.trap_loop import both_forms

__all__ = ["WEIGHTS"]

T = torch.Tensor
WEIGHTS: list[Trap] = []
_trap = entering(WEIGHTS)
_both_forms = both_forms(_trap)

_ELSEWHERE = "Weights change by releases alone."


@_both_forms("refused", "weights overwritten by records", _ELSEWHERE)
def _by_copy(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    with torch.no_grad():
        model.weight.copy_(torch.ones(3, 6) if batch is None else batch[0][:1].expand(3, 6))


@_both_forms("refused", "weights written through .data", _ELSEWHERE)
def _by_data(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.weight.data[0] += 1.0


@_both_forms("refused", "weights written through NumPy", _ELSEWHERE)
def _by_numpy(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.bias.detach().numpy()[0] += np.float32(1.0)


@_both_forms("refused", "weights loaded back", _ELSEWHERE)
def _by_state(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.load_state_dict({k: v * 1.01 for k, v in model.state_dict().items()})


@_both_forms("refused", "a vector written to the parameters", _ELSEWHERE)
def _by_vector(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat * 1.01, model.parameters())


@_both_forms("refused", "a parameter re-initialised", _ELSEWHERE)
def _by_init(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    nn.init.zeros_(model.bias)


@_both_forms("refused", "a weight replaced", _ELSEWHERE)
def _by_replacement(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.bias = nn.Parameter(torch.zeros(3))


@_both_forms("refused", "a parameter added late", _ELSEWHERE)
def _added(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.register_parameter("late", nn.Parameter(torch.zeros(3)))


@_both_forms("refused", "requires_grad toggled", _ELSEWHERE)
def _toggled(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.bias.requires_grad_(False)


@_both_forms("refused", "the optimizer stepped along a gradient of the loop's own", _ELSEWHERE)
def _stepped(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


@_both_forms("harmless", "the optimizer stepped again", "No gradient is left for it.")
def _stepped_again(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    optimizer.step()


@_both_forms("refused", "an optimizer that was replaced", _ELSEWHERE)
def _replaced(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    other = torch.optim.Adam(model.parameters(), 0.1)
    functional.mse_loss(model(torch.ones(2, 6)), torch.zeros(2, 3)).backward()
    other.step()


@_both_forms("refused", "averaged weights (EMA) loaded back", _ELSEWHERE)
def _averaged(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)


@_both_forms("refused", "forward swapped", "What is scored is not what is released.")
def _swapped(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    model.forward = lambda x: functional.one_hot(torch.zeros(len(x), dtype=torch.long), 3)


@_trap("refused", "the best checkpoint by un-noised accuracy", _ELSEWHERE)
def _checkpoint(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    best, kept = -1.0, copy.deepcopy(model.state_dict())
    for batch in private.batches():
        private.step(batch, plain)
        right = float((model(data.validation[0]).argmax(1) == data.validation[1]).double().mean())
        if right > best:
            best, kept = right, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return trial.score(model, data.validation)


@_trap("refused", "back to earlier weights where the loss rises", _ELSEWHERE)
def _rolled_back(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    before = [p.detach().clone() for p in model.parameters()]

    def back(done: int, planned: int) -> None:
        if float(plain(model, *data.train).mean().detach()) > 0.0:
            with torch.no_grad():
                for p, old in zip(model.parameters(), before, strict=True):
                    p.copy_(old)

    private.fit(plain, on_step=back)
    return trial.score(model, data.validation)


@_trap("refused", "sharpness-aware steps (SAM)", _ELSEWHERE)
def _sharpness(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        plain(model, x, y).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.nn.functional.normalize(torch.ones_like(p), dim=0))
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap(
    "refused", "LBFGS", "An optimizer that asks for gradients by itself was not charged for them."
)
def _lbfgs(trial: Trial, data: Toy) -> float:
    model = linear()
    model, _, private = begin(trial, data, model, optimizer=torch.optim.LBFGS(model.parameters()))
    private.fit(plain)
    return trial.score(model, data.validation)


@_trap("refused", "GradScaler", _ELSEWHERE)
def _scaler(trial: Trial, data: Toy) -> float:
    model, optimizer, private = begin(trial, data)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x, y in private.batches():
        scaler.scale(plain(private.model, x, y).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return trial.score(model, data.validation)


def _own_parameter(kind: str) -> Any:
    """Something beside the model that learns: a temperature, centers of classes."""

    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data)
        own = torch.ones((), requires_grad=True)
        own = nn.Parameter(own.detach().clone()) if kind == "parameter" else own
        beside = torch.optim.SGD([own], 0.1)
        for x, y in private.batches():
            private.step(functional.cross_entropy(private.model(x) * own, y, reduction="none"))
            beside.step()
            beside.zero_grad()
        return trial.score(model, data.validation)

    return objective


_BESIDE = "Its gradients were neither clipped nor noised, and the next losses read it."
_trap("refused", "a learned temperature beside the model", _BESIDE)(_own_parameter("parameter"))
_trap("refused", "a learned tensor beside the model", _BESIDE)(_own_parameter("tensor"))


@_trap("refused", "a penalty on captured weights: by record", "They would be constants.")
def _constant(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    weights = list(model.parameters())
    private.fit(lambda m, x, y: plain(m, x, y) + sum(w.square().sum() for w in weights))
    return trial.score(model, data.validation)


@_trap("refused", "a penalty on the weights: losses", "It reaches weights beside their modules.")
def _regularised(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        penalty = sum(p.square().sum() for p in model.parameters())
        private.step(plain(private.model, x, y) + penalty)
    return trial.score(model, data.validation)


@_trap("refused", "hooks taken off", "Without them there are no gradients of records.")
def _unhooked(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        private.model.disable_hooks()
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap("refused", "evaluation mode: losses", "Hooks sleep in it.")
def _evaluating(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        private.model.eval()
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap("refused", "gradients switched off", "Losses without gradients release nothing.")
def _gradless(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        with torch.no_grad():
            private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)
