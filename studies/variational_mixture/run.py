"""Private variational inference for a Gaussian mixture: ADADP against DP-SGD and DP-Adam.

python -m studies.variational_mixture.run        # goes on where it was
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from privtune.accounting import epsilon
from privtune.plots import plot_lines
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from studies.harness import Split, fit, secrets_for
from studies.sheet import Again, Options, Sheet, by, last, markdown, mean, pm
from studies.variational_mixture import arms, task
from studies.variational_mixture.arms import ADAM, ADAPTIVE, SGD

if TYPE_CHECKING:
    import plotly.graph_objects as go

DELTA, RECORDS, TESTS, BATCH, SEEDS = 1e-6, 1000, 2000, 20, 4
STEPS = {1.2: 3000, 6.0: 8000, 0.0: 3000}
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.75, 1.0)  # of the steps, that are kept
PLAIN, NATURAL = "plain, C = 1", "natural, C = 1"
SHORT = ("natural, C = 0.1", "plain, C = 0.1")
PLACES = ("best", "second", "third")


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every σ, kind of gradient and method."""
    if options.smoke:
        for kind, arm in ((PLAIN, SGD), (NATURAL, ADAPTIVE)):
            yield {"sigma": 1.2, "gradient": kind, "arm": arm}
        return
    for sigma in (6.0, 1.2):
        for arm in (ADAPTIVE, SGD, ADAM, arms.KEPT, arms.END):
            if (arm, sigma) != (arms.END, 6.0):
                yield {"sigma": sigma, "gradient": PLAIN, "arm": arm}
    for kind in (NATURAL, *SHORT):
        for arm in (ADAPTIVE, SGD):
            yield {"sigma": 1.2, "gradient": kind, "arm": arm}
    yield {"sigma": 0.0, "gradient": PLAIN, "arm": arms.EXACT}
    for arm in arms.TOLERANCES:
        yield {"sigma": 1.2, "gradient": PLAIN, "arm": arm}


@functools.cache
def spent(sigma: float, steps: int) -> float:
    """Return the ε after some steps: the same for every arm, since each step is one release."""
    method = FixedDPSGD(sigma)
    return epsilon(method.event(Schedule(RECORDS, BATCH / RECORDS, steps)), DELTA).epsilon


@functools.cache
def data() -> tuple[Split, torch.Tensor]:
    """Return the records, the same for every seed, and draws to judge a posterior at."""
    x, tests = task.records(train=RECORDS, tests=TESTS)
    draws = torch.randn((200, task.LATENT), generator=torch.Generator().manual_seed(1))
    return Split(x, torch.zeros(RECORDS), tests, torch.zeros(TESTS)), draws


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train all rates and seeds of an arm in one pass; a line for each at several times."""
    sigma, arm, kind = cell["sigma"], cell["arm"], cell["gradient"]
    split, draws = data()
    steps, seeds = (60, 5) if options.smoke else (STEPS[sigma], SEEDS)
    method = arms.method_of(arm, sigma)
    grid = arms.LONGER if (arm, kind in SHORT) == (SGD, True) else arms.GRIDS.get(arm, (-2,))
    rates = [10 ** (i / 2) for i in grid]
    pairs = [(rate, seed) for rate in rates for seed in range(seeds)]
    norm = 0.1 if kind in SHORT else 1.0
    ends = sorted(
        {max(1, round(steps * share)) - 1 for share in SHARES[-1:] * options.smoke or SHARES}
    )
    found = fit(
        method,
        Schedule(RECORDS, BATCH / RECORDS, steps),
        model=functools.partial(task.Posterior, RECORDS, natural=kind.startswith("natural")),
        split=split,
        loss=task.bound_of,
        candidates=[{"learning_rate": rate, "max_grad_norm": norm} for rate, _ in pairs],
        secrets=[secrets_for("variational_mixture", seed, 1)[0] for _, seed in pairs],
        snapshots_at=ends,
    )
    lines = []
    for k, (rate, seed) in enumerate(pairs):
        for step in ends:
            errors = found.report.get("error", found.report["learning_rate"])[1 : step + 1 : 2, k]
            compared = errors[: max(1, round(steps * getattr(method, "adapt_share", 0.0) / 2))]
            tolerance = getattr(method, "tolerance", math.inf)
            judged = task.held_out(found.snapshots[k][step], split.x_test, draws)
            lines.append(
                {
                    "seed": seed,
                    "initial_rate": f"{rate:.4g}",
                    "step": step + 1,
                    "epsilon": round(spent(sigma, step + 1), 4) if sigma else "inf",
                    "rate": f"{found.report['learning_rate'][step, k].item():.4g}",
                    "above": round((compared > tolerance).double().mean().item(), 4),
                    "log_likelihood": round(judged, 4),
                }
            )
    return lines


def final(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the lines of finished trainings."""
    return last(rows, "step", *SHEET.key)


def ranked(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the initial rates of one arm, the best first."""
    groups = by(final(rows), "initial_rate")
    return [
        rate for (rate,) in sorted(groups, key=lambda key: -mean(groups[key], "log_likelihood"))
    ]


def lines_of(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return what Figure 5 shows: ADADP from 0.1, the others at their three best rates."""
    found = []
    for (_, _, arm), group in by(rows, "sigma", "gradient", "arm").items():
        names = {f"{arm}, {n} rate": rate for n, rate in zip(PLACES, ranked(group), strict=False)}
        for line, rate in ({arm: "0.1"} if arm.startswith("ADADP") else names).items():
            found += [{**row, "arm": line} for row in group if row["initial_rate"] == rate]
    return found


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return the held-out log likelihood of every line, and how far ADADP's rates are apart."""
    found = {
        f"σ = {float(sigma):g}, {kind}: {arm}": mean(group, "log_likelihood")
        for (sigma, kind, arm), group in by(final(lines_of(rows)), *SHEET.key).items()
    }
    for (sigma, kind, arm), group in by(final(rows), *SHEET.key).items():
        if (kind, arm) == (PLAIN, ADAPTIVE):
            means = [mean(each, "rate") for each in by(group, "initial_rate").values()]
            found[f"σ = {float(sigma):g}: largest over smallest rate"] = max(means) / min(means)
    return found


def tables(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of Figure 5, the kinds of gradients, and ADADP's rate from three starts."""
    found = []
    for (sigma, kind), group in by(final(lines_of(rows)), "sigma", "gradient").items():
        spends = f"σ = {float(sigma):g}, ε = {float(group[0]['epsilon']):.3g}, {kind}"
        lines = [
            (
                arm,
                pm(of, "log_likelihood", digits=3),
                f"{mean(of, 'rate'):.2g}",
                f"{100 * mean(of, 'above'):.0f}%",
            )
            for (arm,), of in by(group, "arm").items()
        ]
        found.append(markdown((spends, "log likelihood", "rate before decay", "above τ"), lines))
    lines = [
        (
            f"{float(sigma):g}",
            start,
            *(f"{mean(of, 'rate'):.2g}" for of in by(each, "step").values()),
        )
        for (sigma, kind, arm, start), each in by(
            rows, "sigma", "gradient", "arm", "initial_rate"
        ).items()
        if (kind, arm) == (PLAIN, ADAPTIVE)
    ]
    head = ("σ", "η₀", *(f"{100 * part:g}%" for part in SHARES))
    return [*found, markdown(head, lines)]


def charts(rows: Sequence[Mapping[str, str]]) -> dict[str, go.Figure]:
    """Return Figure 5: held-out log likelihood against ε, at both σ."""
    lines = {ADAPTIVE, f"{ADAM}, best rate", *(f"{SGD}, {place} rate" for place in PLACES)}
    whole = [row for row in lines_of(rows) if row["gradient"] == PLAIN and row["arm"] in lines]
    shown = [row for row in whole if float(row["step"]) >= 300.0]  # before, all are far below
    for row in shown:
        row["panel"] = f"σ = {float(row['sigma']):g}"
    return {"chart": plot_lines(shown, x="epsilon", y="log_likelihood", line="arm", panel="panel")}


SHEET = Sheet(
    name="variational_mixture",
    key=("sigma", "gradient", "arm"),
    values=("seed", "initial_rate", "step", "epsilon", "rate", "above", "log_likelihood"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {"gradient": PLAIN, "arm": SGD, "step": "60", "initial_rate": "0.1"},
        "log_likelihood",
        stand_in=True,
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
