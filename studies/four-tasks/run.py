"""Every strategy on four tasks at one epsilon each: what it buys, and what would have been claimed.

    python studies/four-tasks/run.py --seeds 5 --out results.csv       # digits and a table; minutes
    python studies/four-tasks/run.py --smoke                           # one seed, seconds
    python studies/four-tasks/run.py --seeds 0 --out results.csv --check --chart chart.html

MNIST and the fine-tuned network are read from the results of their own studies beside this one.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import privtune
from privtune.accounting import epsilon as account

HERE = Path(__file__).parent
CLIP = {"max_grad_norm": 1.0}
SPACE = {"learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True}}
SEARCH = {"mean_runs": 10, "parameters": CLIP}
ARMS: dict[str, dict[str, Any]] = {
    "defaults": {"strategy": "fixed", "parameters": {"learning_rate": 0.5, **CLIP}},
    "papernot-steinke": {"strategy": "papernot-steinke", **SEARCH},
    "liu-talwar": {"strategy": "liu-talwar", "maximum": 40, **SEARCH},
    "subsampled-2": {"strategy": "subsampled-tuning", "variant": 2, "rate": 0.1, **SEARCH},
    "hyfreedp": {"strategy": "hyfreedp"},
    "adadp": {"strategy": "adadp", "parameters": CLIP},
    "prodigy": {"strategy": "prodigy"},
    "methods": {
        "strategy": "papernot-steinke",
        "mean_runs": 5,
        "candidates": [
            {"method": "hyfreedp"},
            {"method": "adadp", "parameters": CLIP},
            {"method": "dpsgd", "parameters": CLIP},
        ],
    },
    "everything, TPE": {
        "strategy": "everything",
        "trials": 10,
        "sampler": "tpe",
        "parameters": CLIP,
    },
}
TASKS = {
    "digits": {"task": "digits-mlp", "epochs": 20, "expected_batch_size": 64},
    "table": {"task": "synthetic-logistic", "epochs": 5, "expected_batch_size": 128},
}
OTHERS = {
    "mnist": HERE.parent / "mnist-strategies" / "results.csv",
    "transfer": HERE.parent / "transfer" / "results.csv",
}
EPSILONS = (1.0, 4.0)
FIELDS = ["task", "epsilon", "seed", "arm", "accuracy", "gradient_evaluations", "spent", "claimed"]


def run_arm(task: str, name: str, epsilon: float, seed: int, *, smoke: bool) -> dict[str, Any]:
    """Run one arm in a study of its own and return its line."""
    arm = ARMS[name]
    searches = "mean_runs" in arm or "trials" in arm
    terms = {**TASKS[task], **({"epochs": 1} if smoke else {})}
    with tempfile.TemporaryDirectory() as folder:
        study = privtune.create_study(
            "four-tasks",
            budget=privtune.Budget(epsilon, 1e-5, name=task),
            arms=[{"name": "arm", **arm}],
            space=SPACE if searches else {},
            seed=seed,
            storage=f"sqlite:///{folder}/study.db",
            **terms,
        )
        (plan,) = study.plans
        (release,) = study.run()
        study.close()
    return {
        "task": task,
        "epsilon": epsilon,
        "seed": seed,
        "arm": name,
        "accuracy": round(release.utility.get("test_accuracy", float("nan")), 4),
        "gradient_evaluations": round(release.cost.gradient_evaluations),
        "spent": round(release.guarantee.epsilon, 4),
        # What a script says that accounts for its last training alone.
        "claimed": round(account(plan.training.event, 1e-5).epsilon, 4),
    }


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the lines of a results file, with those of the other studies, in one form."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for task, other in OTHERS.items():
        with other.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row.get("trainable", "all") == "all":
                    rows.append({**dict.fromkeys(FIELDS, ""), **row, "task": task})
    return rows


def cells(
    rows: Sequence[Mapping[str, str]],
) -> dict[tuple[str, float, str], list[Mapping[str, str]]]:
    """Return lines by task, epsilon and arm."""
    groups: dict[tuple[str, float, str], list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        groups[row["task"], float(row["epsilon"]), row["arm"]].append(row)
    return groups


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table of the results: mean and standard deviation over the seeds."""
    lines = [
        "| task | ε | arm | seeds | test accuracy | ε as usually claimed | gradient evaluations |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (task, epsilon, arm), group in cells(rows).items():
        values = [100 * float(row["accuracy"]) for row in group]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        first = group[0]
        evaluations = (
            f"{int(first['gradient_evaluations']):,}" if first["gradient_evaluations"] else ""
        )
        lines.append(
            f"| {task} | {epsilon:g} | {arm} | {len(group)} | {statistics.mean(values):.1f}{spread} % | "
            f"{first['claimed']} | {evaluations} |"
        )
    return "\n".join(lines)


def compare(rows: Sequence[Mapping[str, str]], expected: Mapping[str, Any]) -> list[str]:
    """Return where results deviate from what is expected, one sentence each."""
    problems = []
    for (task, epsilon, arm), group in cells(rows).items():
        if any(row["spent"] and float(row["spent"]) > epsilon for row in group):
            problems.append(f"{arm} on {task} spent more than epsilon {epsilon:g}")
        known = expected["accuracy"].get(task, {}).get(f"{epsilon:g}", {}).get(arm)
        found = 100 * statistics.mean(float(row["accuracy"]) for row in group)
        if known is not None and not abs(found - known) <= expected["tolerance"]:
            problems.append(f"{arm} on {task} at epsilon {epsilon:g}: {found:.1f} %, not {known} %")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not in the results file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--chart", type=Path, help="where to write the chart, as HTML")
    options = parser.parse_args(argv)
    if options.smoke:
        options.seeds, options.epsilons = 1, [4.0]
    out = options.out or Path(tempfile.mkdtemp()) / "results.csv"
    if not out.exists():
        out.write_text(",".join(FIELDS) + "\n", encoding="utf-8")
    with out.open(encoding="utf-8") as file:
        done = {
            (r["task"], float(r["epsilon"]), int(r["seed"]), r["arm"]) for r in csv.DictReader(file)
        }
    for seed in range(options.seeds):
        for task in options.tasks:
            for epsilon in options.epsilons:
                for arm in options.arms:
                    if (task, epsilon, seed, arm) in done:
                        continue
                    row = run_arm(task, arm, epsilon, seed, smoke=options.smoke)
                    with out.open("a", encoding="utf-8", newline="") as file:
                        csv.DictWriter(file, FIELDS).writerow(row)
                        file.flush()
                        os.fsync(file.fileno())
    rows = rows_of(out)
    print(table(rows))
    if options.chart:
        from privtune.plots import plot_results

        plot_results(rows).write_html(options.chart, config={"displayModeBar": False})
    if not options.check:
        return 0
    problems = compare(rows, json.loads((HERE / "expected.json").read_text(encoding="utf-8")))
    for problem in problems:
        print(f"DEVIATION: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
