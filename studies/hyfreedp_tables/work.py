"""The cells, and what each kind of them runs: a training, its course, an account, the time of a step."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from privtune.accounting import calibrate
from privtune.tasks import Task, fine_tuned
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import (
    AutomaticClipping,
    DAdaptation,
    DPAdam,
    HyFreeDP,
    Prodigy,
    PublicRate,
)
from privtune.training.methods.hyfreedp_account import hyfreedp_event
from studies.harness import Split, TrainingResult, accuracies, fit, secrets_for
from studies.hyfreedp_tables import curves
from studies.sheet import Options, releases_of
from studies.transfer.task import digits_5_to_9, half, public_weights

NORM = {"max_grad_norm": 0.1}  # Adam does not see the scale of its gradients
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "HyFreeDP, K = 1": (HyFreeDP, {"interval": 1}),
    "HyFreeDP, K = 5": (HyFreeDP, {"interval": 5}),
    "HyFreeDP, K = 10": (HyFreeDP, {"interval": 10}),
    "HyFreeDP, K = 5, Laplace": (HyFreeDP, {"interval": 5, "loss_noise": "laplace"}),
    "HyFreeDP, K = 5, five losses": (curves.FivePoints, {"interval": 5}),
    "Algorithm 1 to the letter, K = 5": (HyFreeDP, {"interval": 5, "fit": "paper"}),
    "Algorithm 1, K = 5, five losses": (
        curves.FivePoints,
        {"interval": 5, "fit": "paper", "reach": 2.0},
    ),
    "Prodigy": (Prodigy, {}),
    "D-Adaptation": (DAdaptation, {}),
    "public-rate": (PublicRate, {}),
}
COSINE, LINEAR = "un-paid grid, cosine", "un-paid grid, linear"
GRIDS = {"un-paid grid": "constant", COSINE: "cosine", LINEAR: "linear"}
SCHEDULED = {"biases": COSINE, "all": LINEAR}  # the paper's Tables 2 and 5
RATES = {
    "all": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "lora:4": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "biases": (1e-2, 3e-2, 1e-1, 3e-1, 1.0),
}
BEST = {"all": 1e-2, "biases": 1e-1}  # of them, at ε = 1
SEARCH = {
    "strategy": "dp-hyper",
    "mean_runs": 3,
    "method": "dp-adam",
    "parameters": NORM,
}
ARMS = (
    "HyFreeDP, K = 5",
    "un-paid grid",
    "public-rate",
    "Prodigy",
    "D-Adaptation",
    "DP-hyper",
    LINEAR,
    COSINE,
    "HyFreeDP, K = 1",
    "HyFreeDP, K = 10",
    "HyFreeDP, K = 5, Laplace",
    "HyFreeDP, K = 5, five losses",
    "Algorithm 1 to the letter, K = 5",
    "Algorithm 1, K = 5, five losses",
)
STARTS = (1e-6, 1e-4, 1e-2, 1.0)
SETTINGS = {"27,000 records, 135 steps": (27_000, 135), "50,000 records, 250 steps": (50_000, 250)}
STEPS = ("DP-SGD", "DP-AdamW", "K = 1", "K = 5", "K = 10")
PASS = "forward pass"
THEN = (("biases", 1.0), ("all", 0.3), ("lora:4", 1.0), ("all", 3.0), ("biases", 3.0))
OURS, GRID = "HyFreeDP, K = 5", "un-paid grid"
HARD = (OURS, "Prodigy", "D-Adaptation", "public-rate", GRID)  # at ε = 0.3
EASY = (OURS, GRID, LINEAR, "public-rate", "HyFreeDP, K = 1")  # at ε = 8
COURSES = (("all", "robust"), ("all", "paper"), ("biases", "robust"))
WIDE = {"spread": 1e16}  # Figure 4 is about rates that find their way from any start
BATCH, SEEDS, DELTA = 1000, 3, 1e-5
WARM, TIMED, ROUNDS = 5, 10, 3


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every cell: accuracies, how rates move, noise, times of a step."""
    small = options.smoke
    yield from trainings([("biases", 3.0) if small else ("all", 1.0)], HARD[::4] if small else ARMS)
    for part, rule in COURSES[2:3] if small else COURSES:
        yield {"what": "rate", "part": part, "epsilon": 1.0, "arm": rule}
    if small:
        return
    for part in ("all", "biases"):
        yield {"what": "curve", "part": part, "epsilon": 1.0, "arm": GRID}
    for arm in (OURS, "Algorithm 1 to the letter, K = 5", GRID):
        yield {"what": "course", "part": "lora:4", "epsilon": 1.0, "arm": arm}
    for epsilon in (1.0, 8.0):
        for name in SETTINGS:
            yield {"what": "noise", "part": name, "epsilon": epsilon, "arm": "all"}
    for arm in ("all", PASS):
        yield {"what": "seconds", "part": "all", "epsilon": 1.0, "arm": arm}
    yield from trainings(THEN, ARMS)
    yield from trainings([("all", 8.0)], EASY)


def trainings(
    settings: Sequence[tuple[str, float]], arms: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the cells of accuracies; a grid with a schedule as the paper has it for that part."""
    for part, epsilon in settings:
        for arm in HARD if epsilon < 1.0 else arms:
            if arm not in (COSINE, LINEAR) or SCHEDULED.get(part) == arm:
                yield {"what": "accuracy", "part": part, "epsilon": epsilon, "arm": arm}


def setting(part: str, options: Options) -> tuple[Task, Split, Schedule]:
    """Return the task, its private records and the steps."""
    # Asked each time: it also sets the width of the networks that are made from now on.
    return _setting(part, options, public_weights(16 if options.smoke else 128))


@functools.cache
def _setting(part: str, options: Options, path: Path) -> tuple[Task, Split, Schedule]:
    task, split = fine_tuned(digits_5_to_9(), pretrained=str(path), trainable=part), half(5)
    split.x, split.y = split.x[: task.train_records], split.y[: task.train_records]
    size = {"expected_batch_size": 100, "epochs": 1} if options.smoke else {}
    shape: dict[str, Any] = {"expected_batch_size": BATCH, "epochs": 5, **size}
    return task, split, Schedule.from_epochs(records=task.train_records, **shape)


def line(name: str, seed: int, at: float, value: float) -> dict[str, Any]:
    """Return one line of the file."""
    return {"line": name, "seed": seed, "at": f"{at:.6g}", "value": f"{value:.6g}"}


def fill_accuracy(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Train one arm with every seed; a grid's lines are its rates, DP-hyper's say what it spent."""
    seeds = 5 if options.smoke else SEEDS
    told, arm = {"epsilon": cell["epsilon"], "delta": DELTA}, cell["arm"]
    task, split, _ = setting(cell["part"], options)
    if arm == "DP-hyper":
        path = public_weights(128)
        named = "studies.transfer.task:public_digits"
        kind = {"type": "fine-tuning", "pretrained": str(path), "trainable": cell["part"]}
        terms = {"task": {**kind, "task": named}, "epochs": 5, "expected_batch_size": BATCH}
        low, high = RATES[cell["part"]][0], RATES[cell["part"]][-1]
        space = {"learning_rate": {"type": "float", "low": low, "high": high, "log": True}}
        # One study, so that the seeds draw their numbers of candidates by strata of the law.
        runs = releases_of(SEARCH, repeats=seeds, space=space, **told, **terms)
        return [line(arm, s, run["spent"], 100 * run["accuracy"]) for s, run in enumerate(runs)]
    rates = rates_of(cell, options)
    found = train_arm(cell, options, rates, seeds)
    named_rates = [(seed, rate) for seed in range(seeds) for rate in rates]
    right = accuracies(task.model, found.params, split)
    return [line(arm, s, rate, value) for (s, rate), value in zip(named_rates, right, strict=True)]


def rates_of(cell: Mapping[str, Any], options: Options) -> Sequence[float]:
    """Return the rates of a grid; one that is no number for an arm that finds its own."""
    if cell["arm"] not in GRIDS:
        return (math.nan,)
    rates = RATES[cell["part"]]
    if cell["arm"] == LINEAR or cell["what"] == "course":
        rates = rates[2:4]  # the best constant one, and three times that
    return rates[-1:] if options.smoke else rates


def train_arm(
    cell: Mapping[str, Any],
    options: Options,
    rates: Sequence[float],
    seeds: int,
    snapshots_at: Collection[int] = (),
) -> TrainingResult:
    """Train an arm with every seed, at every rate of a grid, as one stack."""
    arm, told = cell["arm"], {"epsilon": cell["epsilon"], "delta": DELTA}
    task, split, schedule = setting(cell["part"], options)
    if arm in GRIDS:
        method: Any = DPAdam.for_budget(schedule, **told, schedule=GRIDS[arm])
    else:
        kind_of, fields = METHODS[arm]
        own = kind_of.complete(fields, part=cell["part"]) if issubclass(kind_of, HyFreeDP) else {}
        method = kind_of.for_budget(schedule, **told, **{**own, **fields})
    given = [{"learning_rate": rate, **NORM} if arm in GRIDS else {} for rate in rates]
    return fit(
        method,
        schedule,
        model=task.model,
        split=split,
        candidates=given * seeds,
        secrets=[s for s in secrets_for(cell["part"], 0, seeds) for _ in rates],
        snapshots_at=snapshots_at,
    )


def fill_curve(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Look at the losses along a step of a training at the best rate: fits, and what clipping takes."""
    task, split, schedule = setting(cell["part"], options)
    told, lines = {"epsilon": cell["epsilon"], "delta": DELTA}, []
    noise = HyFreeDP.for_budget(schedule, **told).loss_noise_multiplier
    found = train_arm(cell, options, (BEST[cell["part"]],), SEEDS, curves.LOOKED_AT)
    for seed, snapshots in enumerate(found.snapshots):
        for step in curves.AT:
            model = task.model()
            losses = curves.losses_at(model, snapshots[step - 1], split)
            lines += [line(name, seed, step, value) for name, value in curves.biases(losses)]
            # Along the step that was taken next, as the paper: its losses are about one step.
            here, along = snapshots[step - 1], snapshots[step - 1] - snapshots[step]
            for points in (curves.THREE, curves.FIVE):
                named = {"noise": noise, "batch": BATCH, "seed": seed}
                of = curves.fits(model, split, here, along, curves.POINTS[points], **named)
                lines += [line(f"{points}, {n}", seed, step, value) for n, value in of]
    return lines


def fill_course(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Follow the rate and the test set over a training."""
    task, split, schedule = setting(cell["part"], options)
    ends = [round(schedule.steps * share / 5) - 1 for share in range(1, 6)]
    rates = rates_of(cell, options)
    found = train_arm(cell, options, rates, SEEDS, ends)
    lines, arm = [], cell["arm"]
    for k, (seed, rate) in enumerate((s, r) for s in range(SEEDS) for r in rates):
        name = f"{arm}, {rate:g}" if arm in GRIDS else arm
        rows = torch.stack([found.snapshots[k][end] for end in ends])
        for end, right in zip(ends, accuracies(task.model, rows, split), strict=True):
            lines.append(line(f"{name}: accuracy", seed, end + 1, right))
        if arm not in GRIDS:
            column = found.report["learning_rate"][:, k].tolist()
            lines += [
                line(f"{name}: learning_rate", seed, step, column[step])
                for step in range(0, schedule.steps, 5)
            ]
    return lines


def fill_rate(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Follow rate and loss from several first rates, with every seed."""
    seeds = 1 if options.smoke else SEEDS
    task, split, schedule = setting(cell["part"], options)
    told = {"epsilon": cell["epsilon"], "delta": DELTA, "fit": cell["arm"]}
    told |= WIDE if cell["arm"] == "robust" else {}
    starts = [(seed, start) for seed in range(seeds) for start in STARTS]
    found = fit(
        HyFreeDP.for_budget(schedule, **told),
        schedule,
        model=task.model,
        split=split,
        candidates=[{"learning_rate": start} for _, start in starts],
        secrets=[s for s in secrets_for("rates", 0, seeds) for _ in STARTS],
    )
    right = accuracies(task.model, found.params, split)
    lines = []
    for k, (seed, start) in enumerate(starts):
        name = f"{cell['arm']}, from {start:g}"
        lines.append(line(f"{name}: accuracy", seed, schedule.steps, right[k]))
        for kind in ("learning_rate", "loss"):
            column = found.report[kind][:, k].tolist()
            # Between updates both stay as they are.
            shown = range(0, schedule.steps, 5)
            lines += [line(f"{name}: {kind}", seed, step, column[step]) for step in shown]
    return lines


def fill_noise(cell: Mapping[str, Any], _: Options) -> list[dict[str, Any]]:
    """Account for both noises at every K: what the product plans, nothing is trained."""
    records, steps = SETTINGS[cell["part"]]
    told = {"epsilon": cell["epsilon"], "delta": DELTA}
    schedule = Schedule(records, BATCH / records, steps)
    plain = AutomaticClipping.for_budget(schedule, **told).noise_multiplier
    lines = []
    for k in (1, 2, 5, 10, 20):
        even = hyfreedp_event(
            schedule.sample_rate, steps, interval=k, gradient_noise=1.0, loss_noise=1.0
        )
        lines.append(line("σ, DP-SGD", 0, k, plain))
        lines.append(line("σ, even split", 0, k, calibrate(even, **told).scale))
        for law in ("gaussian", "laplace"):
            made = HyFreeDP.for_budget(schedule, **told, interval=k, loss_noise=law)
            if law == "gaussian":
                lines.append(line("σ_g", 0, k, made.gradient_noise_multiplier))
            lines.append(line(f"σ_l, {law}", 0, k, made.loss_noise_multiplier))
    return lines


def large() -> nn.Module:
    """Return a network of 1,067,525 weights."""
    hidden = (nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(256, 5))


def seconds_of_a_pass(x: torch.Tensor) -> float:
    """Return the CPU seconds of one pass of a batch through the large network."""
    model, began = large(), time.process_time()
    with torch.no_grad():
        for _ in range(TIMED):
            model(x)
    return (time.process_time() - began) / TIMED


def fill_seconds(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Take the CPU seconds of a step, methods by turns, without the first steps of each."""
    _, split, _ = setting("all", options)
    if cell["arm"] == PASS:
        return [line(PASS, turn, 0, seconds_of_a_pass(split.x[:BATCH])) for turn in range(ROUNDS)]
    model = fine_tuned(replace(digits_5_to_9(), model=large), trainable=cell["part"]).model
    schedule = Schedule(len(split), BATCH / len(split), WARM + TIMED)
    methods: dict[str, Any] = {f"K = {k}": HyFreeDP(1.0, 5.0, interval=k) for k in (1, 5, 10)}
    methods |= {"DP-SGD": AutomaticClipping(1.0), "DP-AdamW": DPAdam(1.0)}
    given = {"DP-SGD": {"learning_rate": 0.1}, "DP-AdamW": {"learning_rate": 1e-3, **NORM}}
    lines = []
    for turn in range(ROUNDS):
        for name in STEPS:
            ends: list[float] = []
            fit(
                methods[name],
                schedule,
                model=model,
                split=split,
                candidates=[given.get(name, {})],
                secrets=secrets_for("seconds", turn, 1),
                on_step=lambda *_, ends=ends: ends.append(time.process_time()),
            )
            lines.append(line(name, turn, 0, (ends[-1] - ends[WARM - 1]) / TIMED))
    return lines


FILL: dict[str, Callable[[Mapping[str, Any], Options], list[dict[str, Any]]]] = {
    "accuracy": fill_accuracy,
    "rate": fill_rate,
    "noise": fill_noise,
    "curve": fill_curve,
    "course": fill_course,
    "seconds": fill_seconds,
}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one cell."""
    return FILL[cell["what"]](cell, options)
