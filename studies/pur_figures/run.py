"""Figures 1 and 2 of the PUR draft, and which start has the risks of its Table 3.

python -m studies.pur_figures.run --data mnist.npz      # --smoke: seconds, Iris and a made-up table
python -m studies.pur_figures.run --data kddcup.csv     # a table of one's own, as data set "table"
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch

from privtune.plots import plot_lines
from studies.pur_figures.work import (
    CONSTANTS,
    START_BOUND,
    STARTS,
    Problem,
    course,
    ends_at,
    problem,
    stand_in,
    starts,
)
from studies.sheet import Again, Options, Row, Sheet, by, markdown

DATA = ("iris", "breast-cancer", "synthetic", "mnist")
SPENT = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
DECAY, EPSILON = 0.1, 0.1  # of Table 3, and of its cells above log 2
REACH = (1.0, 10.0)  # R of the convex loss, which the paper does not state
OURS, ORACLE, BEST = "schedule", "oracle", "best constant"
PAPER = {
    "synthetic": (0.5090, 0.5307),
    "iris": (0.6465, 0.6809),
    "breast-cancer": (1.1656, 0.8651),
    "mnist": (1.0058, 0.9449),
}
CLOSE = 0.02


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield figures and starts; a table of one's own has no others beside it."""
    own = options.smoke or (options.data is not None and options.data.suffix == ".csv")
    names = ("table",) if own else DATA
    begun = ("0", "uniform, Glorot") if options.smoke else STARTS
    for name in names:
        for decay in () if name == "mnist" else (DECAY, 0.0):  # a step of MNIST is 1/30,000
            yield {"what": "figure", "data": name, "setting": decay}
    for name in reversed(names):
        for start in begun:
            yield {"what": "start", "data": name, "setting": start}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one cell."""
    if not options.smoke:
        return FILL[cell["what"]](cell, options.data, cell["data"] == "mnist")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        stand_in(path)
        return FILL[cell["what"]](cell, path, True)


def fill_figure(cell: Mapping[str, Any], data: Path | None, small: bool) -> list[dict[str, Any]]:
    """Follow the gradient's norm along ε under every schedule."""
    decay, name = cell["setting"], cell["data"]
    first = problem(name, decay, data, None if decay else REACH[0])
    sigmas: dict[str, tuple[Problem, Any]] = {
        f"σ = {sigma:g}": (first, lambda _, sigma=sigma: sigma) for sigma in CONSTANTS
    }
    sigmas[ORACLE] = (first, None)
    if decay:
        sigmas[OURS] = (first, first.schedule(START_BOUND))
    for reach in () if decay else REACH:
        of = problem(name, decay, data, reach)
        sigmas[f"{OURS}, R = {reach:g}"] = (of, of.schedule(START_BOUND))
    lines = []
    for line, (of, sigma) in sigmas.items():
        steps, repetitions = (60, 8) if small else (600, 120)
        spent, norms = course(of, sigma, steps=steps, repetitions=repetitions, seed=1)
        for epsilon in SPENT:
            # What a repetition has released by then: its last step within ε.
            last = (spent <= epsilon).sum(dim=0) - 1
            at = norms.gather(0, last[None])[0]
            cut = bool((last == len(spent) - 1).all()) and len(spent) == steps
            quarters = at.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=at.dtype)).tolist()
            lines.append(row(line, epsilon, quarters[1], quarters[0], quarters[2], cut))
    return lines


def fill_start(cell: Mapping[str, Any], data: Path | None, small: bool) -> list[dict[str, Any]]:
    """Take the risk at ε = 0.1 from one law of starts, under the schedule and under constants."""
    of = problem(cell["data"], DECAY, data)
    start = starts(cell["setting"], of.x, repetitions=20 if small else 120)
    told = {"epsilon": EPSILON, "steps": 300}
    # The gap that the schedule needs: the mean risk at the start, since none is below 0.
    gap = of.risk(start).mean().item()
    found = {OURS: ends_at(of, of.schedule(gap), start, **told)}
    constants = [ends_at(of, lambda _, s=s: s, start, **told) for s in CONSTANTS]
    found[BEST] = min(constants, key=lambda risks: risks.mean().item())
    lines = []
    for line, risks in found.items():
        low, high = risks.quantile(torch.tensor([0.025, 0.975], dtype=risks.dtype)).tolist()
        lines.append(row(line, EPSILON, risks.mean().item(), low, high, False))
    return lines


def row(
    line: str, epsilon: float, value: float, low: float, high: float, cut: bool
) -> dict[str, Any]:
    """Return one line of the file; ``cut`` says that the largest number of steps ended it."""
    numbers = {"epsilon": epsilon, "value": value, "low": low, "high": high, "cut": int(cut)}
    return {"line": line, **{name: f"{number:.5g}" for name, number in numbers.items()}}


def spread(row: Row) -> float:
    """Return the standard error of a risk: the mean of 120, of which 95% lie between two of them."""
    return (float(row["high"]) - float(row["low"])) / (2.0 * 1.96 * math.sqrt(120.0))


FILL = {"figure": fill_figure, "start": fill_start}


def of_kind(rows: Sequence[Row], what: str) -> dict[tuple[str, ...], list[Row]]:
    """Return the lines of figures or starts, by data set and setting."""
    return by([row for row in rows if row["what"] == what], "data", "setting")


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return gradients' norms at ε = 1 and 20, and risks from every start."""
    found = {}
    for (data, decay), lines in of_kind(rows, "figure").items():
        for each in lines:
            if each["epsilon"] in ("1", "20"):
                where = f"{data}, λ = {decay}, {each['line']}, ε = {each['epsilon']}"
                found[f"gradient, {where}"] = float(each["value"])
    for (data, start), lines in of_kind(rows, "start").items():
        for each in lines:
            found[f"risk, {data}, {each['line']}, from {start}"] = float(each["value"])
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the gradients' norms at two ε, and the risks of every start beside the paper's."""
    found = []
    for epsilon in ("1", "20"):
        shown: dict[str, dict[str, str]] = {}
        for (data, decay), lines in of_kind(rows, "figure").items():
            for each in lines:
                if each["epsilon"] == epsilon:
                    text = f"{float(each['value']):.3g}" + ("*" if each["cut"] == "1" else "")
                    shown.setdefault(each["line"], {})[f"{data}, λ = {decay}"] = text
        heads = list(dict.fromkeys(head for cell in shown.values() for head in cell))
        body = [(name, *(cell.get(h, "–") for h in heads)) for name, cell in shown.items()]
        found.append(markdown((f"gradient's norm at ε = {epsilon}", *heads), body))
    begun = of_kind(rows, "start")
    names = list(dict.fromkeys(data for data, _ in begun))
    heads = [f"{data}: {line}" for data in names for line in (OURS, BEST)]
    quoted = [f"{v:.4f}" for data in names for v in PAPER.get(data, (math.nan, math.nan))]
    body = [("the paper's", *quoted)]
    for start in dict.fromkeys(start for _, start in begun):
        values = []
        for data in names:
            for each, paper in zip(begun[data, start], PAPER.get(data, (0.0, 0.0)), strict=True):
                value, low, high = (float(each[name]) for name in ("value", "low", "high"))
                mark = "=" if abs(value - paper) <= CLOSE else "~" if low <= paper <= high else ""
                values.append(f"{value:.3f}{mark}")
        body.append((start, *values))
    found.append(markdown(("risk at ε = 0.1 from", *heads), body))
    return found


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return Figures 1 and 2: medians of the gradient's norm against ε."""
    drawn = [
        {"ε": row["epsilon"], "gradient's norm": row["value"], "schedule": row["line"],
         "data": f"{row['data']}, λ = {row['setting']}"}
        for row in rows
        if row["what"] == "figure"
    ]  # fmt: skip
    told = {"x": "ε", "y": "gradient's norm", "line": "schedule", "panel": "data"}
    return {"gradients": plot_lines(drawn, **told, log="xy")}


SHEET = Sheet(
    name="pur_figures",
    key=("what", "data", "setting"),
    values=("line", "epsilon", "value", "low", "high", "cut"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {"what": "start", "data": "iris", "setting": "uniform, Glorot", "line": OURS},
        "value",
        error=spread,
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
