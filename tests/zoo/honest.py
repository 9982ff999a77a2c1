"""A zoo of honest models and losses: what ``build`` and ``loss`` must take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import privtune
from tests.zoo.trap import Net, plain

RECORDS = 48
CLASSES, WORDS, LENGTH, FEATURES = 3, 9, 5, 6
T = torch.Tensor
Parameters = Iterable[nn.Parameter]


def ce(outputs: T, y: T, **options: Any) -> T:
    return functional.cross_entropy(outputs, y, reduction="none", **options)


def bce(logits: T, y: T) -> T:
    return functional.binary_cross_entropy_with_logits(logits, y, reduction="none")


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Honest:
    """A model and a loss that nothing is wrong with."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Callable[..., T] = plain
    optimizer: Callable[[Parameters], torch.optim.Optimizer] = sgd
    schedule: Any = None
    draws: bool = False
    score: str | privtune.Score | None = None
    trainable: str | None = None

    def build(self, trial: privtune.Trial) -> privtune.Candidate:
        """Return the candidate."""
        model = self.model()
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        decay = None if self.schedule is None else self.schedule(optimizer)
        return privtune.Candidate(
            model, optimizer, max_grad_norm=0.3, schedule=decay, trainable=self.trainable
        )


# Data: nothing to learn, only shapes.


def whole(most: int, *shape: int) -> T:
    return torch.randint(most, (RECORDS, *shape), generator=torch.Generator().manual_seed(7))


def floats(*shape: int) -> T:
    return torch.randn(RECORDS, *shape, generator=torch.Generator().manual_seed(7))


def of(*shape: int) -> Callable[[], Any]:
    return lambda: (floats(*shape), whole(CLASSES))


def text() -> T:
    return whole(WORDS, LENGTH)


def tokens() -> Any:
    return text(), whole(CLASSES)


def numbers(*shape: int) -> Callable[[], Any]:
    return lambda: (floats(FEATURES), floats(*shape).sigmoid())


rows, images, sequence = of(FEATURES), of(2, 6, 6), of(LENGTH, 4)

# Models.


def seq(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts)


def mlp(drop: float = 0.0) -> nn.Module:
    return seq(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, CLASSES))


def over(body: nn.Module) -> nn.Module:
    """Return something over a sequence ``[B, T, 4]``, its places averaged, and a linear head."""

    def run(m: Any, x: T) -> T:
        attends = "Attention" in type(body).__name__
        found = m.body(x, x, x, need_weights=False) if attends else m.body(x)
        return m.head((found[0] if isinstance(found, tuple) else found).mean(dim=1))

    return Net(run, body=body, head=nn.Linear(4, CLASSES))


def bag(**options: Any) -> nn.Module:
    parts = {"bag": nn.EmbeddingBag(WORDS, 4, **options), "head": nn.Linear(4, CLASSES)}
    return Net(lambda m, x: m.head(m.bag(x)), **parts)


def frozen_norm() -> nn.Module:
    """Return convolutions with BatchNorm that were trained elsewhere, frozen, and a head to train."""
    torch.manual_seed(0)
    body = seq(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return seq(body.requires_grad_(False).eval(), nn.Linear(64, CLASSES))


def encoder(*, two_axes: bool = False, seed: int = 0) -> nn.Module:
    """Return a tiny BERT of Hugging Face, made from its configuration; 0 is padding."""
    from transformers import BertConfig, BertModel

    if seed:
        torch.manual_seed(seed)  # what stays frozen
    body: Any = BertModel(
        BertConfig(
            vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip

    def run(m: Any, input_ids: T, attention_mask: T | None = None) -> T:
        x = input_ids if attention_mask is None else input_ids * attention_mask
        # The library looks into a mask of two axes, but not where it is traced; one of four is taken.
        mask = (x != 0) if two_axes else (x != 0)[:, None, None, :]
        return m.head(m.body(x, attention_mask=mask).last_hidden_state[:, 0])

    return Net(run, body=body, head=nn.Linear(8, CLASSES))


def language(kind: str, *, seed: int = 0) -> nn.Module:
    """Return a tiny language model of Hugging Face, made from its configuration."""
    import transformers as library

    if seed:
        torch.manual_seed(seed)  # what stays frozen
    ends = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        sizes = library.GPT2Config(n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, **ends)
        body: Any = library.GPT2LMHeadModel(sizes)
    else:
        sizes = library.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=LENGTH, **ends,
        )  # fmt: skip
        body = library.LlamaForCausalLM(sizes)
    return Net(lambda m, x: m.body(input_ids=x, use_cache=False).logits, body=body)


def two_heads() -> nn.Module:
    body = seq(nn.Linear(FEATURES, 8), nn.Tanh())
    heads = {"first": nn.Linear(8, CLASSES), "second": nn.Linear(8, 1)}
    return Net(
        lambda m, x: (m.first(m.body(x)), m.second(m.body(x)).squeeze(-1)), body=body, **heads
    )


def coded() -> nn.Module:
    """Return a model of a float table whose first column is a code from 1 on."""
    return Net(
        lambda m, x: m.head(torch.cat([m.table(x[:, 0].long() - 1), x[:, 1:].log()], dim=1)),
        table=nn.Embedding(WORDS, 4), head=nn.Linear(6, CLASSES),
    )  # fmt: skip


def codes() -> Any:
    return torch.cat([1.0 + whole(WORDS, 1), floats(2).exp()], dim=1), whole(CLASSES)


def opacus(name: str, *sizes: int) -> nn.Module:
    from opacus import layers

    return getattr(layers, name)(*sizes, batch_first=True)


# Losses.


def both(m: Any, x: T, y: T) -> T:
    logits, number = m(x)
    return ce(logits, y) + 0.3 * (number - x.sum(dim=1)).square()


def augmented(m: Any, x: T, y: T) -> T:
    return plain(m, x * (torch.rand_like(x) < 0.9) + 0.1 * torch.randn_like(x), y)


def penalised(m: Any, x: T, y: T) -> T:
    slope: T = torch.func.grad(lambda x: plain(m, x, y).sum())(x)
    return plain(m, x, y) + 0.1 * slope.square().sum(dim=1)


def penalised_by_autograd(m: Any, x: T, y: T) -> T:
    inputs = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(plain(m, inputs, y).sum(), inputs, create_graph=True)
    return plain(m, x, y) + 0.1 * slope.square().sum(dim=1)


def decayed(m: Any, x: T, y: T) -> T:
    """Decay inside the loss: clipped with each record's gradient, so the bound holds."""
    return plain(m, x, y) + 1e-3 * sum(p.square().sum() for p in m.parameters())


def hits(m: Any, x: T, y: T) -> T:
    return (m(x).argmax(dim=1) == y).float().flatten(1).mean(dim=1)


def huber(m: Any, x: T, y: T) -> T:
    return functional.huber_loss(m(x), y, reduction="none").sum(dim=1)


def rebuilt(m: Any, x: T, *_: T) -> T:
    return (m(x) - x).square().flatten(1).mean(dim=1)


def rebuilt_pixels(m: Any, x: T, *_: T) -> T:
    return functional.binary_cross_entropy(m(x), x, reduction="none").mean(dim=1)


def of_probabilities(m: Any, x: T, y: T) -> T:
    return functional.binary_cross_entropy(m(x), y, reduction="none").sum(dim=1)


def next_tokens(m: Any, x: T) -> T:
    return ce(m(x)[:, :-1].transpose(1, 2), x[:, 1:]).mean(dim=1)


def places(m: Any, x: T, y: T) -> T:
    """Cross-entropy of every place; what has no label counts nothing."""
    logits = m(x).movedim(-1, 1) if y.ndim == 2 else m(x)
    return ce(logits, y, ignore_index=-100).flatten(1).mean(dim=1)


# Optimizers and schedules.


def rated(kind: Any, **options: Any) -> Callable[[Parameters], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, lr=0.01, **options)


HONEST: tuple[Honest, ...] = (
    Honest(
        "ConvTranspose",
        lambda: seq(
            nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2, stride=2)
        ),
        images, rebuilt,
    ),
    Honest("EmbeddingBag, sum, padding", lambda: bag(mode="sum", padding_idx=0), tokens),
    Honest("EmbeddingBag, max", lambda: bag(mode="max"), tokens),
    Honest(
        "RNN, two layers, dropout", lambda: over(nn.RNN(4, 4, 2, dropout=0.3, batch_first=True)), sequence,
        draws=True,
    ),
    Honest("DPLSTM", lambda: over(opacus("DPLSTM", 4, 4)), sequence),
    Honest("DPMultiheadAttention", lambda: over(opacus("DPMultiheadAttention", 4, 2)), sequence),
    Honest("Hugging Face encoder, mask of two axes", lambda: encoder(two_axes=True), tokens, draws=True),
    Honest(
        "weight_norm",
        lambda: seq(parametrizations.weight_norm(nn.Linear(FEATURES, 8)), nn.ReLU(), nn.Linear(8, CLASSES)),
        rows,
    ),
    Honest("dropout", lambda: mlp(drop=0.5), rows, draws=True),
    Honest("several labels", mlp, numbers(CLASSES), lambda m, x, y: bce(m(x), y.round()).mean(dim=1)),
    Honest("two tasks", two_heads, rows, both),
    Honest("augmentation", mlp, rows, augmented, draws=True),
    Honest("gradient penalty within a record", mlp, rows, penalised),
    Honest("gradient penalty by autograd.grad", mlp, rows, penalised_by_autograd),
    Honest("decay in the loss", mlp, rows, decayed),
    Honest(
        "sigmoid and BCELoss", lambda: seq(nn.Linear(FEATURES, 1), nn.Sigmoid()), numbers(1), of_probabilities
    ),
    Honest(
        "autoencoder of pixels", lambda: seq(nn.Linear(6, 2), nn.Linear(2, 6), nn.Sigmoid()),
        lambda: floats(FEATURES).sigmoid(), rebuilt_pixels, score=privtune.Score("loss", bound=3.0),
    ),
    Honest("codes in a float column", coded, codes),
    Honest(
        "momentum, schedule by step", mlp, rows, optimizer=rated(torch.optim.SGD, momentum=0.9),
        schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=8),
    ),
    Honest(
        "GPT-2, tied, token loss", lambda: language("gpt2"), text, next_tokens, draws=True,
        score=privtune.Score(next_tokens, bound=4.0),
    ),
    Honest(
        "GPT-2, lora:2, perplexity", lambda: language("gpt2", seed=1), text, next_tokens, draws=True,
        score=privtune.Score("perplexity", bound=4.0), trainable="lora:2",
    ),
    Honest(
        "Llama, token loss", lambda: language("llama"), text, next_tokens,
        score=privtune.Score("loss", bound=4.0),
    ),
    Honest(
        "Hugging Face encoder, dict, lora:2", lambda: encoder(seed=1),
        lambda: {"input_ids": text(), "attention_mask": whole(2, LENGTH), "labels": whole(CLASSES)},
        lambda m, r: ce(m(r["input_ids"], r["attention_mask"]), r["labels"]), draws=True, trainable="lora:2",
    ),
    Honest(
        "segmentation",
        lambda: seq(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1)),
        lambda: (floats(2, 6, 6), whole(CLASSES, 6, 6)), places, score=privtune.Score(hits, maximize=True),
    ),
    Honest(
        "tagging", lambda: seq(nn.Embedding(WORDS, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
        lambda: (text(), whole(4, LENGTH).where(whole(4, LENGTH) < CLASSES, -100)), places,
        score=privtune.Score(places, bound=3.0),
    ),
    Honest(
        "autoencoder", lambda: seq(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6)), lambda: floats(FEATURES),
        rebuilt, score=privtune.Score("loss", bound=3.0),
    ),
    Honest("vectors", mlp, numbers(CLASSES), huber, score=privtune.Score("loss", bound=2.0)),
    Honest("frozen BatchNorm, head trained", frozen_norm, images, score="accuracy"),
    Honest(
        "one logit", lambda: nn.Linear(FEATURES, 1), lambda: (floats(FEATURES), whole(2)),
        lambda m, x, y: bce(m(x).squeeze(-1), y.float()), score="accuracy",
    ),
)  # fmt: skip
