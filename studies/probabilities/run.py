"""How far the probabilities of released models are from what happens, with and without a temperature.

python -m studies.probabilities.run --data mnist.npz        # goes on where it was
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import privtune
from privtune.accounting import Adjacency
from privtune.plots import plot_lines
from privtune.strategies import Reporting, ScorePlan
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.scoring import fit_temperature
from studies.sheet import STRATEGY_OF, Again, Options, Row, Sheet, by, markdown, mean, seed_of
from studies.transfer.task import public_weights
from studies.two_factors.six import FINE_TUNING, SIX, Work

if TYPE_CHECKING:
    import plotly.graph_objects as go

DELTA = 1e-5
CLIP = {"max_grad_norm": 1.0}
SPACE = {"learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True}}
SEARCH = {"mean_runs": 8, "parameters": CLIP}
ARMS: dict[str, dict[str, Any]] = {
    "defaults": {"strategy": "fixed", "parameters": {"learning_rate": 0.5, **CLIP}},
    "public-rate": {"strategy": "public-rate"},
    "selection": {"strategy": "papernot-steinke", **SEARCH},
    "subsampled tuning": {"strategy": "subsampled-tuning", "variant": 1, "rate": 0.1, **SEARCH},
    "hyfreedp": {"strategy": "hyfreedp"},
    "adadp": {"strategy": "adadp", "parameters": CLIP},
    "adaclip": {
        "strategy": "adaclip",
        "parameters": {"learning_rate": 0.5, "largest_variance": 3e-3},
    },
    "prodigy": {"strategy": "prodigy"},
}
WORKS = {
    "rare": Work("studies.probabilities.tasks:rare", 5, 128),
    "uncommon": Work("studies.probabilities.tasks:uncommon", 5, 128),
    **SIX,
}
CHEAP = ("rare", "uncommon", "table", "digits", "transfer")
DEAR = ("mnist mlp", "mnist cnn")
EPSILONS = (1.0, 2.0, 4.0, 8.0)
BINS = 15  # of confidence, equally wide
DRAWS = 20  # of the noise of each temperature: training costs, noise does not
WORSE = 0.01  # nats above the best constant answer that chance explains

Floats = npt.NDArray[np.float64]


class Known(nn.Module):
    """A model whose inputs are its logits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return x


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm on every task, the cheap tasks first."""
    if options.smoke:
        yield {"task": "uncommon", "epsilon": 4.0, "arm": "hyfreedp"}
        return
    for epsilon, tasks in product(EPSILONS, (CHEAP, DEAR)):
        for task, arm in product(tasks, ARMS):
            yield {"task": task, "epsilon": epsilon, "arm": arm}


def logits_of(cell: Mapping[str, Any], options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Train one arm, and return the logits and the classes of the test records."""
    work, arm = WORKS[cell["task"]], ARMS[cell["arm"]]
    terms: dict[str, Any] = {"task": work.task, "epochs": 1 if options.smoke else work.epochs}
    if cell["task"] == "transfer":
        terms["task"] = {**FINE_TUNING, "pretrained": str(public_weights(64))}
    if "mean_runs" in arm:
        terms["space"] = SPACE
    with tempfile.TemporaryDirectory() as folder:
        study = privtune.create_study(
            "study",
            budget=privtune.Budget(cell["epsilon"], DELTA, name="data"),
            arms=[{"name": "arm", **arm}],
            expected_batch_size=work.batch,
            seed=seed_of(cell["task"], cell["epsilon"]),
            storage=f"sqlite:///{folder}/study.db",
            **terms,
        )
        (release,) = study.run()
        model = release.model
        test = study.spec.load_task().load().test
        study.close()
    with torch.no_grad():
        logits = torch.cat([model(x) for x in test.x.split(1000)])
    return logits, test.y


def report_of(epsilon: float, records: int, classes: int) -> ScorePlan:
    """Return how so many private test records are scored at an arm's ε, as a plan has it."""
    reporting = Reporting()
    score = reporting.plan(
        records=records,
        public=False,
        epsilon=epsilon,
        delta=DELTA,
        adjacency=Adjacency.ADD_REMOVE,
    )
    return reporting.with_temperature(score, classes=classes)


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Fit temperatures on one half of the test records, and look at the probabilities of the other."""
    logits, targets = logits_of(cell, options)
    classes = logits.shape[1]
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    held, asked = order.chunk(2)
    report = report_of(cell["epsilon"], len(held), classes)
    data = TensorData(logits[held], targets[held])
    draws = []
    for draw in range(DRAWS):
        rng = np.random.default_rng([seed_of(*cell.values()), draw])
        draws.append(fit_temperature(report, Known(), data, rng=rng) or 1.0)
    given = logits[asked].double().numpy(), targets[asked].numpy()
    losses = [log_loss(*given, temperature) for temperature in draws]
    errors = [calibration_error(*given, temperature) for temperature in draws]
    values = {
        "accuracy": float((given[0].argmax(axis=1) == given[1]).mean()),
        "base": base_rate(given[1]),
        "loss": log_loss(*given, 1.0),
        "error": calibration_error(*given, 1.0),
        "share": report.calibration,
        "temperature": statistics.median(draws),
        "fitted loss": statistics.mean(losses),
        "worst loss": max(losses),
        "fitted error": statistics.mean(errors),
    }
    return [{name: round(value, 4) for name, value in values.items()}]


def shares_of(logits: Floats, temperature: float) -> Floats:
    """Return logarithms of probabilities."""
    found = logits / temperature
    found = found - found.max(axis=1, keepdims=True)
    logarithms: Floats = found - np.log(np.exp(found).sum(axis=1, keepdims=True))
    return logarithms


def log_loss(logits: Floats, targets: npt.NDArray[np.int64], temperature: float) -> float:
    """Return the mean log loss in nats."""
    shares = shares_of(logits, temperature)
    return float(-shares[np.arange(len(targets)), targets].mean())


def calibration_error(logits: Floats, targets: npt.NDArray[np.int64], temperature: float) -> float:
    """Return the expected calibration error: confidence less accuracy, in the mean over bins."""
    confidence = np.exp(shares_of(logits, temperature).max(axis=1))
    right = logits.argmax(axis=1) == targets
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, confidence - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(targets))


def base_rate(targets: npt.NDArray[np.int64]) -> float:
    """Return the log loss of the best constant answer: the classes' shares among these records."""
    shares = np.bincount(targets) / len(targets)
    shares = shares[shares > 0.0]
    return float(-(shares * np.log(shares)).sum())


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the log loss of every arm in the mean over the ε, as trained and with a temperature."""
    found = {}
    for (task, arm), group in by(rows, "task", "arm").items():
        found[f"{arm} on {task}, as trained"] = mean(group, "loss")
        found[f"{arm} on {task}, with a temperature"] = mean(group, "fitted loss")
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Return log loss and calibration error by task and arm, and the cells above the base rate."""
    lines = []
    places = {task: place for place, task in enumerate((*CHEAP, *DEAR))}
    rows = sorted(rows, key=lambda row: (places[row["task"]], (*ARMS,).index(row["arm"])))
    for (task, arm), group in by(rows, "task", "arm").items():
        of_epsilon = {float(row["epsilon"]): row for row in group}
        shown = (pair(of_epsilon.get(epsilon)) for epsilon in sorted(EPSILONS))
        base = f"{mean(group, 'base'):.2f}"
        errors = f"{mean(group, 'error'):.3f} → {mean(group, 'fitted error'):.3f}"
        lines.append((task, arm, base, *shown, errors))
    head = ("task", "arm", "base rate", *(f"ε = {e:g}" for e in sorted(EPSILONS)), "ECE")
    counts = []
    for column in ("loss", "fitted loss", "worst loss"):
        above = [row for row in rows if float(row[column]) > float(row["base"]) + WORSE]
        names = (f"{row['arm']} on {row['task']} at {float(row['epsilon']):g}" for row in above)
        most = max((float(r[column]) - float(r["base"]) for r in rows), default=math.nan)
        shown = ", ".join(names) if column != "loss" else "–"
        counts.append((column, f"{len(above)} of {len(rows)}", f"{most:.2f}", shown or "–"))
    above_head = ("log loss", f"more than {WORSE:g} above the base rate", "most", "where")
    return [markdown(head, lines), markdown(above_head, counts)]


def pair(row: Row | None) -> str:
    """Return the log loss as trained and with a temperature."""
    if row is None:
        return "–"
    before = float(row["loss"])
    shown = f"**{before:.2f}**" if before > float(row["base"]) + WORSE else f"{before:.2f}"
    return f"{shown} → {float(row['fitted loss']):.2f}"


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: log loss with a temperature against that as trained, a panel a task."""
    drawn = [
        {
            "log loss over the base rate's": str(float(row[column]) / float(row["base"])),
            "ε": row["epsilon"],
            "arm": row["arm"],
            "panel": f"{row['task']}, {name}",
        }
        for row in rows
        for column, name in (("loss", "as trained"), ("fitted loss", "with a temperature"))
        if row["task"] in ("rare", "table")
    ]
    figure = plot_lines(
        drawn,
        x="ε",
        y="log loss over the base rate's",
        line="arm",
        panel="panel",
        log="xy",
        strategies=STRATEGY_OF,
    )
    figure.update_layout(height=800)
    return {"chart": figure}


SHEET = Sheet(
    name="probabilities",
    key=("task", "epsilon", "arm"),
    values=(
        "accuracy",
        "base",
        "loss",
        "error",
        "share",
        "temperature",
        "fitted loss",
        "worst loss",
        "fitted error",
    ),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"task": "uncommon", "epsilon": "1.0", "arm": "hyfreedp"}, "fitted loss"),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
