"""Four models of a user's own, tuned by a selection of eight candidates: by a loop before, by ``build`` now.

    OMP_NUM_THREADS=1 python studies/benchmarks/own_models/run.py --data mnist.npz [--before CHECKOUT]

Counts the lines that a user writes, and takes seconds of processor time and the accuracy on test records. A
checkout of version 817b7f9 gives the numbers of before, in processes of their own, by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def lines(version: str) -> dict[str, int]:
    """Return how many lines that are not blank a user writes in each program."""
    parts = (HERE / f"{version}.py").read_text("utf-8").split("    # user\n")[1:]
    counts = [
        sum(bool(line.strip()) for line in part.split("    # end")[0].splitlines())
        for part in parts
    ]
    from works import WORKS

    return dict(zip(WORKS, counts, strict=True))


def one(version: str, name: str, data: Path | None, seed: int) -> None:
    """Run one program and print its seconds and its accuracy."""
    import torch
    from works import WORKS, accuracy, records

    import privtune

    programs = __import__(version).PROGRAMS
    torch.set_num_threads(1)
    work = WORKS[name]
    x, y = records(name, data)
    with tempfile.TemporaryDirectory() as folder:
        study = privtune.create_study(
            "bench",
            budget=privtune.Budget(4.0, 1e-5, name="bench"),
            storage=f"sqlite:///{folder}/privtune.db",
            seed=seed,
        )
        began, wall = time.process_time(), time.perf_counter()
        release, model = programs[name](study, x, y)
        seconds, wall = time.process_time() - began, time.perf_counter() - wall
        first = sum(work.sizes[:2])
        found = accuracy(model, x[first:], y[first:])
        said = {"seconds": seconds, "wall": wall, "accuracy": found, "params": release.params}
        print(json.dumps(said, default=dict))
        study.close()


def measured(version: str, name: str, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """Run one program in a process of its own."""
    root = ROOT if version == "now" else arguments.before
    command = [sys.executable, __file__, "--one", version, name, "--seed", str(seed)]
    command += [] if arguments.data is None else ["--data", str(arguments.data)]
    environment = {**os.environ, "PYTHONPATH": f"{root}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="mnist.npz")
    parser.add_argument("--before", type=Path, help="a checkout of version 817b7f9")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--works", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if arguments.one:
        return one(*arguments.one, arguments.data, arguments.seed)
    import torch
    from works import WORKS

    versions = ["now"] if arguments.before is None else ["before", "now"]
    machine = f"{platform.system()} {platform.machine()}"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {machine}")
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in range(arguments.rounds):
        for name in arguments.works or WORKS:
            for version in versions:
                each = measured(version, name, arguments, seed)
                found.setdefault(name, {}).setdefault(version, []).append(each)
                print(f"{seed}: {name}, {version}: {each}", file=sys.stderr, flush=True)
    heads = "".join(f" | {version}: lines | CPU s | accuracy" for version in versions)
    print(f"\n| model{heads} |\n|{' --- |' * (1 + 3 * len(versions))}")
    for name, by_version in found.items():
        cells = [name]
        for version, runs in by_version.items():
            cells.append(str(lines(version)[name]))
            cells.append(f"{statistics.median(run['seconds'] for run in runs):.1f}")
            cells.append(", ".join(f"{run['accuracy']:.3f}" for run in runs))
        print(f"| {' | '.join(cells)} |")
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    main()
