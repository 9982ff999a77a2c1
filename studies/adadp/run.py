"""ADADP on MNIST: does it find the learning rate from any start, and is it as good as a grid?"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from torch import nn

from privtune.accounting import epsilon
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import ADADP, FixedDPSGD
from studies.harness import accuracies, fit, mnist, secrets_for, study


def network(hidden: list[int]) -> nn.Module:
    sizes = [784, *hidden, 10]
    layers: list[nn.Module] = []
    for one, two in itertools.pairwise(sizes):
        layers += [nn.Linear(one, two, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def run(settings: dict[str, Any], data: Path | None, *, smoke: bool) -> dict[str, Any]:
    split = mnist(data, smoke=smoke)

    def model() -> nn.Module:
        return network(settings["hidden"])

    def schedule(epochs: float) -> Schedule:
        return Schedule.from_epochs(
            records=len(split),
            expected_batch_size=settings["expected_batch_size"],
            epochs=epochs,
        )

    sigma, norm = settings["noise_multiplier"], settings["max_grad_norm"]
    method = ADADP(sigma, tolerance=settings["tolerance"], adapt_share=1.0)  # to the end
    starts = [{"learning_rate": r, "max_grad_norm": norm} for r in settings["initial_rates"]]
    short = schedule(settings["rate_epochs"])
    secrets = secrets_for("adadp", settings["seed"], len(starts))
    found = fit(method, short, model=model, split=split, candidates=starts, secrets=secrets)
    tail = found.report["learning_rate"][-short.steps // 4 :].log().mean(dim=0).exp()
    rates = dict(zip(map(str, settings["initial_rates"]), tail.tolist(), strict=True))
    del found

    full = schedule(settings["epochs"])
    secret = secrets_for("adadp", settings["seed"] + 1, 1)
    start = [{"learning_rate": 0.1, "max_grad_norm": norm}]
    adaptive = fit(method, full, model=model, split=split, candidates=start, secrets=secret)
    grid = [{"learning_rate": r, "max_grad_norm": norm} for r in settings["grid"]]
    secrets = secrets_for("adadp", settings["seed"] + 2, len(grid))
    constant = fit(
        FixedDPSGD(sigma), full, model=model, split=split, candidates=grid, secrets=secrets
    )
    constants = accuracies(model, constant.params, split)
    return {
        "parameters": sum(p.numel() for p in model().parameters()),
        "epsilon": epsilon(method.event(full), settings["delta"]).epsilon,
        "rates_after_adaptation": rates,
        "rate_ratio": max(rates.values()) / min(rates.values()),
        "adadp_accuracy": accuracies(model, adaptive.params, split)[0],
        "adadp_final_rate": adaptive.report["learning_rate"][-1, 0].item(),
        "grid_accuracy": dict(zip(map(str, settings["grid"]), constants, strict=True)),
        "best_constant_accuracy": max(constants),
    }


def compare(results: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    problems = []
    if results["rate_ratio"] > expected["rate_ratio_at_most"]:
        problems.append(f"rates differ by a factor of {results['rate_ratio']:.2f}")
    gap = results["best_constant_accuracy"] - results["adadp_accuracy"]
    if gap > expected["points_below_grid_at_most"]:
        problems.append(f"{gap:.2f} points below the best constant rate")
    away = abs(results["adadp_accuracy"] - expected["adadp_accuracy"])
    if away > expected["accuracy_tolerance"]:
        problems.append(f"accuracy is {away:.2f} points from the recorded one")
    return problems


def main(argv: list[str] | None = None) -> int:
    return study("adadp", run, compare, argv)


if __name__ == "__main__":
    sys.exit(main())
