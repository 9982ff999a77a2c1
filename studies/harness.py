"""What the reproductions share: data, and training of candidates side by side."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from privtune.training.engine.train import TrainableCandidate, Training, initialisation
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOfOutputs, load_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.mechanism.transcript import Transcript

__all__ = [
    "Split",
    "TrainingResult",
    "accuracies",
    "cross_entropy",
    "fit",
    "mnist",
    "secrets_for",
    "train",
]


class Split:
    """A training set and a test set that is declared public."""

    def __init__(self, x: Any, y: Any, x_test: Any, y_test: Any) -> None:
        self.x, self.y = torch.as_tensor(x), torch.as_tensor(y)
        self.x_test, self.y_test = torch.as_tensor(x_test), torch.as_tensor(y_test)

    def __len__(self) -> int:
        return len(self.y)


def mnist(path: Path | None, *, smoke: bool) -> Split:
    """Load MNIST in [0, 1], flat; for a smoke run scikit-learn's digits, blown up to 28 x 28."""
    if smoke:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        images = torch.tensor(x / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
        x = F.interpolate(images, size=(28, 28)).view(len(y), -1)
        return Split(x[:1200], y[:1200].astype(np.int64), x[1200:], y[1200:].astype(np.int64))
    if path is None:
        sys.exit("--data PATH must give mnist.npz (x_train, y_train, x_test, y_test).")
    with np.load(path) as data:
        flat = {
            k: data[k].reshape(len(data[k]), -1).astype(np.float32) / 255.0
            for k in ("x_train", "x_test")
        }
        return Split(
            flat["x_train"],
            data["y_train"].astype(np.int64),
            flat["x_test"],
            data["y_test"].astype(np.int64),
        )


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss of each record."""
    return F.cross_entropy(outputs, targets, reduction="none")


def secrets_for(study: str, seed: int, count: int) -> list[bytes]:
    """Derive a secret for each candidate from the study's name and a seed."""
    return [hashlib.sha256(f"{study}/{seed}/{k}".encode()).digest() for k in range(count)]


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What became of candidates of one model, side by side: see the engine's ``TrainedCandidate``.

    Args:
        params: Shape ``[K, P]``.
        report: By name, shape ``[T, K]``.
        transcripts: One a candidate.
        unusable: Of each candidate.
        diverged: Whether the final parameters are not finite.
        snapshots: Of each candidate.
    """

    params: torch.Tensor
    report: Mapping[str, torch.Tensor]
    transcripts: tuple[Transcript, ...]
    unusable: tuple[int, ...]
    diverged: tuple[bool, ...]
    snapshots: tuple[Mapping[int, torch.Tensor], ...]


def train(
    method: Any,
    schedule: Schedule,
    *,
    model: Callable[[], nn.Module],
    loss: Any,
    data: TensorData,
    candidates: Sequence[Mapping[str, Any]],
    secrets: Sequence[bytes],
    **options: Any,
) -> TrainingResult:
    """Train candidates whose models one function makes; options are those of the engine's ``Training``."""

    def made() -> Iterator[TrainableCandidate]:
        for values, secret in zip(candidates, secrets, strict=True):
            with initialisation(Streams(secret)):
                own = model()
            yield TrainableCandidate(own, secret, values)

    found = Training(method, schedule, LossOfOutputs(loss), data, **options).alike(made())
    params = torch.stack([outcome.params for outcome in found])
    return TrainingResult(
        params=params,
        report={n: torch.stack([o.report[n] for o in found], dim=1) for n in found[0].report},
        transcripts=tuple(outcome.transcript for outcome in found),
        unusable=tuple(outcome.unusable for outcome in found),
        diverged=tuple((~params.isfinite().all(dim=1)).tolist()),
        snapshots=tuple(outcome.snapshots for outcome in found),
    )


def fit(
    method: Any,
    schedule: Schedule,
    *,
    model: Callable[[], nn.Module],
    split: Split,
    candidates: Sequence[Mapping[str, float]],
    secrets: Sequence[bytes],
    loss: Any = cross_entropy,
    on_step: Callable[[int, Mapping[str, torch.Tensor]], None] | None = None,
    snapshots_at: Collection[int] = (),
) -> TrainingResult:
    """Train candidates on the CPU with one thread; ``on_step`` is called after every step.

    Parameters are kept after the steps ``snapshots_at``, counted from 0.
    """
    return train(
        method,
        schedule,
        model=model,
        loss=loss,
        data=TensorData(split.x, split.y),
        candidates=candidates,
        secrets=secrets,
        device="cpu",
        on_step=on_step,
        snapshots_at=snapshots_at,
    )


def accuracies(model: Callable[[], nn.Module], params: torch.Tensor, split: Split) -> list[float]:
    """Test accuracy of each row of parameters, in percent."""
    module = model()
    found = []
    for row in params:
        load_params(module, row)
        with torch.no_grad():
            right = module(split.x_test).argmax(dim=1) == split.y_test
        found.append(100.0 * right.double().mean().item())
    return found
