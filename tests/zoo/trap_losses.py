"""Traps in the loss or in the model: records that touch each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.trap import Loss, Trap, by_losses, by_record, linear, plain

__all__ = ["LOSSES"]

T = torch.Tensor


def _ce(outputs: T, y: T) -> T:
    return functional.cross_entropy(outputs, y, reduction="none")


def _scaled(m: Any, x: T, y: T) -> T:
    with torch.no_grad():
        largest = x.abs().amax()
    return _ce(m(x / largest), y)


# Habits of papers and of Kaggle, one expression each: the name, the loss.
_COUPLED: dict[str, Loss] = {
    "inputs standardised by the batch": lambda m, x, y: _ce(
        m((x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5)), y
    ),
    "log_softmax over dim 0": lambda m, x, y: functional.nll_loss(
        torch.log_softmax(m(x), 0), y, reduction="none"
    ),
    "mixup": lambda m, x, y: _ce(m(0.7 * x + 0.3 * x.flip(0)), y),
    "cutmix of features": lambda m, x, y: _ce(m(torch.cat([x[:, :3], x.roll(1, 0)[:, 3:]], 1)), y),
    "manifold mixup": lambda m, x, y: _ce(0.7 * m(x) + 0.3 * m(x).roll(1, 0), y),
    "losses over their detached sum": lambda m, x, y: _over_sum(plain(m, x, y)),
    "losses over their largest": lambda m, x, y: _over_max(plain(m, x, y)),
    "in-batch contrastive": lambda m, x, y: _ce(m(x) @ m(x).T, torch.arange(len(x))),
    "triplets mined in the batch": lambda m, x, y: _triplets(m(x), y),
    "supervised contrastive": lambda m, x, y: _supcon(m(x), y),
    "hard examples above the batch's median": lambda m, x, y: _hardest(plain(m, x, y)),
    "losses clamped at the batch's quantile": lambda m, x, y: _winsorised(plain(m, x, y)),
    "softmax-weighted losses (DRO)": lambda m, x, y: _robust(plain(m, x, y)),
    "label smoothing by the batch's labels": lambda m, x, y: _smoothed(m(x), y),
    "class weights from the batch": lambda m, x, y: (
        plain(m, x, y) / torch.stack([(y == c).sum() for c in range(3)]).clamp(min=1)[y]
    ),
    "mean prediction of the batch kept uniform": lambda m, x, y: (
        plain(m, x, y) + torch.softmax(m(x), 1).mean(0).log().mean()
    ),
    "decorrelated features of the batch": lambda m, x, y: (
        plain(m, x, y) + (m(x).T @ m(x)).square().sum()
    ),
    "moments matched across the batch": lambda m, x, y: (
        plain(m, x, y) + (m(x) - m(x).mean(0)).square().sum(1)
    ),
    "pairwise ranking": lambda m, x, y: functional.softplus(m(x)[:, :1] - m(x)[:, 0]).mean(1),
    "messages passed between records": lambda m, x, y: _ce(torch.softmax(x @ x.T, 1) @ m(x), y),
    "inputs sorted in the batch": lambda m, x, y: _ce(m(x.sort(dim=0).values), y),
    "losses in another order": lambda m, x, y: plain(m, x, y).flip(0),
    "one record's loss for all": lambda m, x, y: plain(m, x, y)[torch.zeros_like(y)],
    "their sum, expanded": lambda m, x, y: plain(m, x, y).sum().expand(len(x)),
    "scaled by the largest input, without autograd": _scaled,
}


def _over_sum(losses: T) -> T:
    return losses / losses.detach().sum()


def _over_max(losses: T) -> T:
    return losses / losses.max()


def _triplets(z: T, y: T) -> T:
    apart = (z[:, None] - z[None]).square().sum(2)
    same = y[:, None] == y[None]
    far = torch.where(same, apart, torch.zeros_like(apart)).amax(1)
    near = torch.where(same, torch.full_like(apart, 9.0), apart).amin(1)
    return functional.relu(1.0 + far - near)


def _supcon(z: T, y: T) -> T:
    same = (y[:, None] == y[None]).to(z.dtype)
    return -(torch.log_softmax(z @ z.T, 1) * same).sum(1) / same.sum(1)


def _hardest(losses: T) -> T:
    return losses * (losses.detach() >= losses.detach().median())


def _winsorised(losses: T) -> T:
    return losses.minimum(losses.detach().quantile(0.7))


def _robust(losses: T) -> T:
    return losses * torch.softmax(losses.detach(), 0)


def _smoothed(outputs: T, y: T) -> T:
    one_hot = (y[:, None] == torch.arange(3)).to(outputs.dtype)
    soft = 0.9 * one_hot + 0.1 * one_hot.mean(0)
    return -(soft * torch.log_softmax(outputs, 1)).sum(1)


class Sequence(nn.Module):
    """Recurrent and attention layers whose default axis of time is the axis of records."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer, self.head = layer(), nn.Linear(6, 3)

    def forward(self, x: T) -> T:
        out = self.layer(x.unsqueeze(1))
        made: T = self.head((out[0] if isinstance(out, tuple) else out).squeeze(1))
        return made


class Attention(nn.Module):
    """Attention by hand over what its author takes for the words of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: T) -> T:
        out: T = self.head(torch.softmax(self.keys(x) @ x.T, -1) @ x)
        return out


class Reversed(nn.Module):
    """Normalises gradients on their way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: T) -> T:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda g: g - g.mean(0))
        out: T = self.head(h)
        return out


class RunningMean(nn.Module):
    """Centres inputs by a mean that it keeps: in a buffer, or in an attribute."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        if buffer:
            self.register_buffer("mean", torch.zeros(6))
        else:
            self.mean = torch.zeros(6)

    def forward(self, x: T) -> T:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        out: T = self.inner(x - self.mean)
        return out


class Lagging(nn.Module):
    """Centres inputs by the mean of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.mean = torch.zeros(6)

    def forward(self, x: T) -> T:
        out: T = self.inner(x - self.mean)
        self.mean = x.detach().mean(0)
        return out


class Stateful(nn.Module):
    """Carries its hidden state from batch to batch, as truncated backpropagation does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.hidden = torch.zeros(6)

    def forward(self, x: T) -> T:
        h = torch.tanh(self.inner(x) + self.hidden)
        self.hidden = h.detach()[0]
        out: T = self.head(h)
        return out


class Tokens(nn.Module):
    """A table of words."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 5, **options), nn.Linear(5, 3)

    def forward(self, x: T) -> T:
        out: T = self.head(self.table(x.abs().clamp(max=3.0).long()).mean(1))
        return out


class Renormed(Tokens):
    """Renormalises the rows that occur, in functional form."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.table.weight.mul_(9.0)

    def forward(self, x: T) -> T:
        words = x.abs().clamp(max=3.0).long()
        out: T = self.head(functional.embedding(words, self.table.weight, max_norm=1.0).mean(1))
        return out


class ByFrequency(Tokens):
    """Divides gradients by how often a word is in the batch, in functional form."""

    def forward(self, x: T) -> T:
        words = x.abs().clamp(max=3.0).long()
        rows = functional.embedding(words, self.table.weight, scale_grad_by_freq=True)
        out: T = self.head(rows.mean(1))
        return out


class Tied(nn.Module):
    """Uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        h = torch.tanh(self.inner(x))
        return functional.linear(h, self.inner.weight)[:, :3]


class Instance(nn.Module):
    """Normalises each record by its own statistics."""

    def __init__(self, *, track: bool) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=track)
        self.head = nn.Linear(6, 3)

    def forward(self, x: T) -> T:
        out: T = self.head(self.norm(x.view(-1, 2, 3)).flatten(1))
        return out


class Inner(torch.autograd.Function):
    """Divides gradients by the norm of the batch's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: T) -> T:
        """Return the input."""
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient, divided."""
        return grads[0] / (grads[0].norm() + 1e-6)


def _normalised(m: Any, x: T, y: T) -> T:
    return _ce(Inner.apply(m(x)), y)


def _batch_norm(m: Any, x: T, y: T) -> T:
    return _ce(functional.batch_norm(m(x), None, None, training=True), y)


def _python_number(m: Any, x: T, y: T) -> T:
    return plain(m, x, y) / float(x.abs().mean())


def _own_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def _spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, 3))


def _lstm() -> nn.Module:
    return Sequence(lambda: nn.LSTM(6, 6))


def _encoder() -> nn.Module:
    return Sequence(lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0))


def _penalised(m: Any, x: T, y: T) -> T:
    losses = plain(m, x, y)
    parameters = [p for p in m.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(losses.mean(), parameters, create_graph=True)
    return losses + sum(s.square().sum() for s in slopes)


def _augmented(m: Any, x: T, y: T) -> T:
    return plain(m, x * (1.0 + 0.1 * random.random()), y)


_MEMORY: list[T] = []


def _remembering(m: Any, x: T, y: T) -> T:
    _MEMORY.append(x.detach().mean())
    return plain(m, x - 0.1 * torch.stack(_MEMORY[-9:]).mean(), y)


_CHANGES = "The loss of a record changes with the other records of its batch."
_ALONE = "Each record is computed by itself: a batch of one has nothing to couple with."


def _refused(name: str, objective: Any, why: str) -> Trap:
    return Trap(name=name, objective=objective, verdict="refused", when="before", why=why)


def _alone(
    name: str, loss: Loss, why: str = _ALONE, model: Callable[[], nn.Module] = linear
) -> Trap:
    return Trap(
        name=name,
        objective=by_record(loss, model),
        verdict="harmless",
        why=why,
        loss=loss,
        model=model,
    )


def _both(
    name: str, loss: Loss, why: str = _CHANGES, model: Callable[[], nn.Module] = linear
) -> tuple[Trap, ...]:
    return (
        _refused(f"{name}: losses", by_losses(loss, model), why),
        _alone(f"{name}: by record", loss, model=model),
    )


def _neither(
    name: str, loss: Loss, why: str, model: Callable[[], nn.Module] = linear
) -> tuple[Trap, ...]:
    return (
        _refused(f"{name}: losses", by_losses(loss, model), why),
        _refused(f"{name}: by record", by_record(loss, model), why),
    )


LOSSES: tuple[Trap, ...] = (
    *(trap for name, loss in _COUPLED.items() for trap in _both(name, loss)),
    *_both("transformer over the axis of records", plain, model=_encoder),
    *_both("attention over the batch", plain, model=Attention),
    *_both("gradients over the batch's norm", _normalised, "Gradients are coupled on their way back."),
    *_both("a weight used twice", plain, "Opacus' hooks see one use of it.", Tied),
    *_neither("batch_norm in functional form", _batch_norm, _CHANGES),
    *_neither("scaled by a Python number of the batch", _python_number, _CHANGES),
    *_both("LSTM over the axis of records", plain, model=_lstm),
    *_neither("gradients centred by a hook", plain, "Gradients are coupled on their way back.", Reversed),
    *_neither("a penalty on the batch's gradient", _penalised, _CHANGES),
    *_neither("BatchNorm", plain, "Batch statistics.", _own_batch_norm),
    *_neither(
        "running mean in a buffer", plain, "The buffer is a release of un-noised means.",
        lambda: RunningMean(buffer=True),
    ),
    *_neither(
        "running mean in an attribute", plain, "What a module keeps of records reaches the next ones.",
        lambda: RunningMean(buffer=False),
    ),
    *_neither("mean of the batch before", plain, "A step reads records that it does not charge.", Lagging),
    *_neither("hidden state carried on", plain, "A step reads records that it does not charge.", Stateful),
    *_neither(
        "embedding with max_norm", plain, "Looking a word up changes its row.",
        lambda: Tokens(max_norm=1.0),
    ),
    *_neither("embedding with max_norm, functional", plain, "Looking a word up changes its row.", Renormed),
    *_neither(
        "embedding scaled by frequency", plain, "Frequencies in the batch scale gradients.",
        lambda: Tokens(scale_grad_by_freq=True),
    ),
    *_neither("InstanceNorm with running statistics", plain, "Its buffers are un-noised means.",
              lambda: Instance(track=True)),
    *_neither("spectral norm", plain, "It changes its buffers by itself.", _spectral),
    _refused(
        "augmentation by Python's random numbers: by record", by_record(_augmented),
        "No stream of the trial's draws it.",
    ),
    *_neither(
        "a loss that keeps a list of records", _remembering,
        "A step reads records that it does not charge.",
    ),
    Trap(
        name="InstanceNorm: losses", objective=by_losses(plain, lambda: Instance(track=False)),
        verdict="harmless", why="Its statistics are a record's own.", like="InstanceNorm: by record",
    ),
    _alone(
        "InstanceNorm: by record", plain, "Its statistics are a record's own.",
        lambda: Instance(track=False),
    ),
)  # fmt: skip
"""Traps in losses and models."""
