"""Traps in ``build``: trials that hang on each other, models, optimizers and schedules."""

from __future__ import annotations

import atexit
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from torch import nn

import privtune
from tests.zoo.trap import CLASSES, FEATURES, Toy, Trap, candidate, linear, over, plain, trap

__all__ = ["BUILDS"]

T = torch.Tensor
BUILDS: list[Trap] = []


def _refused(name: str, says: str, arm: str = "fixed") -> Any:
    return trap(BUILDS, "refused", name, says, arm)


def _each(
    outcome: Any, says: str, traps: dict[str, Callable[..., Any]], arm: str = "fixed"
) -> None:
    """Enter functions of a trial."""
    for name, build in traps.items():
        trap(BUILDS, outcome, name, says, arm)(over("build", build))


# Trials that hang on each other, under private selection.

_DEPENDS = "a trial depends on the trials before it"


def _walking(name: str, values: list[Any], make: Callable[[Any, Any], Any]) -> None:
    """Enter a ``build`` that takes the next of some values each time."""

    @_refused(name, _DEPENDS, "selection")
    def _(toy: Toy) -> dict[str, Any]:
        walk: Iterator[Any] = itertools.cycle(values)
        return {"build": lambda trial: make(trial, next(walk))}


def _kept_on_disk(trial: Any, step: Path) -> Any:
    count = len(step.read_text()) if step.exists() else 0
    step.write_text("x" * (count + 1))
    return candidate(rate=0.1 * (1 + count % 7))


def _wide(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))


def _filled(value: float) -> nn.Module:
    model = linear()
    nn.init.constant_(model.bias, value)
    return model


def _seeded(seed: int) -> Any:
    torch.manual_seed(seed)
    return candidate()


_walking("an iterator over a grid of rates", [0.1, 0.5, 1.0], lambda t, v: candidate(rate=v))
_walking("a counter that chooses a width", [4, 8, 16], lambda t, v: candidate(_wide(v)))
_walking("a seed that counts", list(range(9)), lambda t, v: _seeded(v))
_walking("an iterator over clipping norms", [0.5, 1.0], lambda t, v: candidate(max_grad_norm=v))
_walking("an iterator over schedules", ["cosine", "linear"], lambda t, v: candidate(schedule=v))
_walking(
    "an iterator over dropout", [0.1, 0.5],
    lambda t, v: candidate(nn.Sequential(nn.Dropout(v), linear())),
)  # fmt: skip
_walking(
    "a range that is narrowed", [1.0, 0.9, 0.8],
    lambda t, v: candidate(rate=t.suggest_float("rate", 0.1, v)),
)  # fmt: skip
_walking(
    "choices that are used up", [[1, 2, 3], [2, 3], [3]],
    lambda t, v: candidate(_wide(t.suggest_categorical("width", v))),
)  # fmt: skip
_walking("a start from the best trial so far", [0.0, 0.5], lambda t, v: candidate(_filled(v)))
_walking(
    "a parameter that is suggested now and then", [True, False],
    lambda t, v: candidate(rate=t.suggest_float("rate", 0.1, 1.0) if v else 0.5),
)  # fmt: skip
_each(
    "refused",
    _DEPENDS,
    {
        "NumPy's random numbers": lambda t: candidate(rate=float(np.random.uniform(0.1, 1.0))),
        "Python's random numbers": lambda t: candidate(rate=random.uniform(0.1, 1.0)),
        "entropy of the system's": lambda t: candidate(rate=0.1 + random.SystemRandom().random()),
    },
    "selection",
)


@_refused("a counter in a file", _DEPENDS, "selection")
def _file(toy: Toy) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp()) / "count"
    return {"build": lambda trial: _kept_on_disk(trial, place)}


trap(BUILDS, "refused", "a sampler of Optuna's that learns", "sampler", "selection")(
    over("sampler", optuna.samplers.TPESampler())
)
trap(BUILDS, "refused", "a pruner on sealed scores", "pruner", "selection")(
    over("pruner", optuna.pruners.MedianPruner())
)
_GRID = (0.1, 0.5, 1.0)
_each(
    "harmless",
    "In a sealed selection the number is drawn from the trial's own stream.",
    {"the trial's number as the place in a grid": lambda t: candidate(rate=_GRID[t.number % 3])},
    "selection",
)
_each(
    "harmless",
    "The same constant for every trial.",
    {"a fixed seed of torch": lambda t: _seeded(0)},
    "selection",
)


@_refused("a handler for the program's end", "atexit", "selection")
def _handler(toy: Toy) -> dict[str, Any]:
    def build(trial: Any) -> Any:
        atexit.register(repr, trial)
        return candidate()

    return {"build": build}


# Models that outlive their trial.


def _shared(part: Callable[[], nn.Module], wrap: Callable[[nn.Module], Any]) -> Any:
    def make(toy: Toy) -> dict[str, Any]:
        kept = part()
        return {"build": lambda trial: wrap(kept)}

    return make


_NEW = "anew"
_refused("a model kept between trials", _NEW)(_shared(linear, candidate))
_refused("a trained body kept between trials", _NEW)(
    _shared(
        lambda: nn.Linear(FEATURES, 4), lambda b: candidate(nn.Sequential(b, nn.Linear(4, CLASSES)))
    )
)


class _Own(nn.Module):
    """Holds a weight that was made elsewhere."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: T) -> T:
        return x @ self.weight


@_refused("a weight kept between trials", _NEW)
def _weight(toy: Toy) -> dict[str, Any]:
    weight = nn.Parameter(torch.zeros(FEATURES, CLASSES))
    return {"build": lambda trial: candidate(_Own(weight))}


@trap(BUILDS, "harmless", "a frozen body kept between trials", "Nothing writes to it.")
def _frozen_body(toy: Toy) -> dict[str, Any]:
    body = nn.Linear(FEATURES, 4).requires_grad_(False)

    def build(trial: Any) -> Any:
        head = nn.Linear(4, CLASSES)
        return privtune.Candidate(
            nn.Sequential(body, head), torch.optim.SGD(head.parameters(), 0.5)
        )

    return {"build": build}


def _frozen_anew(trial: Any) -> Any:
    body, head = nn.Linear(FEATURES, 4).requires_grad_(False), nn.Linear(4, CLASSES)
    return privtune.Candidate(nn.Sequential(body, head), torch.optim.SGD(head.parameters(), 0.5))


@trap(
    BUILDS, "harmless", "a table that is trained further", "What is trained is a copy.", "selection"
)
def _table(toy: Toy) -> dict[str, Any]:
    table = torch.zeros(CLASSES, FEATURES)

    def build(trial: Any) -> Any:
        assert not table.any()
        model = linear()
        model.weight = nn.Parameter(table)
        return candidate(model)

    return {"build": build}


# What build returns.


def _nothing_trained() -> nn.Module:
    return linear().requires_grad_(False)


class _View(nn.Module):
    """Keeps a view of a weight from its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.out = self.inner.weight.detach()[:CLASSES]

    def forward(self, x: T) -> T:
        return self.inner(x) @ self.out.T


class _Unread(nn.Module):
    """Does not use what it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: T) -> T:
        return x[:, :CLASSES] + 0.0 * self.weight.sum()


def _hooked_weight() -> nn.Module:
    model = linear()
    model.weight.register_hook(lambda g: 1000.0 * g)
    return model


_each("refused", "must return privtune.Candidate", {
    "the model alone": lambda t: linear(),
    "nothing": lambda t: None,
    "a function in a model's place": lambda t: privtune.Candidate(plain),
})  # fmt: skip
_each("refused", "must be the same every time", {"a frozen part made anew": _frozen_anew})
_each("refused", "must not be a view", {"a view of a weight": lambda t: candidate(_View())})
_each(
    "refused",
    "does not reach its loss",
    {"weights that no loss reads": lambda t: candidate(_Unread())},
)
_each("refused", "must have no hook", {"a hook on a weight": lambda t: candidate(_hooked_weight())})
_each("refused", "requires? gradients?|trainable", {
    "a model with nothing to train": lambda t: t.suggest_float("learning_rate", 0.1, 1.0)
    and privtune.Candidate(_nothing_trained(), max_grad_norm=1.0),
})  # fmt: skip
_each("refused", "without lazy layers", {
    "a lazy layer": lambda t: candidate(nn.LazyLinear(CLASSES)),
})  # fmt: skip
_each("refused", "max_grad_norm", {
    "no bound on gradients": lambda t: candidate(max_grad_norm=float("inf")),
    "a negative bound": lambda t: candidate(max_grad_norm=-1.0),
})  # fmt: skip
_each("refused", "method", {
    "another method by chance": lambda t: candidate(method="hyfreedp"),
})  # fmt: skip


def _suggesting(name: str, choices: list[Any]) -> Callable[[Any], Any]:
    def build(trial: Any) -> Any:
        trial.suggest_categorical(name, choices)
        return candidate()

    return build


_each("refused", "must be", {"classes as choices": _suggesting("layer", [nn.ReLU, nn.Tanh])})
_each("refused", "batch", {"a batch size that is suggested": _suggesting("batch_size", [16, 32])})
_each("harmless", "It stays inside the trust boundary.", {
    "an attribute of the trial": lambda t: t.set_user_attr("mean", 3.0) or candidate(),
    "params edited": lambda t: t.params.update(mean=3.0) or candidate(),
})  # fmt: skip


# Layers.


class _Words(nn.Module):
    """A table of words."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 5, **options), nn.Linear(5, CLASSES)

    def forward(self, x: T) -> T:
        out: T = self.head(self.table(x.abs().clamp(max=3.0).long()).mean(1))
        return out


class _Instance(nn.Module):
    """Normalises each record by statistics of its own, or by running ones."""

    def __init__(self, *, track: bool) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=track)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: T) -> T:
        out: T = self.head(self.norm(x.view(-1, 2, 3)).flatten(1))
        return out


class _Running(nn.Module):
    """Centres inputs by a mean that it keeps: in a buffer, or in an attribute."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)
        if buffer:
            self.register_buffer("mean", torch.zeros(FEATURES))
        else:
            self.mean = torch.zeros(FEATURES)

    def forward(self, x: T) -> T:
        out: T = self.inner(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return out


class _Writing(nn.Module):
    """Writes to its own weights while records pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: T) -> T:
        with torch.no_grad():
            self.inner.weight.add_(x.mean() * 0.01)
        out: T = self.inner(x)
        return out


class _Centred(nn.Module):
    """Centres gradients over the batch on their way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)

    def forward(self, x: T) -> T:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda g: 3.0 * g)
        out: T = self.head(h)
        return out


def _hooked(kind: str) -> nn.Module:
    model, seen = _wide(4), list[Any]()
    if kind == "forward":
        model[0].register_forward_hook(lambda m, x, out: seen.append(x[0].detach()))
    else:
        model[0].register_full_backward_hook(lambda m, i, o: (None,))
    return model


def _spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, 3))


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def _untracked() -> nn.Module:
    """Batch statistics in evaluation mode as well."""
    return nn.Sequential(
        nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)
    ).eval()


def _models(outcome: Any, says: str, models: dict[str, Callable[[], nn.Module]]) -> None:
    def of(make: Callable[[], nn.Module]) -> Callable[[Any], Any]:
        return lambda trial: candidate(make())

    _each(outcome, says, {name: of(make) for name, make in models.items()})


_models("refused", "must treat each record by itself", {
    "BatchNorm": _batch_norm,
    "BatchNorm without running statistics, in evaluation mode": _untracked,
    "InstanceNorm with running statistics": lambda: _Instance(track=True),
})  # fmt: skip
_models("refused", "must not have max_norm", {
    "an embedding with max_norm": lambda: _Words(max_norm=1.0),
    "an embedding scaled by frequency": lambda: _Words(scale_grad_by_freq=True),
})  # fmt: skip
_models("refused", "buffer", {
    "spectral norm": _spectral,
    "a running mean in a buffer": lambda: _Running(buffer=True),
})  # fmt: skip
_models("refused", "changes from call to call", {
    "a running mean in an attribute": lambda: _Running(buffer=False),
})  # fmt: skip
_models("refused", "write to its parameters", {"weights written in forward": _Writing})
_models("harmless", "Each record meets a copy of the model.", {
    "forward hooks that keep records": lambda: _hooked("forward"),
    "hooks on the way back": lambda: _hooked("backward"),
    "gradients changed by a hook": _Centred,
})  # fmt: skip
_models(
    "harmless",
    "Its statistics are a record's own.",
    {"InstanceNorm": lambda: _Instance(track=False)},
)
_models("harmless", "Each record is computed by itself.", {
    "DataParallel": lambda: nn.DataParallel(linear()),
    "another model's evaluation mode": lambda: nn.Sequential(nn.Dropout(0.5), linear()).eval(),
})  # fmt: skip


# Optimizers and schedules.


class _Mine(torch.optim.SGD):
    """Steps twice as far."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        return super().step(closure)


def _optimizers(says: str, makers: dict[str, Callable[[nn.Module], Any]]) -> None:
    def of(make: Callable[[nn.Module], Any]) -> Callable[[Any], Any]:
        def build(trial: Any) -> Any:
            model = linear()
            return privtune.Candidate(model, make(model))

        return build

    _each("refused", says, {name: of(make) for name, make in makers.items()})


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)


def _post_hook(model: nn.Module) -> Any:
    optimizer = _sgd(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _pre_hook(model: nn.Module) -> Any:
    optimizer = _sgd(model)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def _replaced(model: nn.Module) -> Any:
    optimizer = _sgd(model)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


def _stepped(model: nn.Module) -> Any:
    optimizer = _sgd(model)
    model(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()
    return optimizer


_optimizers("must have no hooks on its steps", {
    "a hook after the step": _post_hook, "a hook before the step": _pre_hook,
})  # fmt: skip
_optimizers("must be one of torch's classes", {
    "an optimizer with a step of its own": lambda m: _Mine(m.parameters(), 0.5),
})  # fmt: skip
_optimizers("must be that of SGD", {"a step that was replaced": _replaced})
_optimizers("asks for more", {"LBFGS": lambda m: torch.optim.LBFGS(m.parameters())})
_optimizers("must be new", {"an optimizer that has stepped": _stepped})
_optimizers("must be one optimizer made", {"the optimizer's class": lambda m: torch.optim.SGD})
_optimizers("must hold exactly", {
    "an optimizer over another model": lambda m: _sgd(linear()),
    "an optimizer over a part": lambda m: torch.optim.SGD([m.weight], 0.5),
    "an optimizer over one parameter more": lambda m: torch.optim.SGD(
        [*m.parameters(), nn.Parameter(torch.zeros(()))], 0.5
    ),
})  # fmt: skip


@_refused("an optimizer kept between trials", "must hold exactly")
def _kept_optimizer(toy: Toy) -> dict[str, Any]:
    kept = _sgd(linear())
    return {"build": lambda trial: privtune.Candidate(linear(), kept)}


def _scheduled(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(trial: Any) -> Any:
        model = linear()
        optimizer = _sgd(model)
        return privtune.Candidate(model, optimizer, schedule=make(optimizer))

    return build


def _late(optimizer: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.step()
    scheduler.step()
    return scheduler


_rates = torch.optim.lr_scheduler
_each("refused", "stepped once after every step, by no metric", {
    "ReduceLROnPlateau": _scheduled(lambda o: _rates.ReduceLROnPlateau(o)),
})  # fmt: skip
_each("refused", "candidate's own optimizer", {
    "a schedule of another optimizer": _scheduled(lambda o: _rates.StepLR(_sgd(linear()), 2)),
})  # fmt: skip
_each("refused", "must be new", {"a schedule that has been stepped": _scheduled(_late)})
_each("refused", "schedule", {"an unknown schedule": lambda t: candidate(schedule="plateau")})


# Data in build: nothing can see it.


def _on_page(name: str, says: str) -> Any:
    return trap(BUILDS, "on the page", name, says)


@_on_page("weights made of records", "weights initialised from records")
def _prototypes(toy: Toy) -> dict[str, Any]:
    def build(trial: Any) -> Any:
        model, (x, y) = linear(), toy.train
        with torch.no_grad():
            model.weight.copy_(torch.stack([x[y == c].mean(0) for c in range(CLASSES)]))
        return candidate(model)

    return {"build": build}


@_on_page("a model that build trains", "pretrained on the private records")
def _pretrained(toy: Toy) -> dict[str, Any]:
    def build(trial: Any) -> Any:
        model = linear()
        own = torch.optim.SGD(model.parameters(), 0.5)
        plain(model, *toy.train).mean().backward()
        own.step()
        own.zero_grad()
        return candidate(model)

    return {"build": build}


def _reading(name: str, says: str, read: Callable[[Any, T, T], Any]) -> None:
    _on_page(name, says)(lambda toy: {"build": lambda trial: read(trial, *toy.train)})


_reading(
    "a seed hashed from the data",
    "seed hashed from the data",
    lambda t, x, y: _seeded(int(y.sum())),
)
_reading(
    "a rate from the data",
    "rate from the data",
    lambda t, x, y: candidate(rate=float(1 / x.norm())),
)
_reading(
    "a width from the data",
    "width from the data",
    lambda t, x, y: candidate(_wide(int(y.max()) + 2)),
)
_reading(
    "a range from the data", "range from the data",
    lambda t, x, y: candidate(rate=t.suggest_float("rate", 0.1, 0.1 + float(x.abs().max()))),
)  # fmt: skip
_reading(
    "a clipping norm from the data", "clipping norm from the data",
    lambda t, x, y: candidate(max_grad_norm=float(x.norm(dim=1).median())),
)  # fmt: skip


@_refused("an assertion on the data that fails", "AssertionError")
def _asserted(toy: Toy) -> dict[str, Any]:
    def build(trial: Any) -> Any:
        largest = float(toy.train[0].max())
        assert largest < 1.0, f"the largest is {largest}"
        return candidate()

    return {"build": build}
