"""People against rows: what it costs in accuracy to protect people, on a made-up table.

Writes a table of visits, trains the same model at the same ε on a budget of records and on one of
people, and prints what each promises a person of six visits, and its test accuracy (mean over runs).
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import privtune

EPSILON, DELTA, MOST = 1.0, 1e-5, 6
ARM = {"name": "a", "strategy": "fixed", "parameters": {"learning_rate": 2.0, "max_grad_norm": 1.0}}


def write(path: Path, people: int) -> int:
    """Write a table of 1 to 6 visits of each person; return how many there are."""
    made = np.random.default_rng(5)
    lines = ["who,age,dose,ill"]
    for person in range(people):
        age, frail = made.uniform(20, 80), made.normal(0, 6)
        for _ in range(int(made.integers(1, MOST + 1))):
            dose = made.uniform(0, 10)
            ill = int(age + 4 * dose + frail + made.normal(0, 6) > 70)
            lines.append(f"p{person},{age:.1f},{dose:.2f},{ill}")
    path.write_text("\n".join(lines))
    return len(lines) - 1


def accuracy(folder: Path, unit: str, records: int, runs: int) -> float:
    """Return the mean test accuracy of studies on a budget of this unit."""
    group = {} if unit == "record" else {"group": "who", "max_per_group": MOST, "unit": unit}
    train, rest = records * 8 // 10, records // 10
    found = []
    for run in range(runs):
        study = privtune.create_study(
            f"{unit}-{run}",
            budget=privtune.Budget(EPSILON, DELTA, name=f"{unit}-{run}", unit=unit),
            task={
                "type": "tabular", "path": str(folder / "visits.csv"), "target": "ill",
                "classes": [0, 1], "bounds": {"age": [0, 100], "dose": [0, 10]}, "train": train,
                "validation": rest, "test": rest, "public_test": True, **group,
            },
            arms=[ARM],
            epochs=20,
            expected_batch_size=train // 12,
            storage=f"sqlite:///{folder / 'people.db'}",
        )  # fmt: skip
        [release] = study.run()
        found.append(release.utility["test_accuracy"])
        study.close()
    return statistics.mean(found)


def main(people: int = 3000, runs: int = 1) -> None:
    """Print the comparison."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = write(folder / "visits.csv", people)
        print("unit    records     ε of a visit  ε of a person  test accuracy")
        for unit, records, of_person in (
            ("record", rows, f"up to {EPSILON * MOST:g}"),
            ("person", people, f"{EPSILON:g}"),
        ):
            shown = accuracy(folder, unit, records, runs)
            print(f"{unit:7} {records:<11} {EPSILON:<13g} {of_person:14} {shown:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
