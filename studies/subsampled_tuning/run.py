"""Tuning on a tenth of the records against tuning on all: SGD, Adam, and noise, rates and batch at once.

python -m studies.subsampled_tuning.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from studies.sheet import Again, Options, Sheet, by, markdown, mean, pm, release_of
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
SPACES: dict[str, dict[str, Any]] = {
    SGD: {"learning_rate": law(0.05, 5.0), "max_grad_norm": law(0.1, 10.0)},
    ADAM: {"learning_rate": law(1e-4, 1e-1)},
    JOINT: {
        "learning_rate": law(0.05, 5.0),
        "noise_multiplier": grid([0.7, 1.0, 1.4]),
        "expected_batch_size": grid([64, 128, 256]),
    },
}
TASKS: dict[str, dict[str, Any]] = {
    "MNIST": {"task": "mnist-logistic", "epochs": 3, "expected_batch_size": 512},
    "table": {"task": "synthetic-logistic", "epochs": 5, "expected_batch_size": 128},
}
GROUPS = (("MNIST", SGD), ("MNIST", ADAM), ("table", SGD), ("table", ADAM), ("table", JOINT))
OF_MANY = (("table", ADAM + MANY), ("MNIST", SGD + MANY), ("MNIST", ADAM + MANY))
EPSILONS, SEEDS = (0.5, 1.0, 2.0, 4.0), 3


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every way of tuning, seed by seed."""
    if options.smoke:
        # Planning a variant takes longer than seconds.
        named = {"task": "table", "epsilon": 4.0, "seed": 0}
        yield {**named, "what": ADAM, "how": BASELINE}
        yield {**named, "what": RATE["table"], "how": TENTH}
        yield {**named, "what": RATE["table"], "how": BASELINE}
        return
    for seed in range(SEEDS):
        for task, what in (*OF_MANY, *GROUPS):
            few = what == JOINT or what.endswith(MANY)
            for epsilon in EPSILONS[1::2] if few else EPSILONS:
                for how in HOW:
                    named = {"task": task, "what": what, "epsilon": epsilon}
                    yield {**named, "seed": seed, "how": how}
    for seed in range(SEEDS):
        for epsilon in EPSILONS[1::2]:
            for task, what in RATE.items():
                named = {"task": task, "what": what, "epsilon": epsilon, "seed": seed}
                yield {**named, "how": TENTH}
                yield {**named, "how": BASELINE}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one way of tuning as a study, or train at every rate."""
    terms = dict(TASKS[cell["task"]])
    if cell["what"] in RATE.values():
        return by_rate(cell, terms, share=10 if cell["how"] == TENTH else 1)
    if options.smoke:
        terms |= {"epochs": 1}
    what, runs = cell["what"].removesuffix(MANY), 40 if cell["what"].endswith(MANY) else 10
    arm = {**HOW[cell["how"]], **ARMS[what], "mean_runs": runs, "min_runs": 1}  # the paper's law
    told = {"epsilon": cell["epsilon"], "delta": 1e-5, "seed": cell["seed"]}
    return [release_of(arm, **told, space=SPACES[what], **terms)]


def savings(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, str, str], float]:
    """Return how many times fewer gradients each variant takes than the baseline: plans alone decide."""
    found = {}
    for (task, what), of in by([r for r in rows if not r["rate"]], "task", "what").items():
        cost = {how: mean(g, "gradient_evaluations") for (how,), g in by(of, "how").items()}
        found |= {(task, what, how): cost[BASELINE] / cost[how] for how in cost if BASELINE in cost}
    return found


def behind(ways: Mapping[str, Sequence[Mapping[str, str]]], how: str) -> list[Mapping[str, str]]:
    """Return by how many points each seed is behind the baseline of the same seed."""
    best = {row["seed"]: float(row["accuracy"]) for row in ways.get(BASELINE, ())}
    return [
        {"points": str(100.0 * (best[row["seed"]] - float(row["accuracy"])))}
        for row in ways[how]
        if row["seed"] in best
    ]


def grouped(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the lines by way of tuning, for every task, what is tuned, and ε."""
    cases = by(rows, "task", "what", "epsilon").items()
    return {case: {how: of for (how,), of in by(group, "how").items()} for case, group in cases}


def given(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the lines of trainings whose rate was given."""
    return [row for row in rows if row["rate"]]


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return accuracies, and how far behind the baseline each is."""
    found = {}
    for (task, what, epsilon), ways in grouped([r for r in rows if not r["rate"]]).items():
        for how, of in ways.items():
            where = f"{how}, {what} on {task} at ε = {float(epsilon):g}"
            found[where] = 100.0 * mean(of, "accuracy")
            found[f"{where}: claimed"] = mean(of, "claimed")
            if how != BASELINE and (points := behind(ways, how)):
                found[f"{where}: points behind"] = mean(points, "points")
    found |= {
        f"{how}, {what} on {task}: times fewer gradients": times
        for (task, what, how), times in savings(rows).items()
        if how != BASELINE
    }
    for (task, how, epsilon), of in by(given(rows), "task", "how", "epsilon").items():
        means = {float(rate): mean(each, "accuracy") for (rate,), each in by(of, "rate").items()}
        best = max(means, key=lambda rate: means[rate])
        found[f"best rate for {task} on {how} at ε = {float(epsilon):g}"] = best
    return found


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return accuracies, then how far behind the baseline they are and for how much less."""
    accuracies, distances, prices, fewer = [], [], [], savings(rows)
    told = [f"{e:g}" for e in EPSILONS]
    for (task, what), group in by([r for r in rows if not r["rate"]], "task", "what").items():
        cases = {case[2]: ways for case, ways in grouped(group).items()}
        of_epsilon = [next((w for e, w in cases.items() if float(e) == at), {}) for at in EPSILONS]
        hows = list(dict.fromkeys(row["how"] for row in group))
        for how in hows:
            of = [r for r in group if r["how"] == how]
            shown = [pm(w[how], "accuracy", scale=100.0) if how in w else "" for w in of_epsilon]
            seeds = len({row["seed"] for row in of})
            accuracies.append((task, what, how, *shown, seeds))
            shown = [f"{mean(w[how], 'claimed'):.2f}" if how in w else "" for w in of_epsilon]
            times = f"{fewer[task, what, how]:.1f}"
            prices.append((task, what, how, *shown, times))
            if how != BASELINE:
                shown = [pm(behind(w, how), "points") if how in w else "" for w in of_epsilon]
                distances.append((task, what, how, *shown, times))
    head = ("task", "tuned", "on", *(f"ε = {e}" for e in told))
    return [
        markdown((*head, "seeds"), accuracies),
        markdown((*head[:2], "points behind", *head[3:], "fewer gradients"), distances),
        markdown((*head[:2], "ε of the training alone", *head[3:], "fewer gradients"), prices),
        *(rate_table(of) for _, of in by(given(rows), "task").items()),
    ]


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against ε, a panel a task and what is tuned."""
    lines = [
        {
            "ε": row["epsilon"],
            "accuracy": row["accuracy"],
            "tuned on": row["how"],
            "panel": f"{row['task']}, {row['what']}",
        }
        for row in rows
        if not row["rate"]
    ]
    terms: dict[str, Any] = {"line": "tuned on", "panel": "panel", "log": "x"}
    return {"chart": plot_lines(lines, x="ε", y="accuracy", **terms)}


SHEET = Sheet(
    name="subsampled_tuning",
    key=("task", "what", "epsilon", "seed", "how"),
    values=("accuracy", "gradient_evaluations", "spent", "claimed", "rate"),
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
