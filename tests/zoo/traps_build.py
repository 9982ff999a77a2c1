"""Traps in ``build``: trials that hang on each other, models, optimizers and schedules."""

from __future__ import annotations

import atexit
import itertools
import random
from collections.abc import Callable
from typing import Any

import optuna
import torch
from torch import nn

import privtune
from tests.zoo.trap import (
    CLASSES,
    FEATURES,
    Make,
    Net,
    T,
    Trap,
    candidate,
    entering,
    kept,
    linear,
    plain,
)

BUILDS: list[Trap] = []
_trap = entering(BUILDS, "build")
SGD = torch.optim.SGD


def stays(make: Callable[[], Any], use: Callable[[Any, Any], Any]) -> Make:
    """Return a ``build`` that keeps something between trials."""
    return kept("build", lambda toy: make(), lambda state, trial: use(trial, state))


def walk(values: list[Any], use: Callable[[Any, Any], Any]) -> Make:
    """Return a ``build`` that takes the next of some values each time."""
    return stays(lambda: itertools.cycle(values), lambda trial, left: use(trial, next(left)))


def reading(use: Callable[[Any, T, T], Any]) -> Make:
    """Return a ``build`` that reads the training records."""
    return kept("build", lambda toy: toy.train, lambda train, trial: use(trial, *train))


def wide(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))


def with_weight(weight: nn.Parameter) -> nn.Module:
    model = linear()
    model.weight = weight
    return model


def started(trial: Any, weight: T) -> Any:
    return candidate(with_weight(nn.Parameter(weight)))


def seeded(seed: int) -> Any:
    torch.manual_seed(seed)
    return candidate()


# Trials that hang on each other, under private selection.

_trap("refused", "a trial depends on the trials before it", {
    "an iterator over a grid of rates": walk([0.1, 0.5, 1.0], lambda t, v: candidate(rate=v)),
    "a counter that chooses a width": walk([4, 8, 16], lambda t, v: candidate(wide(v))),
    "a range that is narrowed": walk(
        [1.0, 0.9, 0.8], lambda t, v: candidate(rate=t.suggest_float("rate", 0.1, v))
    ),
    "an attribute of the model by turns": walk(
        [1.0, 2.0, 3.0], lambda t, v: candidate(Net(lambda net, x: v * net.body(x), body=linear(), scale=v))
    ),
    "a start from the best trial so far": walk([torch.zeros(3, 6), torch.ones(3, 6)], started),
    "a parameter that is suggested now and then": walk(
        [True, False], lambda t, v: candidate(rate=t.suggest_float("rate", 0.1, 1.0) if v else 0.5)
    ),
    "Python's random numbers": stays(lambda: random, lambda t, v: candidate(rate=v.uniform(0.1, 1.0))),
}, selects=True, made=True)  # fmt: skip
_trap("refused", "sampler|pruner", {
    "a sampler that learns": lambda toy: {"sampler": optuna.samplers.TPESampler()},
    "a pruner on sealed scores": lambda toy: {"pruner": optuna.pruners.MedianPruner()},
}, selects=True, made=True)  # fmt: skip
_trap(
    "on the page",
    "a handler of `atexit`",
    {"a handler left": lambda t: atexit.register(int) and candidate()},
    True,
)
_trap("harmless", "In a sealed selection the number is a draw of the trial's own.", {
    "the trial's number as the place in a grid": lambda t: candidate(rate=(0.1, 0.5, 1.0)[t.number % 3]),
    "a fixed seed of torch": lambda t: seeded(0),
}, selects=True)  # fmt: skip


# Models that outlive their trial.


def headed(body: nn.Module) -> Any:
    return candidate(nn.Sequential(body, nn.Linear(4, CLASSES)))


def frozen() -> nn.Module:
    return nn.Linear(FEATURES, 4).requires_grad_(False)


def from_table(trial: Any, table: T) -> Any:
    assert not table.any()
    return candidate(with_weight(nn.Parameter(table)))


_trap("refused", "must make its model anew", {
    "a model kept between trials": stays(linear, lambda t, kept: candidate(kept)),
    "a weight kept between trials": stays(
        lambda: nn.Parameter(torch.zeros(CLASSES, FEATURES)), lambda t, kept: candidate(with_weight(kept))
    ),
}, made=True)  # fmt: skip
_trap(
    "refused",
    "must be the same every time",
    {"a frozen part made anew": lambda t: headed(frozen())},
)
_trap("harmless", "What is trained is a copy; what is frozen is written by nobody.", {
    "a frozen body kept between trials": stays(frozen, lambda t, kept: headed(kept)),
    "a table that is trained further": stays(lambda: torch.zeros(CLASSES, FEATURES), from_table),
}, selects=True, made=True)  # fmt: skip


# What build returns.


def suggesting(name: str, choices: list[Any]) -> Callable[[Any], Any]:
    return lambda trial: trial.suggest_categorical(name, choices) and candidate()


def view() -> nn.Module:
    inner = nn.Linear(FEATURES, FEATURES)
    return Net(lambda m, x: m.inner(x) @ m.out.T, inner=inner, out=inner.weight.detach()[:CLASSES])


def unread() -> nn.Module:
    weight = nn.Parameter(torch.zeros(2))
    return Net(lambda m, x: x[:, :CLASSES] + 0.0 * m.weight.sum(), weight=weight)


def hooked_weight() -> nn.Module:
    model = linear()
    model.weight.register_hook(lambda g: 1000.0 * g)
    return model


def nothing_trained(trial: Any) -> Any:
    trial.suggest_float("learning_rate", 0.1, 1.0)
    return privtune.Candidate(linear().requires_grad_(False), max_grad_norm=1.0)


_trap("refused", "must return privtune.Candidate", {
    "the model alone": lambda t: linear(),
    "nothing": lambda t: None,
    "a function in a model's place": lambda t: privtune.Candidate(plain),
})  # fmt: skip
_trap("refused", "must not be a view", {"a view of a weight": lambda t: candidate(view())})
_trap(
    "refused",
    "does not reach its loss",
    {"weights that no loss reads": lambda t: candidate(unread())},
)
_trap("refused", "must have no hook", {"a hook on a weight": lambda t: candidate(hooked_weight())})
_trap(
    "refused", "requires? gradients?|trainable", {"a model with nothing to train": nothing_trained}
)
_trap(
    "refused", "without lazy layers", {"a lazy layer": lambda t: candidate(nn.LazyLinear(CLASSES))}
)
_trap("refused", "max_grad_norm", {"no bound": lambda t: candidate(max_grad_norm=float("inf"))})
_trap("refused", "method", {"another method": lambda t: candidate(method="hyfreedp")})
_trap("refused", "must be", {"classes as choices": suggesting("layer", [nn.ReLU, nn.Tanh])})
_trap("refused", "batch", {"a batch size that is suggested": suggesting("batch_size", [16, 32])})


# Layers.


def words(**options: Any) -> nn.Module:
    return Net(
        lambda m, x: m.head(m.table(x.abs().clamp(max=3.0).long()).mean(1)),
        table=nn.Embedding(4, 5, **options), head=nn.Linear(5, CLASSES),
    )  # fmt: skip


def instance(*, track: bool) -> nn.Module:
    norm = nn.InstanceNorm1d(2, track_running_stats=track)
    return Net(lambda m, x: m.head(m.norm(x.view(-1, 2, 3)).flatten(1)), norm=norm, head=linear())


def running(*, buffer: bool) -> nn.Module:
    def run(m: Any, x: T) -> T:
        out: T = m.inner(x - m.mean)
        m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
        return out

    mean = nn.Buffer(torch.zeros(FEATURES)) if buffer else torch.zeros(FEATURES)
    return Net(run, inner=linear(), mean=mean)


def writing() -> nn.Module:
    def run(m: Any, x: T) -> T:
        with torch.no_grad():
            m.inner.weight.add_(x.mean() * 0.01)
        return m.inner(x)

    return Net(run, inner=linear())


def on_the_way_back() -> nn.Module:
    def run(m: Any, x: T) -> T:
        h = m.first(x)
        if h.requires_grad:
            h.register_hook(lambda g: 3.0 * g)
        return m.head(h)

    return Net(run, first=nn.Linear(FEATURES, 4), head=nn.Linear(4, CLASSES))


def normed(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 3))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, 3))


def models(outcome: Any, says: str, makers: dict[str, Callable[[], nn.Module]]) -> None:
    """Enter models that a candidate is made of."""
    made = {name: lambda trial, make=make: candidate(make()) for name, make in makers.items()}
    _trap(outcome, says, made)


models("refused", "must treat each record by itself", {
    "BatchNorm": normed,
    "batch statistics in evaluation mode": lambda: normed(track_running_stats=False).eval(),
    "InstanceNorm with running statistics": lambda: instance(track=True),
})  # fmt: skip
models("refused", "must not have max_norm", {
    "an embedding with max_norm": lambda: words(max_norm=1.0),
    "an embedding scaled by frequency": lambda: words(scale_grad_by_freq=True),
})  # fmt: skip
models(
    "refused",
    "buffer",
    {"spectral norm": spectral, "a running mean in a buffer": lambda: running(buffer=True)},
)
models(
    "refused",
    "changes from call to call",
    {"a running mean in an attribute": lambda: running(buffer=False)},
)
models("refused", "write to its parameters", {"weights written in forward": writing})
models("harmless", "Each record is computed by itself, on a copy of the model.", {
    "gradients changed by a hook": on_the_way_back,
    "InstanceNorm": lambda: instance(track=False),
    "DataParallel": lambda: nn.DataParallel(linear()),
    "dropout in evaluation mode": lambda: nn.Sequential(nn.Dropout(0.5), linear()).eval(),
})  # fmt: skip


# Optimizers and schedules.


class Own(SGD):
    """Another class, which may step as it likes."""


def changed(change: Callable[[Any], object]) -> Callable[[nn.Module], Any]:
    """Return what makes an optimizer to which something was done."""

    def make(model: nn.Module) -> Any:
        model(torch.ones(2, FEATURES)).sum().backward()
        optimizer = SGD(model.parameters(), 0.5, momentum=0.9)
        change(optimizer)
        return optimizer

    return make


def optimizers(says: str, makers: dict[str, Callable[[Any], Any]]) -> None:
    """Enter optimizers of a linear model."""

    def of(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def build(trial: Any) -> Any:
            model = linear()
            return privtune.Candidate(model, make(model))

        return build

    _trap("refused", says, {name: of(make) for name, make in makers.items()})


def scheduled(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(trial: Any) -> Any:
        model = linear()
        optimizer = SGD(model.parameters(), 0.5)
        return privtune.Candidate(model, optimizer, schedule=make(optimizer))

    return build


rates = torch.optim.lr_scheduler
optimizers("must have no hooks on its steps", {
    "a hook after the step": changed(lambda o: o.register_step_post_hook(lambda *_: None)),
    "a hook before the step": changed(lambda o: o.register_step_pre_hook(lambda *_: None)),
})  # fmt: skip
optimizers(
    "must be one of torch's classes", {"a step of one's own": lambda m: Own(m.parameters(), 0.5)}
)
optimizers(
    "must be that of SGD", {"a step replaced": changed(lambda o: setattr(o, "step", lambda: None))}
)
optimizers("asks for more", {"LBFGS": lambda m: torch.optim.LBFGS(m.parameters())})
optimizers("must be new", {"an optimizer that has stepped": changed(lambda o: o.step())})
optimizers("must be one optimizer made", {"the optimizer's class": lambda m: SGD})
optimizers("must hold parameters of the candidate.s model alone", {
    "an optimizer over another model": lambda m: SGD(linear().parameters(), 0.5),
    "an optimizer over one parameter more": lambda m: SGD([*m.parameters(), nn.Parameter(m.bias)], 0.5),
})  # fmt: skip
_trap("refused", "by no metric", {"ReduceLROnPlateau": scheduled(rates.ReduceLROnPlateau)})
_trap("refused", "candidate's own optimizer", {
    "a schedule of another optimizer": scheduled(lambda o: rates.StepLR(SGD(linear().parameters(), 0.5), 2)),
})  # fmt: skip
_trap("refused", "schedule", {"an unknown schedule": lambda t: candidate(schedule="plateau")})


# Data in build: nothing can see it.


def prototypes(trial: Any, x: T, y: T) -> Any:
    return candidate(
        with_weight(nn.Parameter(torch.stack([x[y == c].mean(0) for c in range(CLASSES)])))
    )


def pretrained(trial: Any, x: T, y: T) -> Any:
    model = linear()
    plain(model, x, y).mean().backward()
    SGD(model.parameters(), 0.5).step()
    model.zero_grad()
    return candidate(model)


def asserted(trial: Any, x: T, y: T) -> Any:
    assert x.max() < 1.0, f"the largest is {x.max()}"


for _says, _use in {
    "weights initialised from records": prototypes,
    "pretrained on the private records": pretrained,
    "seed hashed from the data": lambda t, x, y: seeded(int(y.sum())),
    "rate from the data": lambda t, x, y: candidate(rate=float(1.0 / x.norm())),
    "width from the data": lambda t, x, y: candidate(wide(int(y.max()) + 2)),
    "range from the data": lambda t, x, y: candidate(
        rate=t.suggest_float("rate", 0.1, float(x.max()))
    ),
    "clipping norm from the data": lambda t, x, y: candidate(
        max_grad_norm=float(x.norm(dim=1).median())
    ),
}.items():
    _trap("on the page", _says, {_says: reading(_use)}, made=True)
_trap(
    "refused",
    "AssertionError",
    {"an assertion on the data that fails": reading(asserted)},
    made=True,
)
