"""Private selection against adaptation while training, at one epsilon: what luck costs.

python -m studies.selection_against_adaptation.run    # goes on where it was
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from studies.selection_against_adaptation.account import by_theorem, of_pure_runs, rounded_up
from studies.selection_against_adaptation.luck import tables_of_luck
from studies.sheet import (
    STRATEGY_OF,
    Again,
    Options,
    Sheet,
    by,
    floats,
    markdown,
    mean,
    releases_of,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

DELTA, EPSILON = 1e-5, 4.0
CLIP = {"max_grad_norm": 1.0}
TERMS = {"task": "digits-mlp", "epochs": 20, "expected_batch_size": 128}
SCORING = {"metric": "accuracy", "mechanism": "laplace"}
STEPS = {f"10^{-i / 2:g}": 10 ** (-i / 2) for i in range(-1, 11)}  # each of the rates, alone
SHARE = 1.4927  # of one training where γ = 2^-4: at that ε they are trained
RATES = {  # the paper's, and as many a decade above them
    "selection": list(STEPS)[2:],
    "larger": list(STEPS)[:10],
}
NAMES = {
    "adadp": "ADADP",
    "hyfreedp": "HyFreeDP",
    "selection": "selection",
    "larger": "selection of larger rates",
}
ROUNDS = {  # of an arm with so many runs in the mean, 1/γ
    ("adadp", 1): 20,
    ("hyfreedp", 1): 20,
    **{("selection", 2**k): 20 for k in range(1, 7)},
    ("selection", 128): 8,
    ("selection", 256): 5,
    **{("larger", 2**k): 20 for k in (2, 4)},
    ("larger", 64): 10,
    **{(rate, 1): 3 for rate in STEPS},
}
PAPER = {  # Table 1, on CIFAR-10: mean accuracy and its deviation, in percent, and evaluations
    ("adadp", 1): (63.49, 0.33, 1),
    ("selection", 2): (47.28, 16.88, 2.04),
    ("selection", 4): (54.67, 12.78, 3.42),
    ("selection", 16): (60.53, 6.62, 14.79),
    ("selection", 128): (63.17, 3.99, 131.76),
    ("selection", 256): (63.68, 1.13, 224.30),
}


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield both methods that adapt, then selection from the shortest to the longest."""
    for arm, runs in ROUNDS:
        if not options.smoke or (runs <= 2 and arm in NAMES):
            yield {"arm": arm, "mean_runs": runs}


def arm_of(name: str, runs: int, epochs: int) -> dict[str, Any]:
    """Return an arm as a spec has it; rates fall from the middle on, to a sixth as in the paper."""
    decay = 10.0 / epochs  # (5.1): 0.1 an epoch where half of the training is 50
    if name == "adadp":
        return {"strategy": "adadp", "parameters": CLIP, "adapt_share": 0.5, "decay": decay}
    if name == "hyfreedp":
        return {"strategy": "hyfreedp"}
    options = {"schedule": {"type": "decay", "start": 0.5, "decay": decay}}
    if name in STEPS:
        parameters = CLIP | {"learning_rate": STEPS[name]}
        return {"strategy": "fixed", "parameters": parameters, "options": options}
    # The paper's law, which halts after any run.
    law = {"mean_runs": runs, "min_runs": 1}
    return {"strategy": "liu-talwar", **law, "parameters": CLIP, "options": options}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run every round of an arm: a study with a budget of its own."""
    terms: dict[str, Any] = dict(TERMS)
    if options.smoke:
        terms |= {"epochs": 1}
    arm = arm_of(cell["arm"], cell["mean_runs"], terms["epochs"])
    told = {"epsilon": SHARE if cell["arm"] in STEPS else EPSILON, "delta": DELTA}
    if cell["arm"] in RATES:
        rates = {"type": "categorical", "choices": [STEPS[name] for name in RATES[cell["arm"]]]}
        terms |= {"space": {"learning_rate": rates}, "scoring": SCORING}
    rounds = 1 if options.smoke else ROUNDS[cell["arm"], cell["mean_runs"]]
    lines = releases_of(arm, repeats=rounds, **told, **terms)
    if cell["arm"] in RATES:  # the account of every round
        lines[0]["theorem"] = round(by_theorem(arm, **told, **terms), 4)
        lines[0]["pure"] = round(of_pure_runs(float(cell["mean_runs"]), DELTA), 4)
    return lines


def deviation(rows: Sequence[Mapping[str, str]]) -> float:
    """Return the standard deviation of the accuracy over rounds, in percent; 0 of a single one."""
    values = floats(rows, "accuracy")
    return 100.0 * statistics.stdev(values) if len(values) > 1 else 0.0


def compared(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, ...], list[Mapping[str, str]]]:
    """Return the rounds of each arm; a rate that is trained alone is none of them."""
    return by((row for row in rows if row["arm"] in NAMES), "arm", "mean_runs")


def named(arm: str, runs: str) -> str:
    """Return an arm's name, with its probability of halting."""
    return NAMES[arm] + (f", γ = 2^-{int(runs).bit_length() - 1}" if arm in RATES else "")


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return mean and deviation of every arm, and ADADP's deviation over a selection's."""
    found, spread = {}, {}
    for (arm, runs), group in compared(rows).items():
        spread[arm, runs] = deviation(group)
        found[f"deviation of {named(arm, runs)}"] = deviation(group)
        found[f"mean of {named(arm, runs)}"] = 100.0 * mean(group, "accuracy")
        if theorem := group[0]["theorem"]:
            found[f"ε by the theorem of {named(arm, runs)}"] = float(theorem)
    for arm in RATES:
        if wide := spread.get((arm, "4")):
            name = f"deviation of ADADP over that of {named(arm, '4')}"
            found[name] = spread["adadp", "1"] / wide
    return found


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the paper's Table 1, and what each account says of a selection."""
    results, accounts = [], []
    for (arm, runs), of in compared(rows).items():
        values = [100.0 * value for value in floats(of, "accuracy")]
        numbers = f"{statistics.mean(values):.1f}", f"{deviation(of):.1f}"
        extent = f"{min(values):.1f} to {max(values):.1f}"
        cost = f"{int(of[0]['gradient_evaluations']):,}"
        quoted = " / ".join(map(str, PAPER.get((arm, int(runs)), "–")))
        results.append((named(arm, runs), *numbers, extent, runs, cost, len(of), quoted))
        if arm == "selection":
            told = (rounded_up(of[0][name]) for name in ("spent", "theorem", "pure"))
            accounts.append((named(arm, runs), f"{float(of[0]['claimed']):.2f}", *told))
    head = ("digits, ε = 4", "mean", "deviation", "range", "expected evaluations")
    head = (*head, "gradient evaluations", "rounds", "CIFAR-10 in the paper")
    price = ("ε of", "released training alone", "selection", "selection by the theorem")
    price = (*price, "selection of pure ε = 1 (theorem: 3)")
    alone = {
        rate: [100.0 * value for value in floats(of, "accuracy")]
        for (rate,), of in by(rows, "arm").items()
        if rate in STEPS
    }
    found = [markdown(head, results), markdown(price, accounts)]
    return [*found, *tables_of_luck(alone, {NAMES[arm]: rates for arm, rates in RATES.items()})]


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return accuracy, and its deviation, against the expected number of evaluations."""
    drawn, spread, most = [], [], max(int(row["mean_runs"]) for row in rows)
    for (arm, runs), group in compared(rows).items():
        # One training stands beside selections of any length.
        for x in (runs,) if arm in RATES else ("1", str(most)):
            at = {"arm": NAMES[arm], "expected evaluations": x}
            drawn += [at | {"accuracy": row["accuracy"]} for row in group]
            if deviation(group):
                spread.append(at | {"deviation": str(deviation(group))})
    for (arm, runs), (_, wide, _) in PAPER.items():
        for x in (1, most) if runs == 1 else (runs,):
            at = {"arm": f"{NAMES[arm]}, paper", "expected evaluations": str(x)}
            spread.append(at | {"deviation": str(wide)})
    terms: dict[str, Any] = {"x": "expected evaluations", "line": "arm"}
    return {
        "chart": plot_lines(
            drawn, y="accuracy", log="x", bars="deviation", **terms, strategies=STRATEGY_OF
        ),
        "deviation": plot_lines(spread, y="deviation", log="xy", **terms, strategies=STRATEGY_OF),
    }


SHEET = Sheet(
    name="selection_against_adaptation",
    key=("arm", "mean_runs"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed", "theorem", "pure"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"arm": "adadp"}, "accuracy"),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
