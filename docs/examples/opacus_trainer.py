"""A transformer trained by the Trainer of Hugging Face with Opacus' hooks, as a declared mechanism."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from privtune.opacus import make_private, select

tokens = torch.randint(1, 20, (400, 8), generator=torch.Generator().manual_seed(0))
labels = (tokens < 10).sum(dim=1).gt(4).long()  # made up: nothing is downloaded
data = DataLoader(TensorDataset(tokens[:300], labels[:300]), batch_size=50)
QUIET = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def logits(model, x):  # positions of every record's own
    return model(x, position_ids=torch.arange(8).expand_as(x)).logits


class PrivateTrainer(Trainer):
    def get_train_dataloader(self):
        return self.train_dataset  # Opacus' loader, with its Poisson samples

    def compute_loss(self, model, inputs, **_):
        self.optimizer.zero_grad()  # the Trainer clears the model alone
        return torch.nn.functional.cross_entropy(logits(model, inputs[0]), inputs[1])


def train(trial):
    model = BertForSequenceClassification(BertConfig(vocab_size=20, hidden_size=16, **SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), trial.suggest_float("rate", 1e-3, 0.1))
    engine, model, optimizer, loader = make_private(trial, model, optimizer, data)
    arguments = TrainingArguments(num_train_epochs=3, max_grad_norm=0.0, **QUIET)
    PrivateTrainer(model, arguments, train_dataset=loader, optimizers=(optimizer, None)).train()
    trial.check(engine)
    score = trial.score(lambda x: logits(model.eval(), torch.tensor(x)).numpy())
    return trial.result(model, score=score)


terms = {"epsilon": 6.0, "delta": 1e-4, "declared_by": "the author"}
release = select(train, data, epochs=3, validation=(tokens[300:], labels[300:]), **terms)
print(f"{release.params}: accuracy {release.score:.1%} at {release.guarantee}")
