"""Wall time of whole trainings by one thread and by several, by turns in one process.

    python studies/benchmarks/engine/threads.py [--threads 2] [--rounds 5] [WORK:K ...]

"one stack" gives the same threads to torch's kernels, as a training of one stack does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from unittest.mock import patch

import torch
from run import RECORDS, WORKS, Work, cross_entropy

from privtune.training.engine import train as engine
from privtune.training.engine.candidates import Made
from privtune.training.engine.stacks import Split
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import OfOutputs
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD

CASES = ["mlp-64:16", "mlp-64:64", "mlp-256:16", "mlp-256:64", "mlp-wide:8", "cnn:2", "cnn:8"]
CANDIDATE = {"learning_rate": 0.1, "max_grad_norm": 1.0}


def seconds(work: Work, data: TensorData, candidates: int, steps: int) -> float:
    start = time.perf_counter()
    schedule = Schedule(RECORDS, work.batch / RECORDS, steps)
    training = engine.Training(
        FixedDPSGD(1.0), schedule, OfOutputs(cross_entropy), data, device="cpu"
    )
    training.alike(Made(work.model(), bytes([k]) * 32, CANDIDATE) for k in range(candidates))
    return time.perf_counter() - start


def case(name: str, candidates: int, threads: int, rounds: int, aim: float) -> None:
    work = WORKS[name]
    data = work.data(torch.device("cpu"))
    used: list[int] = []
    asked = engine.split

    def noted(*args: object, **options: object) -> Split:
        found = asked(*args, **options)
        used.append(found.threads)
        return found

    def one(*args: object, **options: object) -> Split:
        return asked(*args, **{**options, "cores": 1})

    def run(cores: int, steps: int, *, pool: bool = True) -> float:
        torch.set_num_threads(cores)
        with patch.object(engine, "split", noted if pool else one):
            return seconds(work, data, candidates, steps)

    ways = {"one": (1, True), "one stack": (threads, False), "threads": (threads, True)}
    for cores, pool in ways.values():
        run(cores, 60, pool=pool)
    steps = max(20, int(aim / run(1, 60) * 60))
    seen: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (cores, pool) in ways.items():
            seen[way].append(run(cores, steps, pool=pool) / steps / candidates * 1e6)
    shares = [
        statistics.median(a / b for a, b in zip(seen[way], seen["one"], strict=True))
        for way in ("one stack", "threads")
    ]
    single, other, several = (statistics.median(seen[way]) for way in ways)
    print(
        f"| {work.title} | {candidates} | {used[-1]} | {single:.0f} | {other:.0f} ({shares[0]:.2f}) "
        f"| {several:.0f} ({shares[1]:.2f}) |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[], metavar="WORK:K", help=", ".join(WORKS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a training by one thread")
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, torch {torch.__version__}\n")
    print(
        "| work | K | stacks side by side | us per candidate-step, one thread "
        f"| {arguments.threads} threads, one stack | {arguments.threads} threads |\n|"
        + " --- |"
        * 6
    )
    for each in arguments.cases or CASES:
        name, _, candidates = each.partition(":")
        case(name, int(candidates), arguments.threads, arguments.rounds, arguments.seconds)
    print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
