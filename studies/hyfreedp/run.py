"""HyFreeDP against Prodigy, D-Adaptation and an un-paid grid of learning rates, on MNIST."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import AutomaticClipping, DAdaptation, HyFreeDP, Prodigy
from studies.harness import Split, accuracies, fit, mnist, secrets_for, study


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


def plan(settings: dict[str, Any], schedule: Schedule, eps: float) -> dict[str, Any]:
    """Every method at the same epsilon."""
    budget = {"epsilon": eps, "delta": settings["delta"]}
    methods: dict[str, Any] = {}
    # The recorded runs have this optimizer, and a fit that is no longer there: see the README.
    sgd = {**budget, "optimizer": "sgd"}
    for interval in settings["intervals"]:
        methods[f"hyfreedp K={interval}"] = HyFreeDP.for_budget(schedule, **sgd, interval=interval)
    middle = settings["intervals"][len(settings["intervals"]) // 2]
    methods[f"hyfreedp K={middle}, Algorithm 1 to the letter"] = HyFreeDP.for_budget(
        schedule, **{**sgd, "fit": "paper"}, interval=middle
    )
    methods[f"hyfreedp K={middle}, 5% more gradient noise"] = HyFreeDP.for_budget(
        schedule, **sgd, interval=middle, gradient_noise_factor=1.05
    )
    methods[f"hyfreedp K={middle}, Laplace noise on the losses"] = HyFreeDP.for_budget(
        schedule, **sgd, interval=middle, loss_noise="laplace"
    )
    methods[f"hyfreedp K={middle}, momentum 0.9"] = HyFreeDP.for_budget(
        schedule, **sgd, interval=middle, momentum=0.9
    )
    methods[f"hyfreedp K={middle}, AdamW"] = HyFreeDP.for_budget(
        schedule, **{**sgd, "optimizer": "adamw"}, interval=middle
    )
    methods["prodigy"] = Prodigy.for_budget(schedule, **budget)
    methods["d-adaptation"] = DAdaptation.for_budget(schedule, **budget)
    return methods


def table_for(
    settings: dict[str, Any], split: Split, schedule: Schedule, name: str, eps: float
) -> dict[str, Any]:
    model, seeds = MODELS[name], settings["seeds"]
    table: dict[str, Any] = {}
    for label, method in plan(settings, schedule, eps).items():
        secrets = [secrets_for("hyfreedp", seed, 1)[0] for seed in seeds]
        result = fit(
            method,
            schedule,
            model=model,
            split=split,
            candidates=[{}] * len(seeds),
            secrets=secrets,
        )
        found = accuracies(model, result.params, split)
        table[label] = {
            "mean": statistics.mean(found),
            "runs": found,
            "final_rate": result.report["learning_rate"][-1].tolist(),
        }
    rates = settings["grid"]
    result = fit(
        AutomaticClipping.for_budget(schedule, epsilon=eps, delta=settings["delta"]),
        schedule,
        model=model,
        split=split,
        candidates=[{"learning_rate": rate} for _ in seeds for rate in rates],
        secrets=[s for seed in seeds for s in secrets_for("hyfreedp-grid", seed, len(rates))],
    )
    found = accuracies(model, result.params, split)
    runs = {str(rate): found[k :: len(rates)] for k, rate in enumerate(rates)}
    table["un-paid grid"] = {"mean": max(map(statistics.mean, runs.values())), "runs": runs}
    return table


def times(settings: dict[str, Any], split: Split, name: str) -> dict[str, float]:
    """CPU seconds of a step relative to DP-SGD with the same clipping.

    Methods take turns, and the fastest round of each counts: what else the machine does slows some
    rounds down, even in CPU time. The first steps of every training, in which graphs are captured,
    do not count.
    """
    warm, steps = settings["timing_steps"]
    rate = settings["expected_batch_size"] / len(split)
    schedule = Schedule(len(split), rate, warm + steps)

    def seconds(method: Any, candidate: dict[str, float]) -> float:
        ends: list[float] = []
        fit(
            method,
            schedule,
            model=MODELS[name],
            split=split,
            candidates=[candidate],
            secrets=secrets_for("hyfreedp-time", 1, 1),
            on_step=lambda *_: ends.append(time.process_time()),
        )
        return ends[-1] - ends[warm - 1]

    base = math.inf
    best: dict[str, float] = {}
    for _ in range(settings["timing_rounds"]):
        base = min(base, seconds(AutomaticClipping(1.0), {"learning_rate": 0.1}))
        for batch in ("same", "separate"):
            for interval in settings["intervals"]:
                method = HyFreeDP(1.0, 5.0, interval=interval, loss_batch=batch)
                label = f"K={interval}, {batch} batch"
                best[label] = min(best.get(label, math.inf), seconds(method, {}))
    return {label: round(value / base, 3) for label, value in best.items()}


def run(settings: dict[str, Any], data: Path | None, *, smoke: bool) -> dict[str, Any]:
    split = mnist(data, smoke=smoke)
    schedule = Schedule.from_epochs(
        records=len(split),
        expected_batch_size=settings["expected_batch_size"],
        epochs=settings["epochs"],
    )
    return {
        "accuracy": {
            name: {
                str(eps): table_for(settings, split, schedule, name, eps)
                for eps in settings["epsilons"]
            }
            for name in settings["models"]
        },
        "relative_step_time": {name: times(settings, split, name) for name in settings["models"]},
    }


def compare(results: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    problems = []
    for name, limits in expected["relative_step_time_at_most"].items():
        for label, limit in limits.items():
            found = results["relative_step_time"][name][label]
            if found > limit:
                problems.append(f"{name}, {label}: {found:.2f} times a step of DP-SGD, not {limit}")
    for name, cells in expected["accuracy"].items():
        for eps, recorded in cells.items():
            for label, value in recorded.items():
                found = results["accuracy"][name][eps][label]["mean"]
                if abs(found - value) > expected["tolerance"]:
                    problems.append(f"{name}, {label}, epsilon {eps}: {found:.2f}, not {value}")
    return problems


def main(argv: list[str] | None = None) -> int:
    return study("hyfreedp", run, compare, argv)


if __name__ == "__main__":
    sys.exit(main())
