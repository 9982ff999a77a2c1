"""Which learning rates were best on public data: what ``prior: public`` and public rates are made of.

python -m studies.priors.run --data mnist.npz             # goes on where it was
python -m studies.priors.run --only method=dp-adam        # some of the cells
python -m studies.priors.run --no-run --write             # the laws of the results, into the package
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import privtune
from privtune.plots import plot_lines
from privtune.tasks import get_task
from privtune.training.engine.train import initialisation
from privtune.training.mechanism.kernel import Layout, load_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import METHODS
from studies.harness import secrets_for, train
from studies.sheet import Again, Options, Row, Sheet, by, markdown, mean

if TYPE_CHECKING:
    import plotly.graph_objects as go

RATES = {
    "dpsgd": tuple(2.0**k for k in range(-6, 5)),
    "dp-adam": tuple(2.0**k for k in range(-10, 1)),
}
FALLS = {"constant": "constant", "linear": "falling"}  # schedules, under the names of the package
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
ZEROS = {
    name for name in TASKS if name.endswith("logistic")
}  # linear models, whose first weights are 0
GUESSES = tuple(2.0 ** (k / 2) for k in range(-16, 9))
PACKAGE = Path(privtune.__file__).parent / "public-priors.json"


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every task at every ε; two tasks in a smoke run."""
    tasks = (*TASKS,)[:2] if options.smoke else (*TASKS,)
    for method, fall, task, epsilon in product(RATES, FALLS, tasks, EPSILONS):
        yield {"task": task, "epsilon": epsilon, "method": method, "schedule": fall}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train every rate at a clipping norm of 1 with every seed, in one pass; test on the public split."""
    task, seeds = get_task(cell["task"]), 1 if options.smoke else SEEDS
    epochs, batch = TASKS[cell["task"]]
    schedule = Schedule.from_epochs(
        records=task.train_records, expected_batch_size=batch, epochs=epochs
    )
    data, rates = task.load(), RATES[cell["method"]]
    trained = [(rate, seed) for rate in rates for seed in range(seeds)]
    method = METHODS[cell["method"]].for_budget(
        schedule, epsilon=cell["epsilon"], delta=1e-5, schedule=cell["schedule"]
    )
    secrets = secrets_for(f"priors/{cell['task']}/{cell['epsilon']:g}", 0, len(trained))
    result = train(
        method,
        schedule,
        model=task.model,
        loss=task.loss,
        data=data.train,
        candidates=[{"learning_rate": rate, "max_grad_norm": 1.0} for rate, _ in trained],
        secrets=secrets,
        device="cpu",
    )
    x, y = data.test.take(torch.arange(len(data.test)))
    with initialisation(Streams(secrets[0])):
        module, lines = task.model(), []
    sizes = sizes_of(method, schedule, module)
    facts = {"records": task.train_records, "steps": schedule.steps, **sizes}
    for (rate, seed), row in zip(trained, result.params, strict=True):
        load_params(module, row)
        with torch.no_grad():
            right = (module(x).argmax(dim=1) == y).double().mean().item()
        found = {"rate": rate, "seed": seed, "accuracy": round(right, 4), "parameters": len(row)}
        lines.append({**found, **facts})
    return lines


def sizes_of(method: Any, schedule: Schedule, module: torch.nn.Module) -> dict[str, float]:
    """Return the size of the first weights, and that of the noise on a mean gradient: both public."""
    first = torch.cat([weights.detach().flatten() for weights in module.parameters()])
    size = first.square().mean().sqrt().item() or Layout(module).usual_size
    noise = method.noise_multiplier / schedule.expected_batch_size
    return {"size": round(size, 6), "noise": round(noise, 6)}


def best_rates(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return for each cell its public facts, the rate of the best mean accuracy, and that."""
    bests = []
    for name, of in by(rows, *SHEET.key).items():
        task, epsilon, method, schedule = name
        means = {float(rate): mean(own, "accuracy") for (rate,), own in by(of, "rate").items()}
        best = max(means, key=means.__getitem__)
        facts = {name: int(float(of[0][name])) for name in ("records", "parameters", "steps")}
        bests.append(
            {
                "task": task,
                "epsilon": float(epsilon),
                "method": method,
                "schedule": schedule,
                **facts,
                "learning_rate": best,
                "accuracy": round(means[best], 4),
            }
        )
    return bests


def law_of(rows: Sequence[Row], method: str, schedule: str) -> dict[str, Any]:
    """Return the log-normal law of the best rates, wider by two neighbouring rates: tasks differ.

    Empty of fewer than two cells, which have no spread.
    """
    logs = [math.log(best["learning_rate"]) for best in best_rates(select(rows, method, schedule))]
    if len(logs) < 2:
        return {}
    median, sigma = math.exp(statistics.mean(logs)), math.hypot(statistics.stdev(logs), math.log(4))
    law = {"median": median, "sigma": sigma}
    return {"type": "log_normal"} | {name: float(f"{number:.3g}") for name, number in law.items()}


def guess_of(
    rows: Sequence[Row],
    method: str,
    schedule: str,
    *,
    tasks: Collection[str] = tuple(TASKS),
    share: bool = False,
) -> float:
    """Return the rate, or its share of the first weights, that loses least against the best of each cell.

    The loss is in test accuracy, in the mean over cells. Between two measured rates accuracy is linear
    in the logarithm of the rate, and beyond them as at the last one.
    """
    curves = []
    for (task, _), of in by(select(rows, method, schedule), "task", "epsilon").items():
        if task not in tasks:
            continue
        unit = float(of[0]["size"]) if share else 1.0
        means = {float(rate): mean(own, "accuracy") for (rate,), own in by(of, "rate").items()}
        rates = sorted(means)
        curves.append(([math.log(rate / unit) for rate in rates], [means[rate] for rate in rates]))

    def loss(guess: float) -> float:
        return -sum(float(np.interp(math.log(guess), *curve)) for curve in curves)

    return float(f"{min(GUESSES, key=loss):.3g}") if curves else math.nan


def select(rows: Sequence[Row], method: str, schedule: str) -> list[Row]:
    """Return the rows of one method with one schedule."""
    return [row for row in rows if (row["method"], row["schedule"]) == (method, schedule)]


def guesses_of(
    rows: Sequence[Row], method: str, schedule: str, without: Collection[str] = ()
) -> dict[str, float]:
    """Return the options of ``public-rate`` that a method gets with a schedule, from all tasks but some."""
    of = partial(guess_of, rows, method, schedule)
    others = {task for task in TASKS if task not in without}
    if method == "dpsgd":
        return {"learning_rate": of(tasks=others)}
    return {
        "share": of(tasks=others - ZEROS, share=True),
        "zero_share": of(tasks=others & ZEROS, share=True),
    }


def shipped(rows: Sequence[Row]) -> str:
    """Return the package's file: laws of the best rates, guesses, and the measurements below them."""
    laws: dict[str, dict[str, Any]] = {}
    guesses: dict[str, dict[str, Any]] = {}
    for method, (schedule, fall) in product(RATES, FALLS.items()):
        of = best_rates(select(rows, method, schedule))
        laws.setdefault(method, {})[fall] = {"law": law_of(rows, method, schedule), "rows": of}
        guesses.setdefault(method, {})[fall] = guesses_of(rows, method, schedule)
    source = "python -m studies.priors.run --data mnist.npz --write"
    text = {"source": source, "guesses": guesses, "laws": {"learning_rate": laws}}
    return json.dumps(text, indent=1) + "\n"


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the laws, and the accuracy of the best rate by cell."""
    found = {}
    for method, schedule in product(RATES, FALLS):
        if law := law_of(rows, method, schedule):
            values = {"median": law["median"], "sigma": law["sigma"]}
            values |= guesses_of(rows, method, schedule)
            found |= {f"{name}, {method}, {schedule}": value for name, value in values.items()}
    for best in best_rates(rows):
        name = f"{best['task']}, ε = {best['epsilon']:g}, {best['method']}, {best['schedule']}"
        found[name] = 100.0 * best["accuracy"]
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the best rate and its accuracy by task, method and schedule, and the laws."""
    arms = [*product(RATES, FALLS)]
    cells: dict[tuple[str, float], dict[tuple[str, str], dict[str, Any]]] = {}
    for best in best_rates(rows):
        arm = (best["method"], best["schedule"])
        cells.setdefault((best["task"], best["epsilon"]), {})[arm] = best
    lines = []
    for (task, epsilon), bests in cells.items():
        facts = next(iter(bests.values()))
        shown = (
            f"{bests[arm]['learning_rate']:.3g}: {100.0 * bests[arm]['accuracy']:.1f}"
            if arm in bests
            else "–"
            for arm in arms
        )
        public = (f"{facts[name]:,}" for name in ("records", "parameters", "steps"))
        lines.append((task, f"{epsilon:g}", *public, *shown))
    head = ("task", "ε", "records", "parameters", "steps", *map(", ".join, arms))
    names = ("method", "schedule", "median", "sigma", "loses least")
    laws = []
    for arm in arms:
        if law := law_of(rows, *arm):
            guess = guesses_of(rows, *arm)
            shown = ", ".join(f"{name} {value:g}" for name, value in guess.items())
            laws.append((*arm, f"{law['median']:g}", f"{law['sigma']:g}", shown))
    return [markdown(head, lines), markdown(names, laws)]


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return a chart a method: accuracy against the rate, a panel a task, a line an ε and schedule."""
    figures = {}
    for (method,), of in by(rows, "method").items():
        named = [{**row, "line": f"ε = {row['epsilon']}, {row['schedule']}"} for row in of]
        figures[method] = plot_lines(
            named, x="rate", y="accuracy", line="line", panel="task", log="x"
        )
    return figures


SHEET = Sheet(
    name="priors",
    key=("task", "epsilon", "method", "schedule"),
    values=("rate", "seed", "accuracy", "records", "parameters", "steps", "size", "noise"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {
            "task": "iris-logistic",
            "epsilon": "1.0",
            "method": "dpsgd",
            "schedule": "constant",
            "rate": "1.0",
        },
        "accuracy",
    ),
)


def main() -> int:
    """Run the study; with ``--write`` the package gets the laws of the results."""
    asked = [word for word in sys.argv[1:] if word != "--write"]
    code = SHEET.main(asked)
    if "--write" not in sys.argv:
        return code
    rows = SHEET.read(SHEET.folder / "results.csv")
    missing = len([*SHEET.cells(Options(None, smoke=False))]) - len(by(rows, *SHEET.key))
    if missing:
        print(f"{missing} cells are missing: run them, then write the laws.", file=sys.stderr)
        return 1
    PACKAGE.write_text(shipped(rows), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
