"""All of MNIST, with a training as long as its ε deserves: a perceptron and a CNN.

python -m studies.full_size.run --data mnist.npz        # goes on where it was; two to fifteen minutes a cell
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from studies.sheet import (
    STRATEGY_OF,
    Again,
    Options,
    Row,
    Sheet,
    by,
    floats,
    markdown,
    mean,
    most_spent,
    releases_of,
    seed_of,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

DELTA = 1e-5
EPSILONS = (1.0, 2.0, 4.0, 8.0)
WORK = 3_000_000  # gradient evaluations that one training may spend
TASKS = {"MLP": "mnist-mlp", "tanh CNN": "studies.epochs.tasks:mnist_tanh"}
ARMS: dict[str, dict[str, Any]] = {
    "guess": {
        "strategy": "fixed",
        "parameters": {"learning_rate": 1.0, "max_grad_norm": 0.1},
        "options": {"momentum": 0.9, "schedule": {"type": "linear", "start": 0.0}},
    },
    "public rate": {"strategy": "public-rate", "method": "dp-adam", "schedule": "linear"},
    "hyfreedp": {"strategy": "hyfreedp"},
}
"""The guess is the literature's: tanh CNNs on MNIST are trained with about these."""
PAPERS: dict[tuple[str, float], str] = {
    ("MLP", 2.0): "95 (Abadi et al. 2016)",
    ("MLP", 8.0): "97 (Abadi et al. 2016)",
    ("tanh CNN", 2.0): "98.1 at ε = 2.93 (Papernot et al. 2021)",
}
SMOKE = {"task": "digits-mlp", "compute": 4_000}


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every network, arm and ε, the cheap network first; in a smoke run two arms on digits."""
    if options.smoke:
        for arm in ("public rate", "hyfreedp"):
            yield {"network": "MLP", "epsilon": 8.0, "arm": arm}
        return
    for network, arm, epsilon in product(TASKS, ARMS, EPSILONS):
        yield {"network": network, "epsilon": epsilon, "arm": arm}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train one arm once, for the epochs and the batch of its plan; in a smoke run twice."""
    network, epsilon = cell["network"], cell["epsilon"]
    terms = SMOKE if options.smoke else {"task": TASKS[network], "compute": WORK}
    return releases_of(
        ARMS[cell["arm"]],
        epsilon=epsilon,
        delta=DELTA,
        repeats=2 if options.smoke else 1,
        report=None,
        seed=seed_of(network, epsilon),  # arms share it
        epochs="auto",
        expected_batch_size="auto",
        **terms,
    )


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the accuracy of every cell, and the most of its budget that any spent."""
    accuracies = {
        f"{network} at ε = {float(epsilon):g}: {arm}": 100.0 * mean(of, "accuracy")
        for (network, epsilon, arm), of in by(rows, *SHEET.key).items()
    }
    return {**accuracies, **most_spent(rows)}


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the accuracy of every network and ε, an arm a column, beside the literature's."""
    lines = []
    for (network, epsilon), of in by(rows, "network", "epsilon").items():
        arms = {arm: group for (arm,), group in by(of, "arm").items()}
        shown = [_accuracy(arms[arm]) if arm in arms else "–" for arm in ARMS]
        paper = PAPERS.get((network, float(epsilon)), "")
        lines.append((network, f"{float(epsilon):g}", *shown, paper))
    return [markdown(("network", "ε", *ARMS, "literature"), lines)]


def _accuracy(rows: Sequence[Row]) -> str:
    """Return an accuracy in percent and the gradient evaluations of its training, in millions."""
    evaluations = max(floats(rows, "gradient_evaluations"))
    return f"{100.0 * mean(rows, 'accuracy'):.1f} ({evaluations / 1e6:.1f})"


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against ε, a panel a network."""
    named = [
        {**row, "ε": row["epsilon"], "test accuracy, %": str(100.0 * float(row["accuracy"]))}
        for row in rows
    ]
    figure = plot_lines(
        named,
        x="ε",
        y="test accuracy, %",
        line="arm",
        panel="network",
        log="x",
        strategies=STRATEGY_OF,
    )
    return {"chart": figure}


SHEET = Sheet(
    name="full_size",
    key=("network", "epsilon", "arm"),
    values=("seed", "accuracy", "gradient_evaluations", "spent"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"arm": "hyfreedp"}, "accuracy", stand_in=True),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
