"""Overhead of a study for each trial, beside training, against Optuna with MLflow.

    python studies/benchmarks/orchestration/run.py [--trials 100 1000] [--repeats 3]

Everything that a study does for a trial counts: its row and its lease, sealing its result, recording it,
telling it, tracking what is released. The training itself (`build`, one step of a tiny model, its score) is
timed apart and taken off, as is planning. All of it is on SQLite files, in wall time, of which durable
commits are a part, and in CPU time. The status quo is what the same trials take with Optuna and MLflow
alone: an Optuna trial and a nested MLflow run with the same parameters and the same one metric.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import optuna
import torch
from torch import nn

import privtune
from privtune.strategies import Everything, PapernotSteinke
from privtune.study import run as running
from privtune.study.arm_rounds import TrialFiles
from privtune.tracking.mlflow import MlflowObserver
from privtune.tracking.store import local_uri, open_client

RECORDS = 20
PARAMETERS = ("learning_rate", "max_grad_norm")
METRIC = "acc/val"


@dataclass(frozen=True)
class Seconds:
    """Wall time, and CPU time of all threads."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


class Clock:
    """Adds up what is not overhead, and notes when trials began."""

    def __init__(self) -> None:
        self.apart = Seconds(0.0, 0.0)
        self.began: list[float] = []

    def time(self, function: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = Seconds.now()
            try:
                return function(*arguments, **options)
            finally:
                self.apart += Seconds.now() - start

        return timed


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def records(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(RECORDS, 2, generator=generator), torch.arange(RECORDS) % 2


def privtune_run(folder: Path, trials: int, strategy: str) -> tuple[Seconds, int, list[float]]:
    """Return seconds of overhead, trials run, and when they began."""
    clock = Clock()
    study = privtune.create_study(
        "bench",
        budget=privtune.Budget(8.0, 1e-5, name="bench"),
        storage=f"sqlite:///{folder / 'privtune.db'}",
        stack=1,
    )
    # The first use of a new MLflow database takes seconds, once; so it does on the other side.
    uri = local_uri(study.storage)
    with open_client(study.storage, uri) as client:
        client.search_experiments()
    plan, train = running.plan_arms, TrialFiles.train

    def trained(*arguments: Any, **options: Any) -> Any:
        clock.began.append(time.perf_counter())
        return clock.time(train)(*arguments, **options)

    def build(trial: privtune.Trial) -> privtune.Candidate:
        rate = trial.suggest_float("learning_rate", 0.01, 10.0, log=True)
        norm = trial.suggest_float("max_grad_norm", 0.1, 10.0, log=True)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        return privtune.Candidate(model, optimizer, max_grad_norm=norm)

    chosen = (
        PapernotSteinke(law="poisson", mean_runs=trials)
        if strategy == "selection"
        else Everything(trials=trials, sampler="random")
    )
    running.plan_arms, TrialFiles.train = clock.time(plan), trained
    start = Seconds.now()
    try:
        task = privtune.make_task(
            build, loss=loss, train=records(0), public={"validation": records(1)}
        )
        study.optimize(
            task,
            strategy=chosen,
            epochs=1,
            expected_batch_size=RECORDS,
            observer=MlflowObserver(study, uri=uri),
        )
    finally:
        running.plan_arms, TrialFiles.train = plan, train
    return Seconds.now() - start - clock.apart, len(clock.began), clock.began


def usual_run(folder: Path, trials: int, _: str) -> tuple[Seconds, int, list[float]]:
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
        with mlflow.start_run(nested=True):
            mlflow.log_params(params)
            mlflow.log_metric(METRIC, 0.5)
        return 0.5

    start = Seconds.now()
    with mlflow.start_run():
        study.optimize(one, n_trials=trials)
    return Seconds.now() - start, trials, clock.began


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
    found: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in COMPETITORS}
    drift: dict[str, float] = {}
    for run, strategy in COMPETITORS.values():  # imports and caches are paid once
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), 3, strategy)
    for trials in arguments.trials:
        for _ in range(arguments.repeats):
            for name, (run, strategy) in COMPETITORS.items():
                with tempfile.TemporaryDirectory() as folder:
                    seconds, count, began = run(Path(folder), trials, strategy)
                each = 1e3 * seconds.wall / count, 1e3 * seconds.cpu / count
                found[name].setdefault(trials, []).append(each)
                print(
                    f"{name}, {count} trials: {each[0]:.1f} ms, CPU {each[1]:.1f} ms",
                    file=sys.stderr,
                )
                # How much longer the last tenth of the trials takes than the first, to begin.
                tenth = max(2, len(began) // 10)
                drift[name] = (began[-1] - began[-tenth]) / (began[tenth - 1] - began[0])
    _print_table(found, drift, arguments.trials)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2))


def _print_table(
    found: dict[str, dict[int, list[tuple[float, float]]]],
    drift: dict[str, float],
    trials: list[int],
) -> None:
    columns = [(t, kind) for t in trials for kind in (0, 1)]
    heads = [f"{t} trials, {('wall', 'CPU')[kind]} ms a trial" for t, kind in columns]
    print("| | " + " | ".join(heads) + " | of Optuna + MLflow | last tenth |")
    print("|" + " --- |" * (3 + len(columns)))

    def median(name: str, count: int, kind: int) -> float:
        return statistics.median(each[kind] for each in found[name][count])

    for name in found:
        cells = [f"{median(name, t, kind):.1f}" for t, kind in columns]
        parts = [f"{median(name, *c) / median('Optuna + MLflow', *c):.2f}" for c in columns]
        print(f"| {name} | {' | '.join(cells)} | {', '.join(parts)} | {drift[name]:.2f} |")


if __name__ == "__main__":
    main()
