"""A zoo of honest models and losses: what ``build`` and ``loss`` must take.

Each is run through ``study.optimize``, and its step is held against micro-batches of one by plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import privtune
from privtune.training.engine.opacus_adapter import layer_of_opacus

__all__ = ["HONEST", "RECORDS", "Honest"]

RECORDS = 48
"""Records of every data set here."""

_CLASSES, _WORDS, _LENGTH, _FEATURES = 3, 9, 5, 6

Tensors = tuple[torch.Tensor, torch.Tensor]
Net = Callable[..., torch.Tensor]
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def plain(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of a record."""
    return functional.cross_entropy(model(x), y, reduction="none")


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Honest:
    """A model and a loss that nothing is wrong with.

    Args:
        name: What is special about it.
        model: Makes the model.
        data: Makes the records.
        loss: The loss of a record.
        optimizer: Makes the optimizer.
        schedule: Makes a schedule, or is its name.
        draws: Whether it draws random numbers.
        score: How a selection scores it; None: it is trained once.
        trainable: Which part is trained.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Callable[..., torch.Tensor] = plain
    optimizer: Optimizers = sgd
    schedule: Any = None
    draws: bool = False
    score: str | privtune.Score | None = None
    trainable: str | None = None

    def build(self, trial: privtune.Trial) -> privtune.Candidate:
        """Return the candidate."""
        model = self.model()
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        decay = self.schedule(optimizer) if callable(self.schedule) else self.schedule
        return privtune.Candidate(
            model, optimizer, max_grad_norm=0.3, schedule=decay, trainable=self.trainable
        )


# Data: nothing to learn, only shapes.


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _whole(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(most, (RECORDS, *shape), generator=_generator())


def _floats(*shape: int) -> Callable[[], Tensors]:
    return lambda: (torch.randn(RECORDS, *shape, generator=_generator()), _whole(_CLASSES))


def _tokens() -> Tensors:
    return _whole(_WORDS, _LENGTH), _whole(_CLASSES)


def _numbers(*shape: int) -> Callable[[], Tensors]:
    return lambda: (_rows()[0], torch.rand(RECORDS, *shape, generator=_generator()))


_rows, _images, _series, _sequence = (
    _floats(_FEATURES),
    _floats(2, 6, 6),
    _floats(2, 8),
    _floats(_LENGTH, 4),
)


# Models.


def _mlp(width: int = 8, *, drop: float = 0.0) -> nn.Module:
    layers = [nn.Linear(_FEATURES, width), nn.ReLU(), nn.Dropout(drop), nn.Linear(width, _CLASSES)]
    return nn.Sequential(*layers)


class _Head(nn.Module):
    """Something over a sequence ``[B, T, 4]``, its places averaged, and a linear head."""

    def __init__(self, body: nn.Module, width: int = 4, *, words: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, 4) if words else nn.Identity()
        self.body, self.head = body, nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        h = self.run(self.words(x))
        out: torch.Tensor = self.head(h.mean(dim=1))
        return out

    def run(self, h: torch.Tensor) -> torch.Tensor:
        """Run the body."""
        found = self.body(h)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out


class _Attention(_Head):
    def run(self, h: torch.Tensor) -> torch.Tensor:
        """Attend to itself."""
        out: torch.Tensor = self.body(h, h, h, need_weights=False)[0]
        return out


class _Bag(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(_WORDS, 4, **options), nn.Linear(4, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.head(self.bag(x))
        return out


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        h = self.first(x)
        for block in self.blocks:
            h = h + torch.relu(block(self.norm(h)))
        out: torch.Tensor = self.head(h)
        return out


class _ResidualConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        h = torch.relu(self.norm(self.first(x)))
        h = h + torch.relu(self.second(h))
        out: torch.Tensor = self.head(h.mean(dim=(2, 3)))
        return out


class _Tied(nn.Module):
    """Words in and words out by one table, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(_WORDS, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, _WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.out(torch.tanh(self.mix(self.words(x))).mean(dim=1))
        return out


class _Own(nn.Module):
    """Parameters of its own, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(_FEATURES)), _mlp()
        self.token = nn.Parameter(torch.zeros(_CLASSES))
        self.warmth = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.inner(x * self.scale) * self.warmth.exp() + self.token
        return out


def _frozen() -> nn.Module:
    torch.manual_seed(0)  # what is frozen is public, and must be the same whenever it is made
    model = nn.Sequential(nn.Linear(_FEATURES, 8), nn.Tanh(), nn.Linear(8, _CLASSES))
    model[0].requires_grad_(False)
    return model


def _bias_only() -> nn.Module:
    torch.manual_seed(0)
    model = _mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def _weight_norm() -> nn.Module:
    first = parametrizations.weight_norm(nn.Linear(_FEATURES, 8))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(8, _CLASSES))


class _Lora(nn.Module):
    """A frozen layer and a low-rank update of it that is trained (arXiv 2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, moved."""
        out: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return out


class _Encoder(nn.Module):
    """A tiny BERT of Hugging Face, made from its configuration."""

    def __init__(self, *, lora: bool = False, two_axes: bool = False) -> None:
        super().__init__()
        self.two_axes = two_axes
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=_WORDS,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=_LENGTH,
        )
        if lora:
            torch.manual_seed(0)
        self.body, self.head = BertModel(config), nn.Linear(8, _CLASSES)
        if lora:
            self.body.requires_grad_(False)
            layers: Any = self.body.encoder.layer
            attention = layers[0].attention.self
            attention.query = _Lora(attention.query)
            attention.value = _Lora(attention.value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits; 0 is padding."""
        # The library looks into a mask of two axes (is it all ones?), but not where it is traced;
        # one of four is taken as it is. Each record gets its own positions for Opacus.
        mask = (x != 0) if self.two_axes else (x != 0)[:, None, None, :]
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        states = self.body(x, attention_mask=mask, position_ids=places).last_hidden_state
        out: torch.Tensor = self.head(states[:, 0])
        return out


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(_FEATURES, 8), nn.Tanh())
        self.first, self.second = nn.Linear(8, _CLASSES), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Tensors:
        """Return logits and a number."""
        h = self.body(x)
        return self.first(h), self.second(h).squeeze(-1)


def _opacus(name: str, *sizes: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: layer_of_opacus(name)(*sizes, **options)


class _Language(nn.Module):
    """A tiny language model of Hugging Face, made from its configuration: logits of every token."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers as library

        if kind == "gpt2":
            self.body: Any = library.GPT2LMHeadModel(
                library.GPT2Config(
                    vocab_size=_WORDS, n_positions=_LENGTH, n_embd=8, n_layer=1, n_head=2,
                    bos_token_id=0, eos_token_id=0,
                )
            )  # fmt: skip
        else:
            self.body = library.LlamaForCausalLM(
                library.LlamaConfig(
                    vocab_size=_WORDS, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                    num_attention_heads=2, max_position_embeddings=_LENGTH, bos_token_id=0, eos_token_id=0,
                    use_cache=False,
                )
            )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``[B, T, words]``."""
        out: torch.Tensor = self.body(input_ids=x, use_cache=False).logits
        return out


class _Classifier(nn.Module):
    """The encoder, as data sets of Hugging Face call it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # what stays frozen
        self.encoder = _Encoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.encoder(input_ids * attention_mask)
        return out


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(_WORDS, 4), nn.Linear(4, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``[B, T, classes]``."""
        out: torch.Tensor = self.head(torch.tanh(self.words(x)))
        return out


def _segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, _CLASSES, 1))


def _frozen_norm() -> nn.Module:
    """Return convolutions with BatchNorm that were trained elsewhere, frozen, and a head to train."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    body.requires_grad_(False).eval()
    return nn.Sequential(body, nn.Linear(64, _CLASSES))


# Losses.


def _weighted(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0.5, 1.0, 2.0])[y] * plain(model, x, y)


def _weighted_by_torch(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0])
    return functional.cross_entropy(model(x), y, weight=weight, reduction="none")


def _smoothed(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y, reduction="none", label_smoothing=0.1)


def _squared(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(-1) - y).square()


def _huber(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.huber_loss(model(x), y, reduction="none").sum(dim=1)


def _binary(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = functional.binary_cross_entropy_with_logits(
        model(x), y.round(), reduction="none"
    )
    return losses.mean(dim=1)


def _focal(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = plain(model, x, y)
    return (1.0 - torch.exp(-losses)).square() * losses


def _two_tasks(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits, number = model(x)
    both: torch.Tensor = functional.cross_entropy(logits, y, reduction="none")
    return both.add((number - x.sum(dim=1)).square(), alpha=0.3)


def _augmented(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    keep = torch.rand_like(x) < 0.9
    return plain(model, x * keep + 0.1 * torch.randn_like(x), y)


def _penalised(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return plain(model, x, y).sum()

    slope: torch.Tensor = torch.func.grad(loss)(x)
    return plain(model, x, y) + 0.1 * slope.square().sum(dim=1)


def _decoded(model: Net, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().flatten(1).mean(dim=1)


def _reached(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Decay inside the loss: clipped with each record's gradient, so the bound holds."""
    decay: torch.Tensor = sum(p.square().sum() for p in model.parameters())
    return plain(model, x, y) + 1e-3 * decay


def _next_tokens(model: Net, x: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(model(x)[:, :-1].transpose(1, 2), x[:, 1:], reduction="none")
    return losses.mean(dim=1)


def _places(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every place, classes last; what has no label counts nothing."""
    logits = model(x).movedim(-1, 1) if y.ndim == 2 else model(x)
    losses = functional.cross_entropy(logits, y, reduction="none", ignore_index=-100)
    return losses.flatten(1).mean(dim=1)


def _hits(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Share of the places that are right: a score of whole pictures."""
    return (model(x).argmax(dim=1) == y).float().flatten(1).mean(dim=1)


def _rebuilt(model: Net, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean(dim=1)


def _one_logit(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(
        model(x).squeeze(-1), y.float(), reduction="none"
    )


def _of_dict(model: Any, record: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(record["input_ids"], record["attention_mask"])
    return functional.cross_entropy(logits, record["labels"], reduction="none")


# Optimizers and schedules.


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def _rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01)


def _momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def _groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    groups: list[dict[str, Any]] = [{"params": every[:1], "lr": 0.01}, {"params": every[1:]}]
    return torch.optim.SGD(groups, lr=0.1)


class _Sign(torch.optim.Optimizer):
    """An optimizer of one's own: signs of gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move by the sign."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


def _warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8)


HONEST: tuple[Honest, ...] = (
    Honest("Linear", lambda: nn.Linear(_FEATURES, _CLASSES), _rows),
    Honest("MLP", _mlp, _rows),
    Honest(
        "Conv1d, GroupNorm",
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, _CLASSES)
        ),
        _series,
    ),
    Honest(
        "Conv2d, GroupNorm",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16, _CLASSES),
        ),
        _images,
    ),
    Honest(
        "Conv2d, depthwise, InstanceNorm",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.InstanceNorm2d(4, affine=True), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, _CLASSES),
        ),
        _images,
    ),
    Honest(
        "ConvTranspose",
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(3, 2, 2, stride=2),
        ),
        _images,
        _decoded,
    ),
    Honest("Embedding", lambda: _Head(nn.Linear(4, 4), words=True), _tokens),
    Honest("EmbeddingBag", _Bag, _tokens),
    Honest(
        "EmbeddingBag, sum, padding", lambda: _Bag(mode="sum", padding_idx=0), _tokens,

    ),
    Honest(
        "EmbeddingBag, mean, padding", lambda: _Bag(padding_idx=0), _tokens
    ),
    Honest("EmbeddingBag, max", lambda: _Bag(mode="max"), _tokens),
    Honest(
        "LayerNorm",
        lambda: nn.Sequential(nn.Linear(_FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, _CLASSES)),
        _rows,
    ),
    Honest(
        "RMSNorm",
        lambda: nn.Sequential(nn.Linear(_FEATURES, 8), nn.RMSNorm(8), nn.Linear(8, _CLASSES)),
        _rows,
    ),
    Honest("LSTM", lambda: _Head(nn.LSTM(4, 4, batch_first=True)), _sequence),
    Honest("GRU", lambda: _Head(nn.GRU(4, 4, batch_first=True)), _sequence),
    Honest(
        "LSTM, both ways, projected",
        lambda: _Head(
            nn.LSTM(4, 4, 2, proj_size=2, bidirectional=True, batch_first=True, bias=False)
        ),
        _sequence
    ),
    Honest(
        "RNN, two layers, dropout",
        lambda: _Head(nn.RNN(4, 4, 2, dropout=0.3, batch_first=True)),
        _sequence,
        draws=True
    ),
    Honest(
        "DPLSTM",
        lambda: _Head(_opacus("DPLSTM", 4, 4, batch_first=True)()),
        _sequence
    ),
    Honest(
        "DPGRU", lambda: _Head(_opacus("DPGRU", 4, 4, batch_first=True)()), _sequence,

    ),
    Honest(
        "DPMultiheadAttention",
        lambda: _Attention(_opacus("DPMultiheadAttention", 4, 2, batch_first=True)()),
        _sequence,
    ),
    Honest(
        "MultiheadAttention",
        lambda: _Attention(nn.MultiheadAttention(4, 2, batch_first=True)),
        _sequence
    ),
    Honest(
        "TransformerEncoderLayer",
        lambda: _Head(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), words=True),
        _tokens
    ),
    Honest(
        "TransformerEncoderLayer, dropout",
        lambda: _Head(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), words=True),
        _tokens,
        draws=True
    ),
    Honest("Hugging Face encoder", _Encoder, _tokens, draws=True),
    Honest(
        "Hugging Face encoder, mask of two axes",
        lambda: _Encoder(two_axes=True),
        _tokens,
        draws=True,
    ),
    Honest("Hugging Face encoder, LoRA", lambda: _Encoder(lora=True), _tokens, draws=True),
    Honest("tied weights", _Tied, _tokens),
    Honest("weight_norm", _weight_norm, _rows),
    Honest("parameters of its own", _Own, _rows),
    Honest("frozen parts", _frozen, _rows),
    Honest("biases alone", _bias_only, _rows),
    Honest("residual net", _Residual, _rows),
    Honest("residual convolutions", _ResidualConv, _images),
    Honest("dropout", lambda: _mlp(drop=0.5), _rows, draws=True),
    Honest("classes weighted", _mlp, _rows, _weighted),
    Honest("classes weighted by torch", _mlp, _rows, _weighted_by_torch),
    Honest("label smoothing", _mlp, _rows, _smoothed),
    Honest("focal loss", _mlp, _rows, _focal),
    Honest("regression", lambda: nn.Linear(_FEATURES, 1), _numbers(), _squared),
    Honest("regression, several numbers", _mlp, _numbers(_CLASSES), _huber),
    Honest("several labels", _mlp, _numbers(_CLASSES), _binary),
    Honest("two tasks", _TwoHeads, _rows, _two_tasks),
    Honest("augmentation", _mlp, _rows, _augmented, draws=True),
    Honest("gradient penalty within a record", _mlp, _rows, _penalised),
    Honest("decay in the loss", _mlp, _rows, _reached),
    Honest("Adam", _mlp, _rows, optimizer=_adam),
    Honest("AdamW", _mlp, _rows, optimizer=_adamw),
    Honest("RMSprop", _mlp, _rows, optimizer=_rmsprop),
    Honest("momentum, schedule by step", _mlp, _rows, optimizer=_momentum, schedule=_warm_up),
    Honest("groups of parameters", _mlp, _rows, optimizer=_groups),
    Honest("an optimizer of one's own", _mlp, _rows, optimizer=_Sign),
    Honest(
        "GPT-2, tied, token loss", lambda: _Language("gpt2"), lambda: _whole(_WORDS, _LENGTH),
        _next_tokens, draws=True, score=privtune.Score(_next_tokens, bound=4.0),
    ),
    Honest(
        "Llama, token loss", lambda: _Language("llama"), lambda: _whole(_WORDS, _LENGTH), _next_tokens,
        score=privtune.Score("loss", bound=4.0),
    ),
    Honest(
        "Hugging Face encoder, dict, lora:2", _Classifier,
        lambda: {
            "input_ids": _whole(_WORDS, _LENGTH), "attention_mask": _whole(2, _LENGTH), "labels": _whole(3),
        },
        _of_dict, draws=True, trainable="lora:2",
    ),
    Honest(
        "segmentation", _segmenter, lambda: (_images()[0], _whole(_CLASSES, 6, 6)), _places,
        score=privtune.Score(_hits, maximize=True),
    ),
    Honest(
        "tagging", _Tagger, lambda: (_whole(_WORDS, _LENGTH), _whole(4, _LENGTH).where(_whole(4, _LENGTH) < 3, -100)),
        _places, score=privtune.Score(_places, bound=3.0),
    ),
    Honest(
        "autoencoder", lambda: nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6)),
        lambda: _rows()[0], _rebuilt, score=privtune.Score("loss", bound=3.0),
    ),
    Honest(
        "regression of a vector", _mlp, _numbers(_CLASSES), _huber, score=privtune.Score("loss", bound=2.0)
    ),
    Honest("frozen BatchNorm, head trained", _frozen_norm, _images, score="accuracy"),
    Honest(
        "one logit", lambda: nn.Linear(_FEATURES, 1), lambda: (_rows()[0], _whole(2)), _one_logit,
        score="accuracy",
    ),
)  # fmt: skip
