"""Every strategy on four tasks at one epsilon each: what it buys, and what would have been claimed.

python -m studies.four_tasks.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_results
from studies.sheet import Again, Options, Sheet, by, markdown, mean, most_spent, pm, release_of
from studies.transfer.task import public_weights

if TYPE_CHECKING:
    import plotly.graph_objects as go

CLIP = {"max_grad_norm": 1.0}
SEARCH = {"mean_runs": 10, "parameters": CLIP}
ARMS: dict[str, dict[str, Any]] = {
    "defaults": {"strategy": "fixed", "parameters": {"learning_rate": 0.5, **CLIP}},
    "papernot-steinke": {"strategy": "papernot-steinke", **SEARCH},
    "liu-talwar": {"strategy": "liu-talwar", "maximum": 40, **SEARCH},
    "subsampled-1": {"strategy": "subsampled-tuning", "variant": 1, "rate": 0.1, **SEARCH},
    "subsampled-2": {"strategy": "subsampled-tuning", "variant": 2, "rate": 0.1, **SEARCH},
    "hyfreedp": {"strategy": "hyfreedp"},
    "adadp": {"strategy": "adadp", "parameters": CLIP},
    "prodigy": {"strategy": "prodigy"},
    "methods": {
        "strategy": "papernot-steinke",
        "mean_runs": 5,
        "candidates": [
            {"method": "hyfreedp"},
            {"method": "adadp", "parameters": CLIP},
            {"method": "dpsgd", "parameters": CLIP},
        ],
    },
    "everything, TPE": {
        "strategy": "everything",
        "trials": 10,
        "sampler": "tpe",
        "parameters": CLIP,
    },
}
SPACE = {"learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True}}
FINE_TUNING = {
    "type": "fine-tuning",
    "task": "studies.transfer.task:digits_5_to_9",
    "trainable": "all",
}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"task": "digits-mlp", "epochs": 20, "expected_batch_size": 64},
    "table": {"task": "synthetic-logistic", "epochs": 5, "expected_batch_size": 128},
    "mnist": {"task": "mnist-mlp", "epochs": 3, "expected_batch_size": 512},
    "transfer": {"task": FINE_TUNING, "epochs": 5, "expected_batch_size": 1000},
}
EPSILONS, SEEDS = (1.0, 4.0), 5


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm on every task, seed by seed."""
    if options.smoke:
        for task, arm in (("table", "adadp"), ("transfer", "hyfreedp")):
            yield {"task": task, "epsilon": 4.0, "seed": 0, "arm": arm}
        return
    for seed in range(SEEDS):
        for task in TASKS:
            for epsilon in EPSILONS:
                for arm in ARMS:
                    yield {"task": task, "epsilon": epsilon, "seed": seed, "arm": arm}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm on one task."""
    arm, terms = ARMS[cell["arm"]], dict(TASKS[cell["task"]])
    if "mean_runs" in arm or "trials" in arm:
        terms["space"] = SPACE
    if options.smoke:
        terms |= {"epochs": 1, "expected_batch_size": 100}
    if cell["task"] == "transfer":
        weights = public_weights(16 if options.smoke else 128)
        terms["task"] = {**FINE_TUNING, "pretrained": str(weights)}
    told = {"epsilon": cell["epsilon"], "delta": 1e-5, "seed": cell["seed"]}
    return [release_of(arm, **told, **terms)]


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return the accuracy of every arm, and the largest share of its budget that any spent."""
    found = {
        f"{arm} on {task} at ε = {float(epsilon):g}": 100 * mean(group, "accuracy")
        for (task, epsilon, arm), group in by(rows, "task", "epsilon", "arm").items()
    }
    return {**found, **most_spent(rows)}


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return one table a task: what each arm released, claimed and cost."""
    found = []
    for (task,), group in by(rows, "task").items():
        lines = [
            (
                arm,
                *(pm(each, "accuracy", scale=100.0) for each in by(of, "epsilon").values()),
                " / ".join(
                    f"{float(each[0]['claimed']):.2f}" for each in by(of, "epsilon").values()
                ),
                f"{int(of[0]['gradient_evaluations']):,}",
                len({row["seed"] for row in of}),
            )
            for (arm,), of in by(group, "arm").items()
        ]
        spent = [f"ε = {float(epsilon):g}" for (epsilon,) in by(group, "epsilon")]
        head = (task, *spent, "ε as usually claimed", "gradient evaluations", "seeds")
        found.append(markdown(head, lines))
    return found


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against ε, a panel a task."""
    return {"chart": plot_results(rows)}


SHEET = Sheet(
    name="four_tasks",
    key=("task", "epsilon", "seed", "arm"),
    values=("accuracy", "gradient_evaluations", "spent", "claimed"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"task": "table", "epsilon": "4.0", "arm": "adadp"}, "accuracy"),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
