"""Tuning on a tenth of the records against tuning on all: SGD, Adam, and noise, rates and batch at once.

python -m studies.subsampled_tuning.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from studies.estimates import Estimate
from studies.sheet import (
    Again,
    Options,
    Row,
    Sheet,
    by,
    floats,
    markdown,
    mean,
    releases_of,
    seed_of,
)
from studies.subsampled_tuning.rates import by_rate, rate_table

if TYPE_CHECKING:
    import plotly.graph_objects as go

BASELINE = "all records"
HOW: dict[str, dict[str, Any]] = {
    BASELINE: {"strategy": "papernot-steinke"},
    "variant 1": {"strategy": "subsampled-tuning", "variant": 1, "rate": 0.1},
    "variant 2": {"strategy": "subsampled-tuning", "variant": 2, "rate": 0.1},
}
TENTH = "a tenth"
CLIP = {"max_grad_norm": 1.0}


def law(low: float, high: float) -> dict[str, Any]:
    """Return what a number is drawn from, uniformly in its logarithm."""
    return {"type": "float", "low": low, "high": high, "log": True}


def grid(choices: Sequence[float]) -> dict[str, Any]:
    """Return a finite grid, from which draws are uniform."""
    return {"type": "categorical", "choices": list(choices)}


SGD, ADAM, JOINT, MANY = "SGD: η, C", "Adam: η", "SGD: η, σ, γ", ", μ = 40"
RATE = {"MNIST": "SGD: η given", "table": "Adam: η given"}
ARMS: dict[str, dict[str, Any]] = {
    SGD: {},
    ADAM: {"method": "dp-adam", "parameters": CLIP},
    JOINT: {"guarantee": "common", "parameters": CLIP},
}
TASKS: dict[str, dict[str, Any]] = {
    "MNIST": {"task": "mnist-logistic", "epochs": 3, "expected_batch_size": 512},
    "reviews": {
        "task": "studies.subsampled_tuning.tasks:reviews",
        "epochs": 5,
        "expected_batch_size": 128,
    },
    "table": {"task": "synthetic-logistic", "epochs": 5, "expected_batch_size": 128},
}
BATCHES = {"MNIST": [256, 512, 1024], "table": [64, 128, 256]}  # the choices of γ
TUNED = (
    ("table", SGD),
    ("table", ADAM),
    ("reviews", SGD),
    ("reviews", ADAM),
    ("MNIST", SGD),
    ("MNIST", ADAM),
)
EXTREMES = (  # at the second and the last ε alone
    ("table", JOINT),
    ("table", ADAM + MANY),
    ("MNIST", JOINT),
    ("MNIST", SGD + MANY),
    ("MNIST", ADAM + MANY),
)
EPSILONS, DELTA, REPEATS, SEEDS = (0.5, 1.0, 2.0, 4.0), 1e-5, 10, 3


def space_of(task: str, what: str) -> dict[str, Any]:
    """Return the space of a search."""
    if what == SGD:
        return {"learning_rate": law(0.05, 5.0), "max_grad_norm": law(0.1, 10.0)}
    if what == ADAM:
        return {"learning_rate": law(1e-4, 1e-1)}
    return {
        "learning_rate": law(0.05, 5.0),
        "noise_multiplier": grid([0.7, 1.0, 1.4]),
        "expected_batch_size": grid(BATCHES[task]),
    }


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every way of tuning, then the trainings at given rates."""
    if options.smoke:
        # Planning a variant takes longer than seconds.
        named = {"task": "table", "epsilon": 4.0}
        yield {**named, "what": ADAM, "how": BASELINE}
        yield {**named, "what": RATE["table"], "how": TENTH}
        yield {**named, "what": RATE["table"], "how": BASELINE}
        return
    for groups, epsilons in ((TUNED, EPSILONS), (EXTREMES, EPSILONS[1::2])):
        for (task, what), epsilon, how in product(groups, epsilons, HOW):
            yield {"task": task, "what": what, "epsilon": epsilon, "how": how}
    for epsilon, (task, what), how in product(EPSILONS[1::2], RATE.items(), (TENTH, BASELINE)):
        yield {"task": task, "what": what, "epsilon": epsilon, "how": how}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one way of tuning as a study, or train at every rate."""
    terms = dict(TASKS[cell["task"]])
    if cell["what"] in RATE.values():
        share = 10 if cell["how"] == TENTH else 1
        seeds = range(1 if options.smoke else SEEDS)
        return [line for seed in seeds for line in by_rate(cell, terms, share=share, seed=seed)]
    if options.smoke:
        terms |= {"epochs": 1}
    what = cell["what"].removesuffix(MANY)
    runs = 40 if cell["what"].endswith(MANY) else 10
    arm = {**HOW[cell["how"]], **ARMS[what], "mean_runs": runs, "min_runs": 1}  # the paper's law
    return releases_of(
        arm,
        epsilon=cell["epsilon"],
        delta=DELTA,
        repeats=2 if options.smoke else REPEATS,
        seed=seed_of(cell["task"], cell["what"], cell["epsilon"]),  # the three ways share it
        space=space_of(cell["task"], what),
        **terms,
    )


def searched(rows: Sequence[Row]) -> list[Row]:
    """Return the lines of searches."""
    return [row for row in rows if not row["rate"]]


def given(rows: Sequence[Row]) -> list[Row]:
    """Return the lines of trainings whose rate was given."""
    return [row for row in rows if row["rate"]]


def savings(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """Return how many times fewer gradients each variant takes than the baseline: plans alone decide."""
    factors: dict[tuple[str, str, str], float] = {}
    for (task, what), of in by(searched(rows), "task", "what").items():
        costs = {
            how: mean(group, "gradient_evaluations") for (how,), group in by(of, "how").items()
        }
        if BASELINE in costs:
            factors |= {(task, what, how): costs[BASELINE] / costs[how] for how in costs}
    return factors


def estimates(rows: Sequence[Row]) -> dict[tuple[str, str, float], dict[str, Estimate]]:
    """Return by task, what is tuned, and ε the accuracy of every way, in percent."""
    cases: dict[tuple[str, str, float], dict[str, Estimate]] = {}
    for (task, what, epsilon, how), of in by(
        searched(rows), "task", "what", "epsilon", "how"
    ).items():
        values = [100.0 * value for value in floats(of, "accuracy")]
        if len(values) > 1:
            case = cases.setdefault((task, what, float(epsilon)), {})
            case[how] = Estimate.of([values])
    return cases


def distances_of(rows: Sequence[Row]) -> dict[tuple[str, str, float, str], Estimate]:
    """Return by task, what is tuned, ε and way how many points it is behind the baseline.

    Repetitions are compared one by one: the three ways of a case try the same candidates in each.
    """
    distances: dict[tuple[str, str, float, str], Estimate] = {}
    groups = by(searched(rows), "task", "what", "epsilon", "how")
    for (task, what, epsilon, how), of in groups.items():
        baseline = groups.get((task, what, epsilon, BASELINE), [])
        pairs = zip(floats(baseline, "accuracy"), floats(of, "accuracy"), strict=False)
        gaps = [100.0 * (ours - theirs) for ours, theirs in pairs]
        if how != BASELINE and len(gaps) > 1:
            distances[task, what, float(epsilon), how] = Estimate.of([gaps])
    return distances


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return accuracies, how far behind the baseline each is, and the best of given rates."""
    values: dict[str, float] = {}
    claims = by(searched(rows), "task", "what", "epsilon", "how")
    for (task, what, epsilon, how), of in claims.items():
        name = f"{how}, {what} on {task} at ε = {float(epsilon):g}"
        values[name] = 100.0 * mean(of, "accuracy")
        values[f"{name}: claimed"] = mean(of, "claimed")
    for (task, what, epsilon, how), distance in distances_of(rows).items():
        values[f"{how}, {what} on {task} at ε = {epsilon:g}: points behind"] = distance.mean
    values |= {
        f"{how}, {what} on {task}: times fewer gradients": times
        for (task, what, how), times in savings(rows).items()
        if how != BASELINE
    }
    for (task, how, epsilon), of in by(given(rows), "task", "how", "epsilon").items():
        means = {float(rate): mean(each, "accuracy") for (rate,), each in by(of, "rate").items()}
        best = max(means, key=lambda rate: means[rate])
        values[f"best rate for {task} on {how} at ε = {float(epsilon):g}"] = best
    return values


def tables(rows: Sequence[Row]) -> list[str]:
    """Return accuracies, then how far behind the baseline they are and for how much less."""
    accuracies, distances, prices = [], [], []
    factors, cases, gaps = savings(rows), estimates(rows), distances_of(rows)
    for (task, what, how), of in by(searched(rows), "task", "what", "how").items():
        claims = {float(e): mean(each, "claimed") for (e,), each in by(of, "epsilon").items()}
        ways = [cases.get((task, what, epsilon), {}) for epsilon in EPSILONS]
        times = f"{factors[task, what, how]:.1f}"
        shown = (str(way[how]) if how in way else "" for way in ways)
        accuracies.append((task, what, how, *shown))
        shown = (f"{claims[epsilon]:.2f}" if epsilon in claims else "" for epsilon in EPSILONS)
        prices.append((task, what, how, *shown, times))
        if how != BASELINE:
            points = (gaps.get((task, what, epsilon, how)) for epsilon in EPSILONS)
            shown = (str(gap) if gap else "" for gap in points)
            distances.append((task, what, how, *shown, times))
    head = ("task", "tuned", "on", *(f"ε = {epsilon:g}" for epsilon in EPSILONS))
    return [
        markdown(head, accuracies),
        markdown((*head[:2], "points behind", *head[3:], "fewer gradients"), distances),
        markdown((*head[:2], "ε of the training alone", *head[3:], "fewer gradients"), prices),
        *(rate_table(of) for _, of in by(given(rows), "task").items()),
    ]


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against ε, a panel a task and what is tuned by ten runs in the mean."""
    lines = [
        {
            "ε": row["epsilon"],
            "accuracy": row["accuracy"],
            "tuned on": row["how"],
            "panel": f"{row['task']}, {row['what']}",
        }
        for row in searched(rows)
        if (row["task"], row["what"]) in TUNED
    ]
    terms: dict[str, Any] = {"line": "tuned on", "panel": "panel", "log": "x"}
    return {"chart": plot_lines(lines, x="ε", y="accuracy", **terms)}


SHEET = Sheet(
    name="subsampled_tuning",
    key=("task", "what", "epsilon", "how"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed", "rate"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {"task": "table", "what": RATE["table"], "epsilon": "1.0", "how": BASELINE, "rate": "0.01"},
        "accuracy",
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
