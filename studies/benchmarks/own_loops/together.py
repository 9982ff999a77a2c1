"""What 16 trials of an own objective take together, one by one, and as candidates of a task.

OMP_NUM_THREADS=1 python studies/benchmarks/own_loops/together.py [--rounds 5] [--output FILE]

Processor time of the whole process for what a round calls to train leased rows: first weights, captures,
169 steps, scores, checks of the transcripts. Every round runs every way once, after one run of each that
does not count; a task's captured passes are forgotten between rounds, since a round's trials make theirs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import privtune
from privtune.execution.training import train_trials
from privtune.spaces import SearchSpace
from privtune.strategies import Plan
from privtune.study.objective import ObjectiveFiles, plan_objective
from privtune.tasks import Task, TaskData
from privtune.training.engine import train as engine
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.streams import Streams

TRIALS, WIDTH = 16, 32
LOOP = privtune.DPSGD(records=1077, epochs=10, expected_batch_size=64)
SPLIT = privtune.Validation(records=360)
STREAMS = Streams(bytes(32))
SECRETS = {n: STREAMS.key("trial", n) for n in range(TRIALS)}
Objective = Callable[[privtune.Trial], float]


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the digits, as the guide reads them."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


X, Y = digits()


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every record."""
    return cross_entropy(outputs, targets, reduction="none")


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same of one record and a model."""
    return cross_entropy(model(x), y, reduction="none")


def network(width: int = WIDTH) -> nn.Module:
    """The guide's network."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def guide(trial: privtune.Trial, *, width: int | None = None, adam: bool = False) -> float:
    """The guide's objective; with one width for all, or with Adam, where asked for."""
    found, rate = trial.suggest_int("width", 16, 64), trial.suggest_float("rate", 0.05, 5, log=True)
    heavy = trial.suggest_categorical("heavy", [True, False])
    momentum = trial.suggest_float("momentum", 0.5, 0.9) if heavy else 0.0
    model = network(width or found)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), rate, momentum)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), rate / 100)
    private = trial.make_private(model, optimizer, (X[:1077], Y[:1077]), max_grad_norm=1.0)
    private.fit(loss_of)
    return trial.score(model, (X[1077:1437], Y[1077:1437]))


def stepping(trial: privtune.Trial) -> float:
    """The same network, where the plan's method steps by itself."""
    rate = trial.suggest_float("learning_rate", 0.05, 5, log=True)
    model = network()
    given = {"learning_rate": rate, "max_grad_norm": 1.0}
    trial.make_private(model, None, (X[:1077], Y[:1077]), parameters=given).fit(loss_of)
    return trial.score(model, (X[1077:1437], Y[1077:1437]))


class Kept:
    """Keeps the digest of the split, as a study's results do."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}

    def adopt(self, _: str) -> None:
        """Nothing of another version is there."""

    def put(self, name: str, content: bytes) -> None:
        """Keep what is not there yet."""
        self._known.setdefault(name, content)

    def get(self, name: str) -> bytes | None:
        """Return what is kept."""
        return self._known.get(name)


def plan() -> Plan:
    """Return the guide's plan."""
    return plan_objective(
        privtune.strategies.PapernotSteinke(mean_runs=5),
        LOOP,
        SPLIT,
        budget=privtune.Budget(4.0, 1e-5, name="digits"),
        epsilon=4.0,
        sampler=None,
        pruner=None,
    )


def by_objective(plan: Plan, objective: Objective, *, stack: Any) -> None:
    """Run the trials as a round does."""
    if plan.search is None:
        raise AssertionError
    results: Any = Kept()
    files = ObjectiveFiles(
        plan=plan,
        secret=bytes(32),
        results=results,
        space=SearchSpace({}),
        objective=objective,
        stack=stack,
    )
    trials: dict[int, dict[str, Any]] = {n: {} for n in range(TRIALS)}
    list(files.train(plan.search.trainings[0], trials, secrets=SECRETS, scored=True))


def by_task(plan: Plan) -> None:
    """Train as many candidates of a task with the same network, loss, records and score."""
    if plan.search is None:
        raise AssertionError
    engine._kernels.clear()
    parts = [TensorData(X[a:b], Y[a:b]) for a, b in ((0, 1077), (1077, 1437), (1437, 1797))]
    data = TaskData(*parts)
    task = Task(
        name="digits",
        description="the guide's",
        train_records=1077,
        validation_records=360,
        test_records=360,
        input_shape=(64,),
        classes=10,
        load=lambda: data,
        model=network,
        loss=loss,
    )
    rates = [0.05 * 100 ** (n / (TRIALS - 1)) for n in range(TRIALS)]
    train_trials(
        plan.search.trainings[0],
        task=task,
        data=data,
        records=data.train,
        score=plan.score,
        trials={n: {"learning_rate": rate, "max_grad_norm": 1.0} for n, rate in enumerate(rates)},
        secrets=SECRETS,
    )


OBJECTIVES: dict[str, Objective] = {
    "guide, one width": partial(guide, width=WIDTH),
    "guide, one width, Adam": partial(guide, width=WIDTH, adam=True),
    "the method steps": stepping,
    "guide": guide,
}


def main() -> None:
    """Measure every way and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("together.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    fixed = plan()
    ways: dict[str, Callable[[], None]] = {"task": partial(by_task, fixed)}
    for name, objective in OBJECTIVES.items():
        ways[f"{name}: together"] = partial(by_objective, fixed, objective, stack="auto")
        ways[f"{name}: one by one"] = partial(by_objective, fixed, objective, stack=1)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(given.rounds + 1):
        for way, run in ways.items():
            gc.collect()  # what another way has left is not this one's time
            began = time.process_time()
            run()
            if number:
                times[way].append(time.process_time() - began)
    medians = {way: statistics.median(own) for way, own in times.items()}
    found = {
        way: {"seconds": round(took, 3), "times a task": round(took / medians["task"], 2)}
        for way, took in medians.items()
    }
    text = json.dumps({"torch": torch.__version__, "rounds": given.rounds, "ways": found}, indent=2)
    given.output.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
