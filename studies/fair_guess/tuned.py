"""DP-Adam with and without DP-AdamBC's correction, each at its best rate on other random numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from privtune.tasks import Task, get_task
from privtune.training.engine.train import initialisation
from privtune.training.mechanism.kernel import load_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import METHODS
from studies.harness import secrets_for, train

FALLING = "linear"
SEEDS = 3  # of a point of the grid
EXPONENTS = range(-7, 2)  # of the rates without a floor, powers of two
FLOORS: Mapping[
    str, Mapping[float | None, int]
] = {  # with the power of two by which rates are smaller: about the root of the floor
    "Adam, tuned": {None: 0},
    "Adam with a noise floor, tuned": {0.1: -2, 1.0: 0},
}


@dataclass(frozen=True)
class Point:
    """A point of the grid.

    Args:
        rate: The first learning rate, which falls to 0.
        floor: The least share of the noise's variance that the second moment keeps, or None.
    """

    rate: float
    floor: float | None

    @property
    def options(self) -> dict[str, Any]:
        """What DP-Adam is told beside its rate."""
        floor = {} if self.floor is None else {"noise_floor": self.floor}
        return {"schedule": FALLING, **floor}

    @property
    def arm(self) -> dict[str, Any]:
        """The arm as a spec has it."""
        parameters = {"learning_rate": self.rate, "max_grad_norm": 1.0}
        shared = {"strategy": "fixed", "method": "dp-adam"}
        return {**shared, "parameters": parameters, "options": self.options}


def grid(arm: str) -> Iterator[Point]:
    """Yield the points that an arm is tuned over."""
    for floor, shift in FLOORS[arm].items():
        for exponent in EXPONENTS:
            yield Point(2.0 ** (exponent + shift), floor)


def best_point(arm: str, name: str, *, epochs: int, batch: int, epsilon: float) -> Point:
    """Return the point of an arm's grid whose mean test accuracy is the best.

    Args:
        arm: One of :data:`FLOORS`.
        name: The task, as a spec has it.
        epochs: Passes over the records.
        batch: Expected records in a sample.
        epsilon: ε of each training, at δ = 1e-5.
    """
    task = get_task(name)
    schedule = Schedule.from_epochs(
        records=task.train_records, expected_batch_size=batch, epochs=epochs
    )
    found: dict[Point, float] = {}
    for floor in FLOORS[arm]:
        points = [point for point in grid(arm) if point.floor == floor]
        found |= _accuracies(task, schedule, points, epsilon)
    return max(found, key=found.__getitem__)


def _accuracies(
    task: Task, schedule: Schedule, points: list[Point], epsilon: float
) -> dict[Point, float]:
    """Return the mean test accuracy of points that share a floor, trained side by side."""
    data = task.load()
    method = METHODS["dp-adam"].for_budget(
        schedule, epsilon=epsilon, delta=1e-5, **points[0].options
    )
    trained = [point for point in points for _ in range(SEEDS)]
    # Points share their random numbers, those of other floors too.
    secrets = secrets_for(f"fair_guess/{task.name}/{epsilon:g}", 0, SEEDS) * len(points)
    result = train(
        method,
        schedule,
        model=task.model,
        loss=task.loss,
        data=data.train,
        candidates=[{"learning_rate": point.rate, "max_grad_norm": 1.0} for point in trained],
        secrets=secrets,
        device="cpu",
    )
    x, y = data.test.take(torch.arange(len(data.test)))
    with initialisation(Streams(secrets[0])):
        module = task.model()
    right: dict[Point, list[float]] = {}
    for point, row in zip(trained, result.params, strict=True):
        load_params(module, row)
        with torch.no_grad():
            hits = module(x).argmax(dim=1) == y
        right.setdefault(point, []).append(hits.double().mean().item())
    return {point: statistics.mean(values) for point, values in right.items()}
