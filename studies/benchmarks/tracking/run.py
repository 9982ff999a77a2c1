"""What logging an arm to MLflow costs, for each arm and each step, on SQLite.

python studies/benchmarks/tracking/run.py [--smoke] [--output FILE]

The same run is logged twice: in one go, as PrivTune does when an arm is released, and call by call,
as a training script with `mlflow.log_metric` in its loop does. Wall time and processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import privtune
from privtune.tracking.store import OWNER_TAG, experiment_id, open_client, write_record
from privtune.views.record import ArmRecord, arm_record, budget_view

STEP_METRICS = ("lr", "clip", "eps/arm_steps")


def finished_study(folder: Path) -> privtune.Study:
    """Run a small study, which the arms that are logged are copies of."""
    study = privtune.create_study(
        "benchmark",
        budget=privtune.Budget(4.0, 1e-3, name="benchmark"),
        task="iris-logistic",
        arms=[
            {
                "name": "arm",
                "strategy": "fixed",
                "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
            }
        ],
        epochs=2,
        expected_batch_size=20,
        storage=f"sqlite:///{folder / 'privtune.db'}",
    )
    study.run()
    return study


def with_steps(record: ArmRecord, steps: int) -> ArmRecord:
    """Return the record with that many steps of each step metric and no others."""
    once = tuple(point for point in record.points if point[0] not in STEP_METRICS)
    curves = tuple((name, 0.5, step) for step in range(steps) for name in STEP_METRICS)
    return replace(record, points=once + curves)


def at_once(client: Any, experiment: str, record: ArmRecord) -> None:
    """Log as PrivTune does."""
    write_record(client, experiment, record)


def call_by_call(client: Any, experiment: str, record: ArmRecord) -> None:
    """Log the same as a script does: one call for each parameter, tag, value and file."""
    run = client.create_run(experiment, run_name=record.arm).info.run_id
    for name, value in record.params.items():
        client.log_param(run, name, value)
    for name, value in {**record.tags, "mlflow.note.content": record.note}.items():
        client.set_tag(run, name, value)
    for name, number, step in record.points:
        client.log_metric(run, name, number, step=step)
    for path, document in record.documents.items():
        client.log_dict(run, document, path)
    client.log_text(run, record.report, "privacy/report.html")
    client.log_artifact(run, str(record.model), "model")
    client.set_terminated(run)


@contextlib.contextmanager
def fresh_store(folder: Path, name: str) -> Iterator[tuple[Any, str]]:
    """Give a client on a store of its own, initialised and warm."""
    uri = f"sqlite:///{folder / f'{name}.db'}"
    storage = f"sqlite:///{folder / f'{name}-study.db'}"
    with open_client(storage, uri) as client:
        yield client, experiment_id(client, name, storage=storage, tags={OWNER_TAG: name})


def timed(call: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Return the medians of wall time and processor time, in milliseconds."""
    wall, cpu = [], []
    for _ in range(repeats):
        began, worked = time.perf_counter(), time.process_time()
        call()
        cpu.append((time.process_time() - worked) * 1e3)
        wall.append((time.perf_counter() - began) * 1e3)
    return statistics.median(wall), statistics.median(cpu)


def measure(
    log: Callable[..., None],
    client: Any,
    experiment: str,
    *,
    study: privtune.Study,
    steps: int,
    repeats: int,
) -> dict[str, float]:
    """Return milliseconds an arm (one without steps) and a step (the difference, by step)."""
    record = arm_record(study, study.plans[0], study.releases()[0], budget_view(study))
    short, long = with_steps(record, 0), with_steps(record, steps)
    log(client, experiment, short)  # the first one pays for imports
    arm = timed(lambda: log(client, experiment, short), repeats)
    whole = timed(lambda: log(client, experiment, long), max(3, repeats // 4))
    return {
        "arm_wall_ms": arm[0],
        "arm_cpu_ms": arm[1],
        "steps": steps,
        "step_wall_ms": (whole[0] - arm[0]) / steps,
        "step_cpu_ms": (whole[1] - arm[1]) / steps,
    }


def disk_ms(folder: Path) -> float:
    """Return the median of one small durable write: SQLite makes some for every commit."""
    with (folder / "disk").open("wb") as file:

        def write() -> None:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())

        return timed(write, 50)[0]


def run(*, arms: int, steps: int, slow_steps: int) -> dict[str, Any]:
    """Measure both ways; the slow one gets fewer steps, its cost is by step anyway."""
    with tempfile.TemporaryDirectory(prefix="privtune-benchmark-") as name:
        folder = Path(name)
        study = finished_study(folder)
        rows: dict[str, Any] = {"disk_write_ms": disk_ms(folder)}
        ways = {"at once": (at_once, steps), "call by call": (call_by_call, slow_steps)}
        for way, (log, count) in ways.items():
            with fresh_store(folder, way.replace(" ", "-")) as (client, experiment):
                rows[way] = measure(log, client, experiment, study=study, steps=count, repeats=arms)
        study.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few arms and steps, for CI")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    few, many = {"arms": 3, "steps": 20, "slow_steps": 5}, {"arms": 40, "steps": 1_000}
    rows = run(**few) if options.smoke else run(**many, slow_steps=50)
    text = json.dumps(rows, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
