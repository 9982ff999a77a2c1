"""Every way of choosing hyperparameters on six tasks at five ε, with and without averaging.

python -m studies.six_tasks.run --data mnist.npz        # goes on where it was; minilm.npz beside it
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, variance
from typing import TYPE_CHECKING, Any

from scipy.stats import t as student

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
    most_spent,
    releases_of,
    seed_of,
)
from studies.transfer.task import public_weights

if TYPE_CHECKING:
    import plotly.graph_objects as go

CLIP = {"max_grad_norm": 1.0}
SPACE = {"learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True}}
SEARCH = {"mean_runs": 8, "parameters": CLIP}
ARMS: dict[str, dict[str, Any]] = {
    "defaults": {"strategy": "fixed", "parameters": {"learning_rate": 0.5, **CLIP}},
    "public-rate": {"strategy": "public-rate"},
    "selection": {"strategy": "papernot-steinke", **SEARCH},
    "subsampled tuning": {"strategy": "subsampled-tuning", "variant": 1, "rate": 0.1, **SEARCH},
    "hyfreedp": {"strategy": "hyfreedp"},
    "adadp": {"strategy": "adadp", "parameters": CLIP},
    "adaclip": {
        "strategy": "adaclip",
        "parameters": {"learning_rate": 0.5, "largest_variance": 3e-3},
    },
    "prodigy": {"strategy": "prodigy"},
}
EPSILONS = (2.0, 0.5, 8.0, 1.0, 4.0)  # in the order in which they run
AVERAGES = ("last", "ema")
OPTIONS = ("fixed", "papernot-steinke", "subsampled-tuning")  # have the method's under this name
CONFIDENCE = 0.95
ALL = "mean of all"


@dataclass(frozen=True)
class Work:
    """A task and how it is trained.

    Attributes:
        task: As a spec names it.
        epochs: Passes over the records, in the mean.
        batch: Expected size of the samples.
    """

    task: Any
    epochs: int
    batch: int


REPEATS = 10  # of each arm
FINE_TUNING = {
    "type": "fine-tuning",
    "task": "studies.six_tasks.tasks:transfer",
    "trainable": "all",
}
TASKS: dict[str, Work] = {
    "digits": Work("digits-mlp", 10, 64),
    "table": Work("synthetic-logistic", 5, 128),
    "minilm": Work("studies.six_tasks.tasks:reuters", 5, 128),
    "mnist mlp": Work("studies.six_tasks.tasks:mnist_mlp", 1, 256),
    "transfer": Work(FINE_TUNING, 2, 400),
    "mnist cnn": Work("studies.six_tasks.tasks:mnist_cnn", 3, 100),
}


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm on every task, the cheap tasks first."""
    if options.smoke:
        for task, arm, average in (("minilm", "adadp", "ema"), ("transfer", "public-rate", "last")):
            yield {"task": task, "epsilon": 4.0, "average": average, "arm": arm}
        return
    for tasks in ((*TASKS,)[:3], (*TASKS,)[3:]):  # the cheap ones first
        for average, epsilon, task in product(AVERAGES, EPSILONS, tasks):
            cell = {"task": task, "epsilon": epsilon, "average": average}
            yield from ({**cell, "arm": arm} for arm in ARMS)


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm on one task."""
    work, arm = TASKS[cell["task"]], dict(ARMS[cell["arm"]])
    terms: dict[str, Any] = {"task": work.task, "epochs": work.epochs}
    terms["expected_batch_size"] = work.batch
    if options.smoke:
        terms |= {"epochs": 1, "expected_batch_size": 100}
    if cell["task"] == "transfer":
        weights = public_weights(16 if options.smoke else 64)
        terms["task"] = {**FINE_TUNING, "pretrained": str(weights)}
    if "mean_runs" in arm:
        terms["space"] = SPACE
    if cell["average"] != "last":
        given = {"average": cell["average"]}
        arm |= {"options": given} if arm["strategy"] in OPTIONS else given
    terms["repeats"] = 2 if options.smoke else REPEATS
    terms["seed"] = seed_of(cell["task"], cell["epsilon"])  # its arms share it
    return releases_of(arm, epsilon=cell["epsilon"], delta=1e-5, **terms)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the accuracy of every arm with each average, and the most of its budget that any spent."""
    found = {
        f"{arm} on {task} at ε = {float(epsilon):g}, {average}": 100.0
        * mean(floats(group, "accuracy"))
        for (task, epsilon, average, arm), group in by(
            rows, "task", "epsilon", "average", "arm"
        ).items()
    }
    return {**found, **most_spent(rows)}


def _welch_freedom(squares: Sequence[float], freedoms: Sequence[float]) -> float:
    """Return the degrees of freedom of a sum of independent estimates, from their squared errors (Welch)."""
    below = sum(square**2 / own for square, own in zip(squares, freedoms, strict=True))
    return sum(squares) ** 2 / below if below > 0.0 else math.inf


@dataclass(frozen=True)
class Estimate:
    """A mean of cells' means, its standard error, and the degrees of freedom of that (Welch)."""

    mean: float
    error: float
    freedom: float

    @classmethod
    def of(cls, cells: Sequence[Sequence[float]]) -> Estimate:
        """Return the mean of the means of independent samples."""
        parts = [variance(values) / len(values) / len(cells) ** 2 for values in cells]
        freedom = _welch_freedom(parts, [len(values) - 1 for values in cells])
        return cls(mean(map(mean, cells)), math.sqrt(sum(parts)), freedom)

    @classmethod
    def mean_of(cls, estimates: Sequence[Estimate]) -> Estimate:
        """Return the mean of independent estimates."""
        count = len(estimates)
        squares = [(each.error / count) ** 2 for each in estimates]
        freedom = _welch_freedom(squares, [each.freedom for each in estimates])
        return cls(mean(each.mean for each in estimates), math.sqrt(sum(squares)), freedom)

    def minus(self, other: Estimate) -> Estimate:
        """Return the difference of two independent estimates."""
        squares = (self.error**2, other.error**2)
        freedom = _welch_freedom(squares, (self.freedom, other.freedom))
        return Estimate(self.mean - other.mean, math.sqrt(sum(squares)), freedom)

    def half(self, confidence: float = CONFIDENCE) -> float:
        """Return half the width of the interval."""
        return self.error * float(student.ppf(0.5 + 0.5 * confidence, self.freedom))

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.error:.1f}"


def contenders(arms: Mapping[str, Estimate]) -> set[str]:
    """Return a set that holds the best arm with 95 %: those that no other is shown to beat.

    One-sided comparisons with every other arm, corrected for their number (Hsu 1984, with Welch's
    degrees of freedom and Bonferroni's correction): if the best arm is not in the set, another one seemed
    better by more than its bound, and there are as many chances of that as other arms.
    """
    one = 1.0 - (1.0 - CONFIDENCE) / max(1, len(arms) - 1)  # of one side
    return {
        name
        for name, own in arms.items()
        if not any(
            (gap := other.minus(own)).mean > gap.half(2.0 * one - 1.0)
            for rival, other in arms.items()
            if rival != name
        )
    }


def estimates(rows: Sequence[Row]) -> dict[str, dict[tuple[float, str], Estimate]]:
    """Return by task, and for the mean of all tasks, the estimate of every arm at every ε, in percent."""
    last = [row for row in rows if row["average"] == "last"]
    found: dict[str, dict[tuple[float, str], Estimate]] = defaultdict(dict)
    at: dict[tuple[float, str], list[list[float]]] = defaultdict(list)
    for (task, epsilon, arm), of in by(last, "task", "epsilon", "arm").items():
        values = [100.0 * value for value in floats(of, "accuracy")]
        if len(values) > 1:
            at[float(epsilon), arm].append(values)
            found[task][float(epsilon), arm] = Estimate.of([values])
    found[ALL] = {key: Estimate.of(cells) for key, cells in at.items() if len(cells) == len(TASKS)}
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Return accuracy by task, arm and ε, and what the moving average changes."""
    spent = sorted({float(row["epsilon"]) for row in rows})
    lines = []
    for task, found in estimates(rows).items():
        best = {e: contenders({a: v for (f, a), v in found.items() if f == e}) for e in spent}
        of = [row for row in rows if row["task"] == task and row["average"] == "last"]
        seeds = sorted({len(group) for group in by(of, "epsilon", "arm").values()})
        for arm in ARMS:
            shown = (
                "–" if value is None else f"**{value}**" if arm in best[epsilon] else str(value)
                for epsilon, value in ((e, found.get((e, arm))) for e in spent)
            )
            lines.append((task, arm, *shown, " or ".join(map(str, seeds)) or "–"))
    head = ("task", "arm", *(f"ε = {epsilon:g}" for epsilon in spent), "seeds")
    return [markdown(head, lines), ranking(rows), averaging(rows)]


def ranking(rows: Sequence[Row]) -> str:
    """Return in how many cells each arm may be the best, and how far below the best it is."""
    cells: dict[tuple[str, float], dict[str, Estimate]] = defaultdict(dict)
    for task, found in estimates(rows).items():
        for (epsilon, arm), value in found.items():
            if task != ALL:
                cells[task, epsilon][arm] = value
    lines = []
    for arm in ARMS:
        of = {cell: arms for cell, arms in cells.items() if arm in arms}
        if not of:
            continue
        gaps = {
            cell: max(arms.values(), key=lambda e: e.mean).minus(arms[arm])
            for cell, arms in of.items()
        }
        among = sum(arm in contenders(arms) for arms in of.values())
        (task, epsilon), worst = max(gaps.items(), key=lambda pair: pair[1].mean)
        lines.append(
            (
                arm,
                f"{among} of {len(of)}",
                f"{mean(gap.mean for gap in gaps.values()):.1f}",
                f"{worst.mean:.1f} ± {worst.half():.1f} ({task}, ε = {epsilon:g})",
            )
        )
    return markdown(("arm", "bold in", "below the best, mean", "below the best, most"), lines)


def averaging(rows: Sequence[Row]) -> str:
    """Return what the moving average adds to each arm on each task, in the mean over the ε."""
    pairs: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    tasks: dict[str, None] = {}
    for (task, _, arm), of in by(rows, "task", "epsilon", "arm").items():
        got = {
            average: floats(group, "accuracy") for (average,), group in by(of, "average").items()
        }
        # The same seeds in the same order, so the same candidates; the noise is another.
        if (both := list(zip(*got.values(), strict=False))) and len(got) > 1 and len(both) > 1:
            pairs[arm, task].append([100.0 * (ema - last) for last, ema in both])
            tasks[task] = None
    lines = []
    for arm in ARMS:
        found = [Estimate.of(pairs[arm, task]) if (arm, task) in pairs else None for task in tasks]
        shown = ("–" if e is None else f"{e.mean:+.1f} ± {e.half():.1f}" for e in found)
        lines.append((arm, *shown))
    return markdown(("ema - last, points", *tasks), lines)


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: test error against ε, a panel a task, all with logarithmic scales."""
    places = {arm: 1.025 ** (n - 0.5 * len(ARMS)) for n, arm in enumerate(ARMS)}  # side by side
    drawn = [
        {
            **row,
            "test error, %": str(100.0 - 100.0 * float(row["accuracy"])),
            "ε": str(float(row["epsilon"]) * places[row["arm"]]),
        }
        for row in sorted(rows, key=lambda row: (*TASKS,).index(row["task"]))
        if row["average"] == "last"
    ]
    figure = plot_lines(
        drawn, x="ε", y="test error, %", line="arm", panel="task", log="xy", strategies=STRATEGY_OF
    )
    figure.update_xaxes(tickvals=sorted(EPSILONS), range=[-0.4, 1.0])
    figure.update_yaxes(tickvals=[3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 90])
    figure.update_layout(height=1150, legend={"y": -0.07})
    return {"chart": figure}


SHEET = Sheet(
    name="six_tasks",
    key=("task", "epsilon", "average", "arm"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {"task": "table", "epsilon": "2.0", "average": "last", "arm": "public-rate"}, "accuracy"
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
