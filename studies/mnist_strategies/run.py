"""Every strategy on MNIST at the same total ε: accuracy against what it costs to compute.

python -m studies.mnist_strategies.run --data mnist.npz        # goes on where it was
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

SPACE = {
    "learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True},
    "max_grad_norm": {"type": "float", "low": 0.1, "high": 10.0, "log": True},
}
DEFAULTS = {"learning_rate": 0.5, "max_grad_norm": 1.0}
SUBSAMPLED = {"strategy": "subsampled-tuning", "rate": 0.1, "mean_runs": 10}
ARMS: dict[str, dict[str, Any]] = {
    "defaults": {"strategy": "fixed", "parameters": DEFAULTS},
    "subsampled-1": {**SUBSAMPLED, "variant": 1},
    "subsampled-2": {**SUBSAMPLED, "variant": 2},
    "hyfreedp": {"strategy": "hyfreedp"},
    "public-rate": {"strategy": "public-rate"},
    "adadp": {"strategy": "adadp", "parameters": {"max_grad_norm": 1.0}},
    "adaclip": {
        "strategy": "adaclip",
        "parameters": {"learning_rate": 0.5, "largest_variance": 3e-3},
    },
    "papernot-steinke": {"strategy": "papernot-steinke", "mean_runs": 10},
    "liu-talwar": {"strategy": "liu-talwar", "mean_runs": 10, "maximum": 40},
}
TERMS = {"task": "mnist-mlp", "epochs": 3, "expected_batch_size": 512}
SMOKE = {"task": "digits-mlp", "epochs": 1, "expected_batch_size": 64}


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm at every ε."""
    if options.smoke:
        for arm in ("defaults", "subsampled-2"):
            yield {"epsilon": 3.0, "arm": arm}
        return
    for epsilon in (1.0, 3.0):
        for arm in ARMS:
            yield {"epsilon": epsilon, "arm": arm}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm, as a study of its own, with every seed."""
    arm = ARMS[cell["arm"]]
    space = {"space": SPACE} if "mean_runs" in arm else {}
    told = {"epsilon": cell["epsilon"], "seed": seed_of(cell["epsilon"])}  # its arms share it
    terms = {**told, **space, **(SMOKE if options.smoke else TERMS)}
    return releases_of(arm, delta=1e-5, repeats=10, **terms)


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return every arm's accuracy and price, what subsampling saves, and what was spent."""
    found: dict[str, float] = {}
    for (epsilon, arm), group in by(rows, "epsilon", "arm").items():
        at = f"{arm} at ε = {float(epsilon):g}"
        found[at] = 100 * mean(group, "accuracy")
        found[f"{at}, gradient evaluations"] = mean(group, "gradient_evaluations")
    for variant in ("subsampled-1", "subsampled-2"):
        of = [
            found.get(f"{a} at ε = 3, gradient evaluations") for a in ("papernot-steinke", variant)
        ]
        if of[0] and of[1]:
            found[f"times fewer gradient evaluations of {variant}"] = of[0] / of[1]
    return {**found, **most_spent(rows)}


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return one line an arm and ε: accuracy, its price, and the number of seeds."""
    lines = [
        (
            f"{float(epsilon):g}",
            arm,
            f"{pm(group, 'accuracy', scale=100.0)} %",
            f"{int(group[0]['gradient_evaluations']):,}",
            len(group),
        )
        for (epsilon, arm), group in sorted(
            by(rows, "epsilon", "arm").items(),
            key=lambda of: (float(of[0][0]), [*ARMS].index(of[0][1])),
        )
    ]
    head = ("ε", "arm", "test accuracy", "gradient evaluations (expected)", "seeds")
    return [markdown(head, lines)]


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against gradient evaluations, a panel an ε."""
    named = [{**row, "ε": f"ε = {float(row['epsilon']):g}"} for row in rows]
    axes = {"x": "gradient_evaluations", "y": "accuracy"}
    return {
        "chart": plot_lines(named, **axes, line="arm", panel="ε", log="x", strategies=STRATEGY_OF)
    }


SHEET = Sheet(
    name="mnist_strategies",
    key=("epsilon", "arm"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"arm": "defaults"}, "accuracy", stand_in=True),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
