"""Fine-tune on MNIST's digits 5 to 9 what was trained on 0 to 4, by every strategy, at one ε each.

python -m studies.transfer.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from privtune.tasks import fine_tuned
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import DPAdam
from studies.harness import accuracies, fit, secrets_for
from studies.sheet import (
    STRATEGY_OF,
    Again,
    Options,
    Sheet,
    by,
    markdown,
    mean,
    most_spent,
    pm,
    releases_of,
    seed_of,
)
from studies.transfer.task import digits_5_to_9, half, public_weights

if TYPE_CHECKING:
    import plotly.graph_objects as go

NORM = {"max_grad_norm": 0.1}  # Adam does not see the scale of its gradients
SMALL = ("head", "biases")  # their best rates are ten times those of all weights, or of adapters
SEARCH = {"method": "dp-adam", "parameters": NORM, "mean_runs": 10}
SUBSAMPLED = {
    "strategy": "subsampled-tuning",
    "rate": 0.1,
    "extrapolation": "keep",  # as the paper does with Adam
    **SEARCH,
}
ARMS: dict[str, dict[str, Any]] = {
    "defaults": {
        "strategy": "fixed",
        "method": "dp-adam",
        "parameters": {"learning_rate": 1e-3, **NORM},
    },
    "hyfreedp": {"strategy": "hyfreedp"},
    "public-rate": {"strategy": "public-rate"},
    "prodigy": {"strategy": "prodigy"},
    "d-adaptation": {"strategy": "d-adaptation"},
    "adadp": {"strategy": "adadp", "parameters": {"max_grad_norm": 1.0}},
    "adaclip": {
        "strategy": "adaclip",
        "parameters": {"learning_rate": 0.5, "largest_variance": 3e-3},
    },
    "papernot-steinke": {"strategy": "papernot-steinke", **SEARCH},
    "subsampled-1": {**SUBSAMPLED, "variant": 1},
    "subsampled-2": {**SUBSAMPLED, "variant": 2},
    "dp-hyper": {"strategy": "dp-hyper", **SEARCH},
    "un-paid grid": {},
}
SGD = {
    "strategy": "subsampled-tuning",
    "variant": 1,
    "rate": 0.1,
    "mean_runs": 10,
    "parameters": {"max_grad_norm": 1.0},
}
OF_SGD = {"learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True}}
GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
GRID_OF_SMALL = (3e-3, 1e-2, 3e-2, 0.1, 0.3)
TRAINABLE = ("all", "head", "biases", "lora:4")
EPSILONS, SEEDS, WIDTH = (0.3, 1.0, 3.0, 8.0), 5, 128
BATCH, EPOCHS = 1000, 5


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm at every ε for every part that is trained."""
    if options.smoke:
        yield {"trainable": "head", "epsilon": 3.0, "arm": "hyfreedp"}
        yield {"trainable": "lora:4", "epsilon": 3.0, "arm": "un-paid grid"}
        return
    for part in TRAINABLE:
        for epsilon in EPSILONS:
            for arm in (*ARMS, "subsampled-1, SGD") if part == "all" else ARMS:
                yield {"trainable": part, "epsilon": epsilon, "arm": arm}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm, once a seed."""
    public = str(public_weights(16 if options.smoke else WIDTH))
    batch, epochs = (100, 1) if options.smoke else (BATCH, EPOCHS)
    schedule = {"expected_batch_size": batch, "epochs": epochs}
    if cell["arm"] == "un-paid grid":
        return [grid(cell, public, schedule, seed=seed) for seed in range(SEEDS)]
    task = {
        "type": "fine-tuning",
        "task": "studies.transfer.task:public_digits",
        "pretrained": public,
        "trainable": cell["trainable"],
    }
    arm = {"subsampled-1, SGD": SGD, **ARMS}[cell["arm"]]
    low, high = (1e-3, 0.3) if cell["trainable"] in SMALL else (1e-4, 3e-2)
    rates = {"learning_rate": {"type": "float", "low": low, "high": high, "log": True}}
    space = {"space": rates} if "mean_runs" in arm else {}
    if arm is SGD:
        space = {"space": OF_SGD}
    terms = {"epsilon": cell["epsilon"], "delta": 1e-5, "repeats": SEEDS, **space}
    seed = seed_of(cell["trainable"], cell["epsilon"])  # its arms share it
    return releases_of(arm, task=task, seed=seed, **schedule, **terms)


def grid(
    cell: Mapping[str, Any], public: str, given: Mapping[str, Any], *, seed: int
) -> dict[str, Any]:
    """Train at every rate of the grid, and report the one that tests best: nobody paid for that."""
    task = fine_tuned(digits_5_to_9(), pretrained=public, trainable=cell["trainable"])
    schedule = Schedule.from_epochs(records=task.train_records, **given)
    split = half(5)
    split.x, split.y = split.x[: task.train_records], split.y[: task.train_records]
    rates = GRID_OF_SMALL if cell["trainable"] in SMALL else GRID
    found = fit(
        DPAdam.for_budget(schedule, epsilon=cell["epsilon"], delta=1e-5),
        schedule,
        model=task.model,
        split=split,
        candidates=[{"learning_rate": rate, **NORM} for rate in rates],
        secrets=secrets_for(f"transfer {cell['trainable']} {cell['epsilon']}", seed, len(rates)),
    )
    best = max(accuracies(task.model, found.params, split))
    return {"seed": seed, "accuracy": round(best / 100.0, 4), "spent": "", "claimed": ""}


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return the accuracy of every arm, and the largest share of its budget that any spent."""
    groups = by(rows, "trainable", "epsilon", "arm").items()
    return {
        **{f"{a}, {t}, ε = {float(e):g}": 100 * mean(g, "accuracy") for (t, e, a), g in groups},
        **most_spent(rows),
    }


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return one table a part that is trained: accuracy by arm and ε, and the number of seeds."""
    found = []
    for (part,), group in by(rows, "trainable").items():
        spent = sorted({float(row["epsilon"]) for row in group})
        lines = []
        for (arm,), of in by(group, "arm").items():
            at = {float(epsilon): each for (epsilon,), each in by(of, "epsilon").items()}
            cells_of = [
                f"{pm(at[e], 'accuracy', scale=100.0)} ({len(at[e])})" if e in at else "–"
                for e in spent
            ]
            lines.append((arm, *cells_of))
        found.append(markdown((part, *(f"ε = {e:g}" for e in spent)), lines))
    return found


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against ε, a panel a part that is trained."""
    figure = plot_lines(
        rows,
        x="epsilon",
        y="accuracy",
        line="arm",
        panel="trainable",
        log="x",
        strategies=STRATEGY_OF,
    )
    return {"chart": figure}


SHEET = Sheet(
    name="transfer",
    key=("trainable", "epsilon", "arm"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"trainable": "head", "arm": "hyfreedp"}, "accuracy", stand_in=True),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
