"""AdaCliP against fixed clipping: MNIST, logistic regression (Table 1 of the paper)."""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

from torch import nn

from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import AdaCliP, FixedDPSGD
from studies.harness import Split, accuracies, fit, mnist, secrets_for, study


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 10))


def score(
    method: Any,
    schedule: Schedule,
    split: Split,
    candidates: list[dict[str, float]],
    secrets: list[bytes],
) -> list[float]:
    result = fit(method, schedule, model=model, split=split, candidates=candidates, secrets=secrets)
    return accuracies(model, result.params, split)


def chosen(
    method: Any,
    schedule: Schedule,
    split: Split,
    candidates: list[dict[str, float]],
    seeds: list[int],
) -> dict[str, Any]:
    """Choose a candidate by test accuracy without paying, as the paper does; then fresh seeds."""
    tuned = score(
        method, schedule, split, candidates, secrets_for("adaclip-grid", 0, len(candidates))
    )
    best = candidates[max(range(len(candidates)), key=tuned.__getitem__)]
    secrets = [secrets_for("adaclip", seed, 1)[0] for seed in seeds]
    found = score(method, schedule, split, [best] * len(seeds), secrets)
    return {
        "mean": statistics.mean(found),
        "standard_error": statistics.stdev(found) / len(found) ** 0.5,
        "chosen": best,
    }


def run(settings: dict[str, Any], data: Path | None, *, smoke: bool) -> dict[str, Any]:
    split = mnist(data, smoke=smoke)
    schedule = Schedule.from_epochs(
        records=len(split),
        expected_batch_size=settings["expected_batch_size"],
        epochs=settings["epochs"],
    )
    rates, seeds = settings["learning_rates"], settings["seeds"]
    fixed = [{"learning_rate": r, "max_grad_norm": settings["max_grad_norm"]} for r in rates]
    adaptive = [
        {"learning_rate": r, "largest_variance": h}
        for r, h in itertools.product(rates, settings["largest_variances"])
    ]
    literal = [
        {"learning_rate": r, "largest_variance": settings["largest_variances"][-1]}
        for r in settings["literal_learning_rates"]
    ]
    table = {}
    for eps in settings["epsilons"]:
        plan = {"epsilon": eps, "delta": settings["delta"]}
        table[str(eps)] = {
            "noise_multiplier": FixedDPSGD.for_budget(schedule, **plan).noise_multiplier,
            "fixed": chosen(FixedDPSGD.for_budget(schedule, **plan), schedule, split, fixed, seeds),
            "adaclip": chosen(
                AdaCliP.for_budget(schedule, **plan), schedule, split, adaptive, seeds
            ),
            "adaclip_literal": chosen(
                AdaCliP.for_budget(schedule, **plan, per_record=False),
                schedule,
                split,
                literal,
                seeds[:2],
            ),
        }
    return {"accuracy": table}


def compare(results: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    problems = []
    for eps, recorded in expected["accuracy"].items():
        for method in ("fixed", "adaclip"):
            away = abs(results["accuracy"][eps][method]["mean"] - recorded[method])
            if away > expected["tolerance"]:
                problems.append(f"{method} at epsilon {eps} is {away:.2f} points from {recorded}")
    return problems


def main(argv: list[str] | None = None) -> int:
    return study("adaclip", run, compare, argv)


if __name__ == "__main__":
    sys.exit(main())
