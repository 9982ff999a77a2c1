"""A transformer of Hugging Face, trained by its Trainer: batches and steps come from the plan.

Nothing is downloaded: the model is a tiny BERT made from its configuration, the tokens are made up.
"""

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import privtune

VOCABULARY, LENGTH, RECORDS = 20, 8, 300


def tokens(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)  # 0 would be padding
    return x, (x < VOCABULARY // 2).sum(dim=1).gt(LENGTH // 2).long()


class Classifier(nn.Module):
    """A tensor of tokens in, a tensor of logits out: that is all that PrivTune asks of a model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bert = BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=width,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=2 * width,
                max_position_embeddings=LENGTH,
                num_labels=2,
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Transformers look one row of positions up for the whole batch, which hides whose gradient
        # is whose: give every record its own.
        positions = torch.arange(x.shape[1], device=x.device).expand_as(x)
        return self.bert(x, attention_mask=(x != 0).long(), position_ids=positions).logits


class PlannedBatches:
    """The plan's samples, once: one batch a step."""

    def __init__(self, private) -> None:
        self.private = private

    def __len__(self) -> int:
        return self.private.schedule.steps

    def __iter__(self):
        return self.private.batches()


class PrivateTrainer(Trainer):
    """A Trainer whose batches and steps are those of a plan."""

    def __init__(self, model, optimizer, private) -> None:
        arguments = TrainingArguments(
            num_train_epochs=1,  # of PlannedBatches: the plan says how many steps there are
            gradient_accumulation_steps=1,
            max_grad_norm=0.0,  # off: records are clipped, not their noisy sum
            lr_scheduler_type="constant",
            use_cpu=True,
            # Nothing of a sealed trial may be shown or kept:
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        super().__init__(model, arguments, optimizers=(optimizer, None))
        self.remove_callback(PrinterCallback)
        self.private = private

    def get_train_dataloader(self):
        return PlannedBatches(self.private)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        x, y = inputs
        self.private.step(nn.functional.cross_entropy(self.private.model(x), y, reduction="none"))
        # The optimizer has stepped and the gradients are gone: the Trainer's own step after this
        # moves nothing. The mean loss, which it would add up and print, was never paid for.
        return torch.zeros(())


def objective(trial: privtune.Trial) -> float:
    model = Classifier(trial.suggest_categorical("width", [8, 16]))
    rate = trial.suggest_float("learning_rate", 1e-3, 0.1, log=True)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-3)
    private = trial.make_private(model, optimizer, tokens(1, RECORDS), max_grad_norm=0.5)
    PrivateTrainer(model, optimizer, private).train()
    return trial.score(model, tokens(2, 100))


def main(storage: str = "sqlite:///privtune.db", epochs: float = 6) -> privtune.Study:
    study = privtune.create_study(
        "transformer", budget=privtune.Budget(6.0, 1e-4, name="tokens"), storage=storage
    )
    release = study.optimize(
        objective,
        strategy=privtune.strategies.PapernotSteinke(mean_runs=3),
        training=privtune.DPSGD(records=RECORDS, epochs=epochs, expected_batch_size=50),
        validation=privtune.Validation(records=100),
    )
    print(f"{dict(release.params)}: score {release.score:.3f} at {release.guarantee}")
    return study


if __name__ == "__main__":
    main()
