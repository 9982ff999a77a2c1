"""What a trap is: something that a user might write, what becomes of it, and how that is measured."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import privtune
from privtune.ledger import Ledger
from privtune.strategies import Fixed, PapernotSteinke, TrainingPlan
from privtune.study.build import build_candidate
from privtune.tasks import Task
from privtune.tasks.own import own_task
from privtune.training.engine.candidates import train_made
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.scoring import OfRecords, score
from privtune.training.methods import FixedDPSGD

__all__ = [
    "BOUND", "Loss", "Net", "Toy", "Trap", "build", "candidate", "linear", "over", "plain", "run", "scored_share",
    "share", "trap",
]  # fmt: skip

Pair = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
Outcome = Literal["refused", "harmless", "on the page"]
RECORDS, HELD_OUT, FEATURES, CLASSES, FEW = 60, 30, 6, 3, 12
BOUND = 0.5
BUDGET = privtune.Budget(6.0, 1e-5, name="traps")


class Net(nn.Module):
    """A model of parts, by their names, and of what is done with them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given: Any) -> Any:
        """Run it."""
        return self.run(self, *given)


def _blobs(records: int, seed: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (records,), generator=generator)
    noise = torch.randn(records, FEATURES, generator=generator)
    return 2.0 * torch.eye(CLASSES, FEATURES)[y] + noise, y


def _hostile() -> Pair:
    """A few records, the first of them chosen to move as much as they can."""
    x, y = (t[:FEW].clone() for t in _blobs(RECORDS, 1))
    x[0], x[1], x[2, :3], x[3] = 1e4 * x[0], 0.0, 1e9, x[4]
    return x, y


@dataclass(frozen=True)
class Toy:
    """Made-up records: six numbers and one of three classes each.

    Args:
        train: Training records.
        validation: Validation records.
    """

    train: Pair = field(default_factory=lambda: _blobs(RECORDS, 1))
    validation: Pair = field(default_factory=lambda: _blobs(HELD_OUT, 2))


@dataclass(frozen=True, kw_only=True)
class Trap:
    """Something that looks right.

    Args:
        name: What it does, in a few words.
        outcome: ``refused``: an error of PrivTune's, nothing is charged. ``harmless``: it runs, and what is
            released is what was charged. ``on the page``: it runs, and nothing can see that it is not.
        says: Words of the refusal; why it is harmless; or its name on the page.
        make: Arguments of ``study.optimize`` that differ from the honest ones.
        arm: ``fixed``, or ``selection`` with a private validation split.
    """

    name: str
    outcome: Outcome
    says: str
    make: Callable[[Toy], dict[str, Any]]
    arm: Literal["fixed", "selection"] = "fixed"


def trap(zoo: list[Trap], outcome: Outcome, name: str, says: str, arm: Any = "fixed") -> Any:
    """Return what enters a function of the toy records into a list."""

    def enter(make: Any) -> Any:
        zoo.append(Trap(name=name, outcome=outcome, says=says, make=make, arm=arm))
        return make

    return enter


def over(value: str, given: Any) -> Callable[[Toy], dict[str, Any]]:
    """Return what makes one argument another."""
    return lambda toy: {value: given}


def linear() -> nn.Module:
    """Return the smallest model."""
    return nn.Linear(FEATURES, CLASSES)


def plain(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of a record."""
    return functional.cross_entropy(model(x), y, reduction="none")


def candidate(model: nn.Module | None = None, rate: float = 0.5, **options: Any) -> Any:
    """Return a candidate with plain SGD."""
    model = linear() if model is None else model
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate), **options)


def build(trial: privtune.Trial) -> Any:
    """Return the honest candidate."""
    return candidate(rate=trial.suggest_float("rate", 0.1, 1.0))


def _arguments(trap: Trap, toy: Toy) -> dict[str, Any]:
    honest: dict[str, Any] = {
        "build": build,
        "loss": plain,
        "score": "accuracy",
        "classes": CLASSES,
    }
    torch.manual_seed(0)  # what a trap makes by the way is the same each time
    own = {**honest, **trap.make(toy)}
    if "data" not in own:
        own = {"train": toy.train, "validation": toy.validation, **own}
    return own


def run(trap: Trap) -> tuple[Exception | None, int]:
    """Run a trap by ``study.optimize``; return what it raised, and how many charges there are."""
    strategy = Fixed() if trap.arm == "fixed" else PapernotSteinke(mean_runs=2)
    failed: Exception | None = None
    with tempfile.TemporaryDirectory() as folder:
        storage = f"sqlite:///{Path(folder) / 'privtune.db'}"
        study = privtune.create_study("zoo", budget=BUDGET, storage=storage, seed=1)
        arguments = {"strategy": strategy, "epochs": 0.4, "expected_batch_size": FEW}
        try:
            arguments |= _arguments(trap, Toy())
            study.optimize(arguments.pop("build"), **arguments)
        except Exception as error:
            failed = error
        with Ledger(storage) as ledger:
            charged = len(ledger.charges(BUDGET.name))
            assert bool(study.releases()) == (failed is None)
    return failed, charged


def _task(trap: Trap, toy: Toy) -> Task:
    own = _arguments(trap, toy)
    allowed = ("loss", "score", "data", "split", "train", "validation", "classes", "pad_to")
    return own_task(own["build"], **{name: own[name] for name in allowed if name in own})


def _parts(pair: Pair) -> list[Pair]:
    """Return the records, and then all of them but one, for each of the first."""
    x, y = pair
    without = [torch.arange(len(x)) != left for left in range(6)]
    return [(x, y), *((x[kept], y[kept]) for kept in without)]


def _moved(values: list[torch.Tensor]) -> float:
    return max(float((values[0] - other).norm()) for other in values[1:])


def share(trap: Trap) -> float:
    """Return how far the sum of clipped gradients moves when one record leaves, over hostile ones."""
    return _moved([_summed(trap, pair) for pair in _parts(_hostile())])


def _summed(trap: Trap, pair: Pair) -> torch.Tensor:
    task = _task(trap, Toy(train=pair))
    schedule, method = Schedule(FEW, 1.0, 1), FixedDPSGD(0.0)
    built = build_candidate(task, TrainingPlan(schedule, method), secret=bytes(32), fixed={})
    before = flatten_params(built.model).clone()
    trained = [p for p in built.model.parameters() if p.requires_grad]
    made = replace(
        built.made,
        optimizer=torch.optim.SGD(trained, float(FEW)),
        scheduler=None,
        values={"max_grad_norm": BOUND},
    )
    data = replace(task.load().train, sealed_size=True)
    (outcome,) = train_made(method, schedule, [made], loss_of=task.record_loss, data=data)
    return outcome.params - before


def scored_share(trap: Trap, bound: float) -> float:
    """Return how far the sum of scores moves when one record leaves, over hostile ones."""
    return _moved([_scored(trap, pair, bound) for pair in _parts(_hostile())])


def _scored(trap: Trap, pair: Pair, bound: float) -> torch.Tensor:
    task = _task(trap, Toy(validation=pair))
    training = TrainingPlan(Schedule(FEW, 1.0, 1), FixedDPSGD(0.0))
    model = build_candidate(task, training, secret=bytes(32), fixed={}).model
    options: Mapping[str, Any] = {"metric": "cost", "options": {}, "bound": bound, "records": FEW}
    terms: Any = SimpleNamespace(**options, mechanism="gaussian", standard_deviation=0.0)
    assert task.score_of is not None
    found = score(
        terms,
        model,
        task.load().validation,
        rng=np.random.default_rng(0),
        loss=OfRecords(task.score_of),
    )
    return torch.tensor([FEW * found], dtype=torch.float64)
