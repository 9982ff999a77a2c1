"""Run every strategy on MNIST at the same total epsilon, and write one line a release.

    python studies/mnist-strategies/run.py --data mnist.npz --seeds 5 --out results.csv
    python studies/mnist-strategies/run.py --smoke          # seconds, on scikit-learn's digits
    python studies/mnist-strategies/run.py --seeds 0 --out results.csv --check

Each arm has a budget of its own: MNIST is public, and the question is what one epsilon buys.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import privtune

SPACE = {
    "learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True},
    "max_grad_norm": {"type": "float", "low": 0.1, "high": 10.0, "log": True},
}
DEFAULTS = {"learning_rate": 0.5, "max_grad_norm": 1.0}
ARMS = {
    "defaults": {"strategy": "fixed", "parameters": DEFAULTS},
    "subsampled-1": {"strategy": "subsampled-tuning", "variant": 1, "rate": 0.1, "mean_runs": 10},
    "subsampled-2": {"strategy": "subsampled-tuning", "variant": 2, "rate": 0.1, "mean_runs": 10},
    "hyfreedp": {"strategy": "hyfreedp"},
    "adadp": {"strategy": "adadp", "parameters": {"max_grad_norm": 1.0}},
    "adaclip": {
        "strategy": "adaclip",
        "parameters": {"learning_rate": 0.5, "largest_variance": 1e-3},
    },
    "papernot-steinke": {"strategy": "papernot-steinke", "mean_runs": 10},
    "liu-talwar": {"strategy": "liu-talwar", "mean_runs": 10, "maximum": 40},
}
FIELDS = ["epsilon", "seed", "arm", "accuracy", "gradient_evaluations", "seconds", "spent"]


def run_arm(name: str, epsilon: float, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Run one arm in a study of its own and return its line."""
    arm = ARMS[name]
    searches = "variant" in arm or "mean_runs" in arm
    with tempfile.TemporaryDirectory() as folder:
        study = privtune.create_study(
            "mnist",
            budget=privtune.Budget(epsilon, 1e-5, name="mnist"),
            task="digits-mlp" if options.smoke else "mnist-mlp",
            arms=[{"name": name, **arm}],
            space=SPACE if searches else {},
            epochs=options.epochs,
            expected_batch_size=options.batch,
            seed=seed,
            storage=f"sqlite:///{folder}/study.db",
        )
        started = time.perf_counter()
        (release,) = study.run()
        seconds = time.perf_counter() - started
        study.close()
    return {
        "epsilon": epsilon,
        "seed": seed,
        "arm": name,
        "accuracy": round(release.utility.get("test_accuracy", float("nan")), 4),
        "gradient_evaluations": round(release.cost.gradient_evaluations),
        "seconds": round(seconds, 1),
        "spent": round(release.guarantee.epsilon, 4),
    }


def cells(path: Path) -> dict[tuple[float, str], list[dict[str, str]]]:
    """Return the lines of a results file by epsilon and arm."""
    groups: dict[tuple[float, str], list[dict[str, str]]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups[float(row["epsilon"]), row["arm"]].append(row)
    return groups


def compare(path: Path, expected: dict[str, Any], *, smoke: bool = False) -> list[str]:
    """Return where a results file deviates from what is expected, one sentence each.

    A smoke run trains on other data: only what does not depend on the data is compared.
    """
    problems = []
    groups = cells(path)
    for (epsilon, arm), rows in groups.items():
        if any(float(row["spent"]) > epsilon for row in rows):
            problems.append(f"{arm} spent more than epsilon {epsilon:g}")
        known = expected["accuracy"].get(f"{epsilon:g}", {})
        if smoke or arm not in known:
            continue
        found = 100 * statistics.mean(float(row["accuracy"]) for row in rows)
        tolerance = expected["tolerance"].get(arm, expected["tolerance"]["default"])
        # Not a number is a deviation as well.
        if not abs(found - known[arm]) <= tolerance:
            problems.append(f"{arm} at epsilon {epsilon:g}: {found:.1f} %, not {known[arm]} %")
        evaluations = int(rows[0]["gradient_evaluations"])
        if evaluations != expected["gradient_evaluations"][arm]:
            problems.append(f"{arm} at epsilon {epsilon:g}: {evaluations} gradient evaluations")
    for epsilon, arm in groups:
        if arm.startswith("subsampled") and (epsilon, "papernot-steinke") in groups:
            baseline = int(groups[epsilon, "papernot-steinke"][0]["gradient_evaluations"])
            saved = baseline / int(groups[epsilon, arm][0]["gradient_evaluations"])
            if saved < expected["times_fewer_gradient_evaluations_at_least"]:
                problems.append(f"{arm} at epsilon {epsilon:g}: only {saved:.2f} times fewer")
    return problems


def table(path: Path) -> str:
    """Return the table of a results file: mean and standard deviation over its seeds."""
    groups = cells(path)
    lines = [
        "| ε | arm | seeds | test accuracy | gradient evaluations (expected) | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (epsilon, arm), rows in sorted(
        groups.items(), key=lambda g: (g[0][0], list(ARMS).index(g[0][1]))
    ):
        values = [100 * float(row["accuracy"]) for row in rows]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        seconds = statistics.mean(float(row["seconds"]) for row in rows)
        lines.append(
            f"| {epsilon:g} | {arm} | {len(rows)} | {statistics.mean(values):.1f}{spread} % | "
            f"{int(rows[0]['gradient_evaluations']):,} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run what is not in the results file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="MNIST as .npz; OpenML unless given")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("results.csv"))
    parser.add_argument("--smoke", action="store_true", help="one seed, digits, one epoch")
    parser.add_argument("--check", action="store_true", help="compare with expected.json")
    options = parser.parse_args()
    if options.data is not None:
        os.environ["PRIVTUNE_DATA"] = str(options.data.absolute())
    if options.smoke:
        options.seeds, options.epsilons, options.epochs, options.batch = 1, [3.0], 1, 64
    done = set()
    if options.out.exists():
        with options.out.open(encoding="utf-8") as file:
            done = {(float(r["epsilon"]), int(r["seed"]), r["arm"]) for r in csv.DictReader(file)}
    with options.out.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not done:
            writer.writeheader()
        for seed in range(options.seeds):
            for epsilon in options.epsilons:
                for name in options.arms:
                    if (epsilon, seed, name) not in done:
                        writer.writerow(run_arm(name, epsilon, seed, options))
                        file.flush()
    print(table(options.out))
    if not options.check:
        return 0
    expected = json.loads(Path(__file__).with_name("expected.json").read_text(encoding="utf-8"))
    problems = compare(options.out, expected, smoke=options.smoke)
    for problem in problems:
        print(f"DEVIATION: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
