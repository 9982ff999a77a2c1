"""A LightningModule trained by lightning's Trainer with Opacus, as a declared mechanism."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from privtune.opacus import make_private, result, select

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
data = DataLoader(TensorDataset(x[:1400].float() / 16, y[:1400]), batch_size=70)


class Classifier(lightning.LightningModule):
    def __init__(self, network, optimizer):
        super().__init__()
        self.network, self.optimizer = network, optimizer

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.optimizer


def train(trial):
    network = torch.nn.Linear(64, 10)
    rate = trial.suggest_float("rate", 0.05, 5.0, log=True)
    optimizer = torch.optim.SGD(network.parameters(), rate)
    engine, network, optimizer, loader = make_private(trial, network, optimizer, data)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(Classifier(network, optimizer), loader)
    return result(trial, engine, network)


terms = {"epsilon": 3.0, "delta": 1e-5, "declared_by": "the author"}
release = select(train, data, epochs=3, validation=(x[1400:] / 16, y[1400:]), **terms)
print(f"{release.params}: accuracy {release.score:.1%} at {release.guarantee}")
