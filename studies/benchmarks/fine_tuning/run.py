"""Benchmark of fine-tuning: CPU time per candidate-step, medians of one interleaved run; peak memory.

    python studies/benchmarks/fine_tuning/run.py --encoder FOLDER [--rounds 7] [--parts lora:4 biases]

Without a folder the encoder is BERT of MiniLM's size with drawn weights. Every round runs every
competitor once, one after the other, on one thread, so that what else the machine does hits them
alike. Memory is that of a process of its own for each competitor, above one that holds the model.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from privtune.training.engine.batched import BatchedKernel
from privtune.training.engine.fine_tuning import set_trainable
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.kernel import OfOutputs, Rows, flatten_params

Step = Callable[[], object]
NAMES = ("stack", "stacks of one", "Opacus", "non-private")
CLASSES = 4


class Classifier(nn.Module):
    """A head on the mean of an encoder's states."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = x != 0
        # A row of positions for each record: Opacus counts rows.
        places = torch.arange(x.shape[1]).expand_as(x)
        states = self.encoder(input_ids=x, attention_mask=there.long(), position_ids=places)
        weights = there.unsqueeze(-1) / there.sum(1).clamp(min=1)[:, None, None]
        return self.head((states.last_hidden_state * weights).sum(1))


def classifier(options: argparse.Namespace, part: str) -> nn.Module:
    """Return the model with what is trained of it; the same every time, in evaluation mode."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    if options.encoder:
        encoder = BertModel.from_pretrained(options.encoder, add_pooling_layer=False)
    else:
        config = BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        encoder = BertModel(config, add_pooling_layer=False)
    kind, _, rank = part.partition(":")
    model = Classifier(encoder.eval(), encoder.config.hidden_size)
    return set_trainable(model, kind, rank=int(rank or 0))


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def competitors(options: argparse.Namespace, part: str) -> dict[str, Callable[[], Step]]:
    """Return what prepares a step of K candidates, each on a batch of its own, by name."""
    count, rows, length = options.candidates, options.batch, options.length
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1000, 5000, (count, rows, length), generator=generator)
    ends = torch.randint(length // 2, length + 1, (count, rows, 1), generator=generator)
    x = x * (torch.arange(length) < ends)
    y = torch.randint(CLASSES, (count, rows), generator=generator)

    @cache
    def kernel() -> BatchedKernel:
        return BatchedKernel(
            lambda: classifier(options, part),
            OfOutputs(losses),
            x=x[0],
            y=y[0],
            device=torch.device("cpu"),
            all_classes=True,
        )

    def ours(stack: int) -> Step:
        params = flatten_params(kernel().module).expand(count, -1).contiguous()
        out = torch.zeros_like(params)

        def step() -> None:
            for start in range(0, count, stack):
                own = slice(start, start + stack)
                records = Rows(
                    x[own], y[own], [rows] * stack, torch.ones(stack, rows),
                    [torch.Generator()] * stack,
                )  # fmt: skip
                kernel().accumulate(params[own], records, Flat(1.0), out=out[own])

        return step

    def plain() -> Step:
        model = classifier(options, part)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, 1e-3)

        def step() -> None:
            for k in range(count):
                optimizer.zero_grad()
                losses(model(x[k]), y[k]).mean().backward()
                optimizer.step()

        return step

    def opacus() -> Step:
        from opacus import GradSampleModule

        model = classifier(options, part).train()  # its hooks look at nothing else
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        hooked = GradSampleModule(model, strict=False)
        trained = [p for p in hooked.parameters() if p.requires_grad]

        def step() -> None:
            for k in range(count):
                losses(hooked(x[k]), y[k]).sum().backward()
                samples = [p.grad_sample.flatten(1) for p in trained]
                norms = torch.stack([s.norm(dim=1) for s in samples]).norm(dim=0)
                factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
                for p, own in zip(trained, samples, strict=True):
                    p.summed_grad = factors @ own
                    p.grad_sample = p.grad = None

        return step

    return {
        "stack": lambda: ours(count),
        "stacks of one": lambda: ours(1),
        "Opacus": opacus,
        "non-private": plain,
    }


def peak() -> float:
    """Return the most memory that this process held, in MiB."""
    # Not getrusage, whose peak a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024.0


def memory(name: str, options: argparse.Namespace, part: str) -> float:
    """Return the peak of a process that holds a model and takes two steps, in MiB."""
    own = ["--encoder", options.encoder] if options.encoder else []
    sizes = [options.candidates, options.batch, options.length]
    found = subprocess.run(
        [
            sys.executable, __file__, *own, "--measure", name, "--parts", part,
            "--candidates", str(sizes[0]), "--batch", str(sizes[1]), "--length", str(sizes[2]),
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(found.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", help="a folder as Hugging Face keeps it")
    parser.add_argument("--parts", nargs="+", default=["lora:4", "biases"])
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.measure:
        if options.measure == "model":
            classifier(options, options.parts[0])
        else:
            step = competitors(options, options.parts[0])[options.measure]()
            step(), step()
        print(peak())
        return
    load = os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}"
    )
    print(f"K = {options.candidates}, B = {options.batch}, {options.length} tokens\n")
    print("| part | " + " | ".join(f"{n}, ms" for n in NAMES) + " | of Opacus | of non-private |")
    print("| --- |" + " --- |" * 6)
    for part in options.parts:
        steps = {name: make() for name, make in competitors(options, part).items()}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            step()
        for _ in range(options.rounds):
            for name, step in steps.items():
                began = time.process_time()
                step()
                taken[name].append((time.process_time() - began) / options.candidates)
        each = {name: 1e3 * statistics.median(own) for name, own in taken.items()}
        cells = " | ".join(f"{each[name]:.0f}" for name in NAMES)
        ratios = [
            " to ".join(f"{each[n] / each[other]:.2f}" for n in NAMES[:2])
            for other in ("Opacus", "non-private")
        ]
        print(f"| {part} | {cells} | {ratios[0]} | {ratios[1]} |", flush=True)
        if options.memory:
            base = memory("model", options, part)
            above = {name: memory(name, options, part) - base for name in NAMES}
            print(f"  {part}: MiB above the model's {base:.0f}: {above}", flush=True)


if __name__ == "__main__":
    main()
