"""What is said of a linear model's loss holds for the model and the loss that the task trains."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.strategies import InRun
from privtune.tasks import Task, get_task
from privtune.training.mechanism.schedule import Schedule
from tests.strategies.world import context

TABLE: dict[str, Any] = {
    "type": "tabular",
    "path": "nowhere.csv",
    "target": "y",
    "columns": {
        "age": [0, 100],
        "sex": {"categories": ["f", "m"]},
        "seen": {"date": ["2020-01-01", "2024-01-01"], "parts": ["time", "month"]},
    },
    "train": 600,
    "validation": 100,
    "test": 100,
}
CLASSES = {"classes": ["a", "b", "c"], "class_weights": [1.0, 2.0, 0.5]}


def extremes(task: Task, square: float) -> torch.Tensor:
    """Records whose features are as long as declared, but for one of few."""
    made = torch.randn((200, *task.input_shape), generator=torch.Generator().manual_seed(0))
    return made / made.norm(dim=1, keepdim=True) * square**0.5


@pytest.mark.parametrize(
    ("task", "square"),
    [
        (get_task({**TABLE, **CLASSES}), 4.0),
        (get_task("iris-logistic"), 4.0),
        (get_task({**TABLE, "target_range": [-3, 5]}), 4.0),
    ],
    ids=["table", "built in", "regression"],
)
def test_no_record_has_a_longer_gradient_or_a_larger_curvature(task: Task, square: float) -> None:
    model = task.model().double()
    x = extremes(task, square).double()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    size = sum(shape.numel() for shape in shapes.values())

    def loss(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        own = {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
        return task.loss(torch.func.functional_call(model, own, (x[None],)), y[None]).squeeze()

    generator = torch.Generator().manual_seed(1)
    known, slopes, curves = task.constants, [], []
    for row in x[:60]:
        if task.classes is None:
            low, high = task.target_range or (0.0, 0.0)
            y = low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64)
        else:
            y = torch.randint(task.classes, (), generator=generator)
        at = 4.0 * torch.randn(size, generator=generator, dtype=torch.float64)
        slope = torch.autograd.functional.jacobian(partial(loss, x=row, y=y), at)
        slopes.append(slope.norm())
        hessian = torch.autograd.functional.hessian(partial(loss, x=row, y=y), 0.05 * at)
        values = torch.linalg.eigvalsh(hessian)
        assert float(values.min()) > -1e-9  # convex
        curves.append(values.max())
        assert float(loss(torch.zeros(size, dtype=torch.float64), row, y)) <= known["gap"] + 1e-6
    assert (
        0.5 * known["smoothness"] < float(torch.stack(curves).max()) <= known["smoothness"] + 1e-5
    )
    if task.classes is None:
        assert "lipschitz" not in known  # it grows with the weights
    else:
        largest = float(torch.stack(slopes).max())
        assert 0.8 * known["lipschitz"] < largest <= known["lipschitz"] + 1e-5


def test_weights_that_nobody_knows_yet_and_other_models_say_nothing() -> None:
    spec = {**TABLE, **CLASSES}
    assert get_task({**spec, "model": "mlp"}).constants == {}
    assert get_task({**spec, "class_weights": "paid"}).constants == {}
    assert get_task({**spec, "projection": [[1.0] * 7]}).constants == {}
    rows = get_task({**spec, "class_weights": [1, 1, 1]}).constants
    people = {**spec, "class_weights": [1, 1, 1], "group": "who", "max_per_group": 5}
    assert get_task(people).constants == {name: 5 * value for name, value in rows.items()}
    head = {"type": "fine-tuning", "task": "iris-logistic", "trainable": "biases"}
    assert get_task(head).constants == {}


def planned(method: str, *, adjacency: Adjacency = Adjacency.ADD_REMOVE, **options: Any) -> Any:
    task = options.pop("task", get_task("iris-logistic"))
    schedule = Schedule(records=task.train_records, sample_rate=1.0, steps=40)
    facts = context({}, task=task, schedule=schedule, adjacency=adjacency)
    return InRun(arm="a", method=method, options=options).plan(facts, epsilon=8.0).training.method


@pytest.mark.parametrize("adjacency", Adjacency)
def test_pur_takes_what_it_needs_from_the_task(adjacency: Adjacency) -> None:
    task = get_task("iris-logistic")
    for name in ("pur", "pur-constant"):
        made = planned(name, adjacency=adjacency)
        assert (made.lipschitz, made.smoothness) == (
            task.constants["lipschitz"],
            task.constants["smoothness"],
        )
        assert (made.dimension, made.adjacency) == (15, adjacency.value)
    assert planned("pur").regime == "non-convex"  # its noise asks for no distance
    assert planned("pur").gap == task.constants["gap"]
    assert planned("pur", distance=3.0).regime == "convex"
    strong = planned("pur", regularisation=0.1, lipschitz=2.0)
    assert (strong.regime, strong.strong_convexity, strong.lipschitz) == ("strongly-convex", 0.1, 2)
    assert strong.smoothness == task.constants["smoothness"] + 0.1


def test_pur_asks_for_what_no_task_says() -> None:
    numbers = get_task({**TABLE, "target_range": [0, 1]})
    with pytest.raises(InvalidInputError, match="needs lipschitz, proven"):
        planned("pur", task=numbers)
    assert planned("pur", task=numbers, lipschitz=1.0).smoothness == 10.0
