"""Memory model against measured peaks, and the cost of noise options.

    python studies/benchmarks/engine/memory.py

Each case runs in a process of its own: the peak is the growth of the resident set over training
steps, captures included. Noise is CPU time a value, one thread.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from privtune.training.engine.batched import BatchedKernel
from privtune.training.engine.stacks import longest_sample, memory_model
from privtune.training.mechanism.kernel import OfOutputs
from privtune.training.mechanism.noise import NoiseSource
from privtune.training.mechanism.noise_options import NoiseOptions
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams

CASES = [("mlp-64", 64), ("mlp-256", 16), ("mlp-wide", 1), ("mlp-wide", 8), ("cnn", 1), ("cnn", 4)]


def peak_bytes() -> int:
    """The largest resident set of this process so far; Linux only.

    Not ``getrusage``: a process that was started by a larger one inherits its peak there.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def case(name: str, candidates: int) -> None:
    from run import RECORDS, WORKS, cross_entropy, engine  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    work, device = WORKS[name], torch.device("cpu")
    data = work.data(device)
    kernel = BatchedKernel(
        work.model, OfOutputs(cross_entropy), x=data.x[:1], y=data.y[:1], device=device
    )
    longest = longest_sample(Schedule(RECORDS, work.batch / RECORDS, 1))
    memory = memory_model(kernel, longest=longest)
    before = peak_bytes()
    step = engine(work, data, candidates, device)
    for _ in range(60 if work.widths else 30):
        step()
    grown = peak_bytes() - before
    bound, working = memory.peak_bytes(candidates), candidates * memory.candidate_bytes
    verdict = "" if grown <= bound else " (above the model)"
    print(
        f"| {work.title} | {candidates} | {working / 2**20:.0f} | {bound / 2**20:.0f} "
        f"| {grown / 2**20:.0f}{verdict} |"
    )


def noise() -> None:
    torch.set_num_threads(1)
    options = {
        "plain": NoiseOptions(),
        "grid (float64, rounded)": NoiseOptions(floating_point="grid"),
        "four draws": NoiseOptions(floating_point="four-draws"),
    }
    size, generator = 100_000, torch.Generator().manual_seed(0)
    draws: dict[str, Callable[[], object]] = {
        name: partial(
            NoiseSource([Streams(bytes(32))], torch.device("cpu"), options=o).gaussian, size
        )
        for name, o in options.items()
    }
    draws["torch's normal_, tails as they are"] = partial(
        torch.empty(size).normal_, generator=generator
    )
    seen: dict[str, list[float]] = {name: [] for name in draws}
    for _ in range(25):
        for name, draw in draws.items():
            start = time.process_time()
            draw()
            seen[name].append((time.process_time() - start) / size * 1e9)
    print("\n| noise | ns a value |\n| --- | --- |")
    for name, values in seen.items():
        print(f"| {name} | {statistics.median(values):.1f} |")


def main() -> None:
    if len(sys.argv) == 3:
        case(sys.argv[1], int(sys.argv[2]))
        return
    print(
        "| work | K | worked on in a step, MiB | model of the peak, MiB | measured, MiB |\n"
        "| --- | --- | --- | --- | --- |",
        flush=True,
    )
    for name, candidates in CASES:
        subprocess.run([sys.executable, __file__, name, str(candidates)], check=True)
    noise()


if __name__ == "__main__":
    main()
