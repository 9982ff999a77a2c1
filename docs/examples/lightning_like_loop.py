"""A trainer with hooks and a scheduler, as Lightning and Hugging Face have them, under a plan.

Neither library is needed: what matters is who makes the batches and who takes the step. Give their
loops `private.batches()` for the data loader and `private.step(losses)` for backward, clipping and
optimizer step; with Lightning that is manual optimization, with Hugging Face a `training_step` of
your own. The model here is a tiny transformer made on the spot; its tokens are made up.
"""

from collections.abc import Callable

import torch
from torch import nn

import privtune

VOCABULARY, LENGTH, CLASSES, RECORDS = 20, 8, 3, 300


def tokens(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return x, (x < VOCABULARY // 2).sum(dim=1).div(
        LENGTH / 2.999, rounding_mode="floor"
    ).long().clamp(0, 2)


class TinyTransformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        mixed = nn.functional.scaled_dot_product_attention(
            self.query(hidden), self.key(hidden), self.value(hidden)
        )
        return self.head(self.norm(hidden + mixed).mean(dim=1))


class Trainer:
    """The part of a trainer that PrivTune needs to meet: batches in, steps out, hooks around."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.on_step = on_step

    def fit(self, private, scheduler) -> None:
        for number, (x, y) in enumerate(private.batches()):
            losses = nn.functional.cross_entropy(private.model(x), y, reduction="none")
            private.step(losses)
            scheduler.step()
            self.on_step(number)


def objective(trial: privtune.Trial) -> float:
    model = TinyTransformer(trial.suggest_categorical("width", [8, 16]))
    rate = trial.suggest("learning_rate", privtune.LogNormal(0.02, 1.0))
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-3)
    private = trial.make_private(model, optimizer, tokens(1, RECORDS), max_grad_norm=0.5)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    Trainer(on_step=lambda _: None).fit(private, warm_up)
    return trial.score(model, tokens(2, 100))


def main(storage: str = "sqlite:///privtune.db", epochs: float = 6) -> privtune.Study:
    study = privtune.create_study(
        "tokens", budget=privtune.Budget(6.0, 1e-4, name="tokens"), storage=storage
    )
    release = study.optimize(
        objective,
        strategy=privtune.strategies.LiuTalwar(gamma=0.3, maximum=12),
        training=privtune.DPSGD(records=RECORDS, epochs=epochs, expected_batch_size=50),
        validation=privtune.Validation(records=100),
    )
    print(
        f"{dict(release.params)}: score {release.score:.3f} at ε = {release.guarantee.epsilon:.3f}"
    )
    return study


if __name__ == "__main__":
    main()
