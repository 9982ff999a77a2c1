"""Shown trials on a part of the records against sealed ones: one, two and four hyperparameters.

python -m studies.subset_search.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from privtune.tasks import get_task
from studies.sheet import (
    STRATEGY_OF,
    Again,
    Options,
    Row,
    Sheet,
    by,
    error,
    floats,
    markdown,
    mean,
    most_spent,
    pm,
    releases_of,
    seed_of,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

HERE = "studies.subset_search.tasks"
OURS, RIVAL = "subset search", "subsampled tuning"
MNIST = "mnist"  # with --data alone
ARMS: dict[str, dict[str, Any]] = {
    # All searches have the gradients of four trainings: 10 · 0.3 + 1, 31 · 0.1 + 0.9, 4.
    OURS: {"strategy": "subset-search"},
    RIVAL: {"strategy": "subsampled-tuning", "mean_runs": 31},
    "selection": {"strategy": "papernot-steinke", "mean_runs": 4, "min_runs": 2},
}
SINGLE = "hyfreedp"  # adapts its rate and clips to one norm: it searches nothing
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"task": "digits-mlp", "epochs": 10, "expected_batch_size": 64},
    "table": {"task": "synthetic-logistic", "epochs": 5, "expected_batch_size": 128},
    MNIST: {"task": f"{HERE}:mnist_task", "epochs": 1, "expected_batch_size": 512},
}
FOUR, TWO, ONE = 4, 2, 1  # hyperparameters
EPSILONS = (2.0, 1.0, 4.0)  # in the order in which they run
DELTA, REPEATS = 1e-5, 10


def law(low: float, high: float) -> dict[str, Any]:
    """Return what a number is drawn from, uniformly in its logarithm."""
    return {"type": "float", "low": low, "high": high, "log": True}


SPACES: dict[int, dict[str, Any]] = {
    ONE: {"learning_rate": law(0.05, 5.0)},
    TWO: {"learning_rate": law(0.05, 5.0), "max_grad_norm": law(0.1, 10.0)},
}


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm, those first that say most for their time."""
    if options.smoke:
        for arm in (OURS, SINGLE):
            yield {"task": "table", "searched": ONE, "epsilon": 2.0, "arm": arm}
        return
    tasks = [task for task in TASKS if task != MNIST or options.data is not None]
    for task in tasks:
        for epsilon in EPSILONS:
            yield {"task": task, "searched": 0, "epsilon": epsilon, "arm": SINGLE}
    searches = [(task, searched) for task in tasks for searched in (FOUR, TWO, ONE)]
    for task, searched in sorted(searches, key=lambda search: search != (MNIST, FOUR)):
        for epsilon in EPSILONS:
            for arm in ARMS:
                yield {"task": task, "searched": searched, "epsilon": epsilon, "arm": arm}


def network(task: str) -> dict[str, Any]:
    """Return the task of a network of which a trial suggests four hyperparameters, as a spec has it."""
    known = get_task(TASKS[task]["task"])
    return {
        "type": "own",
        "build": f"{HERE}:{task}_network",
        "loss": f"{HERE}:loss",
        "score": "accuracy",
        "data": f"{HERE}:{task}",
        "classes": known.classes,
        "split": {
            "train": known.train_records,
            "validation": known.validation_records,
            "test": known.test_records,
        },
        "benchmark": True,
    }


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm ten times."""
    terms = dict(TASKS[cell["task"]])
    searched = cell["searched"]
    if cell["arm"] == SINGLE:
        arm = {"strategy": SINGLE}
    else:
        arm = dict(ARMS[cell["arm"]])
    if searched == ONE:
        arm["parameters"] = {"max_grad_norm": 1.0}
    if cell["arm"] == SINGLE:
        arm.pop("parameters", None)
    elif searched == FOUR:
        terms["task"] = network(cell["task"])
    else:
        terms["space"] = SPACES[searched]
    repeats = REPEATS
    if options.smoke:
        terms["epochs"] = 1
        repeats = 2
    seed = seed_of(cell["task"], searched, cell["epsilon"])  # its arms share it
    return releases_of(
        arm, epsilon=cell["epsilon"], delta=DELTA, seed=seed, repeats=repeats, **terms
    )


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean and the least accuracy of every arm, and the most of its budget that any spent."""
    values: dict[str, float] = {}
    for (task, searched, epsilon, arm), group in _groups(rows):
        where = f"{arm}, {searched} searched on {task} at ε = {float(epsilon):g}"
        values[where] = 100.0 * mean(group, "accuracy")
        values[f"{where}: least"] = 100.0 * min(floats(group, "accuracy"))
    return {**values, **most_spent(rows)}


def _groups(rows: Sequence[Row]) -> list[tuple[tuple[str, ...], list[Row]]]:
    """Return the lines of each arm in each cell."""
    return list(by(rows, "task", "searched", "epsilon", "arm").items())


def _shown(group: Sequence[Row]) -> str:
    """Return mean ± standard error, and the least of the repetitions, in percent."""
    if not group:
        return "–"
    least = 100.0 * min(floats(group, "accuracy"))
    return f"{pm(group, 'accuracy', scale=100.0)} ({least:.1f})"


def tables(rows: Sequence[Row]) -> list[str]:
    """Return accuracies, then by how much the shown trials are ahead of the sealed ones on a part."""
    epsilons = sorted(EPSILONS)
    groups = dict(_groups(rows))
    lines = []
    for task in TASKS:
        for searched, arms in ((0, (SINGLE,)), (ONE, ARMS), (TWO, ARMS), (FOUR, ARMS)):
            for arm in arms:
                cells_of_arm = [
                    groups.get((task, str(searched), str(e), arm), []) for e in epsilons
                ]
                evaluations = [mean(each, "gradient_evaluations") for each in cells_of_arm if each]
                cost = f"{evaluations[0]:,.0f}" if evaluations else "–"
                lines.append((task, searched, arm, *map(_shown, cells_of_arm), cost))
    head = ("task", "searched", "arm", *(f"ε = {e:g}" for e in epsilons), "gradients")
    return [markdown(head, lines), _ahead(groups, epsilons)]


def _ahead(groups: Mapping[tuple[str, ...], Sequence[Row]], epsilons: Sequence[float]) -> str:
    """Return the difference of shown and sealed trials on a part, with its standard error."""
    lines = []
    for task in TASKS:
        for searched in (ONE, TWO, FOUR):
            differences = []
            for epsilon in epsilons:
                place = (task, str(searched), str(epsilon))
                ours = groups.get((*place, OURS), [])
                rival = groups.get((*place, RIVAL), [])
                if not ours or not rival:
                    differences.append("–")
                    continue
                points = 100.0 * (mean(ours, "accuracy") - mean(rival, "accuracy"))
                squares = error(ours, "accuracy") ** 2 + error(rival, "accuracy") ** 2
                differences.append(f"{points:+.1f} ± {100.0 * squares**0.5:.1f}")
            lines.append((task, searched, *differences))
    return markdown(("points ahead on", "searched", *(f"ε = {e:g}" for e in epsilons)), lines)


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against ε, a panel a task and number of hyperparameters."""
    lines = []
    for row in rows:
        if row["arm"] == SINGLE:
            continue
        lines.append(
            {
                "ε": row["epsilon"],
                "accuracy": row["accuracy"],
                "arm": row["arm"],
                "panel": f"{row['task']}, {row['searched']} searched",
            }
        )
    terms: dict[str, Any] = {"line": "arm", "panel": "panel", "log": "x"}
    return {"chart": plot_lines(lines, x="ε", y="accuracy", **terms, strategies=STRATEGY_OF)}


SHEET = Sheet(
    name="subset_search",
    key=("task", "searched", "epsilon", "arm"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {"task": "table", "searched": "0", "epsilon": "2.0", "arm": SINGLE},
        "accuracy",
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
