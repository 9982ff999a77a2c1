"""HyFreeDP against Prodigy, D-Adaptation and an un-paid grid of learning rates, on MNIST.

python -m studies.hyfreedp.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import plotly.graph_objects as go
from torch import nn

from privtune.plots import plot_lines
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import AutomaticClipping, DAdaptation, HyFreeDP, Prodigy, PublicRate
from studies.harness import accuracies, fit, mnist, secrets_for
from studies.sheet import STRATEGY_OF, Again, Options, Row, Sheet, by, markdown, mean, pm

DELTA, BATCH, EPOCHS, SEEDS = 1e-5, 256, 3, 3
EPSILONS, GRID, RATES = (1.0, 3.0, 8.0), "un-paid grid", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
OURS = partial(HyFreeDP.for_budget, optimizer="sgd")
ARMS: dict[str, Callable[..., Any]] = {
    "hyfreedp K=5": partial(OURS, interval=5),
    "prodigy": Prodigy.for_budget,
    "d-adaptation": DAdaptation.for_budget,
    GRID: AutomaticClipping.for_budget,
    "public-rate": PublicRate.for_budget,
    "hyfreedp K=1": partial(OURS, interval=1),
    "hyfreedp K=10": partial(OURS, interval=10),
    "hyfreedp K=5, 5% more gradient noise": partial(OURS, interval=5, gradient_noise_factor=1.05),
    "hyfreedp K=5, Laplace noise on the losses": partial(OURS, interval=5, loss_noise="laplace"),
    "hyfreedp K=5, momentum 0.9": partial(OURS, interval=5, momentum=0.9),
    "hyfreedp K=5, AdamW": partial(HyFreeDP.for_budget, interval=5, optimizer="adamw"),
    "hyfreedp K=5, Algorithm 1 to the letter": partial(OURS, interval=5, fit="paper"),
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm at every ε, on the small network first."""
    if options.smoke:
        yield from ({"model": "mlp", "epsilon": 8.0, "arm": arm} for arm in (*ARMS,)[:4])
        return
    for model in MODELS:
        for arm in ARMS:
            for epsilon in EPSILONS:
                yield {"model": model, "epsilon": epsilon, "arm": arm}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train an arm with every seed, the grid at every rate as well, in one pass."""
    split, model = mnist(options.data, smoke=options.smoke), MODELS[cell["model"]]
    batch, epochs = (100, 1) if options.smoke else (BATCH, EPOCHS)
    schedule = Schedule.from_epochs(records=len(split), expected_batch_size=batch, epochs=epochs)
    grid = cell["arm"] == GRID
    pairs = [
        (rate, seed)
        for rate in (RATES if grid else [None])
        for seed in range(1, 9 if options.smoke else SEEDS + 1)
    ]
    found = fit(
        ARMS[cell["arm"]](schedule, epsilon=cell["epsilon"], delta=DELTA),
        schedule,
        model=model,
        split=split,
        candidates=[{"learning_rate": rate} if grid else {} for rate, _ in pairs],
        secrets=[secrets_for(f"hyfreedp/{rate or ''}", seed, 1)[0] for rate, seed in pairs],
    )
    last = found.report["learning_rate"][-1].tolist()
    right = accuracies(model, found.params, split)
    return [
        {"seed": seed, "rate": f"{rate:.4g}", "accuracy": round(value, 2)}
        for (_, seed), rate, value in zip(pairs, last, right, strict=True)
    ]


def shown(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Return the lines of every cell: of the grid, those of its best rate."""
    found = by(rows, "arm", "model", "epsilon")
    for key, of in found.items():
        if key[0] == GRID:
            found[key] = max(by(of, "rate").values(), key=lambda each: mean(each, "accuracy"))
    return found


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return every accuracy."""
    return {
        f"{arm}, {model}, ε = {float(epsilon):g}": mean(of, "accuracy")
        for (arm, model, epsilon), of in shown(rows).items()
    }


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the accuracies: a line an arm, a column a network and ε."""
    cells_of = shown(rows)
    columns = sorted(
        {key[1:] for key in cells_of}, key=lambda c: ([*MODELS].index(c[0]), float(c[1]))
    )
    lines = [
        (
            arm,
            *(pm(cells_of[arm, *c], "accuracy") if (arm, *c) in cells_of else "–" for c in columns),
        )
        for arm in ARMS
        if any(key[0] == arm for key in cells_of)
    ]
    heads = (f"{model}, ε = {float(epsilon):g}" for model, epsilon in columns)
    return [markdown(("test accuracy, %", *heads), lines)]


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return accuracy against ε, a panel a network."""
    drawn = [row for of in shown(rows).values() for row in of]
    told: dict[str, Any] = {"x": "epsilon", "y": "accuracy", "line": "arm", "panel": "model"}
    return {"chart": plot_lines(drawn, **told, log="x", strategies=STRATEGY_OF)}


SHEET = Sheet(
    name="hyfreedp",
    key=("model", "epsilon", "arm"),
    values=("seed", "rate", "accuracy"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"arm": "hyfreedp K=5"}, "accuracy", stand_in=True),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
