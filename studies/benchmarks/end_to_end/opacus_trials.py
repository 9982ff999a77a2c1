"""The status quo: Optuna draws, Opacus trains, MLflow notes. Data in memory, one request a trial to MLflow.

    python studies/benchmarks/end_to_end/opacus_trials.py --mode ghost --trials 16

The noise of a trial is such that all trials together meet the budget, by Opacus' RDP accountant.
"""

from __future__ import annotations

import argparse
import time
import warnings

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import optuna  # noqa: E402
import torch  # noqa: E402
from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Metric, Param  # noqa: E402
from opacus.accountants.utils import get_noise_multiplier  # noqa: E402
from opacus.grad_sample import GradSampleModule  # noqa: E402
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (  # noqa: E402
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping  # noqa: E402
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import nn  # noqa: E402

RECORDS, BATCH, EPOCHS = 1077, 64, 20
RATE = BATCH / RECORDS
STEPS = round(EPOCHS / RATE)


def train(
    mode: str, x: torch.Tensor, y: torch.Tensor, lr: float, bound: float, noise: float
) -> nn.Module:
    """Train one model."""
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    options = {
        "noise_multiplier": noise,
        "max_grad_norm": bound,
        "expected_batch_size": BATCH,
        "loss_reduction": "mean",
    }
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=bound, use_ghost_clipping=True, loss_reduction="mean"
        )
        optimizer = DPOptimizerFastGradientClipping(plain, **options)
        criterion = DPLossFastGradientClipping(
            wrapped, optimizer, nn.CrossEntropyLoss(), loss_reduction="mean"
        )
    else:
        wrapped = GradSampleModule(
            model, force_functorch=mode == "functorch", loss_reduction="mean"
        )
        optimizer = DPOptimizer(plain, **options)
        criterion = nn.CrossEntropyLoss()
    for _ in range(STEPS):
        chosen = (torch.rand(RECORDS) < RATE).nonzero().squeeze(1)
        optimizer.zero_grad()
        criterion(wrapped(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return model


def main() -> None:
    """Run the trials."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("ghost", "hooks", "functorch"), required=True)
    parser.add_argument("--trials", type=int, required=True)
    asked = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.tensor(images[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(labels[order])
    noise = get_noise_multiplier(
        target_epsilon=8.0,
        target_delta=1e-5,
        sample_rate=RATE,
        steps=STEPS * asked.trials,
        accountant="rdp",
    )
    client = MlflowClient("sqlite:///mlflow.db")
    experiment = client.create_experiment("digits")
    study = optuna.create_study(
        storage="sqlite:///optuna.db", direction="maximize", sampler=optuna.samplers.RandomSampler()
    )

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
        bound = trial.suggest_float("max_grad_norm", 0.1, 10.0, log=True)
        model = train(asked.mode, x[:RECORDS], y[:RECORDS], lr, bound, noise)
        with torch.no_grad():
            held = slice(RECORDS, RECORDS + 360)
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
