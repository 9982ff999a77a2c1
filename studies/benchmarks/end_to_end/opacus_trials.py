"""The status quo: Optuna draws, Opacus trains, MLflow notes. Data in memory, one request a trial to MLflow.

    python studies/benchmarks/end_to_end/opacus_trials.py --mode ghost --trials 16 [--work mnist-mlp]

The noise of a trial is such that all trials together meet the budget, by Opacus' RDP accountant. The mode
`plain` trains without privacy, and `usual` as Opacus' tutorials do: its engine, its loader, hooks. Works of
MNIST read the file that the variable PRIVTUNE_DATA names.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import optuna  # noqa: E402
import torch  # noqa: E402
from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Metric, Param  # noqa: E402
from opacus import PrivacyEngine  # noqa: E402
from opacus.accountants.utils import get_noise_multiplier  # noqa: E402
from opacus.grad_sample import GradSampleModule  # noqa: E402
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (  # noqa: E402
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping  # noqa: E402
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


@dataclass(frozen=True)
class Work:
    """A model, its records, and how long it is trained."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    records: int
    held_out: int
    batch: int
    epochs: int

    @property
    def rate(self) -> float:
        return self.batch / self.records

    @property
    def steps(self) -> int:
        return round(self.epochs / self.rate)


def mlp(width: int) -> nn.Module:
    """A net of one hidden layer."""
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    """The small network of the DP-SGD literature."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


WORKS = {
    "digits-mlp": Work(lambda: mlp(64), (64,), 1077, 360, 64, 20),
    "mnist-mlp": Work(lambda: mlp(784), (784,), 55_000, 5_000, 512, 3),
    "mnist-cnn": Work(cnn, (1, 28, 28), 55_000, 5_000, 512, 1),
}


def records(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the classes of a work, in memory, in an order of chance."""
    if name == "digits-mlp":
        images, labels = load_digits(return_X_y=True)
        images = images / 16.0
    else:
        with np.load(os.environ["PRIVTUNE_DATA"]) as file:
            images, labels = file["x_train"].astype(np.float32) / 255.0, file["y_train"]
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.tensor(images[order], dtype=torch.float32).reshape(-1, *WORKS[name].shape)
    return x, torch.tensor(labels[order], dtype=torch.int64)


def train(
    work: Work, mode: str, x: torch.Tensor, y: torch.Tensor, lr: float, bound: float, noise: float
) -> nn.Module:
    """Train one model."""
    model = work.model()
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    options = {
        "noise_multiplier": noise,
        "max_grad_norm": bound,
        "expected_batch_size": work.batch,
        "loss_reduction": "mean",
    }
    wrapped: nn.Module = model
    optimizer: torch.optim.Optimizer = plain
    criterion: Callable[..., torch.Tensor] = nn.CrossEntropyLoss()
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=bound, use_ghost_clipping=True, loss_reduction="mean"
        )
        optimizer = DPOptimizerFastGradientClipping(plain, **options)
        criterion = DPLossFastGradientClipping(
            wrapped, optimizer, nn.CrossEntropyLoss(), loss_reduction="mean"
        )
    elif mode != "plain":
        wrapped = GradSampleModule(
            model, force_functorch=mode == "functorch", loss_reduction="mean"
        )
        optimizer = DPOptimizer(plain, **options)
    for _ in range(work.steps):
        chosen = (torch.rand(work.records) < work.rate).nonzero().squeeze(1)
        optimizer.zero_grad()
        criterion(wrapped(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return model


def train_as_usual(
    work: Work, x: torch.Tensor, y: torch.Tensor, lr: float, bound: float, noise: float
) -> nn.Module:
    """Train one model with Opacus' engine and its loader."""
    model = work.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    wrapped, private_optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=work.batch),
        noise_multiplier=noise,
        max_grad_norm=bound,
    )
    criterion = nn.CrossEntropyLoss()
    for _ in range(work.epochs):
        for inputs, targets in loader:
            private_optimizer.zero_grad()
            criterion(wrapped(inputs), targets).backward()
            private_optimizer.step()
    return model


def main() -> None:
    """Run the trials."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--mode", choices=("ghost", "hooks", "functorch", "plain", "usual"), required=True
    )
    parser.add_argument("--work", choices=WORKS, default="digits-mlp")
    parser.add_argument("--trials", type=int, required=True)
    asked = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    work = WORKS[asked.work]
    x, y = records(asked.work)
    noise = get_noise_multiplier(
        target_epsilon=8.0,
        target_delta=1e-5,
        sample_rate=work.rate,
        steps=work.steps * asked.trials,
        accountant="rdp",
    )
    client = MlflowClient("sqlite:///mlflow.db")
    experiment = client.create_experiment(asked.work)
    study = optuna.create_study(
        storage="sqlite:///optuna.db", direction="maximize", sampler=optuna.samplers.RandomSampler()
    )

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
        bound = trial.suggest_float("max_grad_norm", 0.1, 10.0, log=True)
        trained = x[: work.records], y[: work.records]
        if asked.mode == "usual":
            model = train_as_usual(work, *trained, lr, bound, noise)
        else:
            model = train(work, asked.mode, *trained, lr, bound, noise)
        with torch.no_grad():
            held = slice(work.records, work.records + work.held_out)
            score = float((model(x[held]).argmax(1) == y[held]).float().mean())
        run = client.create_run(experiment)
        now = int(time.time() * 1000)
        client.log_batch(
            run.info.run_id,
            metrics=[Metric("accuracy", score, now, 0)],
            params=[Param("learning_rate", str(lr)), Param("max_grad_norm", str(bound))],
        )
        client.set_terminated(run.info.run_id)
        return score

    study.optimize(objective, n_trials=asked.trials)
    print(f"best {study.best_value:.3f} at noise {noise:.2f}")


if __name__ == "__main__":
    main()
