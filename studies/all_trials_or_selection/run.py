"""What candidates cost and reach if all are released, if the best alone is, and by linear scaling.

python -m studies.all_trials_or_selection.run        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from privtune import accounting as dp
from privtune.plots import plot_lines
from studies.all_trials_or_selection.work import (
    COUNTS,
    DELTA,
    OPTIMIZERS,
    RATE,
    STEPS,
    accuracies,
)
from studies.sheet import STRATEGY_OF, Again, Options, Sheet, by, markdown, mean, pm

if TYPE_CHECKING:
    import plotly.graph_objects as go

STEP = dp.PoissonSampled(RATE, dp.Gaussian(1.0))
PRICE, LEFT, REACHED = "in all", "left for one", "accuracy with "
ALL_RENYI, ALL = "all, Rényi", "all, ours"
LIU_TALWAR, PAPERNOT_STEINKE, BEST = "best, Liu–Talwar", "best, Papernot–Steinke", "best, ours"
LINEAR = "linear scaling, ours"
ACCOUNTS = (ALL_RENYI, ALL, LIU_TALWAR, PAPERNOT_STEINKE, BEST, LINEAR)
PAIRS = ((ALL_RENYI, LIU_TALWAR), (ALL_RENYI, PAPERNOT_STEINKE), (ALL, BEST), (ALL, LINEAR))
CANDIDATES = (2, 3, 4, 5, 7, 10, 14, 20, 26, 28, 30, 32, 40, 50, 70, 100)
SHOWN = (2, 5, 10, 20, 30, 50, 100)
EPSILONS = (0.5, 1.0, 4.0)
SHARES = (0.1, 0.2)  # of the final training's ε: one candidate of either search of linear scaling


@cache
def noise_of(epsilon: float) -> float:
    """Return the noise multiplier with which one training costs this ε alone."""
    return dp.calibrate(dp.Repeated(STEPS, STEP), epsilon=epsilon, delta=DELTA).scale


def training(epsilon: float) -> dp.Event:
    """Return one training of this ε alone: 20 epochs of digits in batches of 64."""
    return dp.Repeated(STEPS, dp.PoissonSampled(RATE, dp.Gaussian(noise_of(epsilon))))


def linear(count: int, final: float) -> dp.Event:
    """Return two searches of half of the candidates each, at small shares of ε, and a training."""
    low, high = (training(share * final) for share in SHARES)
    half = count // 2
    return dp.Composed((dp.Repeated(count - half, low), dp.Repeated(half, high), training(final)))


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield what candidates of one ε each cost in all, and what a whole of one ε leaves for each."""
    for what in (PRICE, LEFT):
        for epsilon in EPSILONS[1:2] if options.smoke else EPSILONS:
            counts = CANDIDATES if what == PRICE else SHOWN
            for count in counts[:2] if options.smoke else counts:
                yield {"what": what, "epsilon": epsilon, "candidates": count}
    for count in (2,) if options.smoke else COUNTS:
        for epsilon in EPSILONS[2:] if options.smoke else EPSILONS[1:]:
            for optimizer in OPTIMIZERS:
                yield {"what": REACHED + optimizer, "epsilon": epsilon, "candidates": count}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Price some candidates, find what is left for one, or train them."""
    what, epsilon, count = cell["what"], cell["epsilon"], cell["candidates"]
    if what.startswith(REACHED):
        lines = accuracies(what.removeprefix(REACHED), epsilon, count, smoke=options.smoke)
    else:
        found = (prices if what == PRICE else shares)(epsilon, count)
        lines = [{"account": name, "value": value, "seed": ""} for name, value in found.items()]
    return [{**line, "value": f"{line['value']:.6g}"} for line in lines]


def prices(epsilon: float, count: int) -> dict[str, float]:
    """Return what candidates of this ε each cost in all; of linear scaling, the final training's."""
    run = training(epsilon)
    every, best = dp.Repeated(count, run), dp.PrivateSelection(run, dp.Geometric(count))
    chosen = dp.epsilon(best, DELTA)
    return {
        ALL_RENYI: dp.epsilon(every, DELTA, method="rdp").epsilon,
        ALL: dp.epsilon(every, DELTA).epsilon,
        LIU_TALWAR: chosen.bounds["liu-talwar"],
        PAPERNOT_STEINKE: dp.epsilon(best, DELTA, method="rdp").epsilon,
        BEST: chosen.epsilon,
        LINEAR: dp.epsilon(linear(count, epsilon), DELTA).epsilon,
    }


def shares(epsilon: float, count: int) -> dict[str, float]:
    """Return the ε of one training where all together may cost this: that decides what it learns."""
    run = dp.Repeated(STEPS, STEP)
    wholes = {
        ALL: dp.Repeated(count, run),
        BEST: dp.PrivateSelection(run, dp.Geometric(count)),
        LINEAR: linear(count, epsilon),
    }
    found = {}
    for name, whole in wholes.items():
        scale = dp.calibrate(whole, epsilon=epsilon, delta=DELTA).scale
        # All noise of the whole grows by one factor; that of linear scaling's last training, too.
        noise = scale * (noise_of(epsilon) if name == LINEAR else 1.0)
        step = dp.PoissonSampled(RATE, dp.Gaussian(noise))
        found[name] = dp.epsilon(dp.Repeated(STEPS, step), DELTA).epsilon
    return found


def crossing(rows: Sequence[Mapping[str, str]], every: str, other: str) -> float:
    """Return the least number of candidates, of those computed, from which the other is cheaper."""
    costs = {(int(r["candidates"]), r["account"]): float(r["value"]) for r in rows}
    counts = sorted({count for count, _ in costs})
    return float(next((n for n in counts if costs[n, other] < costs[n, every]), counts[-1] + 1))


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return from how many candidates on another way is cheaper, and values at 10 and 100."""
    found = {}
    for (what, epsilon), group in by(rows, "what", "epsilon").items():
        at = f"ε = {float(epsilon):g}"
        if what.startswith(REACHED):
            for (count, name), of in by(group, "candidates", "account").items():
                found[f"{what}, {count} candidates, {at}: {name}"] = mean(of, "value")
            continue
        if what == PRICE:
            for every, other in PAIRS:
                found[f"{other} below {every}, {at} each"] = crossing(group, every, other)
        for row in group:
            if row["candidates"] in ("10", "100"):
                name = f"{what}, {row['candidates']} candidates, {at}: {row['account']}"
                found[name] = float(row["value"])
    return found


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return where the lines cross, what candidates cost, and what is left for one training."""
    priced, lines = [r for r in rows if r["what"] == PRICE], []
    epsilons = list(by(priced, "epsilon"))
    for every, other in PAIRS:
        at = [crossing(of, every, other) for of in by(priced, "epsilon").values()]
        most = max(int(row["candidates"]) for row in priced)
        lines.append((other, every, *(f"{n:g}" if n <= most else f"over {most}" for n in at)))
    head = [f"ε = {float(epsilon):g} each" for (epsilon,) in epsilons]
    found = [markdown(("cheaper from so many candidates on", "than", *head), lines)]
    for (what, epsilon), group in by(rows, "what", "epsilon").items():
        if what.startswith(REACHED):
            continue
        accounts = list(by(group, "account"))
        each = "each" if what == PRICE else "in all"
        values = [
            (count, *(f"{float(row['value']):.2f}" for row in of))
            for (count,), of in by(group, "candidates").items()
            if int(count) in SHOWN
        ]
        name = f"candidates, ε = {float(epsilon):g} {each}; ε {what}"
        found.append(markdown((name, *(account for (account,) in accounts)), values))
    return found + [reached(group) for group in by(trained(rows), "epsilon").values()]


def trained(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the lines of accuracies."""
    return [row for row in rows if row["what"].startswith(REACHED)]


def reached(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the accuracies at one total ε: a line each arm, a column each number of candidates."""
    counts = [count for (count,) in by(rows, "candidates")]
    lines = []
    found = by(rows, "what", "account").items()
    for (what, name), of in sorted(found, key=lambda item: item[0][0], reverse=True):
        at = by(of, "candidates")
        values = (pm(at[n,], "value") if (n,) in at else "" for n in counts)
        lines.append((f"{what.removeprefix(REACHED)}: {name}", *values))
    return markdown((f"digits, ε = {float(rows[0]['epsilon']):g} in all: accuracy", *counts), lines)


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return the price of candidates and what is left for one, against their number."""
    lines = [
        {
            "candidates": row["candidates"],
            "ε": row["value"],
            "account": row["account"],
            "panel": f"ε = {float(row['epsilon']):g} "
            + ("each: in all" if row["what"] == PRICE else "in all: left for one"),
        }
        for row in rows
        if row["epsilon"] != "0.5" and not row["what"].startswith(REACHED)
    ]
    learnt = [
        {
            "candidates": count,
            "accuracy": row["value"],
            "account": row["account"],
            "panel": f"{row['what'].removeprefix(REACHED)}, ε = {float(row['epsilon']):g} in all",
        }
        for row in trained(rows)
        # One training at a given rate stands beside any number of candidates.
        for count in (map(str, COUNTS) if row["account"] == "a given rate" else [row["candidates"]])
    ]
    told: dict[str, Any] = {"x": "candidates", "line": "account", "panel": "panel"}
    return {
        "chart": plot_lines(lines, y="ε", log="xy", **told, strategies=STRATEGY_OF),
        "accuracy": plot_lines(learnt, y="accuracy", log="x", **told, strategies=STRATEGY_OF),
    }


SHEET = Sheet(
    name="all_trials_or_selection",
    key=("what", "epsilon", "candidates"),
    values=("account", "value", "seed"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {"what": f"{REACHED}SGD", "epsilon": "4.0", "candidates": "1", "account": "a given rate"},
        "value",
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
