"""Noise that is correlated over steps beside independent noise, at one ε and equal work.

python -m studies.correlated_noise.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from studies.sheet import (
    Again,
    Options,
    Row,
    Sheet,
    by,
    markdown,
    mean,
    most_spent,
    pm,
    releases_of,
    seed_of,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

NOISES = ("independent", "banded")
REPEATS = {"MLP": 5, "tanh CNN": 3}
TASKS: dict[str, dict[str, Any]] = {
    "MLP": {"task": "mnist-mlp", "epochs": 10, "expected_batch_size": 512},
    "tanh CNN": {
        "task": "studies.epochs.tasks:mnist_tanh",
        "epochs": 10,
        "expected_batch_size": 512,
    },
}
EPSILONS = {"MLP": (8.0, 4.0, 2.0), "tanh CNN": (8.0, 4.0)}
SETTINGS = {  # momentum, schedule and rate
    "MLP": (
        (0.0, "constant", 2.0),
        (0.0, "constant", 4.0),
        (0.0, "constant", 8.0),
        (0.9, "constant", 0.4),
        (0.0, "linear", 8.0),
        (0.0, "linear", 16.0),
    ),
    "tanh CNN": (
        (0.9, "constant", 1.0),
        (0.9, "constant", 2.0),
        (0.9, "constant", 4.0),
        (0.9, "constant", 8.0),
    ),
}
NORMS = {"MLP": 1.0, "tanh CNN": 0.1}
SMOKE = {"task": "digits-mlp", "epochs": 2, "expected_batch_size": 32}


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every task, ε, momentum, rate and kind of noise; in a smoke run both kinds on digits."""
    if options.smoke:
        for noise in NOISES:
            yield {
                "task": "MLP",
                "epsilon": 8.0,
                "momentum": 0.0,
                "schedule": "constant",
                "rate": 0.5,
                "noise": noise,
            }
        return
    for task in TASKS:
        for setting, epsilon, noise in product(SETTINGS[task], EPSILONS[task], NOISES):
            momentum, schedule, rate = setting
            yield {
                "task": task,
                "epsilon": epsilon,
                "momentum": momentum,
                "schedule": schedule,
                "rate": rate,
                "noise": noise,
            }


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train one setting with one kind of noise."""
    arm = {
        "strategy": "fixed",
        "parameters": {
            "learning_rate": float(cell["rate"]),
            "max_grad_norm": NORMS[cell["task"]],
        },
        "options": {"momentum": float(cell["momentum"]), "schedule": cell["schedule"]},
    }
    noise: str | dict[str, str] = "plain"
    if cell["noise"] == "banded":
        noise = {"correlation": "banded"}
    return releases_of(
        arm,
        epsilon=float(cell["epsilon"]),
        delta=1e-5,
        noise=noise,
        repeats=2 if options.smoke else REPEATS[cell["task"]],
        seed=seed_of(cell["task"], cell["epsilon"]),  # both kinds of noise share it
        **(SMOKE if options.smoke else TASKS[cell["task"]]),
    )


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the accuracy of every setting, and the most of its budget that any spent."""
    accuracies = {}
    for key, of in by(rows, *SHEET.key).items():
        task, epsilon, momentum, schedule, rate, noise = key
        kind = "" if schedule == "constant" else f"{schedule} "
        name = f"{task} at ε = {float(epsilon):g}, momentum {momentum}, {kind}rate {rate}: {noise}"
        accuracies[name] = 100.0 * mean(of, "accuracy")
    return {**accuracies, **most_spent(rows)}


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the accuracy of every setting under both kinds of noise, and the difference."""
    lines = []
    for key, of in by(rows, *SHEET.key[:-1]).items():
        kinds = {noise: group for (noise,), group in by(of, "noise").items()}
        accuracies = [
            pm(kinds[noise], "accuracy", scale=100.0) if noise in kinds else "–" for noise in NOISES
        ]
        lines.append((*key, *accuracies, _gain(kinds)))
    head = ("task", "ε", "momentum", "schedule", "rate", "independent", "banded", "gain")
    return [markdown(head, sorted(lines))]


def _gain(kinds: Mapping[str, Sequence[Row]]) -> str:
    """Return by how many points banded noise is ahead of independent noise, in the mean."""
    if not all(noise in kinds for noise in NOISES):
        return "–"
    gain = mean(kinds["banded"], "accuracy") - mean(kinds["independent"], "accuracy")
    return f"{100.0 * gain:+.1f}"


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against the rate, a panel a task and ε."""
    named = []
    for row in rows:
        place = f"{row['task']}, ε = {float(row['epsilon']):g}, momentum {row['momentum']}"
        named.append({**row, "place": place})
    return {
        "chart": plot_lines(named, x="rate", y="accuracy", line="noise", panel="place", log="x")
    }


SHEET = Sheet(
    name="correlated_noise",
    key=("task", "epsilon", "momentum", "schedule", "rate", "noise"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"noise": "banded"}, "accuracy", stand_in=True),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
