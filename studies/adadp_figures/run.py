"""ADADP, DP-Adam and DP-SGD at several σ: rates tuned at each, tuned elsewhere, and not tuned.

python -m studies.adadp_figures.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.accounting import epsilon
from privtune.plots import plot_lines
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from studies.adadp_figures import arms
from studies.adadp_figures.arms import ADAM, ADAPTIVE, DECAYED, PUBLIC, SGD, SMALL
from studies.adadp_figures.task import CONV, EVEN, POOLED, SOFTMAX, UNEVEN, net
from studies.harness import accuracies, fit, secrets_for
from studies.sheet import STRATEGY_OF, Again, Options, Sheet, by, last, markdown, mean, pm

if TYPE_CHECKING:
    import plotly.graph_objects as go

DELTA, BATCH, POINTS = 1e-6, 200, 5
TUNED_AT = "2.0"
SEEDS = {POOLED: 3, CONV: 3, SOFTMAX: 3, EVEN: 4, UNEVEN: 4}
CLIENTS = 100  # expected in a round


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every network, σ and method."""
    if options.smoke:
        pairs = ((POOLED, DECAYED), (POOLED, SGD), (POOLED, ADAM), (SOFTMAX, SMALL[1]))
        for name, arm in (*pairs, (UNEVEN, ADAPTIVE), (EVEN, PUBLIC)):
            yield {"net": name, "sigma": float(TUNED_AT), "arm": arm}
        return
    for name, sigmas in ((POOLED, (2.0, 4.0, 6.0, 8.0)), (CONV, (2.0, 8.0))):
        for sigma in sigmas:
            for arm in (ADAPTIVE, DECAYED, SGD, ADAM):
                if arm != ADAM or sigma in (2.0, 8.0):
                    yield {"net": name, "sigma": sigma, "arm": arm}
    for arm in (*SMALL, SGD):
        yield {"net": SOFTMAX, "sigma": 2.0, "arm": arm}
    for sigma in (2.0, 4.0, 6.0, 8.0):
        for arm in (arms.FALLING,) if sigma == 6.0 else arms.WHY:
            yield {"net": POOLED, "sigma": sigma, "arm": arm}
    for name in (UNEVEN, EVEN):
        for arm in (ADAPTIVE, DECAYED, SGD, PUBLIC):
            yield {"net": name, "sigma": 1.0, "arm": arm}
    for name, sigma in itertools.product((POOLED, CONV), (2.0, 8.0)):
        yield {"net": name, "sigma": sigma, "arm": PUBLIC}


@functools.cache
def spent(sigma: float, records: int, rate: float, steps: int) -> float:
    """Return the ε after some steps: the same for every arm, since each step is one release."""
    return epsilon(FixedDPSGD(sigma).event(Schedule(records, rate, steps)), DELTA).epsilon


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train all rates and seeds of an arm in one pass; one line for each at five times."""
    name, arm, sigma = cell["net"], cell["arm"], cell["sigma"]
    task = net(name, options.data, smoke=options.smoke)
    epochs = 1 if options.smoke else arms.EPOCHS
    schedule = Schedule.from_epochs(
        records=len(task.split),
        expected_batch_size=min(CLIENTS if task.clients else BATCH, len(task.split) // 4),
        epochs=epochs,
    )
    method, seeds = arms.method_of(arm, sigma), range(5 if options.smoke else SEEDS[name])
    rates = [10 ** (i / 2) for i in arms.GRIDS.get((arm, name), [-2])][: 2 if options.smoke else 9]
    pairs = [(rate, seed) for rate in rates for seed in seeds]
    times = sorted({round(schedule.steps * (i + 1) / POINTS) - 1 for i in range(POINTS)})
    found = fit(
        method,
        schedule,
        model=task.model,
        split=task.split,
        candidates=[
            {} if arm == PUBLIC else {"learning_rate": rate, "max_grad_norm": 1.0}
            for rate, _ in pairs
        ],
        loss=task.loss,
        secrets=[secrets_for("adadp_figures", seed, 1)[0] for _, seed in pairs],
        snapshots_at=times,
    )
    lines = []
    for k, (rate, seed) in enumerate(pairs):
        rows = [found.snapshots[k][step] for step in times]
        for step, accuracy in zip(times, accuracies(task.model, rows, task.split), strict=True):
            errors = found.report.get("error", found.report["learning_rate"])[1 : step + 1 : 2, k]
            above = (errors > method.tolerance).double().mean().item() if arm in SMALL else 0.0
            lines.append(
                {
                    "seed": seed,
                    "initial_rate": "" if arm == PUBLIC else f"{rate:.4g}",
                    "epoch": round((step + 1) * schedule.sample_rate, 2),
                    "epsilon": round(
                        spent(sigma, len(task.split), schedule.sample_rate, step + 1), 4
                    ),
                    "rate": f"{found.report['learning_rate'][step, k].item():.4g}",
                    "above": round(above, 4),
                    "accuracy": round(accuracy, 2),
                }
            )
    return lines


def ends(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the lines of finished trainings."""
    return last(rows, "epoch", *SHEET.key)


def ranked(rows: Sequence[Mapping[str, str]], name: str, sigma: str, arm: str) -> list[str]:
    """Return an arm's initial rates, the best first: by finished test accuracy, as in the paper."""
    mine = [r for r in ends(rows) if (r["net"], r["sigma"], r["arm"]) == (name, sigma, arm)]
    groups = by(mine, "initial_rate")
    return [rate for (rate,) in sorted(groups, key=lambda key: -mean(groups[key], "accuracy"))]


def lines_of(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return the lines that the figures show: no tuning, tuning at each σ, tuning at σ = 2."""
    found: list[dict[str, str]] = []
    for (name, sigma, arm), group in by(rows, "net", "sigma", "arm").items():
        rates = ranked(rows, name, sigma, arm)
        told = {f"{arm}, best rate": rates[:1]}
        if arm == ADAM:
            told[f"{arm}, second best"] = rates[1:2]
        if arm == SGD and name not in (EVEN, UNEVEN):
            told[f"{arm}, rate of σ = 2"] = ranked(rows, name, TUNED_AT, SGD)[:1]
        if (name, arm) == (UNEVEN, SGD):
            told[f"{arm}, best rate with all digits"] = ranked(rows, EVEN, sigma, SGD)[:1]
        if arm not in (ADAM, SGD):
            told = {arm: rates}
        found += [
            {**row, "arm": line}
            for line, chosen in told.items()
            for row in group
            if row["initial_rate"] in chosen
        ]
    return found


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return the accuracy of every line at every σ."""
    return {
        f"{name}, σ = {float(sigma):g}: {arm}": mean(group, "accuracy")
        for (name, sigma, arm), group in by(ends(lines_of(rows)), "net", "sigma", "arm").items()
    }


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return for each network its lines, a column each σ, and DP-SGD's accuracy by rate."""
    found = []
    for (name,), whole in by(ends(lines_of(rows)), "net").items():
        sigmas = [sigma for (sigma,) in by(whole, "sigma")]
        head = [f"σ = {float(s):g}, ε = {epsilon_of(whole, s)}" for s in sigmas]
        lines = []
        for (arm,), of in by(whole, "arm").items():
            at = by(of, "sigma")
            lines.append([arm, *(entry(at[s,]) if (s,) in at else "–" for s in sigmas)])
        found.append(markdown([name, *head], lines))
    grid = [row for row in ends(rows) if row["arm"] == SGD]
    rates = [rate for (rate,) in sorted(by(grid, "initial_rate"), key=lambda key: float(key[0]))]
    lines = []
    for (name, sigma), of in by(grid, "net", "sigma").items():
        at = by(of, "initial_rate")
        cells_of = [f"{mean(at[r,], 'accuracy'):.1f}" if (r,) in at else "–" for r in rates]
        lines.append([f"{name}, σ = {float(sigma):g}", *cells_of])
    return [*found, markdown(["DP-SGD at a rate of", *rates], lines)]


def epsilon_of(rows: Sequence[Mapping[str, str]], sigma: str) -> str:
    """Return the ε of a training at a σ."""
    return next(f"{float(r['epsilon']):.2g}" for r in rows if r["sigma"] == sigma)


def entry(rows: Sequence[Mapping[str, str]]) -> str:
    """Return accuracy, rate, and in the small network the share of steps above the tolerance."""
    above = mean(rows, "above")
    share = f"; {100 * above:.0f}% above τ" if above else ""
    return f"{pm(rows, 'accuracy')} ({mean(rows, 'rate'):.2g}{share})"


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return accuracy against σ for each network, and against the epochs for one."""
    nets = [row for row in lines_of(rows) if row["net"] in (POOLED, CONV)]
    shown = [row for row in nets if row["arm"] not in arms.WHY]
    times = [row for row in shown if row["net"] == POOLED and row["sigma"] in (TUNED_AT, "8.0")]
    for row in times:
        row["panel"] = f"{row['net']}, σ = {float(row['sigma']):g}"
    return {
        "chart": plot_lines(
            ends(shown), x="sigma", y="accuracy", line="arm", panel="net", strategies=STRATEGY_OF
        ),
        "epochs": plot_lines(
            times, x="epoch", y="accuracy", line="arm", panel="panel", strategies=STRATEGY_OF
        ),
    }


SHEET = Sheet(
    name="adadp_figures",
    key=("net", "sigma", "arm"),
    values=("seed", "initial_rate", "epoch", "epsilon", "rate", "above", "accuracy"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {"net": POOLED, "arm": SGD, "epoch": "1.0", "initial_rate": "0.1"},
        "accuracy",
        stand_in=True,
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
