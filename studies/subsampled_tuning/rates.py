"""The experiment beside the study: which rates are best on a tenth of the records, and which on all?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from privtune.tasks import get_task
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import DPAdam, FixedDPSGD
from studies.harness import Split, accuracies, fit, secrets_for
from studies.sheet import by, markdown, pm

RATES = {
    "MNIST": (0.015, 0.05, 0.15, 0.5, 1.5, 5.0, 15.0, 50.0),
    "table": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0),
}


def by_rate(
    cell: Mapping[str, Any], terms: Mapping[str, Any], *, share: int, seed: int
) -> list[dict[str, Any]]:
    """Train at every rate on one record in ``share``, with the noise and steps of all records."""
    task = get_task(terms["task"])
    data = task.load()
    (x, y), (x_test, y_test) = (
        part.take(torch.arange(len(part))) for part in (data.train, data.test)
    )
    kept = len(y) // share
    schedule = Schedule.from_epochs(
        records=task.train_records,
        expected_batch_size=terms["expected_batch_size"],
        epochs=terms["epochs"],
    )
    method = DPAdam if cell["task"] == "table" else FixedDPSGD
    rates = RATES[cell["task"]]
    found = fit(
        method.for_budget(schedule, epsilon=cell["epsilon"], delta=1e-5),
        replace(schedule, records=kept),
        model=task.model,
        split=Split(x[:kept], y[:kept], x_test, y_test),
        candidates=[{"learning_rate": rate, "max_grad_norm": 1.0} for rate in rates],
        secrets=secrets_for("subsampled_tuning", seed, len(rates)),
    )
    right = accuracies(task.model, found.params, Split(x, y, x_test, y_test))
    return [
        {"seed": seed, "rate": rate, "accuracy": round(value / 100.0, 4)}
        for rate, value in zip(rates, right, strict=True)
    ]


def rate_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the accuracies of one task at every rate, trained on a tenth and on all records."""
    lines = [
        (
            f"{how}, ε = {float(e):g}",
            *(pm(r, "accuracy", scale=100.0) for r in by(of, "rate").values()),
        )
        for (e, how), of in by(rows, "epsilon", "how").items()
    ]
    rates = (f"η = {float(rate):g}" for (rate,) in by(rows, "rate"))
    return markdown((f"{rows[0]['task']}, {rows[0]['what']}", *rates), lines)
