"""A space and a training loop of one's own: the best of a secret number of trials, and no other."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import privtune

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images / 16, dtype=torch.float32)
y = torch.tensor(labels)
train, validation, test = (x[:1077], y[:1077]), (x[1077:1437], y[1077:1437]), (x[1437:], y[1437:])


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of one record: a batch of one in, shape [1] out."""
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def objective(trial: privtune.Trial) -> float:
    width = trial.suggest_int("width", 16, 64, log=True)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "adam":
        optimizer = torch.optim.Adam(
            model.parameters(), trial.suggest_float("lr_adam", 1e-3, 0.1, log=True)
        )
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), trial.suggest_float("lr_sgd", 0.05, 5, log=True)
        )
    private = trial.make_private(model, optimizer, train, max_grad_norm=1.0)
    private.fit(loss_of)
    return trial.score(model, validation)


def main(storage: str = "sqlite:///privtune.db", epochs: float = 10) -> privtune.Study:
    study = privtune.create_study(
        "example", budget=privtune.Budget(4.0, 1e-5, name="digits"), storage=storage
    )
    release = study.optimize(
        objective,
        strategy=privtune.strategies.PapernotSteinke(mean_runs=5),
        training=privtune.DPSGD(records=1077, epochs=epochs, expected_batch_size=64),
        validation=privtune.Validation(records=360),
    )
    print(release.params)
    print(f"noised validation accuracy {release.score:.1%} at {release.guarantee}")
    return study


if __name__ == "__main__":
    main()
