"""What a trap is: an objective that a user might write, and what must become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from privtune.study.trial import Trial
from privtune.training.own_loop.private_training import PrivateTraining

__all__ = [
    "HONEST",
    "Loss",
    "Pair",
    "Toy",
    "Trap",
    "begin",
    "by_losses",
    "by_record",
    "entering",
    "linear",
    "plain",
    "sgd",
]

Pair = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]

RECORDS, HELD_OUT = 60, 30


def _blobs(records: int, seed: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (records,), generator=generator)
    return 2.0 * torch.eye(3, 6)[y] + torch.randn(records, 6, generator=generator), y


@dataclass(frozen=True)
class Toy:
    """Made-up records: six numbers and one of three classes each.

    Args:
        train: Training records.
        validation: Validation records.
    """

    train: Pair = field(default_factory=lambda: _blobs(RECORDS, 1))
    validation: Pair = field(default_factory=lambda: _blobs(HELD_OUT, 2))


Objective = Callable[[Trial, Toy], float]


@dataclass(frozen=True, kw_only=True)
class Trap:
    """An objective that looks right.

    Args:
        name: What it does, in a few words.
        objective: A function of a trial and of the toy records.
        verdict: ``refused``: raises an error of PrivTune's, and nothing is released. ``harmless``:
            runs, and what it releases is what was charged. ``undecidable``: runs, and nothing can
            see that what was charged is not what it releases.
        why: One sentence.
        severity: Of what is undecidable.
        when: Of what is refused: before anything is charged, or after.
        arm: Which arm it runs in: ``fixed``; ``selection`` with a private split; ``everything``
            with a public one.
        like: Of what is harmless: the honest objective that releases the same weights.
        loss: Of what is harmless, else: the loss whose records are shown to be bounded one by one.
        model: Makes the model of that loss.
    """

    name: str
    objective: Objective
    verdict: Literal["refused", "harmless", "undecidable"]
    why: str
    severity: Literal["critical", "high", "medium", ""] = ""
    when: Literal["before", "after", ""] = ""
    arm: Literal["fixed", "selection", "everything"] = "fixed"
    like: str = ""
    loss: Loss | None = None
    model: Callable[[], nn.Module] | None = None


def entering(zoo: list[Trap], **defaults: Any) -> Callable[..., Callable[[Any], Any]]:
    """Return what enters objectives into a list."""

    def enter(verdict: Any, name: str, why: str, **options: Any) -> Callable[[Any], Any]:
        usual = {**defaults, **({"when": "before"} if verdict == "refused" else {})}

        def entered(objective: Any) -> Any:
            said = {"name": name, "verdict": verdict, "why": why}
            zoo.append(Trap(objective=objective, **said, **{**usual, **options}))
            return objective

        return entered

    return enter


def linear() -> nn.Module:
    """Return the smallest model."""
    return nn.Linear(6, 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every trap that does not say otherwise."""
    return torch.optim.SGD(model.parameters(), 0.5)


def plain(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return one honest loss a record."""
    return functional.cross_entropy(model(x), y, reduction="none")


def begin(
    trial: Trial,
    data: Toy,
    model: nn.Module | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    train: Any = None,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, PrivateTraining]:
    """Return a model, its optimizer and the training that ``make_private`` gives for them."""
    model = linear() if model is None else model
    optimizer = sgd(model) if optimizer is None else optimizer
    train = data.train if train is None else train
    return model, optimizer, trial.make_private(model, optimizer, train, **options)


def by_record(
    loss: Loss = plain, model: Callable[[], nn.Module] = linear, **options: Any
) -> Objective:
    """Return the objective that hands a loss over record by record."""

    def objective(trial: Trial, data: Toy) -> float:
        made, _, private = begin(trial, data, model(), **options)
        private.fit(loss)
        return trial.score(made, data.validation)

    return objective


def by_losses(loss: Loss = plain, model: Callable[[], nn.Module] = linear) -> Objective:
    """Return the objective that computes the losses of a batch by itself, as with Opacus."""

    def objective(trial: Trial, data: Toy) -> float:
        made, _, private = begin(trial, data, model())
        for x, y in private.batches():
            private.step(loss(private.model, x, y))
        return trial.score(made, data.validation)

    return objective


HONEST: dict[str, Objective] = {
    "by record": by_record(),
    "by losses": by_losses(),
}
"""What harmless traps are held against."""
