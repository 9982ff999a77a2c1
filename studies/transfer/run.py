"""Fine-tune on MNIST's digits 5 to 9 what was trained on 0 to 4, by every strategy, at one ε each.

    python -m studies.transfer.run --data mnist.npz --seeds 5 --out results.csv
    python -m studies.transfer.run --smoke                  # seconds, on scikit-learn's digits
    python -m studies.transfer.run --seeds 0 --out results.csv --check

Each arm has a budget of its own: the question is what one epsilon buys.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import privtune
from privtune.tasks import fine_tuned
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import DPAdam
from studies.harness import accuracies, fit, secrets_for
from studies.transfer.task import HIDDEN, digits_5_to_9, half, pretrain

NORM = {"max_grad_norm": 0.1}  # Adam does not see the scale of its gradients
SPACE = {"learning_rate": {"type": "float", "low": 1e-4, "high": 3e-2, "log": True}}
SEARCH = {"method": "dp-adam", "parameters": NORM}
SUBSAMPLED = {
    "strategy": "subsampled-tuning",
    "rate": 0.1,
    "mean_runs": 10,
    "extrapolation": "keep",  # as the paper does with Adam
    **SEARCH,
}
ARMS: dict[str, dict[str, Any]] = {
    "defaults": {
        "strategy": "fixed",
        "method": "dp-adam",
        "parameters": {"learning_rate": 1e-3, **NORM},
    },
    "hyfreedp": {"strategy": "hyfreedp"},
    "hyfreedp, linear": {"strategy": "hyfreedp", "schedule": {"type": "linear", "start": 0.5}},
    "prodigy": {"strategy": "prodigy"},
    "d-adaptation": {"strategy": "d-adaptation"},
    "adadp": {"strategy": "adadp", "parameters": {"max_grad_norm": 1.0}},
    "adaclip": {
        "strategy": "adaclip",
        "parameters": {"learning_rate": 0.5, "largest_variance": 1e-3},
    },
    "papernot-steinke": {"strategy": "papernot-steinke", "mean_runs": 10, **SEARCH},
    "subsampled-1": {**SUBSAMPLED, "variant": 1},
    "subsampled-2": {**SUBSAMPLED, "variant": 2},
    "dp-hyper": {"strategy": "dp-hyper", "mean_runs": 10, **SEARCH},
    "un-paid grid": {},
}
GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
TRAINABLE = ("all", "head", "biases", "lora:4")
FIELDS = ["trainable", "epsilon", "seed", "arm", "accuracy", "spent"]


def run_arm(
    name: str, trainable: str, epsilon: float, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one arm in a study of its own and return its line."""
    with tempfile.TemporaryDirectory() as folder:
        study = privtune.create_study(
            "transfer",
            budget=privtune.Budget(epsilon, 1e-5, name="digits-5-to-9"),
            task={
                "type": "fine-tuning",
                "task": "studies.transfer.task:digits_5_to_9",
                "pretrained": str(options.weights),
                "trainable": trainable,
            },
            arms=[{"name": "arm", **ARMS[name]}],
            space=SPACE if "mean_runs" in ARMS[name] else {},
            epochs=options.epochs,
            expected_batch_size=options.batch,
            seed=seed,
            storage=f"sqlite:///{folder}/study.db",
        )
        (release,) = study.run()
        study.close()
    accuracy = release.utility.get("test_accuracy", float("nan"))
    return {
        "trainable": trainable,
        "epsilon": epsilon,
        "seed": seed,
        "arm": name,
        "accuracy": round(accuracy, 4),
        "spent": round(release.guarantee.epsilon, 4),
    }


def run_grid(
    trainable: str, epsilon: float, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train at every rate of the grid, and report the one that tests best: nobody paid for that."""
    task = fine_tuned(digits_5_to_9(), pretrained=str(options.weights), trainable=trainable)
    schedule = Schedule.from_epochs(
        records=task.train_records, expected_batch_size=options.batch, epochs=options.epochs
    )
    split = half(5)
    split.x, split.y = split.x[: task.train_records], split.y[: task.train_records]
    found = fit(
        DPAdam.for_budget(schedule, epsilon=epsilon, delta=1e-5, schedule=options.grid_schedule),
        schedule,
        model=task.model,
        split=split,
        candidates=[{"learning_rate": rate, **NORM} for rate in GRID],
        secrets=secrets_for("transfer", seed, len(GRID)),
    )
    best = max(accuracies(task.model, found.params, split))
    return {
        "trainable": trainable,
        "epsilon": epsilon,
        "seed": seed,
        "arm": "un-paid grid",
        "accuracy": round(best / 100.0, 4),
        "spent": "",
    }


def cells(path: Path) -> dict[tuple[str, float, str], list[dict[str, str]]]:
    """Return the lines of a results file by part, epsilon and arm."""
    groups: dict[tuple[str, float, str], list[dict[str, str]]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups[row["trainable"], float(row["epsilon"]), row["arm"]].append(row)
    return groups


def compare(path: Path, expected: dict[str, Any], *, smoke: bool = False) -> list[str]:
    """Return where a results file deviates from what is expected, one sentence each."""
    problems = []
    for (trainable, epsilon, arm), rows in cells(path).items():
        where = f"{arm}, {trainable}, at epsilon {epsilon:g}"
        if any(row["spent"] and float(row["spent"]) > epsilon for row in rows):
            problems.append(f"{where} spent more than that")
        known = expected["accuracy"].get(trainable, {}).get(f"{epsilon:g}", {})
        if smoke or arm not in known:
            continue
        found = 100 * statistics.mean(float(row["accuracy"]) for row in rows)
        if not abs(found - known[arm]) <= expected["tolerance"]:
            problems.append(f"{where}: {found:.1f} %, not {known[arm]} %")
    return problems


def table(path: Path) -> str:
    """Return the table of a results file: mean test accuracy over its seeds, and their number."""
    groups = cells(path)
    columns = sorted({(part, epsilon) for part, epsilon, _ in groups}, key=_order)
    head = " | ".join(f"{part}, ε = {epsilon:g}" for part, epsilon in columns)
    lines = [f"| arm | {head} |", "| --- |" + " --- |" * len(columns)]
    for arm in ARMS:
        found = [groups.get((*column, arm), []) for column in columns]
        if any(found):
            lines.append(f"| {arm} | " + " | ".join(map(_cell, found)) + " |")
    return "\n".join(lines)


def _order(column: tuple[str, float]) -> tuple[int, float]:
    return TRAINABLE.index(column[0]), column[1]


def _cell(rows: Sequence[dict[str, str]]) -> str:
    if not rows:
        return "–"
    values = [100 * float(row["accuracy"]) for row in rows]
    return f"{statistics.mean(values):.1f} ({len(values)})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not in the results file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m studies.transfer.run")
    parser.add_argument("--data", type=Path, help="mnist.npz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.3, 1.0, 3.0, 8.0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--trainable", nargs="+", default=list(TRAINABLE), choices=TRAINABLE)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--grid-schedule", default="constant")
    parser.add_argument("--out", type=Path, default=Path("results.csv"))
    parser.add_argument("--smoke", action="store_true", help="one seed, one epoch, small, digits")
    parser.add_argument("--check", action="store_true", help="compare with expected.json")
    options = parser.parse_args(argv)
    if options.data is not None:
        os.environ["PRIVTUNE_DATA"] = str(options.data.absolute())
    elif options.seeds and not options.smoke:
        sys.exit("--data PATH must give mnist.npz (x_train, y_train, x_test, y_test).")
    if options.smoke:
        options.seeds, options.epsilons, options.epochs, options.batch = 1, [3.0], 1, 100
        options.hidden = 16
        os.environ.pop("PRIVTUNE_DATA", None)
    os.environ[HIDDEN] = str(options.hidden)
    with tempfile.TemporaryDirectory() as folder:
        options.weights = Path(folder) / "digits-0-to-4.safetensors"
        if options.seeds:
            pretrain(options.weights)
        _run(options)
    print(table(options.out))
    if not options.check:
        return 0
    expected = json.loads(Path(__file__).with_name("expected.json").read_text(encoding="utf-8"))
    problems = compare(options.out, expected, smoke=options.smoke)
    for problem in problems:
        print(f"DEVIATION: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _run(options: argparse.Namespace) -> None:
    done = set()
    if options.out.exists():
        with options.out.open(encoding="utf-8") as file:
            done = {tuple(row[n] for n in FIELDS[:4]) for row in csv.DictReader(file)}
    with options.out.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not done:
            writer.writeheader()
        for seed in range(options.seeds):
            for epsilon in options.epsilons:
                for trainable in options.trainable:
                    for name in options.arms:
                        if (trainable, str(epsilon), str(seed), name) in done:
                            continue
                        if name == "un-paid grid":
                            line = run_grid(trainable, epsilon, seed, options)
                        else:
                            line = run_arm(name, trainable, epsilon, seed, options)
                        writer.writerow(line)
                        file.flush()


if __name__ == "__main__":
    sys.exit(main())
