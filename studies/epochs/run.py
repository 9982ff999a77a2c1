"""Which epochs and which batch DP-SGD should have, and whether ``epochs: auto`` has them on other tasks.

python -m studies.epochs.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from studies.auto.run import terms_of
from studies.auto.tasks import MADE
from studies.sheet import Again, Options, Row, Sheet, by, floats, releases_of, seed_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

ARMS: dict[str, dict[str, Any]] = {
    "hyfreedp": {"strategy": "hyfreedp"},
    "rate 0.5": {"strategy": "fixed", "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0}},
    "rate 2": {"strategy": "fixed", "parameters": {"learning_rate": 2.0, "max_grad_norm": 1.0}},
    "rate 8": {"strategy": "fixed", "parameters": {"learning_rate": 8.0, "max_grad_norm": 1.0}},
}
LARGE = ("coarse", "hastie", "classes-40k", "shifted")
SMALL = ("net-1k", "classes-3k", "circles")
GRID = (
    (1, (2.0, 8.0), (64, 16, 256, 8, 32, 128), LARGE),
    (5, (2.0, 8.0), (16, 4, 64, 8, 32, 128), LARGE),
    (20, (0.5, 2.0), (16, 4, 1, 64, 8, 2, 32), SMALL),
    (5, (0.5, 2.0), (16, 4, 1, 64, 8, 2, 32), SMALL),
    (20, (2.0,), (4, 16, 64), LARGE),
)


def cells(options: Options) -> Iterator[dict[str, Any]]:
    for passes, epsilons, batches, tasks in GRID:
        for number, epsilon, task, arm in product(batches, epsilons, tasks, ARMS):
            yield {
                "set": "training",
                "task": task,
                "epsilon": epsilon,
                "arm": arm,
                "passes": passes,
                "batches": number,
            }


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    terms = terms_of(cell["task"])
    records = MADE[cell["task"]].sizes.train
    terms["epochs"] = cell["passes"]
    terms["expected_batch_size"] = max(1, records // cell["batches"])
    terms["seed"] = seed_of(cell["task"], cell["epsilon"])
    return releases_of(
        ARMS[cell["arm"]], epsilon=cell["epsilon"], delta=1e-5, repeats=6, report=None, **terms
    )


SHEET = Sheet(
    name="epochs",
    key=("set", "task", "epsilon", "arm", "passes", "batches"),
    values=("seed", "accuracy", "gradient_evaluations", "spent"),
    cells=cells,
    fill=fill,
    figures=lambda rows: {},
    tables=lambda rows: [],
    charts=lambda rows: {},
    again=Again({"task": "net-1k"}, "accuracy"),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
