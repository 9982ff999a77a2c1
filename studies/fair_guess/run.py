"""A guess with HyFreeDP's optimizer and falling rate, beside HyFreeDP: what does adapting add?

Beside it Adam at its best falling rate, with and without DP-AdamBC's correction for the noise.

python -m studies.fair_guess.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from studies.estimates import Estimate
from studies.fair_guess.tuned import FLOORS, best_point
from studies.priors.run import SHEET as PRIORS
from studies.priors.run import guesses_of
from studies.sheet import (
    Again,
    Options,
    Row,
    Sheet,
    by,
    floats,
    markdown,
    mean,
    most_spent,
    pm,
    releases_of,
    seed_of,
)
from studies.two_factors.six import SIX, Work

if TYPE_CHECKING:
    import plotly.graph_objects as go

EPSILONS = (1.0, 2.0, 4.0)
NAMES = ("digits", "table", "mnist cnn")
TASKS = {name: SIX[name] for name in NAMES}
TASKS["breast cancer"] = Work("breast-cancer-logistic", 10, 32)
GUESSES = {  # the method and the schedule
    "Adam, falling": ("dp-adam", "linear"),
    "SGD, falling": ("dpsgd", "linear"),
    "SGD, constant": ("dpsgd", "constant"),
}
BESIDE: dict[str, dict[str, Any]] = {
    "Adam, constant, share 0.2": {"strategy": "public-rate"},
    "SGD, constant, rate 0.5": {
        "strategy": "fixed",
        "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
    },
    "hyfreedp": {"strategy": "hyfreedp"},
}
NAMED = (*GUESSES, *BESIDE)
OF_ONE_KIND = {  # records that a task shares with tasks of public data
    "digits": ("digits-mlp", "digits-cnn"),
    "table": ("synthetic-logistic",),
    "mnist cnn": ("mnist-mlp", "mnist-logistic"),
}
REPEATS = 10


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm on every task at every ε; in a smoke run two arms on the table."""
    if options.smoke:
        for arm in ("Adam, falling", "SGD, falling"):
            yield {"task": "table", "epsilon": 2.0, "arm": arm}
        for arm in FLOORS:
            yield {"task": "breast cancer", "epsilon": 2.0, "arm": arm}
        return
    for arm, epsilon, task in product(NAMED, EPSILONS, NAMES):
        yield {"task": task, "epsilon": epsilon, "arm": arm}
    for task, epsilon, arm in product(TASKS, EPSILONS, FLOORS):
        yield {"task": task, "epsilon": epsilon, "arm": arm}


def arm_of(task: str, name: str) -> dict[str, Any]:
    """Return an arm as a spec has it; a guess has its rate from public tasks of other records."""
    if name in BESIDE:
        return BESIDE[name]
    method, schedule = GUESSES[name]
    rows = PRIORS.read(PRIORS.folder / "results.csv")
    rates = guesses_of(rows, method, schedule, without=OF_ONE_KIND[task])
    return {"strategy": "public-rate", "method": method, "schedule": schedule, **rates}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm on one task."""
    work = TASKS[cell["task"]]
    epochs = 1 if options.smoke else work.epochs
    chosen: dict[str, Any] = {}
    if cell["arm"] in FLOORS:
        point = best_point(
            cell["arm"], work.task, epochs=epochs, batch=work.batch, epsilon=cell["epsilon"]
        )
        arm = point.arm
        chosen = {"rate": point.rate, "floor": point.floor}
    else:
        arm = arm_of(cell["task"], cell["arm"])
    lines = releases_of(
        arm,
        epsilon=cell["epsilon"],
        delta=1e-5,
        task=work.task,
        epochs=epochs,
        expected_batch_size=work.batch,
        repeats=2 if options.smoke else REPEATS,
        seed=seed_of(cell["task"], cell["epsilon"]),  # its arms share it
    )
    return [{**line, **chosen} for line in lines]


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the accuracy of every arm, and the most of its budget that any spent."""
    found = {
        f"{arm} on {task} at ε = {float(epsilon):g}": 100.0 * mean(of, "accuracy")
        for (task, epsilon, arm), of in by(rows, "task", "epsilon", "arm").items()
    }
    return {**found, **most_spent(rows)}


def tables(rows: Sequence[Row]) -> list[str]:
    """Return accuracy by task, ε and arm, what HyFreeDP is ahead of guesses, and the correction's gain."""
    guesses = [row for row in rows if row["arm"] not in FLOORS]
    lines = []
    for (task, epsilon), of in by(guesses, "task", "epsilon").items():
        arms = {arm: group for (arm,), group in by(of, "arm").items()}
        shown = (pm(arms[arm], "accuracy", scale=100.0) if arm in arms else "–" for arm in NAMED)
        lines.append((task, f"{float(epsilon):g}", *shown))
    head = ("task", "ε", *NAMED)
    gaps = []
    for arm in NAMED:
        gap = _ahead(guesses, arm)
        if gap is not None:
            gaps.append((arm, f"{gap.mean:+.1f} ± {gap.half():.1f}"))
    ahead = markdown(("arm", "HyFreeDP is ahead by, mean of the cells, ± 95 %"), gaps)
    return [markdown(head, sorted(lines)), ahead, _corrected(rows)]


def gains(rows: Sequence[Row]) -> dict[tuple[str, str], list[float]]:
    """Return by task and ε what the noise floor adds to Adam, in points, for each repetition.

    Both arms of a cell have the same seeds, and so the same noise and first weights.
    """
    tuned = [row for row in rows if row["arm"] in FLOORS]
    found: dict[tuple[str, str], list[float]] = {}
    for (task, epsilon), of in by(tuned, "task", "epsilon").items():
        parts = by(of, "arm")
        if len(parts) == len(FLOORS):
            plain, corrected = (floats(parts[arm,], "accuracy") for arm in FLOORS)
            pairs = zip(plain, corrected, strict=True)
            found[task, epsilon] = [100.0 * (after - before) for before, after in pairs]
    return found


def _corrected(rows: Sequence[Row]) -> str:
    """Return the table of Adam with and without the correction, each at its best point."""
    tuned = [row for row in rows if row["arm"] in FLOORS]
    differences = gains(rows)
    lines = []
    places = {name: place for place, name in enumerate(TASKS)}
    cells_of = by(tuned, "task", "epsilon")
    for task, epsilon in sorted(cells_of, key=lambda cell: (places[cell[0]], float(cell[1]))):
        parts = by(cells_of[task, epsilon], "arm")
        shown: list[str] = []
        for arm in FLOORS:
            part = parts.get((arm,))
            shown += (
                ["–", "–"] if part is None else [_point(part[0]), pm(part, "accuracy", scale=100)]
            )
        gain = differences.get((task, epsilon))
        lines.append((task, f"{float(epsilon):g}", *shown, "–" if gain is None else _pm(gain)))
    for task in TASKS:
        every = [values for (name, _), values in differences.items() if name == task]
        if len(every) == len(EPSILONS):
            mean_gain = statistics.mean(map(statistics.mean, every))
            spread = math.hypot(*map(_error, every)) / len(every)
            lines.append((task, "all", "", "", "", "", f"{mean_gain:+.1f} ± {spread:.1f}"))
    rate = "rate, and floor"
    plain, corrected = FLOORS
    return markdown(("task", "ε", rate, plain, rate, corrected, "gained"), lines)


def _point(row: Row) -> str:
    """Return the rate and the floor that an arm was given."""
    floor = row["floor"]
    return f"{float(row['rate']):.3g}" + (f", {floor}" if floor else "")


def _pm(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):+.1f} ± {_error(values):.1f}"


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _ahead(rows: Sequence[Row], arm: str) -> Estimate | None:
    """Return by how many points HyFreeDP is ahead of an arm in the mean of the cells that both have."""
    pairs = []
    for (_, _), of in by(rows, "task", "epsilon").items():
        arms = {name: floats(group, "accuracy") for (name,), group in by(of, "arm").items()}
        if arm != "hyfreedp" and arm in arms and "hyfreedp" in arms:
            pairs.append([[100.0 * value for value in arms[name]] for name in ("hyfreedp", arm)])
    if not pairs or min(len(values) for pair in pairs for values in pair) < 2:
        return None
    ours, theirs = ([pair[n] for pair in pairs] for n in range(2))
    return Estimate.of(ours).minus(Estimate.of(theirs))


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against ε, a panel a task."""
    guesses = [row for row in rows if row["arm"] not in FLOORS]
    figure = plot_lines(guesses, x="epsilon", y="accuracy", line="arm", panel="task", log="x")
    return {"chart": figure}


SHEET = Sheet(
    name="fair_guess",
    key=("task", "epsilon", "arm"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed", "rate", "floor"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"task": "table", "epsilon": "2.0", "arm": "Adam, falling"}, "accuracy"),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
