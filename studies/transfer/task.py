"""The digits 5 to 9, learnt by a network that was trained on the digits 0 to 4."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from privtune.tasks import Task, TaskData
from privtune.training.mechanism.data import TensorData
from studies.harness import Split, cross_entropy, mnist

HIDDEN = "PRIVTUNE_TRANSFER_HIDDEN"  # width of the two hidden layers
_CLASSES = 5
_VALIDATION = 2_404  # private records that selections score on
_TRAINED, _TESTED = 29_404, 4_861  # digits 5 to 9 of MNIST
_SMOKE = (500, 100, 290)  # of scikit-learn's digits


def _smoke() -> bool:
    return "PRIVTUNE_DATA" not in os.environ


def half(first: int) -> Split:
    """Return the records of five digits, from ``first`` on, labelled from 0."""
    whole = mnist(Path(os.environ.get("PRIVTUNE_DATA", "")), smoke=_smoke())
    rows = (whole.y >= first) & (whole.y < first + _CLASSES)
    tests = (whole.y_test >= first) & (whole.y_test < first + _CLASSES)
    return Split(
        whole.x[rows], whole.y[rows] - first, whole.x_test[tests], whole.y_test[tests] - first
    )


def network() -> nn.Module:
    """Return the network, 784-H-H-5."""
    width = int(os.environ.get(HIDDEN, "512"))
    return nn.Sequential(
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, _CLASSES),
    )


def pretrain(path: Path, *, epochs: int = 2, seed: int = 0) -> None:
    """Train on the digits 0 to 4, which are public here, and keep everything but the head."""
    source = half(0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(source)).split(256):
                optimizer.zero_grad()
                F.cross_entropy(model(source.x[rows]), source.y[rows]).backward()
                optimizer.step()
    save_file({n: p.detach() for n, p in model.named_parameters() if not n.startswith("4.")}, path)


def public_weights(width: int) -> Path:
    """Return the file of the network of this width that learnt the digits 0 to 4: trained once a run.

    Tasks that are made from now on have this width.
    """
    os.environ[HIDDEN] = str(width)
    return _pretrained(width, os.environ.get("PRIVTUNE_DATA"))


@functools.cache
def _pretrained(width: int, data: str | None) -> Path:  # noqa: ARG001 (what it is known by)
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pretrain(path := folder / "digits-0-to-4.safetensors")
    return path


def _load() -> TaskData:
    target = half(5)
    train, validation, test = _sizes()
    first, second = slice(0, train), slice(train, train + validation)
    return TaskData(
        train=TensorData(target.x[first], target.y[first]),
        validation=TensorData(target.x[second], target.y[second]),
        test=TensorData(target.x_test[:test], target.y_test[:test]),
    )


def _sizes() -> tuple[int, int, int]:
    return _SMOKE if _smoke() else (_TRAINED - _VALIDATION, _VALIDATION, _TESTED)


def digits_5_to_9() -> Task:
    """Return the task; MNIST is read from the file that ``PRIVTUNE_DATA`` names."""
    train, validation, test = _sizes()
    return Task(
        name="digits-5-to-9",
        description="MNIST's digits 5 to 9",
        train_records=train,
        validation_records=validation,
        test_records=test,
        input_shape=(784,),
        classes=_CLASSES,
        load=_load,
        model=network,
        loss=cross_entropy,
        public_test=True,
        bounds={"pixels": (0.0, 255.0)},
    )


def public_digits() -> Task:
    """Return the same task with its records declared public: repetitions of an arm are not charged."""
    return replace(digits_5_to_9(), benchmark=True)
