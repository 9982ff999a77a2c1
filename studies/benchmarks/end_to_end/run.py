"""What a user waits for: CPU seconds of commands, and of whole studies against Optuna + Opacus + MLflow.

    OMP_NUM_THREADS=1 python studies/benchmarks/end_to_end/run.py [--trials 4 16 64] [--rounds 3]
        [--modes ghost usual] [--no-commands] [--work digits-mlp] [--data mnist.npz]
        [--against OTHER_CHECKOUT] [--output FILE]

Every figure is user and system time of a whole process tree, from the start of the interpreter to its
end; of commands the wall time, too. Rounds run every competitor once, by turns; medians. `--against`
runs the commands of another checkout in the same rounds: before and after. Each round starts from an
empty folder, and nothing is left out: the second round finds what the first kept in the cache, of which
each checkout has one of its own.
Checkouts are compiled to bytecode first, as an installation is.

The competitor is `opacus_trials.py`, with each way of Opacus to compute gradients, of which the fastest
counts; without privacy (`plain`); and as Opacus' tutorials do it (`usual`, the row of the usual practice).
`imports` is what all need: the imports of torch, Optuna, MLflow with its database, and autodp, in one
process, and nothing else.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SPEC = ROOT / "privtune" / "tasks" / "digits-demo.yaml"
COMMANDS = (
    "--help",
    "study plan digits-demo.yaml",
    "study create digits-demo.yaml",
    "study run digits-demo",
    "study show digits-demo",
    "study compare digits-demo",
    "budget show digits",
)
MODES = ("ghost", "hooks", "functorch")
EVERYBODY = (*MODES, "plain", "usual")
IMPORTS = (
    "import torch, optuna, mlflow, autodp.autodp_core, mlflow.store.tracking.sqlalchemy_store;"
    "optuna.create_study; optuna.storages.RDBStorage"
)
EPOCHS = {"digits-mlp": (20, 64), "mnist-mlp": (3, 512), "mnist-cnn": (1, 512)}  # and batch sizes
LIBRARIES = ("torch", "opacus", "optuna", "mlflow-skinny", "numpy", "scipy")
STUDY = """
name: race-{trials}
task: {work}
budget: {{name: race, epsilon: 8.0, delta: 1.0e-5}}
space:
  learning_rate: {{type: float, low: 0.05, high: 5.0, log: true}}
  max_grad_norm: {{type: float, low: 0.1, high: 10.0, log: true}}
arms:
  - {{name: selection, strategy: papernot-steinke, law: binomial, n: {trials}, mean_runs: {trials}}}
epochs: {epochs}
expected_batch_size: {batch}
"""


def spent(words: list[str], folder: Path, checkout: Path) -> float:
    """Return the CPU seconds of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = {"PYTHONPATH": str(checkout), "PRIVTUNE_STORAGE": "sqlite:///privtune.db"}
    own |= {"OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    cache = Path(tempfile.gettempdir(), f"race-{os.getpid()}", *checkout.resolve().parts[1:])
    own |= {"XDG_CACHE_HOME": str(cache)}
    subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **own},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(checkout: Path, found: dict[str, list[float]], walls: dict[str, list[float]]) -> None:
    """Run the commands on the demo's study, one after another."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copy(SPEC, folder)
        for command in COMMANDS:
            words = ["-m", "privtune", *command.split()]
            start = time.perf_counter()
            found.setdefault(command, []).append(spent(words, folder, checkout))
            walls.setdefault(command, []).append(time.perf_counter() - start)


def studies(work: str, trials: int, modes: Sequence[str], found: dict[str, list[float]]) -> None:
    """Run so many trials from nothing to a release, by PrivTune and by every competitor."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        epochs, batch = EPOCHS[work]
        spec = STUDY.format(work=work, trials=trials, epochs=epochs, batch=batch)
        (folder / "study.yaml").write_text(spec, encoding="utf-8")
        command = ["-m", "privtune", "study", "run", "study.yaml"]
        found.setdefault("privtune", []).append(spent(command, folder, ROOT))
        found.setdefault("imports", []).append(spent(["-c", IMPORTS], folder, ROOT))
    for mode in modes:
        with tempfile.TemporaryDirectory() as place:
            words = [str(HERE / "opacus_trials.py"), "--mode", mode, "--work", work]
            words += ["--trials", str(trials)]
            found.setdefault(mode, []).append(spent(words, Path(place), ROOT))


def summary(times: list[float]) -> dict[str, Any]:
    """Return the median, and what it was taken of."""
    return {"median": round(statistics.median(times), 2), "all": [round(t, 2) for t in times]}


def main(arguments: list[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", choices=EPOCHS, default="digits-mlp")
    parser.add_argument("--modes", nargs="*", choices=EVERYBODY, default=EVERYBODY)
    parser.add_argument("--no-commands", action="store_true", help="race trials alone")
    parser.add_argument("--data", type=Path, help="MNIST's file, for its works")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(arguments)
    checkouts = {"now": ROOT} | ({"before": asked.against.resolve()} if asked.against else {})
    if asked.data is not None:
        os.environ["PRIVTUNE_DATA"] = str(asked.data.resolve())
    for checkout in checkouts.values():
        compileall.compile_dir(checkout / "privtune", quiet=1)
    waits: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    walls: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    races: dict[int, dict[str, list[float]]] = {trials: {} for trials in asked.trials}
    for _ in range(asked.rounds):
        for name, checkout in () if asked.no_commands else checkouts.items():
            commands(checkout, waits[name], walls[name])
        for trials in asked.trials:
            studies(asked.work, trials, asked.modes, races[trials])
    document: dict[str, Any] = {
        "command": "run.py " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in LIBRARIES},
        "commands": {
            name: {command: summary(times) for command, times in found.items()}
            for name, found in waits.items()
        },
        "wall": {
            name: {command: summary(times) for command, times in found.items()}
            for name, found in walls.items()
        },
        "trials": {
            str(trials): {name: summary(times) for name, times in found.items()}
            for trials, found in races.items()
        },
    }
    for trials, found in document["trials"].items():
        fastest = [found[mode]["median"] for mode in MODES if mode in found]
        if fastest:
            found["times as fast"] = round(min(fastest) / found["privtune"]["median"], 2)
        print(
            f"{trials} trials:",
            {k: v["median"] if isinstance(v, dict) else v for k, v in found.items()},
        )
    for command in COMMANDS if asked.rounds and not asked.no_commands else ():
        print(
            f"{command:32}",
            *(
                f"{name} {waits_of[command]['median']}, wall {document['wall'][name][command]['median']}"
                for name, waits_of in document["commands"].items()
            ),
        )
    if asked.output is not None:
        asked.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
