"""The data, models and settings that both versions train: nothing here is counted as a user's line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

SPLITS = ("train", "validation", "test")
VOCABULARY, LENGTH = 32, 16


@dataclass(frozen=True)
class Work:
    """What is trained, and how long.

    Args:
        sizes: Records for training, validation and test.
        epochs: Passes over the training records.
        batch: Expected records of a sample.
    """

    sizes: tuple[int, int, int]
    epochs: float
    batch: int


WORKS = {
    "MLP": Work((1077, 360, 360), 10, 64),
    "CNN": Work((4000, 1000, 2000), 4, 128),
    "GRU": Work((1000, 500, 2000), 2, 100),
    "encoder, LoRA": Work((2000, 500, 1000), 2, 100),
}


def records(name: str, mnist: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a work: all of them public, as this is a benchmark."""
    count = sum(WORKS[name].sizes)
    if name == "MLP":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(y))[:count]
        return torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])
    if name == "encoder, LoRA":
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
        return tokens, (tokens < VOCABULARY // 2).sum(dim=1).gt(LENGTH // 2).long()
    if mnist is None:
        raise SystemExit("--data PATH must give mnist.npz (x_train, y_train, x_test, y_test).")
    with np.load(mnist) as file:
        x = torch.tensor(file["x_train"][:count] / 255, dtype=torch.float32)
        y = torch.tensor(file["y_train"][:count].astype(np.int64))
    return (x[:, None] if name == "CNN" else x), y


class CNN(nn.Module):
    """Two convolutions of an MNIST picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, 16, 3, stride=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(16 * 5 * 5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


class GRU(nn.Module):
    """A picture read row by row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(28, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


class Encoder(nn.Module):
    """A Hugging Face encoder with random weights, always the same, and a head."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = BertModel(
                BertConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    intermediate_size=128,
                    max_position_embeddings=LENGTH,
                    hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                ),
                add_pooling_layer=False,
            )
        self.head = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x != 0)[:, None, None, :]
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        states = self.body(x, attention_mask=mask, position_ids=places).last_hidden_state
        return self.head(states.mean(dim=1))


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of records whose class a model finds."""
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).float().mean())


def weights_into(model: nn.Module, release: Any) -> nn.Module:
    """Return the model with the weights of a release, by their names."""
    known = release.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in known:
                parameter.copy_(known[name])
    return model
