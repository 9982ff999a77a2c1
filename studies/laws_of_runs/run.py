"""What a law of the number of runs costs and what it buys: their theorems, dp-accounting, and ours.

python -m studies.laws_of_runs.run        # a minute of processor time; nothing is trained
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import integrate, optimize

from privtune import accounting as dp
from privtune.accounting.compare import compare
from privtune.accounting.curves import ORDERS
from privtune.accounting.rdp import rdp_curve
from privtune.plots import plot_lines
from studies.sheet import Again, Options, Sheet, by, markdown

if TYPE_CHECKING:
    import plotly.graph_objects as go

GAUSSIAN, SGD = "0.1-zCDP Gaussian", "DP-SGD"
BASES: dict[str, tuple[dp.Event, float]] = {
    GAUSSIAN: (dp.Gaussian(math.sqrt(5.0)), 1e-6),
    SGD: (dp.Repeated(14063, dp.PoissonSampled(256 / 60000, dp.Gaussian(1.1))), 1e-5),
}
LAWS: dict[str, Callable[[float], dp.RunLaw]] = {
    "fixed number": lambda mean: dp.Binomial(round(mean), round(mean)),
    "Poisson": dp.Poisson,
    "η = 2": lambda mean: dp.TruncatedNegativeBinomial(2.0, mean),
    "η = 1, geometric": dp.Geometric,
    "η = 0.5": lambda mean: dp.TruncatedNegativeBinomial(0.5, mean),
    "η = 0, logarithmic": dp.Logarithmic,
    "η = -0.5": lambda mean: dp.TruncatedNegativeBinomial(-0.5, mean),
}
RUNS, QUANTILES = (3, 10, 30, 100, 300), (0.8, 0.9, 0.95)
# However many runs, a shape of -0.5 finds no more than quantile 2/3; the logarithmic law finds 0.95
# with 10^7 of them.
OUT_OF_REACH = {("η = 0, logarithmic", "quantile 0.95")} | {
    ("η = -0.5", f"quantile {each}") for each in QUANTILES
}
THEIRS, TOOL, OURS, LOWER = "their theorem", "dp-accounting", "ours", "lower bound"
SMALLEST, ORDER_2, ORDER_10 = "smallest Rényi divergence", "of order 2", "of order 10"


def quantile_of(law: dp.RunLaw) -> float:
    """Return the expected quantile of the best of K candidates; that of no candidate is 0."""
    # The best of k uniform numbers has mean k/(k + 1), so the law has 1 - E[1/(K + 1)].
    missing, _ = integrate.quad(lambda x: float(law.pgf(x)), 0.0, 1.0, limit=500)
    return 1.0 - float(missing)


def law_for(name: str, goal: str) -> dp.RunLaw:
    """Return the law of this family with a mean ("30 runs") or a quantile ("quantile 0.9")."""
    family = LAWS[name]
    if goal.endswith(" runs"):
        return family(float(goal.removesuffix(" runs")))
    wanted = float(goal.removeprefix("quantile "))
    if name == "fixed number":
        return family(wanted / (1.0 - wanted))

    def excess(log_mean: float) -> float:
        return quantile_of(family(math.exp(log_mean))) - wanted

    return family(math.exp(optimize.brentq(excess, 0.01, math.log(1e5), xtol=1e-9)))


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield one run alone, then every law at every number of runs and for every quantile."""
    goals = [*(f"{runs} runs" for runs in RUNS), *(f"quantile {each}" for each in QUANTILES)]
    for base in [GAUSSIAN] if options.smoke else BASES:
        yield {"base": base, "law": "one run", "goal": "1 runs"}
        for goal in [goals[1], goals[-1]] if options.smoke else goals:
            for law in list(LAWS)[:3] if options.smoke else LAWS:
                if (law, goal) not in OUT_OF_REACH:
                    yield {"base": base, "law": law, "goal": goal}


def fill(cell: Mapping[str, Any], _options: Options) -> list[dict[str, Any]]:
    """Account for one selection in every way."""
    base, delta = BASES[cell["base"]]
    law = None if cell["law"] == "one run" else law_for(cell["law"], cell["goal"])
    event = base if law is None else dp.PrivateSelection(base, law)
    # They have no theorem for a fixed number: it is charged as if every run were released.
    fixed = cell["law"] == "fixed number"
    theirs = dp.Repeated(law.n, base) if fixed and isinstance(law, dp.Binomial) else event
    (tool,) = compare(theirs, delta, tools=["dp-accounting RDP"]).others
    curve = rdp_curve(theirs)
    said = {
        THEIRS: dp.epsilon(theirs, delta, method="rdp").epsilon,
        TOOL: tool.epsilon,
        OURS: dp.epsilon(event, delta).epsilon,
        LOWER: dp.lower_bound(event, delta),
        SMALLEST: float(curve.min()),
    }
    if law is None:
        said |= {ORDER_2: float(np.interp(2.0, ORDERS, curve))}
        said |= {ORDER_10: float(np.interp(10.0, ORDERS, curve))}
    runs, quantile = (1.0, 0.5) if law is None else (law.expected_runs, quantile_of(law))
    shared = {"runs": f"{runs:.6g}", "quantile": f"{quantile:.6g}"}
    known = {name: f"{value:.6g}" for name, value in said.items() if value is not None}
    return [{"account": name, "epsilon": value, **shared} for name, value in known.items()]


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return what the published script plots, ours and theirs at 10 runs and at quantile 0.9."""
    said = {(r["base"], r["law"], r["goal"], r["account"]): float(r["epsilon"]) for r in rows}
    found = {}
    for order in (ORDER_2, ORDER_10):
        value = said.get((SGD, "one run", "1 runs", order), math.nan)
        found[f"Rényi divergence of DP-SGD {order}"] = value
    for law in ("η = 1, geometric", "Poisson"):
        value = said.get((SGD, law, "10 runs", SMALLEST), math.nan)
        found[f"Figure 7, horizontal: {law}, mean 10"] = value
    for (base, law, goal, name), value in said.items():
        if name in (THEIRS, OURS) and goal in ("1 runs", "10 runs", "quantile 0.9"):
            found[f"ε of {base}, {law}, {goal}, {name}"] = value
    return found


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return ε by every account at equal runs, then what a quantile costs under each law."""
    found = []
    for (base,), group in by(rows, "base").items():
        said = {(r["law"], r["goal"], r["account"]): r for r in group}
        lines = [
            (law, runs, *(_epsilon(said.get((law, f"{runs} runs", a))) for a in _ACCOUNTS))
            for law in ["one run", *LAWS]
            for runs in ([1] if law == "one run" else [10, 100])
        ]
        head = (base, "expected runs", *_ACCOUNTS)
        found.append(markdown(head, [line for line in lines if line[-1]]))
        lines = [
            (goal, law, f"{float(cost['runs']):.1f}", _epsilon(theirs), _epsilon(cost))
            for goal in QUANTILES
            for law in LAWS
            if (cost := said.get((law, f"quantile {goal}", OURS)))
            and (theirs := said.get((law, f"quantile {goal}", THEIRS)))
        ]
        found.append(markdown((f"{base}: quantile", "law", "expected runs", THEIRS, OURS), lines))
    return found


_ACCOUNTS = (THEIRS, TOOL, OURS, LOWER)


def _epsilon(row: Mapping[str, str] | None) -> str:
    return "" if row is None else f"{float(row['epsilon']):.2f}"


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return ε of DP-SGD against runs by every account, and what is missed against ε."""
    kept = [r for r in rows if r["goal"].endswith("runs") and r["law"] != "one run"]
    base = kept[-1]["base"]
    price = [
        {"ε": r["epsilon"], "expected runs": r["runs"], "law": r["law"], "account": r["account"]}
        for r in kept
        if r["base"] == base and r["account"] in _ACCOUNTS
    ]
    power = [
        {
            "ε": r["epsilon"],
            "quantile missed": f"{1.0 - float(r['quantile']):.6g}",
            "law": r["law"],
            "account": f"{r['base']}, {r['account']}",
        }
        for r in kept
        if r["account"] in (THEIRS, OURS)
    ]
    terms: dict[str, Any] = {"line": "law", "panel": "account", "log": "xy"}
    return {
        "price": plot_lines(price, x="expected runs", y="ε", **terms),
        "power": plot_lines(power, x="ε", y="quantile missed", **terms),
    }


SHEET = Sheet(
    name="laws_of_runs",
    key=("base", "law", "goal"),
    values=("account", "epsilon", "runs", "quantile"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {"base": SGD, "law": "η = 1, geometric", "goal": "10 runs", "account": OURS}, "epsilon"
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
