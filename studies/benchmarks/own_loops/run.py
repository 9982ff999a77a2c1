"""What 16 candidates that a ``build`` made take, times 16 candidates of a task.

OMP_NUM_THREADS=1 python studies/benchmarks/own_loops/run.py [--rounds 11] [--output FILE]

Processor time of the whole process for the training of a round: first weights, looks at the programs,
captures, 169 steps, checks of the transcripts. Every round runs every way once, after one round that does
not count; captured passes are forgotten between two ways.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from privtune.training.engine import train as engine
from privtune.training.engine.candidates import Made, initialisation
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import FixedDPSGD

TRIALS, WIDTH = 16, 32
SCHEDULE = Schedule.from_epochs(records=1077, expected_batch_size=64, epochs=10)
METHOD = FixedDPSGD(1.0)
SECRETS = [Streams(bytes(32)).key("trial", n) for n in range(TRIALS)]
RATES = [0.05 * 100 ** (n / (TRIALS - 1)) for n in range(TRIALS)]
Optimizer = Callable[[nn.Module, float], torch.optim.Optimizer] | None


def digits() -> TensorData:
    """Return the training records of the digits, as the guide reads them."""
    images, labels = load_digits(return_X_y=True)
    return TensorData(
        torch.tensor(images[:1077] / 16, dtype=torch.float32), torch.tensor(labels[:1077])
    )


DATA = digits()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of one record and a model."""
    return cross_entropy(model(x), y, reduction="none")


def network(width: int = WIDTH) -> nn.Module:
    """The guide's network."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def made(widths: Sequence[int], optimizer: Optimizer) -> Iterator[Made]:
    """Yield what a study makes of what ``build`` returns."""
    for secret, width, rate in zip(SECRETS, widths, RATES, strict=True):
        with initialisation(Streams(secret)):
            model = network(width)
        values: dict[str, Any] = {"max_grad_norm": 1.0}
        if optimizer is None:
            yield Made(model, secret, {**values, "learning_rate": rate})
        else:
            yield Made(model, secret, values, optimizer(model, rate))


def by_task() -> None:
    """Train as many candidates of a task with the same network, loss and records."""
    engine.Training(METHOD, SCHEDULE, loss_of, DATA).alike(made(SAME, None))


def by_build(widths: Sequence[int], optimizer: Optimizer, stack: Any = "auto") -> None:
    """Train the candidates of a ``build``."""
    list(engine.Training(METHOD, SCHEDULE, loss_of, DATA, stack=stack).of(made(widths, optimizer)))


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """The guide's optimizer."""
    return torch.optim.SGD(model.parameters(), rate)


def adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Adam, at a hundredth of the rate."""
    return torch.optim.Adam(model.parameters(), rate / 100)


def rmsprop(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """One that steps each candidate by itself."""
    return torch.optim.RMSprop(model.parameters(), rate / 100)


SAME, WIDER = [WIDTH] * TRIALS, range(16, 64, 3)
WAYS: dict[str, Callable[[], None]] = {
    "task": by_task,
    "one width, the method steps": lambda: by_build(SAME, None),
    "one width, SGD": lambda: by_build(SAME, sgd),
    "one width, Adam": lambda: by_build(SAME, adam),
    "one width, RMSprop": lambda: by_build(SAME, rmsprop),
    "widths 16 to 61, SGD": lambda: by_build(WIDER, sgd),
    "widths 16 to 61, Adam": lambda: by_build(WIDER, adam),
    "one width, SGD, one by one": lambda: by_build(SAME, sgd, 1),
}


def main() -> None:
    """Measure every way and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(given.rounds + 1):
        for way, run in WAYS.items():
            engine._kernels.clear()
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
