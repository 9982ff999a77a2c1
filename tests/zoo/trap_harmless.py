"""Traps in the loop that change nothing."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from privtune.study.trial import Trial
from tests.zoo.trap import Toy, Trap, begin, entering, linear, plain
from tests.zoo.trap_loop import both_forms

__all__ = ["HARMLESS"]

T = torch.Tensor
HARMLESS: list[Trap] = []
_trap = entering(HARMLESS)
_both_forms = both_forms(_trap)


@_trap(
    "harmless", "evaluation mode: by record", "No layer of the model asks for it.", like="by record"
)
def _evaluating_by_record(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for batch in private.batches():
        model.eval()
        private.step(batch, plain)
    return trial.score(model, data.validation)


@_both_forms("harmless", "an averaged copy (SWA, EMA) kept aside", "It is made of releases.")
def _aside(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    torch.optim.swa_utils.AveragedModel(linear()).update_parameters(model)


@_both_forms("harmless", "zero_grad after the step", "Gradients of the loop's own are not used.")
def _zeroed(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    optimizer.zero_grad()


@_both_forms("harmless", "gradients clipped by hand after the step", "They are not used.")
def _clipped(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@_both_forms("harmless", "an un-noised gradient left in .grad", "It is not used.")
def _left_behind(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e6)


def _copied(form: str) -> Any:
    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data)
        other = copy.deepcopy(model)
        own = torch.optim.SGD(other.parameters(), 0.5)
        for batch in private.batches():
            x, y = batch
            plain(other, x, y).mean().backward()
            own.step()
            if form == "losses":
                private.step(plain(private.model, x, y))
            else:
                private.step(batch, plain)
        return trial.score(model, data.validation)

    return objective


for _form in ("losses", "by record"):
    _trap(
        "harmless", f"a copy trained aside: {_form}", "It is not released.",
        like="by losses" if _form == "losses" else _form,
    )(_copied(_form))  # fmt: skip


@_both_forms("harmless", "a second optimizer that has nothing to do", "No gradient is left for it.")
def _idle(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    torch.optim.SGD(model.parameters(), 9.0).step()


@_both_forms("harmless", "the global seed set in the loop", "Noise has streams of its own.")
def _seeded(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    torch.manual_seed(0)


@_both_forms("harmless", "the training loss summed up for a log", "No loss reads it.")
def _logged(model: Any, optimizer: Any, private: Any, losses: Any, batch: Any) -> None:
    if losses is not None:
        private.total = losses.detach().sum() + getattr(private, "total", 0.0)


@_trap(
    "harmless", "the training loss summed up before the step", "No loss reads it.", like="by losses"
)
def _summed(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    total = torch.zeros(())
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        total = total + losses.detach().sum()
        private.step(losses)
    return trial.score(model, data.validation)


@_trap(
    "harmless", "forward hooks that store records: losses", "Nothing reads them.", like="by losses"
)
def _hooked(trial: Trial, data: Toy) -> float:
    seen: list[Any] = []
    model, _, private = begin(trial, data)
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach()))
    for x, y in private.batches():
        private.step(plain(private.model, x, y))
    return trial.score(model, data.validation)


@_trap(
    "harmless",
    "forward hooks that store records: by record",
    "Nothing reads them.",
    like="by record",
)
def _hooked_by_record(trial: Trial, data: Toy) -> float:
    seen: list[Any] = []
    model, _, private = begin(trial, data)
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    private.fit(plain)
    return trial.score(model, data.validation)


@_trap(
    "harmless",
    "gradients multiplied by a hook on a weight",
    "The engine takes none.",
    like="by record",
)
def _multiplied(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for p in model.parameters():
        p.register_hook(lambda g: 1000.0 * g)
    private.fit(plain)
    return trial.score(model, data.validation)


@_trap("harmless", "DataParallel", "Each record is computed by itself.", like="by record")
def _parallel(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data, nn.DataParallel(linear()))
    private.fit(plain)
    return trial.score(model, data.validation)


@_trap("harmless", "torch.compile: losses", "What it wraps is trained.", like="by losses")
def _compiled_losses(trial: Trial, data: Toy) -> float:
    model = torch.compile(linear(), backend="eager")
    made, _, private = begin(trial, data, model)  # type: ignore[arg-type]
    for x, y in private.batches():
        private.step(plain(private.model, x, y))
    return trial.score(made, data.validation)


@_trap(
    "harmless", "torch.compile: by record", "Each record is computed by itself.", like="by record"
)
def _compiled(trial: Trial, data: Toy) -> float:
    model = torch.compile(linear(), backend="eager")
    made, _, private = begin(trial, data, model)  # type: ignore[arg-type]
    private.fit(plain)
    return trial.score(made, data.validation)


def momentum_encoder(**options: Any) -> Any:
    """Return the objective of a model that follows a slow copy of itself."""

    def objective(trial: Trial, data: Toy) -> float:
        model, _, private = begin(trial, data, **options)
        slow = copy.deepcopy(model).requires_grad_(False)

        def loss(m: Any, x: T, y: T) -> T:
            apart: T = (m(x) - slow(x)).square().sum(1)
            return plain(m, x, y) + apart

        def follow(*_: int) -> None:
            with torch.no_grad():
                for p, q in zip(slow.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.1)

        private.fit(loss, on_step=follow)
        return trial.score(model, data.validation)

    return objective


_trap(
    "harmless", "momentum encoder", "It is made of releases alone.", like="momentum encoder, one by one"
)(momentum_encoder())  # fmt: skip
