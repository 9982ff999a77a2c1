"""ADADP on MNIST: does it find the learning rate from any start, and is it as good as a grid?

python -m studies.adadp.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from torch import nn

from privtune.accounting import epsilon
from privtune.plots import plot_lines
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import ADADP, FixedDPSGD
from studies.harness import accuracies, fit, mnist, secrets_for
from studies.sheet import Again, Options, Row, Sheet, by, markdown, mean, pm

SIGMA, DELTA, BATCH, CLIP, SEEDS = 2.0, 1e-6, 200, 1.0, 1
HIDDEN = (256, 256, 256)  # 784-256-256-256-10 without biases: the paper's 334,336 parameters
FOUND, ADAPTS, GRID = "ADADP, rate from any start", "ADADP, adapting to the end", "DP-SGD"
EARLY = {f"ADADP, fixed after {n} epochs, decay (5.1)": n for n in (2, 10)}
STARTS = (0.001, 0.01, 0.1, 1.0, 10.0)
RATES = {4: (0.1, 0.316, 1.0, 3.16), 20: (0.01, 0.0316, 0.1, 0.316, 1.0, 3.16, 10.0)}


def network(hidden: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for one, two in itertools.pairwise((784, *hidden, 10)):
        layers += [nn.Linear(one, two, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the starts, then 4 epochs, then the paper's 20: half an hour on an idle core."""
    if options.smoke:
        yield from ({"epochs": 1, "arm": arm} for arm in (FOUND, ADAPTS, GRID))
        return
    yield {"epochs": 2, "arm": FOUND}
    for epochs, arms in ((4, (ADAPTS, GRID)), (20, (ADAPTS, *EARLY, GRID))):
        for arm in arms:
            yield {"epochs": epochs, "arm": arm}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train an arm at all of its rates in one pass."""
    epochs, arm = cell["epochs"], cell["arm"]
    split = mnist(options.data, smoke=options.smoke)
    batch, hidden = (60, (16,)) if options.smoke else (BATCH, HIDDEN)
    schedule = Schedule.from_epochs(records=len(split), expected_batch_size=batch, epochs=epochs)
    method: Any = FixedDPSGD(SIGMA)
    if arm in EARLY:
        share = EARLY[arm] / epochs
        method = ADADP(SIGMA, tolerance=1.0, adapt_share=share, decay=0.1)
    elif arm != GRID:
        method = ADADP(SIGMA, tolerance=1.0, adapt_share=1.0)
    starts = STARTS if arm == FOUND else RATES.get(epochs, (0.1, 1.0)) if arm == GRID else (0.1,)
    pairs = [(rate, seed) for rate in starts for seed in range(5 if options.smoke else SEEDS)]
    found = fit(
        method,
        schedule,
        model=lambda: network(hidden),
        split=split,
        candidates=[{"learning_rate": rate, "max_grad_norm": CLIP} for rate, _ in pairs],
        secrets=[secrets_for(f"adadp/{arm}/{rate}", seed, 1)[0] for rate, seed in pairs],
    )
    tail = found.report["learning_rate"][-schedule.steps // 4 :].log().mean(dim=0).exp().tolist()
    right = accuracies(lambda: network(hidden), found.params, split)
    spent = f"{epsilon(method.event(schedule), DELTA).epsilon:.4f}"
    return [
        {
            "start": start,
            "seed": seed,
            "rate": f"{rate:.5g}",
            "accuracy": round(value, 2),
            "epsilon": spent,
        }
        for (start, seed), rate, value in zip(pairs, tail, right, strict=True)
    ]


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the largest over the smallest rate that is found, and every accuracy."""
    found = {}
    for (epochs, arm), of in by(rows, "epochs", "arm").items():
        if arm == FOUND:
            rates = [float(row["rate"]) for row in of]
            found["largest over smallest rate"] = max(rates) / min(rates)
            continue
        for (start,), each in by(of, "start").items():
            at = f" at {start}" if arm == GRID else ""
            found[f"{arm}{at}, {epochs} epochs"] = mean(each, "accuracy")
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the rate from every start, then the accuracies by the number of epochs."""
    found, lines = [], {}
    whole = by((row for row in rows if row["arm"] != FOUND), "epochs")
    for (arm, start), of in by((r for r in rows if r["arm"] != FOUND), "arm", "start").items():
        at = by(of, "epochs")
        name = f"{arm}, constant {start}" if arm == GRID else arm
        lines[name] = [pm(at[e], "accuracy", digits=2) if e in at else "–" for e in whole]
    for (epochs, arm), of in by(rows, "epochs", "arm").items():
        if arm == FOUND:
            head = ("η₀", *(start for (start,) in by(of, "start")))
            rates = (pm(each, "rate", digits=5) for each in by(of, "start").values())
            found.append(markdown(head, [(f"rate after {epochs} epochs", *rates)]))
    head = (f"{e} epochs, ε = {float(of[0]['epsilon']):.2f}" for (e,), of in whole.items())
    return [*found, markdown(("method", *head), [(name, *each) for name, each in lines.items()])]


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return accuracy against the rate at the start."""
    drawn = [{**r, "panel": f"{r['epochs']} epochs"} for r in rows if r["arm"] != FOUND]
    told: dict[str, Any] = {"x": "start", "y": "accuracy", "line": "arm", "panel": "panel"}
    return {"chart": plot_lines(drawn, **told, log="x")}


SHEET = Sheet(
    name="adadp",
    key=("epochs", "arm"),
    values=("start", "seed", "rate", "accuracy", "epsilon"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"arm": ADAPTS}, "accuracy", stand_in=True),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
