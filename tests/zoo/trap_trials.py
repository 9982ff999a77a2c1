"""Traps around the loop: suggestions, scores, reports, and what is returned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from optuna.exceptions import TrialPruned
from torch import nn
from torch.utils.data import Dataset

from privtune.study.trial import Trial
from tests.zoo.trap import Pair, Toy, Trap, begin, entering, linear, plain, sgd

__all__ = ["TRIALS"]

TRIALS: list[Trap] = []
_trap = entering(TRIALS, arm="selection")


def _fitted(trial: Trial, data: Toy, **options: Any) -> Any:
    model, _, private = begin(trial, data, **options)
    private.fit(plain)
    return model


def _memorised(data: Toy) -> nn.Module:
    model = linear()
    own = sgd(model)
    for _ in range(5):
        own.zero_grad()
        plain(model, *data.train).mean().backward()
        own.step()
    return model


_OTHER = "What was charged is a score of the model that is released."


@_trap("refused", "another model scored", _OTHER)
def _other(trial: Trial, data: Toy) -> float:
    _fitted(trial, data)
    return trial.score(_memorised(data), data.validation)


@_trap("refused", "a copy trained on, and scored", _OTHER)
def _copied(trial: Trial, data: Toy) -> float:
    model = copy.deepcopy(_fitted(trial, data))
    plain(model, *data.train).mean().backward()
    sgd(model).step()
    return trial.score(model, data.validation)


@_trap("refused", "averaged weights (SWA) scored", _OTHER)
def _averaged(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    average = torch.optim.swa_utils.AveragedModel(model)
    private.fit(plain, on_step=lambda done, planned: average.update_parameters(model))
    return trial.score(average, data.validation)


@_trap("refused", "other weights for the time of the score", _OTHER)
def _for_a_while(trial: Trial, data: Toy) -> float:
    model = _fitted(trial, data)
    kept = [p.detach().clone() for p in model.parameters()]
    for p, q in zip(model.parameters(), _memorised(data).parameters(), strict=True):
        p.data.copy_(q.data)
    score = trial.score(model, data.validation)
    for p, q in zip(model.parameters(), kept, strict=True):
        p.data.copy_(q)
    return score


@_trap("refused", "forward swapped for the score", _OTHER)
def _swapped(trial: Trial, data: Toy) -> float:
    model = _fitted(trial, data)
    forward, best = model.forward, _memorised(data)
    model.forward = best.forward
    score = trial.score(model, data.validation)
    model.forward = forward
    return score


@_trap(
    "refused",
    "training records as the validation split",
    "They were charged as disjoint.",
    when="after",
)
def _training_rows(trial: Trial, data: Toy) -> float:
    return trial.score(_fitted(trial, data), tuple(t[:30] for t in data.train))


@_trap(
    "refused",
    "validation records in the training set",
    "They were charged as disjoint.",
    when="after",
)
def _both(trial: Trial, data: Toy) -> float:
    train = tuple(torch.cat([t[:30], v]) for t, v in zip(data.train, data.validation, strict=True))
    return trial.score(_fitted(trial, data, train=train), data.validation)


class _Items(Dataset[Any]):
    """Training records that are read one by one."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def __len__(self) -> int:
        return len(self._pair[0])

    def __getitem__(self, index: int) -> Pair:
        return self._pair[0][index], self._pair[1][index]


@_trap("refused", "a training data set, scored", "They were charged as disjoint.", when="after")
def _training_set(trial: Trial, data: Toy) -> float:
    model = _fitted(trial, data, train=_Items(data.train))
    return trial.score(model, tuple(t[:30].clone() for t in data.train))


@_trap(
    "refused", "a fifth of the split in the training set", "They were charged as disjoint.",
    when="after",
)  # fmt: skip
def _fifth(trial: Trial, data: Toy) -> float:
    pairs = zip(data.train, data.validation, strict=True)
    return trial.score(_fitted(trial, data), tuple(torch.cat([a[:6], b[:24]]) for a, b in pairs))


@_trap("refused", "a new split in every trial", "One split was charged.", when="after")
def _new_split(trial: Trial, data: Toy) -> float:
    rows = torch.randperm(30)
    return trial.score(_fitted(trial, data), tuple(t[rows] for t in data.validation))


@_trap("refused", "a part of the split", "It was declared as a whole.")
def _part(trial: Trial, data: Toy) -> float:
    return trial.score(_fitted(trial, data), tuple(t[:10] for t in data.validation))


@_trap("refused", "two looks at a private split", "One was charged.")
def _twice(trial: Trial, data: Toy) -> float:
    model = _fitted(trial, data)
    return max(trial.score(model, data.validation), trial.score(model, data.validation))


def _returning(value: Callable[[float, Any, Toy], float]) -> Any:
    def objective(trial: Trial, data: Toy) -> float:
        model = _fitted(trial, data)
        return value(trial.score(model, data.validation), model, data)

    return objective


def _accuracy(model: Any, data: Toy) -> float:
    return float((model(data.validation[0]).argmax(1) == data.validation[1]).double().mean())


_NUMBER = "Nothing says that it is public or noised."
_trap("refused", "the un-noised accuracy returned", _NUMBER)(
    _returning(lambda score, model, data: _accuracy(model, data))
)
_trap("refused", "the score with the training loss taken off", _NUMBER)(
    _returning(lambda score, model, data: score - 0.1 * float(plain(model, *data.train).mean()))
)
_trap("refused", "the score rounded", _NUMBER)(_returning(lambda score, *_: round(score, 1) + 2.0))


@_trap("refused", "no score", _NUMBER)
def _unscored(trial: Trial, data: Toy) -> float:
    return _accuracy(_fitted(trial, data), data)


@_trap("refused", "no make_private", "What was trained was never clipped, noised or charged.")
def _public(trial: Trial, data: Toy) -> float:
    return _accuracy(_memorised(data), data)


@_trap("refused", "two trainings in one trial", "One was charged.")
def _two(trial: Trial, data: Toy) -> float:
    _fitted(trial, data)
    return trial.score(_fitted(trial, data), data.validation)


@_trap("refused", "an ensemble of two trainings", "One was charged.")
def _ensemble(trial: Trial, data: Toy) -> float:
    parts = nn.ModuleList([_fitted(trial, data) for _ in range(2)])
    return trial.score(parts, data.validation)


@_trap("refused", "more records than were declared", "Rate and noise are those of the declared.")
def _more(trial: Trial, data: Toy) -> float:
    twice = tuple(torch.cat([t, t]) for t in data.train)
    return trial.score(_fitted(trial, data, train=twice), data.validation)


@_trap("refused", "no bound on gradients", "Without a bound no noise is enough.")
def _unbounded(trial: Trial, data: Toy) -> float:
    return trial.score(_fitted(trial, data, max_grad_norm=float("inf")), data.validation)


@_trap("refused", "the training loss reported", "It is no score.", arm="everything")
def _reported(trial: Trial, data: Toy) -> float:
    model = _fitted(trial, data)
    trial.report(-float(plain(model, *data.train).mean()), step=0)
    return trial.score(model, data.validation)


@_trap("refused", "a score of a private split reported", "Each report would be a release.")
def _reported_private(trial: Trial, data: Toy) -> float:
    score = trial.score(_fitted(trial, data), data.validation)
    trial.report(score, step=0)
    return score


@_trap("refused", "pruned on the training loss", "Nobody paid for it.", arm="everything")
def _pruned(trial: Trial, data: Toy) -> float:
    model, _, private = begin(trial, data)
    for x, y in private.batches():
        losses = plain(private.model, x, y)
        private.step(losses)
        if losses.mean() > 0.0:
            raise TrialPruned
    return trial.score(model, data.validation)


@_trap(
    "harmless", "params edited", "They are a copy: what is released are the suggestions.",
    like="by record",
)  # fmt: skip
def _edited(trial: Trial, data: Toy) -> float:
    model = _fitted(trial, data)
    trial.params["mean"] = float(data.train[0].mean())
    return trial.score(model, data.validation)


@_trap(
    "harmless", "an attribute of the trial", "It stays inside the trust boundary.", like="by record"
)
def _noted(trial: Trial, data: Toy) -> float:
    model = _fitted(trial, data)
    trial.set_user_attr("loss", float(plain(model, *data.train).mean()))
    return trial.score(model, data.validation)


@_trap(
    "undecidable",
    "a range from the data",
    "Ranges are numbers of the objective's.",
    severity="high",
)
def _range(trial: Trial, data: Toy) -> float:
    largest = float(data.train[0].norm(dim=1).max())
    trial.suggest_float("scale", 0.5 * largest, largest)
    return trial.score(_fitted(trial, data), data.validation)


@_trap(
    "undecidable", "a choice that carries data", "Choices are values of the objective's.",
    severity="high",
)  # fmt: skip
def _choice(trial: Trial, data: Toy) -> float:
    trial.suggest_categorical("shift", [float(data.train[0].mean())])
    return trial.score(_fitted(trial, data), data.validation)


@_trap(
    "undecidable", "a clipping bound from the data", "It is a number of the objective's.",
    severity="high",
)  # fmt: skip
def _bound(trial: Trial, data: Toy) -> float:
    typical = float(data.train[0].norm(dim=1).median())
    return trial.score(_fitted(trial, data, max_grad_norm=typical), data.validation)


@_trap(
    "undecidable", "the width of a layer from the data", "It is a number of the objective's.",
    severity="medium",
)  # fmt: skip
def _width(trial: Trial, data: Toy) -> float:
    width = 3 + int(torch.unique(data.train[1]).numel())
    model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))
    return trial.score(_fitted(trial, data, model=model), data.validation)


_SCORES: list[float] = []


@_trap(
    "undecidable", "sealed scores kept outside", "Whoever sees the list sees what is sealed.",
    severity="high",
)  # fmt: skip
def _kept(trial: Trial, data: Toy) -> float:
    score = trial.score(_fitted(trial, data), data.validation)
    _SCORES.append(score)
    return score


class _TwoFaced(nn.Linear):
    """Answers otherwise where it is not trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs of the weights in training; a constant else."""
        return super().forward(x) if self.training else torch.eye(3)[torch.zeros(len(x)).long()]


@_trap(
    "undecidable", "a model that answers otherwise in evaluation", "Modes differ honestly, too.",
    severity="medium",
)  # fmt: skip
def _faces(trial: Trial, data: Toy) -> float:
    return trial.score(_fitted(trial, data, model=_TwoFaced(6, 3)), data.validation)


@_trap(
    "undecidable", "a split that was chosen by its score", "Which rows are validation is declared.",
    severity="high",
)  # fmt: skip
def _chosen(trial: Trial, data: Toy) -> float:
    x, y = data.validation
    easy = (x[:, :3].argmax(1) == y).long().argsort(descending=True, stable=True)
    rows = easy[: len(y) // 2].repeat(2)
    return trial.score(_fitted(trial, data), (x[rows], y[rows]))
