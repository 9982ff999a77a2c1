"""The engine's time and memory for a candidate's step, beside Opacus, non-private training and DP-SGD.

    OMP_NUM_THREADS=1 python studies/benchmarks/engine/run.py [--rounds 7] [--before CHECKOUT] [WORK ...]

Times are CPU time on one thread, wall time on CUDA. Every round runs every competitor for a short while, one
right after the other, so that whatever else the machine does slows them alike; a ratio is the median of the
rounds' own ratios. The engine's side is ``train`` as users call it, held and let go step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import opacus
import torch
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from privtune.training.engine.fine_tuning import set_trainable
from privtune.training.engine.train import train
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import AdaCliP, FixedDPSGD, HyFreeDP

RECORDS = 6000
DPSGD = FixedDPSGD(1.0)
STEPS = 40_000  # of the engine's training, which is stopped before it ends
WARM_STEPS = (
    600  # at most, before anything is timed: the common sizes of a sample are captured in these
)
PEAK_STEPS = 60
GIVEN = {"learning_rate": 0.1, "max_grad_norm": 1.0, "largest_variance": 1.0}
Run = Callable[[int], float]
"""Runs so many steps and returns the seconds that one step of one candidate took."""


class Tokens(nn.Module):
    """A classifier of texts: a table, layers that keep the length, and a head on what they say."""

    def __init__(self, vocabulary: int, width: int, body: nn.Module, out: int) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(vocabulary, width), body, nn.Linear(out, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.body(self.table(tokens))
        if isinstance(states, tuple):  # a recurrent layer's outputs and its last state
            return self.head(states[0][:, -1])
        return self.head(states.mean(dim=1))


class Block(nn.Module):
    """Attention with layers of its own for queries, keys and values, and a net of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mixed = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        n = self.first(h)
        q, k, v = (
            layer(n).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + self.mixed(found)
        return h + self.down(F.gelu(self.up(self.second(h))))


def lstm() -> nn.Module:
    return Tokens(200, 32, nn.LSTM(32, 64, batch_first=True), 64)


def gru() -> nn.Module:
    return Tokens(200, 32, nn.GRU(32, 64, batch_first=True), 64)


def transformer() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2)]
    return Tokens(200, 64, nn.Sequential(*layers), 64)


def lora() -> nn.Module:
    """22 million weights, of which adapters of rank 8 on queries and values, and the head, are trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what is frozen has to be the same every time
        model = Tokens(30_000, 384, nn.Sequential(*(Block(384, 12) for _ in range(6))), 384)
    return set_trainable(model, "lora", rank=8, targets=("query", "value"))


def net(*widths: int) -> Callable[[], nn.Module]:
    """Return what makes a fully connected net."""

    def model() -> nn.Module:
        pairs = pairwise(widths)
        layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return model


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What is trained, beside what, and the ratios that the engine's time should stay below.

    Args:
        title: For the table.
        model: Makes the model.
        shape: Of a record; with ``vocabulary`` whole numbers, else real ones.
        batch: Expected records of a sample; the competitors' batches have just as many.
        stacks: Numbers of candidates.
        targets: The largest ratios, by competitor; that of ``"Opacus"`` is for its faster mode.
        against: Competitors.
        peak: Whether the peak memory of one candidate is measured.
        method: How the engine trains.
    """

    title: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    stacks: tuple[int, ...]
    targets: Mapping[str, float]
    against: tuple[str, ...] = ("Opacus hooks", "Opacus ghost", "non-private")
    vocabulary: int = 0
    classes: int = 10
    peak: bool = False
    method: Any = DPSGD

    def data(self, device: torch.device) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        size = (RECORDS, *self.shape)
        if self.vocabulary:
            x = torch.randint(self.vocabulary, size, generator=generator)
        else:
            x = torch.randn(size, generator=generator)
        y = torch.randint(self.classes, (RECORDS,), generator=generator)
        return TensorData(x, y).to(device)


TEXT: dict[str, Any] = {"vocabulary": 200, "classes": 2, "peak": True}
GHOST = ("Opacus ghost", "non-private")
SMALL: dict[str, Any] = {"model": net(64, 64, 10), "shape": (64,), "batch": 64}
WORKS = {
    "lstm": Work("LSTM", lstm, (32,), 64, (1,), {"Opacus": 1.0}, **TEXT),
    "gru": Work("GRU", gru, (32,), 64, (1,), {"Opacus": 1.0}, **TEXT),
    "transformer": Work("transformer", transformer, (32,), 64, (1, 8), {"Opacus": 0.8}, **TEXT),
    "lora": Work("LoRA", lora, (64,), 8, (1, 4), {"Opacus": 0.9, "non-private": 1.3}, **TEXT),
    "mlp": Work(
        "MLP 64-64-10", **SMALL, stacks=(1, 16, 64), targets={"before": 1.15}, against=GHOST
    ),
    "logistic": Work(
        "logistic regression", net(30, 2), (30,), 64, (64,), {"before": 1.15}, GHOST, classes=2
    ),
    "wide": Work(
        "MLP 784-256-256-10", net(784, 256, 256, 10), (784,), 256, (16,), {"non-private": 1.0}, GHOST
    ),
    "cnn": Work("CNN", cnn, (1, 28, 28), 256, (4,), {"non-private": 1.0}, GHOST, peak=True),
    "hyfreedp": Work(
        "HyFreeDP", **SMALL, stacks=(1, 16), targets={"DP-SGD": 1.15}, against=("DP-SGD",),
        method=HyFreeDP(1.0, 8.0),
    ),
    "adaclip": Work(
        "AdaCliP", **SMALL, stacks=(1, 16), targets={"DP-SGD": 1.3}, against=("DP-SGD",),
        method=AdaCliP(1.0),
    ),
}  # fmt: skip


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def timed(steps: Callable[[int], int], device: torch.device) -> Run:
    """Return what runs steps and says how long one step of one candidate took."""
    cuda = device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time

    def run(count: int) -> float:
        if cuda:
            torch.cuda.synchronize()
        start = clock()
        done = steps(count)
        if cuda:
            torch.cuda.synchronize()
        return (clock() - start) / done

    return run


class StoppedError(Exception):
    """Ends a training that is measured no more."""


class Engine:
    """A training in a thread of its own that goes on when it is told how many steps to take."""

    def __init__(self, work: Work, candidates: int, device: torch.device) -> None:
        self._work, self._candidates, self._device = work, candidates, device
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._left = self._rows = 0
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, count: int) -> int:
        """Take so many steps of a stack; return how many steps of a candidate these are."""
        self._left, self._rows = count, 0
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise RuntimeError("the training ended") from self._error
        return self._rows

    def _run(self) -> None:
        torch.set_num_threads(1)  # which each thread sets for itself
        self._go.acquire()
        try:
            run_training(self._work, self._candidates, self._device, self._after)
            raise RuntimeError(f"all {STEPS} steps are done: take fewer rounds")
        except BaseException as error:
            self._error = error
        self._done.release()

    def _after(self, _: int, report: Mapping[str, torch.Tensor]) -> None:
        self._rows += len(report["learning_rate"])
        self._left -= 1
        if not self._left:
            self._done.release()
            self._go.acquire()


def run_training(
    work: Work,
    candidates: int,
    device: torch.device,
    on_step: Callable[[int, Mapping[str, torch.Tensor]], None],
) -> None:
    """Train candidates as a study does, in stacks that the engine chooses."""
    train(
        work.method,
        Schedule(RECORDS, work.batch / RECORDS, STEPS),
        model=work.model,
        loss=cross_entropy,
        data=work.data(device),
        candidates=[{name: GIVEN[name] for name in work.method.parameters}] * candidates,
        secrets=[bytes([k]) * 32 for k in range(candidates)],
        device=device.type,
        on_step=on_step,
    )


def batches(data: TensorData, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of a fixed size in memory: what a tuned loop without a DataLoader does."""
    generator = torch.Generator().manual_seed(0)
    while True:
        index = torch.randint(len(data), (size,), generator=generator).to(data.x.device)
        yield data.take(index)


def loop(work: Work, device: torch.device, *, opacus_mode: str | None) -> Callable[[int], int]:
    """Return the steps of a loop by hand: non-private, or with Opacus, whose own modules it takes."""
    data, criterion = work.data(device), nn.CrossEntropyLoss()
    model = work.model().to(device).train()
    if opacus_mode is not None:
        model = ModuleValidator.fix(model).to(device).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if opacus_mode is not None:
        made = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(data.x, data.y), batch_size=work.batch),
            criterion=criterion,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=opacus_mode,
        )
        model, optimizer = made[:2]
        if opacus_mode == "ghost":
            criterion = made[2]
    stream = batches(data, work.batch)

    def steps(count: int) -> int:
        for _ in range(count):
            x, y = next(stream)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return count

    return steps


def competitor(
    name: str, work: Work, candidates: int, device: torch.device
) -> Callable[[int], int]:
    """Return the steps of a competitor by its name."""
    if name.startswith("Opacus"):
        return loop(work, device, opacus_mode=name.rsplit(maxsplit=1)[-1])
    if name == "non-private":
        return loop(work, device, opacus_mode=None)
    if name == "DP-SGD":
        work = replace(work, method=DPSGD)
    return Engine(work, candidates, device)


def elsewhere(name: str, candidates: int, device: torch.device, checkout: Path) -> Run:
    """Return what runs the engine of another checkout, in a process of its own."""
    command = [sys.executable, __file__, name, "--serve", str(candidates), "--device", device.type]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(count: int) -> float:
        assert process.stdin is not None and process.stdout is not None
        print(count, file=process.stdin, flush=True)
        return float(process.stdout.readline())

    return run


def serve(run: Run) -> None:
    """Run as many steps as each line of the input says, and answer with the seconds of one."""
    for line in sys.stdin:
        print(run(int(line)), flush=True)


def resident(field: str) -> float:
    """Return what this process holds (VmRSS) or held at most (VmHWM) in memory, in MiB; Linux only."""
    # Not getrusage, whose peak a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024


def print_peak(work: Work, name: str, device: torch.device) -> None:
    """Take some steps of one candidate and print by how many MiB the memory grew at most."""
    cuda = device.type == "cuda"
    before = 0.0 if cuda else resident("VmRSS")
    taken = 0

    def count(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken == PEAK_STEPS:
            raise StoppedError

    if name == "engine":
        with suppress(StoppedError):
            run_training(work, 1, device, count)
    else:
        competitor(name, work, 1, device)(PEAK_STEPS)
    print(torch.cuda.max_memory_allocated() / 2**20 if cuda else resident("VmHWM") - before)


def peak(key: str, name: str, device: torch.device) -> float:
    """Return the MiB by which the memory of a process of its own grew."""
    command = [sys.executable, __file__, key, "--peak", name, "--device", device.type]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def warmed(run: Run, seconds: float, warm: float, most: int) -> int:
    """Run steps that nobody times; return how many fill the seconds of a round."""
    start = time.perf_counter()
    for done in range(WARM_STEPS):
        if done >= 5 and time.perf_counter() - start > warm:
            break
        run(1)
    start = time.perf_counter()
    run(3)
    return min(max(2, int(3 * seconds / (time.perf_counter() - start))), most)


def measured(runs: Mapping[str, Run], options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of one step of one candidate by competitor, one a round."""
    most = (STEPS - WARM_STEPS - 10) // options.rounds
    counts = {name: warmed(run, options.seconds, options.warm, most) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            found[name].append(run(counts[name]))
    return found


def print_row(
    title: str, own: str, name: str, other: str, ratios: list[float], most: float
) -> None:
    """Print one ratio and, if there is one, whether it stays below its target."""
    middle = statistics.median(ratios)
    around = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    target = f"{most:g}: {'met' if middle <= most else 'missed'}" if most else ""
    print(f"| {title} | {own} | {name} | {other} | {middle:.2f}{around} | {target} |", flush=True)


def measure_work(key: str, candidates: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the engine beside a work's competitors and print their rows."""
    work, device = WORKS[key], torch.device(options.device)
    names = ("engine", *work.against)
    runs = {name: timed(competitor(name, work, candidates, device), device) for name in names}
    if options.before is not None:
        runs["before"] = elsewhere(key, candidates, device, options.before)
    found = measured(runs, options)
    own = found.pop("engine")
    faster = min((n for n in found if "Opacus" in n), key=lambda n: sum(found[n]), default="")
    for name, times in found.items():
        target = work.targets.get("Opacus" if name == faster else name, 0.0)
        ratios = [a / b for a, b in zip(own, times, strict=True)]
        mine, other = (f"{1e6 * statistics.median(t):.1f} us" for t in (own, times))
        print_row(f"{work.title}, K = {candidates}", mine, name, other, ratios, target)
    return {"engine": own, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "works", nargs="*", metavar="WORK", help=f"all, or some of {', '.join(WORKS)}"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each competitor and round")
    parser.add_argument(
        "--warm", type=float, default=8.0, help="seconds of each before it is timed"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--before", type=Path, help="a checkout of another version, to compare with"
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if unknown := set(options.works) - set(WORKS):
        parser.error(f"no work is called {', '.join(sorted(unknown))}")
    if options.serve is not None:
        return serve(timed(Engine(WORKS[options.works[0]], options.serve, device), device))
    if options.peak is not None:
        return print_peak(WORKS[options.works[0]], options.peak, device)
    print(
        f"torch {torch.__version__}, Opacus {opacus.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n"
        "| a candidate's step | engine | against | takes | ratio (least to largest) | target |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    found: dict[str, Any] = {}
    for key in options.works or WORKS:
        for k in WORKS[key].stacks:
            found[f"{key} {k}"] = measure_work(key, k, options)
        if WORKS[key].peak:
            own, other = (peak(key, name, device) for name in ("engine", "Opacus ghost"))
            found[f"{key} peak"] = {"engine": own, "Opacus ghost": other}
            title = f"{WORKS[key].title}, K = 1: peak memory"
            sizes = (f"{size:.0f} MiB" for size in (own, other))
            print_row(title, next(sizes), "Opacus ghost", next(sizes), [own / other], 1.0)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    main()
