"""Which epochs and which batch DP-SGD should have, and whether ``epochs: auto`` has them on other tasks.

python -m studies.epochs.run --data mnist.npz                        # goes on where it was
python -m studies.epochs.run --data mnist.npz --only set=mnist       # minutes a cell
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import mean
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from privtune.strategies.schedule_rule import (
    TOLERANCE,
    SchedulePoint,
    TrainingFacts,
    choose_schedule,
)
from studies.auto.run import terms_of
from studies.auto.tasks import MADE
from studies.sheet import (
    Again,
    Options,
    Row,
    Sheet,
    by,
    error,
    floats,
    markdown,
    pm,
    releases_of,
    seed_of,
)
from studies.two_factors.six import SIX

if TYPE_CHECKING:
    import plotly.graph_objects as go

DELTA = 1e-5
CLIP = {"max_grad_norm": 1.0}
GUESS = {"learning_rate": 1.0, "max_grad_norm": 0.1}
FALLING = {"momentum": 0.9, "schedule": {"type": "linear", "start": 0.0}}
ARMS: dict[str, dict[str, Any]] = {
    "hyfreedp": {"strategy": "hyfreedp"},
    "rate 0.5": {"strategy": "fixed", "parameters": {"learning_rate": 0.5, **CLIP}},
    "rate 0.125": {"strategy": "fixed", "parameters": {"learning_rate": 0.125, **CLIP}},
    "rate 2": {"strategy": "fixed", "parameters": {"learning_rate": 2.0, **CLIP}},
    "guess": {"strategy": "fixed", "parameters": GUESS, "options": FALLING},
}
LARGE = ("coarse", "hastie", "classes-40k", "shifted")
SMALL = ("net-1k", "classes-3k", "circles")
BOTH = ("hyfreedp", "rate 0.5")
OTHERS = ("rate 2", "rate 0.125")
GRID: tuple[tuple[int, tuple[float, ...], tuple[int, ...], tuple[str, ...], tuple[str, ...]], ...]
GRID = (  # passes over the records, ε, batches a pass, tasks, arms
    (1, (2.0, 8.0), (8, 16, 32, 64, 128, 256), LARGE, BOTH),
    (5, (2.0, 8.0), (16, 64, 128), LARGE, BOTH),
    (20, (0.5, 2.0), (4, 16, 64), SMALL, (*BOTH, *OTHERS)),
    (5, (2.0,), (16, 64, 128), ("coarse", "hastie"), OTHERS),
)
HELD_OUT = ("digits", "table", "cancer", "rings", "loops", "mnist cnn", "mnist mlp")
"""Fixed and committed before the rule was tried on them."""
SCHEDULES = ("today", "auto, equal work")
BEFORE = "the rule before, equal work"
"""Of a given rate, whatever it is: by what the rule takes where some arms alone have one."""
MORE_WORK = "43 x 17"
"""What the first rule had on digits by default: a rate of 0.5 led too far there."""
REPEATS = {"training": 6, "held out": 10, "seen": 10, "mnist": 1}
MNIST = {"task": "studies.epochs.tasks:mnist_tanh", "compute": "15 minutes"}
AUTO = {"epochs": "auto", "expected_batch_size": "auto"}


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the training grid, the held-out tasks, and MNIST."""
    if options.smoke:
        for schedule in SCHEDULES:
            yield _cell("held out", "cancer", 2.0, "hyfreedp", schedule)
        return
    for epsilon, arm, task, schedule in product((2.0, 0.5, 1.0), BOTH, HELD_OUT, SCHEDULES):
        yield _cell("held out", task, epsilon, arm, schedule)
    for epsilon, arm, task, schedule in product((0.5, 2.0), OTHERS, HELD_OUT[:-1], SCHEDULES):
        yield _cell("held out", task, epsilon, arm, schedule)
    for epsilon, task in product((2.0, 0.5, 1.0), HELD_OUT):
        yield _cell("held out", task, epsilon, "rate 0.5", BEFORE)
    for arm in BOTH:
        yield _cell("seen", "digits", 2.0, arm, MORE_WORK)
    for passes, epsilons, batches, tasks, arms in GRID:
        for number, epsilon, task, arm in product(batches, epsilons, tasks, arms):
            yield _cell("training", task, epsilon, arm, f"{passes} x {number}")
    for epsilon in (3.0, 1.2):
        yield _cell("mnist", "mnist tanh cnn", epsilon, "guess", "auto")


def _cell(group: str, task: str, epsilon: float, arm: str, schedule: str) -> dict[str, Any]:
    return {"set": group, "task": task, "epsilon": epsilon, "arm": arm, "schedule": schedule}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm on one task with one schedule."""
    group = cell["set"]
    repeats = 2 if options.smoke else REPEATS[group]
    terms = _terms(group, cell["task"], cell["schedule"], cell["epsilon"])
    terms["seed"] = seed_of(cell["task"], cell["epsilon"])
    return releases_of(
        ARMS[cell["arm"]],
        epsilon=cell["epsilon"],
        delta=DELTA,
        repeats=repeats,
        report=None,
        **terms,
    )


def _terms(group: str, task: str, schedule: str, epsilon: float) -> dict[str, Any]:
    """Return what a spec says of a cell's task and schedule."""
    if group == "mnist":
        return {**MNIST, **AUTO}
    terms = _today(task)
    if group in {"training", "seen"}:
        passes, batches = map(int, schedule.split(" x "))
        batch = _records(task) // batches
        return {**terms, "epochs": passes, "expected_batch_size": batch}
    if schedule == "today":
        return terms
    compute = terms["epochs"] * _records(task)
    if schedule == BEFORE:
        return {**terms, **_before(terms["task"], epsilon, compute)}
    return {**terms, **AUTO, "compute": compute}


def _before(task: str, epsilon: float, compute: float) -> dict[str, Any]:
    """Return epochs and batch of the rule before."""
    from privtune.tasks import get_task

    found = get_task(task)
    facts = TrainingFacts(
        records=found.train_records,
        weights=sum(weights.numel() for weights in found.model().parameters()),
        epsilon=epsilon,
        delta=DELTA,
        given_rate=True,
    )
    point = choose_schedule(facts, compute).point
    return {"epochs": point.epochs, "expected_batch_size": point.batch}


def _today(task: str) -> dict[str, Any]:
    """Return task, epochs and batch as the other studies have them."""
    if task in SIX:
        work = SIX[task]
        return {"task": work.task, "epochs": work.epochs, "expected_batch_size": work.batch}
    return terms_of(task)


def _records(task: str) -> int:
    """Return the declared training records of a task."""
    from privtune.tasks import get_task

    return get_task(_today(task)["task"]).train_records


def shortfall(task: str, epsilon: float, arm: str, passes: int, batches: int) -> float:
    """Return what the rule says of a schedule of the training grid: the smaller, the better."""
    made = MADE[task]
    facts = TrainingFacts(
        records=made.sizes.train,
        weights=made.weights,
        epsilon=epsilon,
        delta=DELTA,
        given_rate=arm != "hyfreedp",
        step_length=None if arm == "hyfreedp" else ARMS[arm]["parameters"]["learning_rate"],
    )
    batch = facts.records // batches
    steps = passes * batches
    return SchedulePoint(
        records=facts.records,
        weights=facts.weights,
        batch=batch,
        steps=steps,
        noise_multiplier=facts.estimate_noise(batch, steps),
        exact=False,
        needed_steps=facts.needed_steps,
        step_length=facts.step_length,
    ).shortfall


def regrets(rows: Sequence[Row], arm: str) -> dict[tuple[str, float, int], float]:
    """Return by task, ε and passes how many points the rule's batch is below the best one of the grid."""
    of_arm = [row for row in rows if row["set"] == "training" and row["arm"] == arm]
    means: dict[tuple[str, float, int], dict[int, float]] = {}
    for (task, epsilon, schedule), group in by(of_arm, "task", "epsilon", "schedule").items():
        passes, batches = map(int, schedule.split(" x "))
        key = (task, float(epsilon), passes)
        means.setdefault(key, {})[batches] = 100.0 * mean(floats(group, "accuracy"))
    found = {}
    for key, accuracies in means.items():
        if len(accuracies) < 3:
            continue
        name, budget, passes = key
        scores = {n: shortfall(name, budget, arm, passes, n) for n in accuracies}
        limit = (1.0 + TOLERANCE) * min(scores.values())
        chosen = min(number for number, score in scores.items() if score <= limit)
        found[key] = max(accuracies.values()) - accuracies[chosen]
    return found


def gains(rows: Sequence[Row], over: str = "today") -> list[tuple[str, float, str, float, float]]:
    """Return task, ε and arm, with what auto gains at equal work over another schedule, and its error."""
    held = [row for row in rows if row["set"] == "held out"]
    found = []
    for (task, epsilon, arm), group in by(held, "task", "epsilon", "arm").items():
        parts = by(group, "schedule")
        today = parts.get((over,))
        equal = parts.get(("auto, equal work",))
        if today is None or equal is None:
            continue
        gain = 100.0 * (mean(floats(equal, "accuracy")) - mean(floats(today, "accuracy")))
        spread = 100.0 * math.hypot(error(equal, "accuracy"), error(today, "accuracy"))
        found.append((task, float(epsilon), arm, gain, spread))
    return found


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the accuracy of every cell off the grid, the rule's regret on it, and mean gains."""
    found: dict[str, float] = {}
    others = [row for row in rows if row["set"] != "training"]
    for (task, epsilon, arm, schedule), group in by(
        others, "task", "epsilon", "arm", "schedule"
    ).items():
        name = f"{arm} on {task} at ε = {float(epsilon):g}, {schedule}"
        found[name] = 100.0 * mean(floats(group, "accuracy"))
    for arm in (*BOTH, *OTHERS):
        of_arm = regrets(rows, arm)
        if of_arm:
            found[f"regret on the grid, {arm}"] = mean(of_arm.values())
        for schedule in ("today", BEFORE):
            of_gain = [gain for *_, name, gain, _ in gains(rows, schedule) if name == arm]
            if of_gain:
                found[f"gain over {schedule}, {arm}"] = mean(of_gain)
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the held-out tasks, the training grid, and MNIST."""
    lines = []
    held = [row for row in rows if row["set"] == "held out"]
    differences = {(task, e, arm): (gain, spread) for task, e, arm, gain, spread in gains(rows)}
    for (task, epsilon, arm), group in by(held, "task", "epsilon", "arm").items():
        parts = by(group, "schedule")
        shown = []
        for schedule in (*SCHEDULES, BEFORE):
            part = parts.get((schedule,))
            shown.append("–" if part is None else pm(part, "accuracy", scale=100.0))
        gain, spread = differences.get((task, float(epsilon), arm), (math.nan, math.nan))
        lines.append((task, f"{float(epsilon):g}", arm, *shown, f"{gain:+.1f} ± {spread:.1f}"))
    head = ("task", "ε", "arm", *SCHEDULES, BEFORE, "auto over today")
    made = [markdown(head, lines)]
    grid = []
    training = [row for row in rows if row["set"] == "training"]
    for (task, epsilon, arm), group in by(training, "task", "epsilon", "arm").items():
        for (schedule,), part in by(group, "schedule").items():
            passes, batches = map(int, schedule.split(" x "))
            value = shortfall(task, float(epsilon), arm, passes, batches)
            grid.append(
                (
                    task,
                    f"{float(epsilon):g}",
                    arm,
                    passes,
                    passes * batches,
                    f"{value:.4f}",
                    pm(part, "accuracy", scale=100.0),
                )
            )
    grid.sort(key=lambda line: (line[2], line[0], line[3], float(line[1]), line[4]))
    columns = ("task", "ε", "arm", "passes", "steps", "shortfall", "accuracy")
    made.append(markdown(columns, grid))
    mnist = [row for row in rows if row["set"] == "mnist"]
    if mnist:
        reached = []
        for (epsilon,), group in by(mnist, "epsilon").items():
            reached.append((f"{float(epsilon):g}", pm(group, "accuracy", scale=100.0)))
        made.append(markdown(("ε", "MNIST, CNN with tanh"), reached))
    return made


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against steps at equal work, a panel for each task of the grid."""
    drawn = []
    for row in rows:
        if row["set"] != "training" or row["arm"] != "hyfreedp":
            continue
        passes, batches = map(int, row["schedule"].split(" x "))
        line = f"{passes} passes, ε = {float(row['epsilon']):g}"
        drawn.append({**row, "steps": str(passes * batches), "work": line})
    return {"chart": plot_lines(drawn, x="steps", y="accuracy", line="work", panel="task", log="x")}


SHEET = Sheet(
    name="epochs",
    key=("set", "task", "epsilon", "arm", "schedule"),
    values=("seed", "accuracy", "gradient_evaluations", "spent"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {
            "set": "held out",
            "task": "cancer",
            "epsilon": "2.0",
            "arm": "hyfreedp",
            "schedule": "auto, equal work",
        },
        "accuracy",
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
