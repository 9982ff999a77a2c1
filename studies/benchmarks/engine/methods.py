"""What a method that adapts costs over DP-SGD, per step: CPU time, paired.

Every round runs each method for some steps, right after DP-SGD for as many; what is printed is the
median over the rounds of the ratio, and its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from run import RECORDS, WORKS, Step, Work, kernel_of

from privtune.training.engine.batched import BatchedKernel
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.stack_oracle import StackOracle
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import (
    ADADP,
    AdaCliP,
    DPAdam,
    FixedDPSGD,
    HyFreeDP,
    QuantileClipping,
)

DEVICE = torch.device("cpu")
WARM = 1500  # steps before anything is timed: every common shape was captured by then
GIVEN = {"learning_rate": 0.1, "max_grad_norm": 1.0, "largest_variance": 1.0}
METHODS: Mapping[str, Any] = {
    "dpsgd": FixedDPSGD(1.0),
    "dpsgd, momentum": FixedDPSGD(1.0, momentum=0.9),
    "dp-adam": DPAdam(1.0),
    "quantile-clipping": QuantileClipping(1.0, 10.0),
    "adadp": ADADP(1.0, adapt_share=1.0),
    "hyfreedp": HyFreeDP(1.0, 8.0),
    "hyfreedp, sgd": HyFreeDP(1.0, 8.0, optimizer="sgd"),
    "adaclip": AdaCliP(1.0),
}


def step_of(
    method: Any, work: Work, data: TensorData, kernel: BatchedKernel, candidates: int
) -> Step:
    """One step of a method on a stack, as ``run_stack`` takes it."""
    oracle = StackOracle(
        Schedule(RECORDS, work.batch / RECORDS, 10**6),
        data=data,
        kernel=kernel,
        streams=[Streams(bytes([k]) * 32) for k in range(candidates)],
        device=DEVICE,
        physical_rows=4096,
    )
    given = {name: GIVEN[name] for name in method.parameters}
    state = method.init(0.05 * torch.randn(candidates, kernel.layout.size), [given] * candidates)

    def step() -> None:
        nonlocal state
        state = method.update(state, oracle)
        method.report(state)

    return step


def seconds(step: Step, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=[n for n in WORKS if WORKS[n].widths], default="mlp-64")
    parser.add_argument("--stacks", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS)[1:], default=None)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=100, help="a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work = WORKS[arguments.work]
    data = work.data(DEVICE)
    print(f"{work.title}; torch {torch.__version__}, one thread\n")
    print("| method | K | us per candidate-step | x DP-SGD | quartiles |\n|" + " --- |" * 5)
    for k in arguments.stacks:
        kernel = kernel_of(work, data, DEVICE)
        base = step_of(METHODS["dpsgd"], work, data, kernel, k)
        names = arguments.methods or list(METHODS)[1:]
        steps = {name: step_of(METHODS[name], work, data, kernel, k) for name in names}
        for step in (base, *steps.values()):
            seconds(step, WARM // 5)
        seconds(base, WARM)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                before = seconds(base, arguments.steps)
                found[name].append((before, seconds(step, arguments.steps)))
        for name, pairs in found.items():
            low, middle, high = statistics.quantiles([own / other for other, own in pairs], n=4)
            own = statistics.median(own for _, own in pairs) / arguments.steps / k * 1e6
            print(
                f"| {name} | {k} | {own:.1f} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
