"""What a step of a loop of one's own costs beside a step of the engine, and what its checks take.

OMP_NUM_THREADS=1 python studies/benchmarks/own_loops/run.py [--rounds 7] [--output FILE]

Processor time of one thread, from the end of a step to the end of the next. Every round runs every
competitor once; medians of all its steps but a run's first ones. Captures of a shape, a few a run,
do not move a median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from privtune.training.engine.train import train
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from privtune.training.own_loop import private_training as own_loop
from privtune.training.own_loop.private_training import PrivateTraining
from privtune.training.own_loop.weights import WatchedWeights

RECORDS, BATCH, SECRET = 4096, 64, bytes(range(32))
_FIRST = 30  # steps of a run that are left out
METHOD = FixedDPSGD(1.0)


def _mlp(*widths: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return build


WORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "MLP 64-64-10, B = 64": (_mlp(64, 64, 10), 64, 400),
    "MLP 784-784-500-10 (1.0 million weights), B = 64": (_mlp(784, 784, 500, 10), 784, 100),
}
"""Model, features, steps of a run."""


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every record."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same of a model's outputs."""
    return loss(model(x), y)


@dataclass(frozen=True)
class TimedDPSGD(FixedDPSGD):
    """DP-SGD that notes when each of its steps begins."""

    ticks: list[float] = field(default_factory=list)

    def update(self, state: Any, oracle: Any) -> Any:
        """Note the time and step."""
        self.ticks.append(time.process_time())
        return super().update(state, oracle)


def by_engine(build: Callable[[], nn.Module], data: TensorData, steps: int) -> list[float]:
    """Train by the engine, which steps by itself."""
    method = TimedDPSGD(1.0)
    train(
        method,
        Schedule(RECORDS, BATCH / RECORDS, steps),
        model=build,
        loss=loss,
        data=data,
        candidates=[{"learning_rate": 0.1, "max_grad_norm": 1.0}],
        secrets=[SECRET],
        device="cpu",
    )
    return method.ticks


def _private(build: Callable[[], nn.Module], data: TensorData, steps: int) -> PrivateTraining:
    model = build()
    return PrivateTraining(
        model,
        data,
        schedule=Schedule(RECORDS, BATCH / RECORDS, steps),
        method=METHOD,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        clipping=Flat(1.0),
        secret=SECRET,
    )


def by_record(build: Callable[[], nn.Module], data: TensorData, steps: int) -> list[float]:
    """Train by ``fit`` with torch's SGD."""
    private = _private(build, data, steps)
    ticks: list[float] = []
    private.fit(loss_of, on_step=lambda *_: ticks.append(time.process_time()))
    private.finish(METHOD.event(private.schedule))
    return ticks


def by_method(build: Callable[[], nn.Module], data: TensorData, steps: int) -> list[float]:
    """Train by ``fit`` without an optimizer: the method steps, as it does in the engine."""
    ticks: list[float] = []
    private = PrivateTraining(
        build(),
        data,
        schedule=Schedule(RECORDS, BATCH / RECORDS, steps),
        method=METHOD,
        candidate={"learning_rate": 0.1, "max_grad_norm": 1.0},
        secret=SECRET,
    )
    private.fit(loss_of, on_step=lambda *_: ticks.append(time.process_time()))
    return ticks


def by_record_unwatched(
    build: Callable[[], nn.Module], data: TensorData, steps: int
) -> list[float]:
    """The same without looking at the weights between releases."""
    private = _private(build, data, steps)
    watch: Any = private._weights
    watch.check = types.MethodType(lambda *_, **__: None, watch)
    watch.accept = types.MethodType(lambda *_: None, watch)
    ticks: list[float] = []
    private.fit(loss_of, on_step=lambda *_: ticks.append(time.process_time()))
    return ticks


def by_losses(build: Callable[[], nn.Module], data: TensorData, steps: int) -> list[float]:
    """Train in the Opacus form; replays are at the first step and at one drawn at random."""
    private = _private(build, data, steps)
    ticks: list[float] = []
    for x, y in private.batches():
        private.step(loss(private.model(x), y))
        ticks.append(time.process_time())
    private.finish(METHOD.event(private.schedule))
    return ticks


WAYS: dict[str, Callable[[Callable[[], nn.Module], TensorData, int], list[float]]] = {
    "engine": by_engine,
    "by record, SGD": by_record,
    "by record, the method": by_method,
    "by record, SGD, unwatched": by_record_unwatched,
    "losses": by_losses,
}


def replay_ms(build: Callable[[], nn.Module], data: TensorData) -> float:
    """Return what a checked step of the Opacus form takes more than another, in milliseconds."""
    times: dict[bool, list[float]] = {True: [], False: []}
    private = _private(build, data, 40)
    private._checked_at = frozenset(range(20, 40))
    began = time.process_time()
    for x, y in private.batches():
        private.step(loss(private.model(x), y))
        now = time.process_time()
        times[private.steps_taken > 20].append(now - began)
        began = now
    return 1e3 * (statistics.median(times[True]) - statistics.median(times[False][5:]))


def watch_us(build: Callable[[], nn.Module], data: TensorData) -> float:
    """Return what one look at the weights before a release, and one after it, take together."""
    private = _private(build, data, 4)
    watch: WatchedWeights = private._weights
    times = []
    for _ in range(200):
        began = time.process_time()
        for _ in range(10):
            watch.check()
            watch.accept()
        times.append((time.process_time() - began) / 10)
    return 1e6 * statistics.median(times)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the medians of one work and their ratios."""
    build, features, count = WORKS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, features, generator=generator)
    data = TensorData(x, torch.randint(10, (RECORDS,), generator=generator))
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, run in WAYS.items():
            ticks = run(build, data, count)
            steps[way] += [1e6 * (b - a) for a, b in pairwise(ticks[_FIRST:])]
    engine = statistics.median(steps["engine"])
    record = statistics.median(steps["by record, SGD"])
    watch = watch_us(build, data)
    return {
        "us_per_step": {way: round(statistics.median(found), 1) for way, found in steps.items()},
        "times_engine": {
            way: round(statistics.median(found) / engine, 3) for way, found in steps.items()
        },
        "weights_us_per_step": round(watch, 2),
        "weights_share_of_a_step": round(watch / record, 4),
        "replay_ms_per_checked_step": round(replay_ms(build, data), 2),
        "rounds": rounds,
    }


def main() -> None:
    """Measure every work and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(name, given.rounds) for name in WORKS}
    results["checked steps of a run"] = len(own_loop._checked_at(own_loop.Streams(SECRET), 1000))
    text = json.dumps({"torch": torch.__version__, "works": results}, indent=2)
    given.output.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
