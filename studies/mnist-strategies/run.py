"""Run every strategy on MNIST at the same total epsilon, and write one line a release.

    python studies/mnist-strategies/run.py --data mnist.npz --seeds 5 --out results.csv
    python studies/mnist-strategies/run.py --smoke          # seconds, on scikit-learn's digits

Each arm has a budget of its own: MNIST is public, and the question is what one epsilon buys.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

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


def table(path: Path) -> str:
    """Return the table of a results file: mean and standard deviation over its seeds."""
    groups: dict[tuple[float, str], list[dict[str, str]]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups[float(row["epsilon"]), row["arm"]].append(row)
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


def main() -> None:
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


if __name__ == "__main__":
    main()
