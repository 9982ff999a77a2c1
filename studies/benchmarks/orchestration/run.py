"""Overhead of a study for each trial, beside training, against Optuna with MLflow.

    python studies/benchmarks/orchestration/run.py [--trials 100 1000] [--repeats 3]

Everything that a study does for a trial counts: drawing its hyperparameters, its row and its lease,
sealing its result, recording it, telling it, tracking what is released. The training itself (one
step of a tiny model) is timed apart and taken off, as are planning and the budget's one charge.
All of it is on SQLite files, in wall time: durable commits are part of the price.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import mlflow
import optuna
import torch
from torch import nn

import privtune
from privtune.strategies import Everything, PapernotSteinke
from privtune.study import _optimize
from privtune.tracking.mlflow import MlflowObserver
from privtune.tracking.store import local_uri, open_client

RECORDS = 20
PARAMETERS = ("learning_rate", "max_grad_norm")
METRICS = ("val_accuracy", "val_loss", "epsilon")


class Clock:
    """Adds up what is not overhead, and notes when trials began."""

    def __init__(self) -> None:
        self.apart = 0.0
        self.began: list[float] = []

    def time(self, function: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.apart += time.perf_counter() - start

        return timed


def objective(
    trial: privtune.Trial, data: tuple[torch.Tensor, torch.Tensor], clock: Clock
) -> float:
    clock.began.append(time.perf_counter())
    rate = trial.suggest_float("learning_rate", 0.01, 10.0, log=True)
    norm = trial.suggest_float("max_grad_norm", 0.1, 10.0, log=True)
    model = nn.Linear(2, 2)

    def training() -> float:
        private = trial.make_private(
            model, torch.optim.SGD(model.parameters(), rate), data, max_grad_norm=norm
        )
        for x, y in private.batches():
            private.step(nn.functional.cross_entropy(private.model(x), y, reduction="none"))
        return trial.score(model, data)

    return clock.time(training)()


def privtune_run(folder: Path, trials: int, strategy: str) -> tuple[float, int, list[float]]:
    """Return seconds of overhead, trials run, and when they began."""
    clock = Clock()
    data = (torch.randn(RECORDS, 2), torch.randint(2, (RECORDS,)))
    study = privtune.create_study(
        "bench",
        budget=privtune.Budget(8.0, 1e-5, name="bench"),
        storage=f"sqlite:///{folder / 'privtune.db'}",
    )
    # The first use of a new MLflow database takes seconds, once; so it does on the other side.
    uri = local_uri(study.storage)
    with open_client(study.storage, uri) as client:
        client.search_experiments()
    observer = MlflowObserver(study, uri=uri)
    planned = _optimize.plan_objective
    _optimize.plan_objective = clock.time(planned)
    chosen = (
        PapernotSteinke(law="poisson", mean_runs=trials)
        if strategy == "selection"
        else Everything(trials=trials, sampler="random")
    )
    start = time.perf_counter()
    try:
        study.optimize(
            lambda trial: objective(trial, data, clock),
            strategy=chosen,
            training=privtune.DPSGD(records=RECORDS, epochs=1, expected_batch_size=RECORDS),
            validation=privtune.Validation(records=RECORDS, public=True),
            observer=observer,
        )
    finally:
        _optimize.plan_objective = planned
    return time.perf_counter() - start - clock.apart, len(clock.began), clock.began


def usual_run(folder: Path, trials: int, _: str) -> tuple[float, int, list[float]]:
    """Optuna on SQLite, and one MLflow run a trial with its parameters and metrics, on SQLite."""
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    mlflow.set_experiment("bench")
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'optuna.db'}",
        sampler=optuna.samplers.RandomSampler(),
        direction="maximize",
    )
    clock = Clock()

    def one(trial: optuna.Trial) -> float:
        clock.began.append(time.perf_counter())
        params = {name: trial.suggest_float(name, 0.1, 10.0, log=True) for name in PARAMETERS}
        with mlflow.start_run():
            mlflow.log_params(params)
            mlflow.log_metrics(dict.fromkeys(METRICS, 0.5))
        return 0.5

    start = time.perf_counter()
    study.optimize(one, n_trials=trials)
    return time.perf_counter() - start, trials, clock.began


COMPETITORS = {
    "PrivTune, private selection": (privtune_run, "selection"),
    "PrivTune, every trial paid for and shown": (privtune_run, "everything"),
    "Optuna + MLflow": (usual_run, ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print(
        f"optuna {optuna.__version__}, mlflow {mlflow.__version__}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}\n"
    )
    found: dict[str, dict[int, list[float]]] = {name: {} for name in COMPETITORS}
    drift: dict[str, float] = {}
    for trials in arguments.trials:
        for _ in range(arguments.repeats):
            for name, (run, strategy) in COMPETITORS.items():
                with tempfile.TemporaryDirectory() as folder:
                    seconds, count, began = run(Path(folder), trials, strategy)
                found[name].setdefault(trials, []).append(1e3 * seconds / count)
                print(f"{name}, {count} trials: {1e3 * seconds / count:.1f} ms", file=sys.stderr)
                # How much longer the last tenth of the trials takes than the first, to begin.
                tenth = max(2, len(began) // 10)
                drift[name] = (began[-1] - began[-tenth]) / (began[tenth - 1] - began[0])
    usual = found["Optuna + MLflow"]
    print("| | " + " | ".join(f"{t} trials, ms a trial" for t in arguments.trials) + " | ", end="")
    print(" | ".join(f"of Optuna + MLflow at {t}" for t in arguments.trials) + " | last tenth |")
    print("|" + " --- |" * (2 + 2 * len(arguments.trials)))
    for name, times in found.items():
        medians = [statistics.median(times[t]) for t in arguments.trials]
        parts = [
            m / statistics.median(usual[t]) for t, m in zip(arguments.trials, medians, strict=True)
        ]
        cells = [f"{m:.1f}" for m in medians] + [f"{p:.2f}" for p in parts]
        print(f"| {name} | " + " | ".join(cells) + f" | {drift[name]:.2f} |")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
