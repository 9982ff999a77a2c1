"""Which learning rates were best on public data: what ``prior: public`` is made of.

python -m studies.priors.run --data mnist.npz --write     # all tasks, into the package
python -m studies.priors.run --smoke                      # two tasks, one seed, nothing written
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import privtune
from privtune.tasks import get_task
from privtune.tasks.built_in import DATA_VARIABLE
from privtune.training.mechanism.kernel import load_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from studies.harness import secrets_for, train

RATES = tuple(2.0**k for k in range(-6, 5))
EPSILONS = (1.0, 4.0)
TASKS = (  # and epochs, and the expected batch size
    ("iris-logistic", 10, 30),
    ("breast-cancer-logistic", 10, 32),
    ("synthetic-logistic", 5, 128),
    ("digits-mlp", 20, 64),
    ("digits-cnn", 10, 64),
    ("mnist-logistic", 2, 512),
    ("mnist-mlp", 3, 512),
)
PACKAGE = Path(privtune.__file__).parent / "public-priors.json"


def best_rate(name: str, epochs: int, batch: int, epsilon: float, seeds: int) -> dict[str, Any]:
    """Train every rate at a clipping norm of 1, and return the best by the public test split."""
    task = get_task(name)
    schedule = Schedule.from_epochs(
        records=task.train_records, expected_batch_size=batch, epochs=epochs
    )
    method = FixedDPSGD.for_budget(schedule, epsilon=epsilon, delta=1e-5)
    data = task.load()
    result = train(
        method,
        schedule,
        model=task.model,
        loss=task.loss,
        data=data.train,
        candidates=[
            {"learning_rate": r, "max_grad_norm": 1.0} for r in RATES for _ in range(seeds)
        ],
        secrets=secrets_for(f"priors/{name}/{epsilon:g}", 0, len(RATES) * seeds),
        device="cpu",
    )
    x, y = data.test.take(torch.arange(len(data.test)))
    module, right = task.model(), []
    for row in result.params:
        load_params(module, row)
        with torch.no_grad():
            right.append((module(x).argmax(dim=1) == y).double().mean().item())
    found = [mean(right[k : k + seeds]) for k in range(0, len(right), seeds)]
    best = max(range(len(RATES)), key=found.__getitem__)
    return {
        "task": name,
        "epsilon": epsilon,
        "records": task.train_records,
        "parameters": int(result.params.shape[1]),
        "steps": schedule.steps,
        "learning_rate": RATES[best],
        "accuracy": round(found[best], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="mnist.npz; without it MNIST is left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="two tasks, one seed")
    parser.add_argument("--write", action="store_true", help="into the package")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.data is not None:
        os.environ[DATA_VARIABLE] = str(given.data)
    tasks = [t for t in TASKS if given.data is not None or not t[0].startswith("mnist")]
    rows = []
    for name, epochs, batch in tasks[:2] if given.smoke else tasks:
        for epsilon in EPSILONS:
            rows.append(best_rate(name, epochs, batch, epsilon, 1 if given.smoke else given.seeds))
            print(json.dumps(rows[-1]), flush=True)
    logs = [math.log(row["learning_rate"]) for row in rows]
    # As wide as what was found, and by two neighbouring rates more: tasks differ from these.
    sigma = math.hypot(stdev(logs), math.log(4.0))
    median = math.exp(mean(logs))
    print(f"median {median:.3g}, sigma {sigma:.3g}")
    if given.write:
        law = {
            "type": "log_normal",
            "median": float(f"{median:.3g}"),
            "sigma": float(f"{sigma:.3g}"),
        }
        source = "python -m studies.priors.run --data mnist.npz --write"
        text = json.dumps({"learning_rate": {"law": law, "source": source, "rows": rows}}, indent=1)
        PACKAGE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
