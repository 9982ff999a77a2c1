"""Last iterate, average of the last half, or moving average: what each releases on the four tasks.

python -m studies.four_tasks.averages --data mnist.npz        # goes on where it was
python -m studies.four_tasks.averages --no-run                # the table of the file as it is

One training gives all three: they are functions of the same iterates, computed here from a copy of
each of them, and not by the engine. A test holds the engine to the same formulas. Searches, whose
choice hangs on the average, are run by the product, once for each.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from privtune.tasks import get_task
from privtune.tasks._fine_tuning import for_candidate
from privtune.training.mechanism.kernel import load_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import METHODS
from studies.four_tasks.run import ARMS, EPSILONS, FINE_TUNING, SEEDS, SPACE, TASKS
from studies.harness import secrets_for, train
from studies.sheet import by, markdown, mean, pm, release_of
from studies.transfer.task import public_weights

FILE = Path(__file__).with_name("averages.csv")
AVERAGES = ("last", "tail", "ema")
KEY = ("task", "epsilon", "seed", "method", "learning_rate")
RATES = {
    "dpsgd": (0.05, 0.15, 0.5, 1.5, 5.0),
    "dp-adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "adadp": (),
    "prodigy": (),
    "hyfreedp": (),
    "dowg": (),
}
SEARCHES = ("papernot-steinke", "everything, TPE")
SMALL = ("digits", "table")  # of which ten trials take seconds


def averaged(iterates: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what is released of the iterates of a training, shape ``[T, P]``, by each rule."""
    steps, moving = len(iterates), iterates[0]
    for step in range(1, steps):
        decay = min(0.9999, (1 + step) / (10 + step))
        moving = decay * moving + (1.0 - decay) * iterates[step]
    return {"last": iterates[-1], "tail": iterates[steps // 2 :].mean(dim=0), "ema": moving}


@cache
def task_of(name: str) -> tuple[Any, Any]:
    """Return a task and its data."""
    said = TASKS[name]["task"]
    if name == "transfer":
        said = {**FINE_TUNING, "pretrained": str(public_weights(128))}
    task = for_candidate(get_task(said), {})
    return task, task.load_checked()


@cache
def planned(name: str, method: str, epsilon: float) -> tuple[Schedule, Any]:
    """Return the schedule of a task, and a method with the noise of an epsilon."""
    task, _ = task_of(name)
    schedule = Schedule.from_epochs(
        records=task.train_records,
        expected_batch_size=TASKS[name]["expected_batch_size"],
        epochs=TASKS[name]["epochs"],
    )
    made = METHODS[method].for_budget(schedule, epsilon=epsilon, delta=1e-5, average="last")
    return schedule, made


def cells(seeds: int) -> Iterator[tuple[str, float, int, str]]:
    """Yield every training, seed by seed; then the searches, the small ones first."""
    for seed, task, epsilon in product(range(seeds), TASKS, EPSILONS):
        for method in RATES:
            yield task, epsilon, seed, method
    for tasks in (SMALL, [task for task in TASKS if task not in SMALL]):
        for seed, task, epsilon in product(range(seeds), tasks, EPSILONS):
            for search in SEARCHES if task in SMALL else SEARCHES[:1]:
                yield task, epsilon, seed, search


def fill(name: str, epsilon: float, seed: int, method: str) -> list[dict[str, Any]]:
    """Train once at every rate, and return the accuracy of each average on the test split."""
    if method in SEARCHES:
        return [search(name, epsilon, seed, method)]
    task, data = task_of(name)
    schedule, made = planned(name, method, epsilon)
    rates, found = RATES[method] or (None,), []
    secrets = secrets_for(f"averages/{name}/{method}/{epsilon}", seed, len(rates))
    clip = {"max_grad_norm": 1.0} if "max_grad_norm" in made.parameters else {}
    module = task.model()
    for rate, secret in zip(rates, secrets, strict=True):
        candidate = {**clip, **({} if rate is None else {"learning_rate": rate})}
        result = train(
            made,
            schedule,
            model=task.model,
            loss=task.loss,
            data=data.train,
            candidates=[candidate],
            secrets=[secret],
            device="cpu",
            snapshots_at=range(schedule.steps),
        )
        iterates = torch.stack([result.snapshots[0][step] for step in range(schedule.steps)])
        row = {"learning_rate": "" if rate is None else rate}
        for average, params in averaged(iterates).items():
            load_params(module, params)
            with torch.no_grad():
                right = module(data.test.x).argmax(dim=1) == data.test.y
            row[average] = round(right.double().mean().item(), 4)
        found.append(row)
    return found


def search(name: str, epsilon: float, seed: int, arm: str) -> dict[str, Any]:
    """Return the accuracy of what a search for the rate of DP-SGD releases with each average."""
    terms: dict[str, Any] = {**TASKS[name], "space": SPACE}
    if name == "transfer":
        terms["task"] = {**FINE_TUNING, "pretrained": str(public_weights(128))}
    terms |= {"epsilon": epsilon, "delta": 1e-5, "seed": seed}
    row: dict[str, Any] = {"learning_rate": ""}
    for average in AVERAGES:
        made = release_of({**ARMS[arm], "options": {"average": average}}, **terms)
        row[average] = made["accuracy"]
    return row


def places(rows: list[dict[str, str]]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the rows of each method: where rates are tried, by their place beside the best of the last."""
    for (method,), of in by(rows, "method").items():
        if method not in RATES or not RATES[method]:
            yield method, of
            continue
        found: dict[str, list[dict[str, str]]] = {
            "below the best": [],
            "best": [],
            "above the best": [],
        }
        for group in by(of, "task", "epsilon").values():
            best = max(RATES[method], key=lambda rate: mean(_at(group, rate), "last"))
            for rate in RATES[method]:
                place = (
                    "best" if rate == best else f"{'below' if rate < best else 'above'} the best"
                )
                found[place] += _at(group, rate)
        yield from ((f"{method}, rates {place}", lines) for place, lines in found.items() if lines)


def _at(rows: list[dict[str, str]], rate: float) -> list[dict[str, str]]:
    return [row for row in rows if float(row["learning_rate"]) == rate]


def summary(rows: list[dict[str, str]]) -> str:
    """Return accuracy by method over all tasks, and the mean difference that an average makes."""
    lines = []
    for name, group in places(rows):
        gains = [
            pm([{"x": float(r[a]) - float(r["last"])} for r in group], "x", scale=100.0)
            for a in AVERAGES[1:]
        ]
        parts = [f"{100 * mean(group, a):.1f}" for a in AVERAGES]
        lines.append((name, *parts, *gains, len(group)))
    head = ("method", *AVERAGES, "tail - last", "ema - last", "trainings")
    return markdown(head, lines)


def table(rows: list[dict[str, str]]) -> str:
    """Return accuracy by task, epsilon, method and rate: mean and standard error over seeds."""
    head = ("task", "ε", "method", "rate", *AVERAGES, "seeds")
    lines = []
    for (task, epsilon, method, rate), group in by(rows, *KEY[:2], *KEY[3:]).items():
        shown = [pm(group, average, scale=100.0) for average in AVERAGES]
        lines.append((task, f"{float(epsilon):g}", method, rate or "-", *shown, len(group)))
    return markdown(head, lines)


def main() -> None:
    """Run what is not in the file yet, and print the table."""
    parser = ArgumentParser(prog="python -m studies.four_tasks.averages")
    parser.add_argument("--data", type=Path, help="mnist.npz")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--no-run", action="store_true")
    given = parser.parse_args()
    rows = list(csv.DictReader(given.out.open(encoding="utf-8"))) if given.out.exists() else []
    if not given.no_run:
        if given.data is not None:
            os.environ["PRIVTUNE_DATA"] = str(given.data.absolute())
        torch.set_num_threads(1)
        done = {(r["task"], float(r["epsilon"]), int(r["seed"]), r["method"]) for r in rows}
        began = time.monotonic()
        for cell in cells(SEEDS):
            if cell in done or time.monotonic() - began > 60.0 * given.minutes:
                continue
            found = [dict(zip(KEY, cell, strict=False)) | row for row in fill(*cell)]
            new = not given.out.exists()
            with given.out.open("a", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, [*KEY, *AVERAGES], lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerows(found)
        rows = list(csv.DictReader(given.out.open(encoding="utf-8")))
    print(summary(rows), table(rows), sep="\n\n")


if __name__ == "__main__":
    sys.exit(main())
