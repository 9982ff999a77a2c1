"""The study of two factors: what its tables say of made-up results, and the tasks that were fixed."""

from __future__ import annotations

import math
from itertools import product
from statistics import stdev

import numpy as np
import pytest
import torch

from studies.estimates import Estimate
from studies.two_factors.run import ADAM, ARMS, FALLING, SGD, WORTH, means_over_tasks, worth, worths
from studies.two_factors.tasks import TWELVE, overconfidence


def rows_of(task: str, way: str, optimizer: str, accuracies: list[float]) -> list[dict[str, str]]:
    cell = {"set": "six", "task": task, "epsilon": "2.0", "way": way, "optimizer": optimizer}
    return [{**cell, "accuracy": str(accuracy)} for accuracy in accuracies]


@pytest.mark.quick
def test_what_adam_is_worth_is_the_mean_of_its_gains_over_cells_by_way() -> None:
    rows = [
        *rows_of("a", "guess", SGD, [0.80, 0.82]),
        *rows_of("a", "guess", ADAM, [0.84, 0.86]),
        *rows_of("b", "guess", SGD, [0.90, 0.90]),
        *rows_of("b", "guess", ADAM, [0.88, 0.90]),
        *rows_of("b", "selection", SGD, [0.10, 0.12]),  # another way: its gains are its own
        *rows_of("b", "selection", ADAM, [0.90, 0.92]),
        *rows_of("b", "public rate", ADAM, [0.10, 0.12]),  # has nothing beside it
    ]
    gain = worth(rows, "six", WORTH["Adam, in the place of SGD: guess"])
    assert gain is not None
    assert gain.mean == pytest.approx((4.0 - 1.0) / 2.0)
    spread = stdev([80.0, 82.0]) / math.sqrt(2.0)  # of each of the three means that have one
    assert gain.error == pytest.approx(math.sqrt(3.0 * spread**2) / 2.0)
    assert worth(rows, "twelve", WORTH["Adam, in the place of SGD: guess"]) is None
    lines = [line for line in worths(rows).splitlines() if "Adam, in the place" in line]
    assert lines[0].endswith(" (-1.0 to +4.0) | – |")
    assert [line.split(" | ")[0] for line in lines] == [
        f"| Adam, in the place of SGD: {way}" for way in FALLING
    ]


@pytest.mark.quick
def test_the_chart_has_the_mean_of_a_repetition_over_the_tasks_that_are_complete() -> None:
    rows = []
    for task, epsilon, (way, optimizer), seed in product("ab", (1.0, 4.0), ARMS, range(2)):
        if (task, epsilon, way) == ("b", 4.0, "guess") and seed == 0:
            continue  # a single repetition has no error: the cell is incomplete
        accuracy = {"a": 0.5, "b": 0.9}[task] + 0.1 * seed
        row = {"set": "twelve", "task": task, "epsilon": str(epsilon), "way": way}
        rows.append({**row, "optimizer": optimizer, "seed": str(seed), "accuracy": str(accuracy)})
    drawn = means_over_tasks(rows)
    assert {row["tasks"] for row in drawn} == {"a"}
    assert {float(row["test accuracy, %"]) for row in drawn} == {50.0, 60.0}
    assert len(drawn) == len({way for way, _ in ARMS}) * len((1.0, 4.0)) * len(range(2))


@pytest.mark.quick
def test_the_mean_of_estimates_is_the_estimate_of_the_cells_mean() -> None:
    cells = [[1.0, 2.0, 4.0], [5.0, 9.0], [0.0, 1.0, 1.0, 3.0]]
    whole = Estimate.of(cells)
    mean = Estimate.mean_of([Estimate.of([cell]) for cell in cells])
    assert mean.mean == pytest.approx(whole.mean)
    assert mean.error == pytest.approx(whole.error)
    assert mean.freedom == pytest.approx(whole.freedom)


@pytest.mark.quick
def test_a_model_that_is_always_sure_is_too_sure_by_its_errors() -> None:
    logits = 100.0 * torch.eye(4)[[0, 1, 2, 3]]
    scores = overconfidence(logits, torch.tensor([0, 1, 2, 0]))
    assert 2.0 * float(scores.mean()) - 1.0 == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["checkers", "cubic", "tailed", "flipped", "lookalikes"])
def test_a_task_has_its_sizes_its_classes_and_bounded_features(name: str) -> None:
    made = TWELVE[name].made
    x, y = made.records()
    assert x.shape[1] == made.layers[0]
    assert np.abs(x).max() <= 1.0
    assert set(np.unique(y)) == set(range(made.layers[-1]))
    sizes = made.sizes
    assert len(x) == pytest.approx(sizes.train + sizes.validation + sizes.test, abs=1)
