"""A space, a model and a loss of one's own: the best of a secret number of trials, and no other."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import privtune

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def build(trial: privtune.Trial) -> privtune.Candidate:
    width = trial.suggest_int("width", 16, 64, log=True)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "adam":
        rate = trial.suggest_float("lr_adam", 1e-3, 0.1, log=True)
        optimizer = torch.optim.Adam(model.parameters(), rate)
    else:
        rate = trial.suggest_float("lr_sgd", 0.05, 5, log=True)
        optimizer = torch.optim.SGD(model.parameters(), rate)
    return privtune.Candidate(model, optimizer, max_grad_norm=1.0)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of one record, [1]; x is [1, 64] and y is [1]."""
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def main(storage: str = "sqlite:///privtune.db", epochs: float = 10) -> privtune.Study:
    study = privtune.create_study(
        "example", budget=privtune.Budget(4.0, 1e-5, name="digits"), storage=storage
    )
    split = {"train": 1077, "validation": 360, "test": 360}
    task = privtune.make_task(build, loss=loss, score="accuracy", data=(x, y), split=split)
    release = study.optimize(
        task,
        strategy=privtune.strategies.PapernotSteinke(mean_runs=5),
        epochs=epochs,
        expected_batch_size=64,
    )
    print(release.params)
    print(f"noised validation accuracy {release.score:.1%} at {release.guarantee}")
    return study


if __name__ == "__main__":
    main()
