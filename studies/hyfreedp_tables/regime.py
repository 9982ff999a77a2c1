"""Where Algorithm 1 trains: with how much less noise on its losses, and from which first rate.

Its fit divides differences of losses. The larger the batch and ε, the less of them is noise. The steps
are those of the other tables, 135, so a batch of 9,000 of the 27,000 records takes 45 epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from privtune.training.methods import DPAdam, HyFreeDP
from studies.harness import accuracies, fit, secrets_for
from studies.hyfreedp_tables.work import BATCH, DELTA, GRID, NORM, RATES, SEEDS, line, setting
from studies.sheet import Options, Row, by, floats, markdown, mean, pm

REGIMES = ((BATCH, 1.0), (BATCH, 8.0), (BATCH, 64.0), (9 * BATCH, 1.0))
LETTER, ROBUST = "Algorithm 1, from ", "HyFreeDP, from "
STARTS = (1e-4, 1e-2)
ARMS = (*(f"{fit_of}{start:g}" for fit_of in (LETTER, ROBUST) for start in STARTS), GRID)


def cells() -> Iterator[dict[str, Any]]:
    """Yield every arm in every regime, that of the other tables first; the grid in large batches not."""
    for (batch, epsilon), arm in product(REGIMES, ARMS):
        if arm != GRID or batch == BATCH:
            yield {"what": "regime", "part": f"batch {batch}", "epsilon": epsilon, "arm": arm}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train all weights with every seed; a line has the accuracy, and the last rate in its place ``at``."""
    task, split, plain = setting("all", options)
    batch = int(cell["part"].removeprefix("batch "))
    schedule = replace(plain, sample_rate=batch / task.train_records)
    arm, budget = cell["arm"], {"epsilon": cell["epsilon"], "delta": DELTA}
    if arm == GRID:
        candidates: list[dict[str, float]] = [
            {"learning_rate": rate, **NORM} for rate in RATES["all"]
        ]
        method: Any = DPAdam.for_budget(schedule, **budget)
    else:
        fit_of = "paper" if arm.startswith(LETTER) else "robust"
        candidates = [{"learning_rate": float(arm.rpartition(" ")[2])}]
        method = HyFreeDP.for_budget(schedule, **budget, interval=5, fit=fit_of)
    result = fit(
        method,
        schedule,
        model=task.model,
        split=split,
        candidates=candidates * SEEDS,
        secrets=[secret for secret in secrets_for("regime", 0, SEEDS) for _ in candidates],
    )
    ends = _last_rates(result.report, candidates * SEEDS)
    values = accuracies(task.model, result.params, split)
    seeds = [seed for seed in range(SEEDS) for _ in candidates]
    return [line(arm, *numbers) for numbers in zip(seeds, ends, values, strict=True)]


def _last_rates(
    report: Mapping[str, Any], candidates: Sequence[Mapping[str, float]]
) -> list[float]:
    """Return the last rate of every training, before the schedule's fall."""
    if "learning_rate" in report:
        rates: list[float] = report["learning_rate"][-1].tolist()
        return rates
    return [candidate["learning_rate"] for candidate in candidates]


def best(rows: Sequence[Row], arm: str) -> list[Row]:
    """Return the lines of an arm; of the grid those of its best rate, for which nobody paid."""
    if arm != GRID:
        return list(rows)
    return max(by(rows, "at").values(), key=lambda lines: mean(lines, "value"))


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the accuracy of every arm."""
    return {
        f"{arm}, {part}, ε = {float(epsilon):g}": mean(best(of, arm), "value")
        for (part, epsilon, arm), of in by(rows, "part", "epsilon", "arm").items()
    }


def table(rows: Sequence[Row]) -> str:
    """Return accuracies, and the least and the largest last rate over the seeds."""
    lines = []
    for (part, epsilon), of_cell in by(rows, "part", "epsilon").items():
        arms = {arm: of for (arm,), of in by(of_cell, "arm").items()}
        shown = (_shown(best(arms[arm], arm)) if arm in arms else "–" for arm in ARMS)
        lines.append((part.removeprefix("batch "), f"{float(epsilon):g}", *shown))
    return markdown(("accuracy, % (last rates): batch", "ε", *ARMS), lines)


def _shown(rows: Sequence[Row]) -> str:
    rates = floats(rows, "at")
    low, high = f"{min(rates):.1g}", f"{max(rates):.1g}"
    return f"{pm(rows, 'value')} ({low if low == high else f'{low} to {high}'})"
