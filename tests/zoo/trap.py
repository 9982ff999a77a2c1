"""What a trap is: something that a user might write, what becomes of it, and how that is measured."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import privtune
from privtune.ledger import Ledger
from privtune.strategies import Fixed, PapernotSteinke, ScorePlan, TrainingPlan
from privtune.study.build import BuildResult, build_candidate
from privtune.tasks import Task
from privtune.training.engine.train import Training
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.scoring import LossOfRecords, released_sums
from privtune.training.methods import FixedDPSGD

T = torch.Tensor
Pair = tuple[T, T]
Make = Callable[["Toy"], dict[str, Any]]
Outcome = Literal["refused", "harmless", "on the page"]
RECORDS, HELD_OUT, FEATURES, CLASSES, FEW = 60, 30, 6, 3, 12
BOUND = 0.5
BUDGET = privtune.Budget(6.0, 1e-5, name="traps")


def _blobs(records: int, seed: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (records,), generator=generator)
    noise = torch.randn(records, FEATURES, generator=generator)
    return 2.0 * torch.eye(CLASSES, FEATURES)[y] + noise, y


@dataclass(frozen=True)
class Toy:
    """Made-up records: six numbers and one of three classes each."""

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
        selects: Whether it runs in a selection with a private validation split, or is trained once.
    """

    name: str
    outcome: Outcome
    says: str
    make: Make
    selects: bool = False


def entering(zoo: list[Trap], argument: str, *, selects: bool = False) -> Callable[..., None]:
    """Return what enters traps into a list: values of an argument, or functions of the toy records."""

    def enter(
        outcome: Outcome,
        says: str,
        traps: Mapping[str, Any],
        selects: bool = selects,
        made: bool = False,
    ) -> None:
        for name, given in traps.items():
            make = given if made else lambda toy, given=given: {argument: given}
            zoo.append(Trap(name=name, outcome=outcome, says=says, make=make, selects=selects))

    return enter


def kept(argument: str, make: Callable[[Toy], Any], use: Callable[..., Any]) -> Make:
    """Return a function that has something beside its arguments, and keeps it between calls."""

    def arguments(toy: Toy) -> dict[str, Any]:
        state = make(toy)
        return {argument: lambda *given: use(state, *given)}

    return arguments


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


def linear() -> nn.Module:
    """Return the smallest model."""
    return nn.Linear(FEATURES, CLASSES)


def plain(model: Any, x: T, y: T) -> T:
    """Return the loss of a record."""
    return functional.cross_entropy(model(x), y, reduction="none")


def candidate(model: nn.Module | None = None, rate: float = 0.5, **options: Any) -> Any:
    """Return a candidate with plain SGD over what is trained."""
    model = linear() if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    return privtune.Candidate(model, torch.optim.SGD(trained, rate), **options)


def build(trial: privtune.Trial) -> Any:
    """Return the honest candidate."""
    return candidate(rate=trial.suggest_float("rate", 0.1, 1.0))


def _arguments(trap: Trap, toy: Toy) -> dict[str, Any]:
    honest = {"build": build, "loss": plain, "score": "accuracy", "classes": CLASSES}
    torch.manual_seed(0)  # what a trap makes by the way is the same each time
    own = {**honest, **trap.make(toy)}
    return own if "data" in own else {"train": toy.train, "validation": toy.validation, **own}


def run(trap: Trap) -> tuple[Exception | None, int]:
    """Run a trap by ``study.optimize``; return what it raised, and how many charges there are."""
    strategy = PapernotSteinke(mean_runs=2) if trap.selects else Fixed()
    failed: Exception | None = None
    with tempfile.TemporaryDirectory() as folder:
        storage = f"sqlite:///{Path(folder) / 'privtune.db'}"
        study = privtune.create_study("zoo", budget=BUDGET, storage=storage, seed=1)
        arguments = {"strategy": strategy, "epochs": 0.4, "expected_batch_size": FEW}
        try:
            task = privtune.make_task(**_arguments(trap, Toy()))
            study.optimize(task, **arguments)
        except Exception as error:
            failed = error
        with Ledger(storage) as ledger:
            charged = len(ledger.charges(BUDGET.name))
            assert bool(study.releases()) == (failed is None)
    return failed, charged


def share(trap: Trap) -> float:
    """Return how far the sum of clipped gradients moves when one record leaves, over hostile ones."""
    return _moved(lambda pair: _summed(*_built(trap, Toy(train=pair))))


def scored_share(trap: Trap, bound: float) -> float:
    """Return how far the sum of scores moves when one record leaves, over hostile ones."""
    return _moved(lambda pair: _scored(*_built(trap, Toy(validation=pair)), bound))


def _moved(measure: Callable[[Pair], T]) -> float:
    """Return how far a sum over a few records moves, the first of which move as much as they can."""
    x, y = (t[:FEW].clone() for t in Toy().train)
    x[0], x[1], x[2, :3], x[3] = 1e4 * x[0], 0.0, 1e9, x[4]
    whole, kept = measure((x, y)), [torch.arange(FEW) != left for left in range(6)]
    return max(float((whole - measure((x[rows], y[rows]))).norm()) for rows in kept)


def _built(trap: Trap, toy: Toy) -> tuple[Task, BuildResult]:
    task = privtune.make_task(**_arguments(trap, toy))
    training = TrainingPlan(Schedule(FEW, 1.0, 1), FixedDPSGD(0.0))
    return task, build_candidate(task, training, secret=bytes(32), fixed={})


def _summed(task: Task, built: BuildResult) -> T:
    before = flatten_params(built.model).clone()
    trained = [p for p in built.model.parameters() if p.requires_grad]
    values, optimizer = {"max_grad_norm": BOUND}, torch.optim.SGD(trained, float(FEW))
    made = replace(built.made, optimizer=optimizer, scheduler=None, values=values)
    data = replace(task.load().train, sealed_size=True)
    training = FixedDPSGD(0.0), Schedule(FEW, 1.0, 1)
    (outcome,) = Training(*training, task.record_loss, data).of([made])
    return outcome.params - before


def _scored(task: Task, built: BuildResult, bound: float) -> T:
    assert task.score_of is not None
    terms = ScorePlan(FEW, None, metric="cost", options={"bound": bound})
    (metric,) = terms.make_metrics()
    rng = np.random.default_rng(0)
    validation = task.load().validation
    released = released_sums(terms, built.model, validation, rng, LossOfRecords(task.score_of))
    assert released is not None
    return torch.from_numpy(released[0]) * bound / metric.sensitivity
