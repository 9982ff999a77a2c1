"""Tables 2, 4 and 5 and Figures 2 to 7 of HyFreeDP, on a network that learnt in public.

python -m studies.hyfreedp_tables.run --data mnist.npz      # --smoke: seconds, on digits
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from privtune.plots import plot_lines
from studies.hyfreedp_tables import curves, regime
from studies.hyfreedp_tables.work import (
    ARMS,
    BATCH,
    COSINE,
    GRIDS,
    LINEAR,
    SETTINGS,
    STARTS,
)
from studies.hyfreedp_tables.work import cells as cells_of_tables
from studies.hyfreedp_tables.work import fill as fill_table
from studies.sheet import Again, Options, Row, Sheet, by, floats, markdown, mean, pm

OURS, GRID, TRAINED = "HyFreeDP, K = 5", "un-paid grid", ("all", "biases", "lora:4")
WEIGHTS = 117_637  # of the network


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the cells of the tables, then Algorithm 1 with less noise on its losses."""
    yield from cells_of_tables(options)
    if not options.smoke:
        yield from regime.cells()


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one cell."""
    run = regime.fill if cell["what"] == "regime" else fill_table
    return run(cell, options)


def of_kind(rows: Sequence[Row], what: str) -> list[Row]:
    """Return the lines of one kind of cell."""
    return [row for row in rows if row["what"] == what]


def best(rows: Sequence[Row]) -> list[Row]:
    """Return the lines of a grid's best rate, by the mean of its seeds: nobody paid for that."""
    return max(by(rows, "at").values(), key=lambda lines: mean(lines, "value"))


def accuracy(rows: Sequence[Row]) -> dict[tuple[str, float], dict[str, list[Row]]]:
    """Return the lines of every arm, by what is trained and ε; a grid's are those of its best rate."""
    found: dict[tuple[str, float], dict[str, list[Row]]] = {}
    for (part, epsilon, arm), lines in by(
        of_kind(rows, "accuracy"), "part", "epsilon", "arm"
    ).items():
        cell = found.setdefault((part, float(epsilon)), {})
        cell[arm] = best(lines) if arm in GRIDS else lines
    return dict(sorted(found.items(), key=lambda item: (TRAINED.index(item[0][0]), item[0][1])))


def ratios(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return the median times of a step over that of DP-AdamW: the same training, at a given rate."""
    found = {}
    for (part,), lines in by(of_kind(rows, "seconds"), "part").items():
        middle = {n: statistics.median(floats(g, "value")) for (n,), g in by(lines, "line").items()}
        for name, value in middle.items():
            found[part, name] = value / middle["DP-AdamW"]
    return found


def noises(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the noise multipliers at K = 5, by setting and ε."""
    at = [row for row in of_kind(rows, "noise") if row["at"] == "5"]
    return {
        (part, epsilon): {row["line"]: float(row["value"]) for row in lines}
        for (part, epsilon), lines in by(at, "part", "epsilon").items()
    }


def magnitudes(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return the expected size of the noise on a mean loss and on a mean gradient (Table 1), by K.

    Bounds of 1, a batch of 1,000, all weights, ε = 1: ``sqrt(2 / π) σ_l / B`` and ``sqrt(d) σ_g / B``.
    """
    found: dict[str, tuple[float, float]] = {}
    for (part, epsilon, at), of in by(of_kind(rows, "noise"), "part", "epsilon", "at").items():
        if part == next(iter(SETTINGS)) and float(epsilon) == 1.0:
            sigma = {row["line"]: float(row["value"]) / BATCH for row in of}
            loss = math.sqrt(2.0 / math.pi) * sigma["σ_l, gaussian"]
            found[at] = (loss, math.sqrt(WEIGHTS) * sigma["σ_g"])
    return found


def mean_log(rates: Sequence[float]) -> float:
    """Return the logarithm to base ten of the geometric mean."""
    return statistics.mean(map(math.log10, rates))


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return accuracies, what HyFreeDP is above each arm, noise over DP-SGD's, times of a step."""
    found = {}
    for (part, epsilon), arms in accuracy(rows).items():
        where = f"{part}, ε = {epsilon:g}"
        values = {arm: mean(lines, "value") for arm, lines in arms.items()}
        for arm in (
            "un-paid grid",
            "public-rate",
            COSINE,
            LINEAR,
            "Prodigy",
            "D-Adaptation",
            "DP-hyper",
        ):
            if arm in values and OURS in values:
                found[f"HyFreeDP above {arm}, {where}"] = values[OURS] - values[arm]
        if LINEAR in values:
            found[f"un-paid grid above the linear one, {where}"] = values[GRID] - values[LINEAR]
        found |= {f"{arm}, {where}": value for arm, value in values.items()}
    for (part, epsilon), noise in noises(rows).items():
        where = f"{part}, ε = {float(epsilon):g}, K = 5"
        found[f"σ_g over DP-SGD's, {where}"] = noise["σ_g"] / noise["σ, DP-SGD"]
        found[f"even split over DP-SGD's, {where}"] = noise["σ, even split"] / noise["σ, DP-SGD"]
        found[f"σ_l, {where}"] = noise["σ_l, gaussian"]
    for fit, start, rates, right in ends(rows):
        found[f"{fit}, from {start}: log10 of the last rate"] = mean_log(rates)
        found[f"{fit}, from {start}: accuracy"] = mean(right, "value")
    found |= {f"step with {n}, {part}": value for (part, n), value in ratios(rows).items()}
    found |= {
        f"course, {arm}: {name}": value
        for arm, values in courses(rows).items()
        for name, value in values.items()
    }
    for k, (loss, gradient) in magnitudes(rows).items():
        found[f"noise on a mean gradient over that on a mean loss, K = {k}"] = gradient / loss
    found |= regime.figures(of_kind(rows, "regime"))
    return found | curves.figures(of_kind(rows, "curve"))


def courses(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return of every course where its rate is largest, how far it rose and fell, and accuracies."""
    found: dict[str, dict[str, float]] = {}
    for (name,), lines in by(of_kind(rows, "course"), "line").items():
        arm, kind = name.split(": ")
        values = found.setdefault(arm, {})
        if kind == "accuracy":
            at = {step: mean(of, "value") for (step,), of in by(lines, "at").items()}
            values |= {"last accuracy": [*at.values()][-1], "best accuracy": max(at.values())}
            continue
        tops = []
        for of in by(lines, "seed").values():
            rates = floats(of, "value")
            top = max(rates)
            step = float(of[rates.index(top)]["at"])
            tops.append((step, math.log10(top / rates[0]), math.log10(rates[-1] / top)))
        named = ("step of the largest rate", "log10 of its rise", "log10 of its fall")
        values |= dict(zip(named, map(statistics.mean, zip(*tops, strict=True)), strict=True))
    return found


def ends(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[float], list[Row]]]:
    """Yield where each first rate led: every seed's last rate and accuracy."""
    for (part, fit), lines in by(of_kind(rows, "rate"), "part", "arm").items():
        named = {name: group for (name,), group in by(lines, "line").items()}
        for start in (f"{start:g}" for start in STARTS):
            rates = named[f"{fit}, from {start}: learning_rate"]
            last = max(floats(rates, "at"))
            found = [float(row["value"]) for row in rates if float(row["at"]) == last]
            yield f"{part}, {fit}", start, found, named[f"{fit}, from {start}: accuracy"]


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the tables of accuracies, first rates, noise and times."""
    cellsof, found = accuracy(rows), []
    heads = [f"{part}, ε = {epsilon:g}" for part, epsilon in cellsof]
    lines = [
        (arm, *(pm(cell[arm], "value") if arm in cell else "–" for cell in cellsof.values()))
        for arm in ARMS
        if any(arm in cell for cell in cellsof.values())
    ]
    found.append(markdown(("test accuracy, %", *heads), lines))
    tried = [
        (f"{arm}, {part}, ε = {float(epsilon):g}",
         "; ".join(f"{float(at):g}: {pm(each, 'value')}" for (at,), each in by(of, "at").items()))
        for (part, epsilon, arm), of in by(of_kind(rows, "accuracy"), "part", "epsilon", "arm").items()
        if arm in GRIDS
    ]  # fmt: skip
    found.append(markdown(("grid", "test accuracy at every rate, %"), tried))
    led: dict[str, list[str]] = {}
    for fit, _, rates, right in ends(rows):
        text = f"{10 ** mean_log(rates):.2g} ({min(rates):.2g} to {max(rates):.2g})"
        led.setdefault(fit, []).append(f"{text}, {mean(right, 'value'):.1f} %")
    heads = [f"from {start:g}" for start in STARTS]
    found.append(
        markdown(("last rate (seeds), accuracy", *heads), [(k, *v) for k, v in led.items()])
    )
    noise = noises(rows)
    if noise:
        names = list(next(iter(noise.values())))
        body = [
            (part, f"{float(epsilon):g}", *(f"{values[name]:.3f}" for name in names))
            for (part, epsilon), values in noise.items()
        ]
        found.append(markdown(("noise multipliers at K = 5", "ε", *names), body))
    if sizes := magnitudes(rows):
        body = [(k, f"{a:.4f}", f"{b:.3f}", f"{b / a:.0f}") for k, (a, b) in sizes.items()]
        head = ("K", "noise on a mean loss", "on a mean gradient", "times")
        found.append(markdown(head, body))
    went = courses(rows)
    if went:
        shown = [
            (
                arm,
                *(
                    f"{values[name]:.3g}" if name in values else "–"
                    for name in next(iter(went.values()))
                ),
            )
            for arm, values in went.items()
        ]
        found.append(markdown(("LoRA, ε = 1", *next(iter(went.values()))), shown))
    if at_less_noise := of_kind(rows, "regime"):
        found.append(regime.table(at_less_noise))
    found += curves.tables(of_kind(rows, "curve"))
    times = ratios(rows)
    if times:
        body = [("a step over one of DP-AdamW", *(f"{value:.2f}" for value in times.values()))]
        found.append(markdown(("times", *(name for _, name in times)), body))
    return found


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return how rates move from every start, and how the noise splits."""
    moving = [
        {"step": r["at"], "learning rate": r["value"], "start": n.split(":")[0].split(", ")[1],
         "fit": f"{r['part']}, fit: {r['arm']}"}
        for r in of_kind(rows, "rate")
        if (n := r["line"]).endswith("learning_rate") and r["seed"] == "0"
    ]  # fmt: skip
    split = [
        {"K": r["at"], "noise multiplier": r["value"], "line": r["line"],
         "setting": f"{r['part']}, ε = {float(r['epsilon']):g}"}
        for r in of_kind(rows, "noise")
    ]  # fmt: skip
    return {
        "rates": plot_lines(
            moving, x="step", y="learning rate", line="start", panel="fit", log="y"
        ),
        "noise": plot_lines(
            split, x="K", y="noise multiplier", line="line", panel="setting", log="xy"
        ),
    }


SHEET = Sheet(
    name="hyfreedp_tables",
    key=("what", "part", "epsilon", "arm"),
    values=("line", "seed", "at", "value"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"what": "accuracy", "arm": OURS}, "value", stand_in=True),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
