"""The engine's time and memory for a candidate's step, beside Opacus, non-private training and DP-SGD.

    OMP_NUM_THREADS=1 python studies/benchmarks/engine/run.py [--rounds 7] [--before CHECKOUT] [WORK ...]

Times are CPU time on one thread, wall time on CUDA. Every round runs every competitor for a short while, one
right after the other, so that whatever else the machine does slows them alike; a ratio is the median of the
rounds' own ratios. Each competitor is a process of its own,
the engine's a call of ``train``, which waits in ``on_step`` while the others take their turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from privtune.training.engine.train import TrainableCandidate, Training
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOfOutputs
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import AdaCliP, FixedDPSGD, HyFreeDP

DPSGD = FixedDPSGD(1.0)
STEPS = 20_000  # of the engine's training, which is stopped before it ends
WARM_STEPS = (
    600  # at most, before anything is timed: the common sizes of a sample are captured in these
)
GIVEN = {"learning_rate": 0.1, "max_grad_norm": 1.0, "largest_variance": 1.0}


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


class Residual(nn.Module):
    """Two convolutions with GroupNorm, added to what went in; a stride halves height and width."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)])
        self.short = nn.Identity()
        if stride > 1:
            self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(h)) + self.short(x))


def resnet() -> nn.Module:
    """Return a small ResNet with GroupNorm: a convolution, three blocks, and a head on means."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU(),
        Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def recommender() -> nn.Module:
    """Return a net on the rows of a user and an item in one large table."""
    layers = [nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)]
    return nn.Sequential(nn.Embedding(50_000, 16), *layers)


class Columns(nn.Module):
    """A classifier of rows of 16 categories, each of which has 50 values and a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16 * 50, 8)  # of all columns, one after the other
        self.register_buffer("firsts", 50 * torch.arange(16))
        self.net = net(128, 64, 2)()

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return self.net(self.table(row + self.firsts).flatten(1))


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
        records: Records of the data.
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
    records: int = 6000

    def data(self, device: torch.device) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        size = (self.records, *self.shape)
        if self.vocabulary:
            x = torch.randint(self.vocabulary, size, generator=generator)
        else:
            x = torch.randn(size, generator=generator)
        y = torch.randint(self.classes, (self.records,), generator=generator)
        return TensorData(x, y).to(device)


TEXT: dict[str, Any] = {"vocabulary": 200, "classes": 2, "peak": True}
FASTER = {"Opacus": 1.0}
GHOST = ("Opacus ghost", "non-private")
SMALL: dict[str, Any] = {"model": net(64, 64, 10), "shape": (64,), "batch": 64}
WORKS = {
    "lstm": Work("LSTM", lstm, (32,), 64, (1,), {"Opacus": 1.0}, **TEXT),
    "gru": Work("GRU", gru, (32,), 64, (1,), {"Opacus": 1.0}, **TEXT),
    "transformer": Work("transformer", transformer, (32,), 64, (1, 8), {"Opacus": 0.8}, **TEXT),
    "lora": Work("LoRA", lora, (64,), 8, (1, 4), {"Opacus": 1.0, "non-private": 1.3}, **TEXT),
    "resnet": Work("ResNet", resnet, (3, 32, 32), 32, (1,), {"Opacus": 0.8}, peak=True),
    "recommender": Work(
        "recommender, table of 50,000 x 16", recommender, (2,), 64, (1, 8), {"Opacus": 0.8},
        vocabulary=50_000, classes=2, peak=True,
    ),
    "columns": Work(
        "16 columns of categories", Columns, (16,), 64, (1, 8, 64), FASTER, vocabulary=50,
        classes=2, peak=True,
    ),
    "large-batch": Work(
        "MLP 64-64-10, B = 4,096", net(64, 64, 10), (64,), 4096, (1, 8), FASTER, peak=True
    ),
    "features": Work(
        "logistic regression, 10,000 features", net(10_000, 2), (10_000,), 64, (1, 8),
        {"Opacus": 0.9}, classes=2, peak=True, records=1500,
    ),
    "mlp": Work(
        "MLP 64-64-10", **SMALL, stacks=(1, 8, 16, 64), targets={"before": 1.15}, against=GHOST,
        peak=True,
    ),
    "logistic": Work(
        "logistic regression", net(30, 2), (30,), 64, (64,), {"before": 1.15}, GHOST, classes=2
    ),
    "wide": Work(
        "MLP 784-256-256-10", net(784, 256, 256, 10), (784,), 256, (16,), {"non-private": 1.0}, GHOST
    ),
    "cnn": Work("CNN", cnn, (1, 28, 28), 256, (1, 4), {"non-private": 1.0}, GHOST, peak=True),
    "hyfreedp": Work(
        "HyFreeDP", **SMALL, stacks=(1, 16), targets={"DP-SGD": 1.3}, against=("DP-SGD",),
        method=HyFreeDP(1.0, 8.0),
    ),
    "adaclip": Work(
        "AdaCliP", **SMALL, stacks=(1, 16), targets={"DP-SGD": 1.4}, against=("DP-SGD",),
        method=AdaCliP(1.0),
    ),
}  # fmt: skip


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Meter:
    """Times the steps of this process: as many as a line of the input asks for, and then waits for the next.

    Answers with seconds, steps times candidates, and by how many MiB the memory has grown at most.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if not self._cuda:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget earlier peaks
        self._clock = time.perf_counter if self._cuda else time.process_time
        self._held = 0.0 if self._cuda else resident("VmRSS")
        self._begin()

    def after(self, candidates: int) -> None:
        """Count one step of so many candidates.

        Raises:
            SystemExit: If nothing more is asked for.
        """
        self._done += candidates
        self._left -= 1
        if not self._left:
            seconds = self._now() - self._start
            peak = torch.cuda.max_memory_allocated() / 2**20 if self._cuda else resident("VmHWM")
            print(seconds, self._done, peak - self._held, flush=True)
            self._begin()

    def _begin(self) -> None:
        asked = sys.stdin.readline()
        if not asked:
            raise SystemExit
        self._left, self._done, self._start = int(asked), 0, self._now()

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return self._clock()


def resident(field: str) -> float:
    """Return what this process holds (VmRSS) or held at most (VmHWM) in memory, in MiB; Linux only."""
    # Not getrusage, whose peak a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024


def serve(name: str, work: Work, candidates: int, device: torch.device) -> object:
    """Take the steps of one competitor, as many at a time as the input asks for."""
    data = work.data(device)
    meter = Meter(device)
    if name not in ("engine", "before", "DP-SGD"):
        return loop(name, work, data, meter)
    method = DPSGD if name == "DP-SGD" else work.method
    torch.manual_seed(0)
    first = work.model()
    values = {name: GIVEN[name] for name in method.parameters}
    models = [first, *(copy.deepcopy(first) for _ in range(candidates - 1))]
    made = [TrainableCandidate(model, bytes([k]) * 32, values) for k, model in enumerate(models)]
    schedule = Schedule(work.records, work.batch / work.records, STEPS)
    how: dict[str, Any] = {
        "loss_of": LossOfOutputs(cross_entropy),
        "data": data,
        "device": device.type,
        "on_step": lambda _, report: meter.after(len(report["learning_rate"])),
    }
    return list(Training(method, schedule, **how).of(made))


def loop(name: str, work: Work, data: TensorData, meter: Meter) -> None:
    """Take the steps of a loop by hand: non-private, or with Opacus, whose own modules it then takes.

    Batches are in memory and of a fixed size, as in a tuned loop without a DataLoader.
    """
    device = data.x.device
    criterion = nn.CrossEntropyLoss()
    model = work.model().train()
    if name != "non-private":
        model = ModuleValidator.fix(model)
    model = model.to(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if name != "non-private":
        made = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(data.x, data.y), batch_size=work.batch),
            criterion=criterion,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=name.removeprefix("Opacus "),
        )
        model, optimizer, criterion = (made[0], made[1], made[2] if len(made) == 4 else criterion)
    generator = torch.Generator().manual_seed(0)
    while True:
        x, y = data.take(torch.randint(len(data), (work.batch,), generator=generator).to(device))
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        meter.after(1)


class Competitor:
    """A competitor in a process of its own, which waits while others take their turns.

    Args:
        name: Its name.
        key: Of the work.
        candidates: How many the engine trains.
        options: The command line's.
    """

    def __init__(self, name: str, key: str, candidates: int, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, key, "--device", options.device]
        command += ["--serve", name, str(candidates)]
        root = {} if name != "before" else {"PYTHONPATH": str(options.before)}
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **root},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.spent = self.peak = 0.0

    def __call__(self, count: int) -> float:
        """Run so many steps and return the seconds that one step of one candidate took."""
        print(count, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().split()
        if not answer:
            raise SystemExit(
                f"{' '.join(self._process.args[2:])}: ended with {self._process.wait()}"
            )
        seconds, done, self.peak = map(float, answer)
        self.spent += seconds
        return seconds / done

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def warmed(run: Competitor, options: argparse.Namespace) -> int:
    """Run steps that nobody times; return how many fill the seconds of a round."""
    for done in range(WARM_STEPS):
        if done >= 5 and run.spent > options.warm:
            break
        run(1)
    before = run.spent
    run(3)
    fill = int(3 * options.seconds / (run.spent - before))
    return min(max(2, fill), (STEPS - WARM_STEPS - 10) // options.rounds)


def print_row(
    title: str, own: str, name: str, other: str, ratios: list[float], most: float
) -> None:
    """Print one ratio and, if there is one, whether it stays below its target."""
    middle = statistics.median(ratios)
    around = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    target = f"{most:g}: {'met' if middle <= most else 'missed'}" if most else ""
    print(f"| {title} | {own} | {name} | {other} | {middle:.2f}{around} | {target} |", flush=True)


def measure(key: str, candidates: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the engine beside a work's competitors, by turns, and print their rows."""
    work = WORKS[key]
    names = ["engine", *([] if options.before is None else ["before"]), *work.against]
    runs = {name: Competitor(name, key, candidates, options) for name in names}
    try:
        counts = {name: warmed(run, options) for name, run in runs.items()}
        rounds = [
            {name: run(counts[name]) for name, run in runs.items()} for _ in range(options.rounds)
        ]
    finally:
        for run in runs.values():
            run.close()
    found = {name: [each[name] for each in rounds] for name in names}
    modes = [name for name in work.against if name.startswith("Opacus")]
    faster = min(modes, key=lambda name: statistics.median(found[name]), default="")
    title, own = f"{work.title}, K = {candidates}", found["engine"]
    for name in names[1:]:
        target = work.targets.get("Opacus" if name == faster else name, 0.0)
        ratios = [a / b for a, b in zip(own, found[name], strict=True)]
        mine, other = (f"{1e6 * statistics.median(t):.1f} us" for t in (own, found[name]))
        print_row(title, mine, name, other, ratios, target)
    if candidates > 1 or not work.peak:
        return {"seconds": found}
    peaks = {name: run.peak for name, run in runs.items()}
    mine, other = (f"{peaks[name]:.0f} MiB" for name in ("engine", "Opacus ghost"))
    ratio = peaks["engine"] / peaks["Opacus ghost"]
    print_row(f"{title}: peak memory", mine, "Opacus ghost", other, [ratio], 1.0)
    return {"seconds": found, "peak MiB": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each competitor and round")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds of each before the rounds")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--before", type=Path, help="a checkout of another version, to compare with"
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.works) - set(WORKS):
        parser.error(f"no work is called {', '.join(sorted(unknown))}")
    if options.serve:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        name, count = options.serve
        return serve(name, WORKS[options.works[0]], int(count), torch.device(options.device))
    print(
        f"torch {torch.__version__}, Opacus {opacus.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n"
        "| a candidate's step | engine | against | takes | ratio (least to largest) | target |\n|"
        + " --- |"
        * 6
    )
    found = {
        f"{key}, K = {candidates}": measure(key, candidates, options)
        for key in options.works or WORKS
        for candidates in WORKS[key].stacks
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
