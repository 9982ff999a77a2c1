"""What an honest account costs a search: every trial charged, against what is chosen otherwise.

python -m studies.price_of_honesty.run        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
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

if TYPE_CHECKING:
    import plotly.graph_objects as go

DELTA, SEEDS = 1e-5, 10
EPSILONS, TRIALS = (1.0, 4.0), (1, 2, 5, 10, 20, 40)
CLIP = {"max_grad_norm": 1.0}
SPACE = {"learning_rate": {"type": "float", "low": 0.01, "high": 10.0, "log": True}}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"task": "digits-mlp", "epochs": 20, "expected_batch_size": 128},
    "table": {"task": "synthetic-logistic", "epochs": 5, "expected_batch_size": 128},
}
ADAPTS = "ADADP, one training"
SEARCHES = ("TPE, every trial charged", "random, every trial charged", "selection")


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm at every number of trials."""
    if options.smoke:
        for arm in SEARCHES:
            yield {"task": "table", "epsilon": 4.0, "arm": arm, "trials": 2}
        return
    for task in TASKS:
        for epsilon in EPSILONS:
            told = {"task": task, "epsilon": epsilon}
            yield {**told, "arm": ADAPTS, "trials": 1}
            for trials in TRIALS:
                for arm in SEARCHES:
                    yield {**told, "arm": arm, "trials": trials}


def arm_of(name: str, trials: int) -> dict[str, Any]:
    """Return an arm as a spec has it; a selection has this many runs in the mean."""
    if name == ADAPTS:
        return {"strategy": "adadp", "parameters": CLIP}
    if name == "selection":
        return {"strategy": "papernot-steinke", "mean_runs": trials, "parameters": CLIP}
    sampler = "tpe" if name.startswith("TPE") else "random"
    return {"strategy": "everything", "trials": trials, "sampler": sampler, "parameters": CLIP}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm with every seed: a study with a budget of its own."""
    terms = dict(TASKS[cell["task"]])
    if cell["arm"] != ADAPTS:
        terms["space"] = SPACE
    if options.smoke:
        terms |= {"epochs": 1}
    arm = arm_of(cell["arm"], cell["trials"])
    terms["repeats"] = 2 if options.smoke else SEEDS
    terms["seed"] = seed_of(cell["task"], cell["epsilon"], cell["trials"])  # its arms share it
    return releases_of(arm, epsilon=cell["epsilon"], delta=DELTA, **terms)


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return accuracy and claim of every arm, and the largest share of a budget that was spent."""
    found = {}
    for (task, epsilon, arm, trials), group in by(rows, "task", "epsilon", "arm", "trials").items():
        name = f"{arm}, {trials} on {task} at ε = {float(epsilon):g}"
        found[f"accuracy of {name}"] = 100.0 * mean(group, "accuracy")
        found[f"claimed by {name}"] = mean(group, "claimed")
    return {**found, **most_spent(rows)}


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return, for every task and ε, accuracy by the number of trials, and what would be claimed."""
    found = []
    for (task, epsilon), group in by(rows, "task", "epsilon").items():
        numbers = sorted({int(row["trials"]) for row in group})
        accuracy, claims = [], []
        for (arm,), of in by(group, "arm").items():
            at = {int(trials): each for (trials,), each in by(of, "trials").items()}
            values = (pm(at[n], "accuracy", scale=100.0) if n in at else "" for n in numbers)
            claimed = (f"{float(at[n][0]['claimed']):.2f}" if n in at else "" for n in numbers)
            accuracy.append((arm, *values, len({row["seed"] for row in of})))
            claims.append((arm, *claimed))
        where = f"{task}, ε = {float(epsilon):g}"
        found.append(markdown((f"{where}: accuracy", *numbers, "seeds"), accuracy))
        found.append(markdown((f"{where}: as usually claimed", *numbers), claims))
    return found


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return accuracy, and the claimed ε, against the number of trials."""
    drawn = []
    for row in rows:
        # One training stands beside every number of trials.
        for trials in TRIALS if row["arm"] == ADAPTS else (row["trials"],):
            where = f"{row['task']}, ε = {float(row['epsilon']):g}"
            drawn.append({**row, "trials": str(trials), "where": where})
    terms: dict[str, Any] = {"x": "trials", "line": "arm", "panel": "where"}
    return {
        "chart": plot_lines(drawn, y="accuracy", log="x", **terms, strategies=STRATEGY_OF),
        "claimed": plot_lines(drawn, y="claimed", log="xy", **terms, strategies=STRATEGY_OF),
    }


SHEET = Sheet(
    name="price_of_honesty",
    key=("task", "epsilon", "arm", "trials"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"task": "digits", "epsilon": "4.0", "arm": ADAPTS}, "accuracy"),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
