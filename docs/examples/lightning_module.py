"""A LightningModule under lightning's Trainer: batches and steps come from the plan.

Lightning calls it manual optimization: the module takes the step, here ``private.step``.
"""

import logging
import warnings

import lightning
import torch
from torch import nn

import privtune

RECORDS, FEATURES, CLASSES = 300, 10, 3

# A line for each Trainer would tell how many sealed trials there were; so would a warning of one.
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


def blobs(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    centres = nn.functional.one_hot(y, FEATURES).float() * 2
    return centres + torch.randn(count, FEATURES, generator=generator), y


class PlannedBatches:
    """The plan's samples, once. Lightning would fetch a batch ahead if this had no length."""

    def __init__(self, private) -> None:
        self.private = private

    def __len__(self) -> int:
        return self.private.schedule.steps

    def __iter__(self):
        return self.private.batches()


class PrivateModule(lightning.LightningModule):
    def __init__(self, network: nn.Module, optimizer, private, schedule=None) -> None:
        super().__init__()
        self.network, self.optimizer, self.private = network, optimizer, private
        self.schedule = schedule
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx: int) -> None:
        x, y = batch
        self.private.step(nn.functional.cross_entropy(self.private.model(x), y, reduction="none"))
        if self.schedule is not None:
            self.schedule.step()

    def train_dataloader(self) -> PlannedBatches:
        return PlannedBatches(self.private)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def trainer() -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=1,  # of PlannedBatches: the plan says how many steps there are
        accelerator="cpu",
        # Nothing of a sealed trial may be shown or kept:
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def objective(trial: privtune.Trial) -> float:
    width = trial.suggest_int("width", 8, 32, log=True)
    network = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))
    rate = trial.suggest("learning_rate", privtune.LogNormal(0.02, 1.0))
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=1e-3)
    private = trial.make_private(network, optimizer, blobs(1, RECORDS), max_grad_norm=0.5)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    trainer().fit(PrivateModule(network, optimizer, private, warm_up))
    return trial.score(network, blobs(2, 100))


def main(storage: str = "sqlite:///privtune.db", epochs: float = 6) -> privtune.Study:
    study = privtune.create_study(
        "lightning", budget=privtune.Budget(6.0, 1e-4, name="blobs"), storage=storage
    )
    release = study.optimize(
        objective,
        strategy=privtune.strategies.LiuTalwar(gamma=0.3, maximum=12),
        training=privtune.DPSGD(records=RECORDS, epochs=epochs, expected_batch_size=50),
        validation=privtune.Validation(records=100),
    )
    print(f"{dict(release.params)}: score {release.score:.3f} at {release.guarantee}")
    return study


if __name__ == "__main__":
    main()
