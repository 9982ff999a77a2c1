"""One candidate of a small transformer: the engine against Opacus ghost and plain SGD, CPU time.

Two blocks of attention and a net behind it, before each a LayerNorm; 128 tokens a record, 32 records
a batch. Every round runs each competitor in turn; what is printed are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from run import RECORDS, Step, Work, kernel_of, opacus_step, plain, stack_step
from torch import nn
from torch.nn import functional as F

from privtune.training.mechanism.data import TensorData

DEVICE = torch.device("cpu")


class Block(nn.Module):
    """Attention and a net, each added to what it is given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.seen, self.said = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        records, length, width = h.shape
        parts = self.seen(self.first(h)).view(records, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        h = h + self.said(mixed.reshape(records, length, width))
        return h + self.down(F.gelu(self.up(self.second(h))))


class Classifier(nn.Module):
    """An embedding, blocks, and a layer on the mean over the tokens."""

    def __init__(self, vocabulary: int, width: int, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.blocks(self.table(tokens))).mean(dim=1))


class Transformer(Work):
    """The same competitors as of ``run.py``, for another model."""

    width, vocabulary, length = 128, 2000, 128

    def model(self) -> nn.Module:
        return Classifier(self.vocabulary, self.width, 2)

    def data(self, device: torch.device) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(self.vocabulary, (RECORDS, self.length), generator=generator)
        return TensorData(x, torch.randint(10, (RECORDS,), generator=generator)).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="a round")
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Transformer.width = arguments.width
    work = Transformer("transformer", (), 32, (1,), {})
    data = work.data(DEVICE)
    kernel = kernel_of(work, data, DEVICE)
    steps: dict[str, Step] = {
        "engine": stack_step(work, data, 1, DEVICE, kernel),
        "Opacus ghost": opacus_step(work, data, DEVICE, ghost=True),
        "Opacus hooks": opacus_step(work, data, DEVICE, ghost=False),
        "non-private": plain(work, data, DEVICE),
    }
    for name, step in steps.items():
        for _ in range(60 if name == "engine" else 5):  # captures are no part of a long training
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            start = time.process_time()
            for _ in range(arguments.steps):
                step()
            found[name].append((time.process_time() - start) / arguments.steps * 1e3)
    print("| competitor | ms a step | of the engine's |\n| --- | --- | --- |")
    for name, times in found.items():
        ratios = [other / own for other, own in zip(times, found["engine"], strict=True)]
        print(f"| {name} | {statistics.median(times):.1f} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
