"""Opacus' MNIST tutorial under a private selection: five added lines, marked with +."""

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from privtune.opacus import result, select  # +

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))  # need no download
images = x.float().view(-1, 1, 8, 8) / 16
loader = DataLoader(TensorDataset(images[:1400], y[:1400]), batch_size=70)
test = images[1400:], y[1400:]


def train(trial):  # + the tutorial's main() as a function of a trial
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    rate = trial.suggest_float("learning_rate", 0.05, 2.0, log=True)  # +
    engine = PrivacyEngine()
    model, optimizer, private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        data_loader=loader,
        noise_multiplier=trial.plan.noise_multiplier,  # was args.sigma
        max_grad_norm=1.0,
    )
    for _ in range(3):
        for data, target in private:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), target).backward()
            optimizer.step()
    return result(trial, engine, model)  # +


# +
release = select(train, loader, epochs=3, validation=test, epsilon=3, delta=1e-5, declared_by="us")
print(f"{release.params}: accuracy {release.score:.1%} at {release.guarantee}, {release.checked}")
