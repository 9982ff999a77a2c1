"""Benchmark of the engine: CPU time per candidate-step, medians of one interleaved run.

    python studies/benchmarks/engine/run.py [--rounds 7] [--json FILE] [WORK ...]

Every round runs every competitor for a short while, one after the other, so that what else the
machine does hits them alike. One thread; on CUDA (--device cuda) wall time is measured instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import opacus
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from privtune.training.engine.batched import BatchedKernel
from privtune.training.engine.stacks import longest_sample, memory_model, split
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import OfOutputs
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.stack_oracle import StackOracle
from privtune.training.mechanism.streams import Streams

Step = Callable[[], None]
RECORDS = 6000
RATE = 0.1  # learning rate
WARM = 5.0  # seconds of CPU time before anything is timed


@dataclass(frozen=True)
class Work:
    """A model, the size of a batch, and how many candidates to stack."""

    title: str
    widths: tuple[int, ...]  # of a fully connected net; empty for the small CNN
    batch: int
    stacks: tuple[int, ...]
    bars: dict[int, tuple[float, float, float]]  # prototype: vs ghost, Opacus default, non-private

    def model(self) -> nn.Module:
        if not self.widths:
            return nn.Sequential(
                nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
                nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
                nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
            )  # fmt: skip
        layers: list[nn.Module] = []
        for a, b in zip(self.widths[:-1], self.widths[1:], strict=True):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def data(self, device: torch.device) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        shape, classes = (
            ((1, 28, 28), 10) if not self.widths else (self.widths[:1], self.widths[-1])
        )
        x = torch.randn(RECORDS, *shape, generator=generator)
        y = torch.randint(classes, (RECORDS,), generator=generator)
        return TensorData(x, y).to(device)


WORKS = {
    "logistic": Work(
        "logistic regression, 30 features, B = 64", (30, 2), 64, (1, 16, 64),
        {16: (27, 25, 8.8), 64: (58, 54, 19)},
    ),
    "mlp-64": Work(
        "MLP 64-64-10, B = 64", (64, 64, 10), 64, (1, 16, 64), {16: (14.5, 15, 4.1)}
    ),
    "mlp-256": Work("MLP 64-64-10, B = 256", (64, 64, 10), 256, (1, 16), {16: (8.3, 15.5, 2.8)}),
    "mlp-wide": Work(
        "MLP 784-256-256-10, B = 256", (784, 256, 256, 10), 256, (1, 16), {16: (1.85, 12, 0.85)}
    ),
    "cnn": Work(
        "small CNN, 28x28, B = 256", (), 256, (1, 4, 16), dict.fromkeys((1, 4, 16), (2.5, 2.3, 1.35))
    ),
}  # fmt: skip


def kernel_of(work: Work, data: TensorData, device: torch.device) -> BatchedKernel:
    return BatchedKernel(
        work.model,
        OfOutputs(cross_entropy),
        x=data.x[:1],
        y=data.y[:1],
        device=device,
        all_classes=True,
    )


def engine(work: Work, data: TensorData, candidates: int, device: torch.device) -> Step:
    """All candidates in one stack."""
    return stack_step(work, data, candidates, device, kernel_of(work, data, device))


def engine_auto(
    work: Work, data: TensorData, candidates: int, device: torch.device
) -> tuple[Step, int]:
    """What ``stack="auto"`` does: stacks one after the other. Returns a step, and its candidates.

    The stacks take turns of 64 steps; in a training each would run to its end.
    """
    kernel = kernel_of(work, data, device)
    longest = longest_sample(Schedule(RECORDS, work.batch / RECORDS, 1))
    sizes = split(kernel, memory_model(kernel, longest=longest), candidates).sizes
    steps = [stack_step(work, data, size, device, kernel) for size in sizes]
    count = 0

    def step() -> None:
        nonlocal count
        steps[count // 64 % len(steps)]()
        count += 1

    return step, max(sizes)


def stack_step(
    work: Work, data: TensorData, candidates: int, device: torch.device, kernel: BatchedKernel
) -> Step:
    oracle = StackOracle(
        Schedule(RECORDS, work.batch / RECORDS, 10**6),
        data=data,
        kernel=kernel,
        streams=[Streams(bytes([k]) * 32) for k in range(candidates)],
        device=device,
        physical_rows=4096,
    )
    params = [0.05 * torch.randn(candidates, kernel.layout.size, device=device)]
    bound = torch.ones(candidates)

    def step() -> None:
        gradient = oracle.gradient(
            oracle.sample(), params[0], clipping=Flat(bound), noise_multiplier=1.0
        )
        params[0] = torch.sub(params[0], gradient, alpha=RATE)  # one pass, as the methods take it

    return step


def batches(data: TensorData, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Fixed-size batches in memory: what a tuned loop without a DataLoader does."""
    generator = torch.Generator().manual_seed(0)
    while True:
        index = torch.randint(len(data), (size,), generator=generator).to(data.x.device)
        yield data.take(index)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def plain(work: Work, data: TensorData, device: torch.device) -> Step:
    model = work.model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    stream = batches(data, work.batch)

    def step() -> None:
        x, y = next(stream)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def opacus_step(work: Work, data: TensorData, device: torch.device, *, ghost: bool) -> Step:
    model = work.model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(TensorDataset(data.x, data.y), batch_size=work.batch)
    privacy = opacus.PrivacyEngine(accountant="rdp")
    options = {"module": model, "optimizer": optimizer, "data_loader": loader}
    options |= {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    if ghost:
        criterion = nn.CrossEntropyLoss()
        model, optimizer, criterion, _ = privacy.make_private(
            **options, criterion=criterion, grad_sample_mode="ghost"
        )
        stream = batches(data, work.batch)
    else:
        criterion = nn.CrossEntropyLoss()
        model, optimizer, private_loader = privacy.make_private(**options)

        def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            while True:
                yield from private_loader

        stream = endless()

    def step() -> None:
        x, y = next(stream)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def batched_plain(work: Work, data: TensorData, candidates: int, device: torch.device) -> Step:
    """A batched non-private trainer of a fully connected net, written by hand."""
    weights = [
        (0.05 * torch.randn(candidates, a, b, device=device)).requires_grad_()
        for a, b in zip(work.widths[:-1], work.widths[1:], strict=True)
    ]
    biases = [
        torch.zeros(candidates, 1, b, device=device).requires_grad_() for b in work.widths[1:]
    ]
    stream = batches(data, work.batch * candidates)

    def step() -> None:
        x, y = next(stream)
        h = x.view(candidates, work.batch, -1)
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            h = torch.baddbmm(b, torch.relu(h) if i else h, w)
        # Classes first: softmax over the leading axis is several times faster for few of them.
        log_p = torch.log_softmax(h.flatten(0, 1).t().contiguous(), dim=0)
        loss = -log_p.gather(0, y.unsqueeze(0)).sum() / work.batch
        grads = torch.autograd.grad(loss, [*weights, *biases])
        with torch.no_grad():
            for p, g in zip([*weights, *biases], grads, strict=True):
                p.sub_(g, alpha=RATE)

    return step


def measure(steps: dict[str, tuple[Step, int]], rounds: int, seconds: float) -> dict[str, float]:
    """Return microseconds per candidate-step, the median over interleaved rounds."""
    cuda = torch.cuda.is_available()
    clock = time.perf_counter if cuda else time.process_time
    counts, seen = {}, {name: [] for name in steps}
    for name, (step, _) in steps.items():
        # The first steps of every shape run without a capture: they are no part of a long training.
        start, warm = clock(), 0
        while warm < 30 or (warm < 600 and clock() - start < WARM):
            step()
            warm += 1
        start = clock()
        for _ in range(5):
            step()
        counts[name] = max(3, int(seconds * 5 / max(clock() - start, 1e-6)))
    for _ in range(rounds):
        for name, (step, candidates) in steps.items():
            if cuda:
                torch.cuda.synchronize()
            start = clock()
            for _ in range(counts[name]):
                step()
            if cuda:
                torch.cuda.synchronize()
            seen[name].append((clock() - start) / counts[name] / candidates * 1e6)
    return {name: statistics.median(values) for name, values in seen.items()}


def print_row(work: Work, times: dict[str, float], name: str, k: int, title: str) -> None:
    own = times[name]
    ratios = [times[other] / own for other in ("ghost", "default", "plain")]
    floor = f"{own / times[f'floor {k}']:.2f} times slower" if work.widths else "-"
    bars = work.bars.get(k) if name.startswith("engine") else None
    bar = " / ".join(f"{0.75 * b:.3g}" for b in bars) if bars else "-"
    met = bars and all(r >= 0.75 * b for r, b in zip(ratios, bars, strict=True))
    verdict = f"{bar} ({'met' if met else 'missed'})" if bars else bar
    cells = " | ".join(f"{ratio:.3g}" for ratio in ratios)
    print(f"| {title} | {k} | {own:.1f} | {cells} | {floor} | {verdict} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("works", nargs="*", default=[], metavar="WORK", help=", ".join(WORKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each competitor and round")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    print(
        f"torch {torch.__version__}, opacus {opacus.__version__}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}, one thread\n"
    )
    print(
        "| work | K | us per candidate-step | vs ghost | vs Opacus default | vs non-private "
        "| vs batched non-private | three quarters of the prototype |\n|" + " --- |" * 8
    )
    found = {}
    for name in arguments.works or WORKS:
        work = WORKS[name]
        data = work.data(device)
        steps: dict[str, tuple[Step, int]] = {
            "ghost": (opacus_step(work, data, device, ghost=True), 1),
            "default": (opacus_step(work, data, device, ghost=False), 1),
            "plain": (plain(work, data, device), 1),
        }
        rows: list[tuple[str, int, str]] = []
        for k in work.stacks:
            steps[f"engine {k}"] = engine_auto(work, data, k, device)
            rows.append((f"engine {k}", k, work.title))
            if work.widths:
                steps[f"floor {k}"] = (batched_plain(work, data, k, device), k)
        if not work.widths:
            steps["purpose 4"] = (engine(work, data, 4, device), 4)
            rows.append(("purpose 4", 4, f"{work.title}, stacked on purpose"))
        times = found[work.title] = measure(steps, arguments.rounds, arguments.seconds)
        for row in rows:
            print_row(work, times, *row)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
