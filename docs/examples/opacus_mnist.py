"""Opacus' MNIST tutorial under a private selection: five lines added (+), one changed (~)."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from privtune.opacus import make_private, result, select  # +

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))  # need no download
images = x.float().view(-1, 1, 8, 8) / 16
loader = DataLoader(TensorDataset(images[:1400], y[:1400]), batch_size=70)
test = images[1400:], y[1400:]


def train(trial):  # + the tutorial's main() as a function of a trial
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    rate = trial.suggest_float("learning_rate", 0.05, 2.0, log=True)  # +
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    engine, model, optimizer, private = make_private(trial, model, optimizer, loader)  # ~
    for _ in range(3):
        for data, target in private:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), target).backward()
            optimizer.step()
    return result(trial, engine, model)  # +


# +
release = select(train, loader, epochs=3, validation=test, epsilon=3, delta=1e-5, declared_by="us")
print(f"{release.params}: accuracy {release.score:.1%} at {release.guarantee}, {release.checked}")
