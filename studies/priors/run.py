"""Which learning rates were best on public data: what ``prior: public`` is made of.

python -m studies.priors.run --data mnist.npz             # goes on where it was
python -m studies.priors.run --no-run --write             # the law of the results, into the package
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import privtune
from privtune.plots import plot_lines
from privtune.tasks import get_task
from privtune.training.mechanism.kernel import load_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from studies.harness import secrets_for, train
from studies.sheet import Again, Options, Row, Sheet, by, markdown, mean

if TYPE_CHECKING:
    import plotly.graph_objects as go

RATES = tuple(2.0**k for k in range(-6, 5))
EPSILONS, SEEDS = (1.0, 4.0), 3
TASKS = {  # epochs, and the expected batch size
    "iris-logistic": (10, 30),
    "breast-cancer-logistic": (10, 32),
    "synthetic-logistic": (5, 128),
    "digits-mlp": (20, 64),
    "digits-cnn": (10, 64),
    "mnist-logistic": (2, 512),
    "mnist-mlp": (3, 512),
}
PACKAGE = Path(privtune.__file__).parent / "public-priors.json"


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every task at every ε; two tasks in a smoke run."""
    for task in (*TASKS,)[:2] if options.smoke else TASKS:
        for epsilon in EPSILONS:
            yield {"task": task, "epsilon": epsilon}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train every rate at a clipping norm of 1 with every seed, in one pass; test on the public split."""
    task, seeds = get_task(cell["task"]), 1 if options.smoke else SEEDS
    epochs, batch = TASKS[cell["task"]]
    schedule = Schedule.from_epochs(
        records=task.train_records, expected_batch_size=batch, epochs=epochs
    )
    data, trained = task.load(), [(rate, seed) for rate in RATES for seed in range(seeds)]
    result = train(
        FixedDPSGD.for_budget(schedule, epsilon=cell["epsilon"], delta=1e-5),
        schedule,
        model=task.model,
        loss=task.loss,
        data=data.train,
        candidates=[{"learning_rate": rate, "max_grad_norm": 1.0} for rate, _ in trained],
        secrets=secrets_for(f"priors/{cell['task']}/{cell['epsilon']:g}", 0, len(trained)),
        device="cpu",
    )
    x, y = data.test.take(torch.arange(len(data.test)))
    module, lines = task.model(), []
    facts = {"records": task.train_records, "steps": schedule.steps}
    for (rate, seed), row in zip(trained, result.params, strict=True):
        load_params(module, row)
        with torch.no_grad():
            right = (module(x).argmax(dim=1) == y).double().mean().item()
        found = {"rate": rate, "seed": seed, "accuracy": round(right, 4), "parameters": len(row)}
        lines.append({**found, **facts})
    return lines


def best_rates(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return for each task and ε its public facts, the rate of the best mean accuracy, and that."""
    found = []
    for (task, epsilon), of in by(rows, "task", "epsilon").items():
        means = {float(rate): mean(own, "accuracy") for (rate,), own in by(of, "rate").items()}
        best = max(means, key=means.__getitem__)
        facts = {name: int(float(of[0][name])) for name in ("records", "parameters", "steps")}
        result = {"learning_rate": best, "accuracy": round(means[best], 4)}
        found.append({"task": task, "epsilon": float(epsilon), **facts, **result})
    return found


def law_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the log-normal law of the best rates, wider by two neighbouring rates: tasks differ."""
    logs = [math.log(best["learning_rate"]) for best in best_rates(rows)]
    median, sigma = math.exp(statistics.mean(logs)), math.hypot(statistics.stdev(logs), math.log(4))
    told = {"median": median, "sigma": sigma}
    return {"type": "log_normal"} | {name: float(f"{value:.3g}") for name, value in told.items()}


def shipped(rows: Sequence[Row]) -> str:
    """Return the package's file."""
    source = "python -m studies.priors.run --data mnist.npz --write"
    found = {"law": law_of(rows), "source": source, "rows": best_rates(rows)}
    return json.dumps({"learning_rate": found}, indent=1) + "\n"


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the law, and the accuracy of the best rate by task and ε."""
    law = law_of(rows) if rows else {}
    found = {name: law[name] for name in ("median", "sigma") if name in law}
    at = {f"{b['task']}, ε = {b['epsilon']:g}": 100.0 * b["accuracy"] for b in best_rates(rows)}
    return {**found, **at}


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the best rate of every task at every ε."""
    head = ("task", "ε", "records", "parameters", "steps", "best rate", "its test accuracy")
    lines = (
        (
            best["task"],
            f"{best['epsilon']:g}",
            *(f"{best[name]:,}" for name in ("records", "parameters", "steps")),
            f"{best['learning_rate']:g}",
            f"{100.0 * best['accuracy']:.1f} %",
        )
        for best in best_rates(rows)
    )
    return [markdown(head, lines)]


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against the rate, a panel a task."""
    figure = plot_lines(rows, x="rate", y="accuracy", line="epsilon", panel="task", log="x")
    return {"chart": figure}


SHEET = Sheet(
    name="priors",
    key=("task", "epsilon"),
    values=("rate", "seed", "accuracy", "records", "parameters", "steps"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"task": "iris-logistic", "epsilon": "1.0", "rate": "1.0"}, "accuracy"),
)


def main() -> int:
    """Run the study; with ``--write`` the package gets the law of the results."""
    asked = [word for word in sys.argv[1:] if word != "--write"]
    code = SHEET.main(asked)
    if "--write" in sys.argv:
        PACKAGE.write_text(shipped(SHEET.read(SHEET.folder / "results.csv")), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
