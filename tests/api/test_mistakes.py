"""Mistakes that come naturally in Python, to users of Optuna, Opacus, MLflow and scikit-learn.

Each ends in one true sentence that names what to do, and costs nothing. Those of the command line stand in
``tests/cli/test_mistakes.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import privtune
from privtune import Budget, PrivTuneError, opacus, strategies
from privtune.ledger import Ledger
from privtune.sklearn import PrivateClassifier, PrivateRegressor
from tests.cli.conftest import Cli, cli
from tests.study.elsewhere import optimize_own

__all__ = ["cli"]

MARK = "98765.4"  # in records, and in none of our sentences
X = torch.randn(240, 3, generator=torch.Generator().manual_seed(0))
X[::7, 0] = float(MARK)
Y = (X[:, 1] > 0).long()
NP = (X.numpy(), Y.numpy())
BUDGET = Budget(4.0, 1e-5, name="clinic")
FIXED = strategies.Fixed(parameters={"learning_rate": 0.5})
LOADER = DataLoader(TensorDataset(X[:160], Y[:160]), batch_size=20)


def made(model: nn.Module, trial: Any, **given: Any) -> privtune.Candidate:
    rate = trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
    optimizer = given.pop("optimizer", None) or torch.optim.SGD(model.parameters(), rate)
    return privtune.Candidate(model, optimizer, **{"max_grad_norm": 1.0, **given})


def build(trial: Any) -> privtune.Candidate:
    return made(nn.Linear(3, 2), trial)


def of_none(trial: Any) -> None:
    trial.suggest_float("learning_rate", 0.05, 5.0)


def of_a_score(trial: Any) -> float:
    return float(trial.suggest_float("learning_rate", 0.05, 5.0))


def of_a_model(trial: Any) -> nn.Module:
    trial.suggest_float("learning_rate", 0.05, 5.0)
    return nn.Linear(3, 2)


def of_loguniform(trial: Any) -> Any:
    return trial.suggest_loguniform("learning_rate", 0.05, 5.0)


def of_other_width(trial: Any) -> privtune.Candidate:
    return made(nn.Linear(4, 2), trial)


def of_batch_norm(trial: Any) -> privtune.Candidate:
    return made(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), trial)


def of_other_weights(trial: Any) -> privtune.Candidate:
    return made(
        nn.Linear(3, 2), trial, optimizer=torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.5)
    )


def of_one_output(trial: Any) -> privtune.Candidate:
    return made(nn.Linear(3, 1), trial)


def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), y, reduction="none")


def of_outputs(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, y, reduction="none")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def script(trial: Any) -> Any:
    """An Opacus script as it stood, which returns its loss."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), trial.suggest_float("learning_rate", 0.05, 5.0))
    return train(*opacus.make_private(trial, model, optimizer, LOADER))


def train(engine: Any, model: Any, optimizer: Any, batches: Any) -> float:
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return 0.3


def mended(trial: Any) -> Any:
    """The same script, which returns what it was asked for."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), trial.suggest_float("learning_rate", 0.05, 5.0))
    engine, private, *others = opacus.make_private(trial, model, optimizer, LOADER)
    train(engine, private, *others)
    return opacus.result(trial, engine, private)


@dataclass
class Place:
    """Where a script runs: the calls that it makes, right but for the one thing that is given."""

    storage: str

    def create(self, *names: str, **given: Any) -> Any:
        usual = {"budget": BUDGET, "storage": self.storage}
        return privtune.create_study(*(names or ("mine",)), **{**usual, **given})

    def optimize(self, of: Any = build, **given: Any) -> Any:
        usual: dict[str, Any] = {
            "loss": loss,
            "score": "accuracy",
            "data": (X, Y),
            "split": {"train": 160, "validation": 40, "test": 40},
            "strategy": FIXED,
            "epochs": 1,
            "expected_batch_size": 20,
        }
        whole = {name: value for name, value in {**usual, **given}.items() if value is not ...}
        return optimize_own(self.create(), of, **whole)

    def classifier(self, **given: Any) -> PrivateClassifier:
        usual = {
            "bounds": (-4, 4),
            "classes": [0, 1],
            "epochs": 1,
            "records": 240,
            "strategy": FIXED,
        }
        return PrivateClassifier(BUDGET, **{**usual, "storage": self.storage, **given})

    def regressor(self, **given: Any) -> PrivateRegressor:
        usual = {"bounds": (-4, 4), "target_range": (-4, 4), "epochs": 1, "records": 240}
        return PrivateRegressor(BUDGET, **{**usual, "storage": self.storage, **given})

    def select(self, of: Any = script, **given: Any) -> Any:
        usual = {"epochs": 1, "validation": (X[160:], Y[160:]), "epsilon": 4, "delta": 1e-5}
        usual["strategy"] = FIXED
        usual |= {"declared_by": "us", "storage": self.storage}
        return opacus.select(of, LOADER, **{**usual, **given})


Does = Callable[[Place], Any]

OPTUNA: dict[str, tuple[Does, tuple[str, ...]]] = {
    "no budget": (lambda p: privtune.create_study("mine"), ("budget=privtune.Budget(",)),
    "a direction": (lambda p: p.create(direction="maximize"), ("score='accuracy'", "maximize=")),
    "a budget of two numbers": (
        lambda p: p.create(budget=(4.0, 1e-5)),
        ("Budget(4.0, 1e-5, name=",),
    ),
    "a budget's name alone": (lambda p: p.create(budget="clinic"), ("Budget(4.0, 1e-5, name=",)),
    "ε as text": (
        lambda p: Budget("4.0", 1e-5, name="x"),
        ("epsilon = '4.0'", "a finite number above 0"),
    ),  # type: ignore[arg-type]
    "δ before ε": (lambda p: Budget(1e-5, 4.0, name="x"), ("delta = 4.0", "ε comes first")),
    "ε and δ in place of a budget": (
        lambda p: privtune.create_study("mine", epsilon=4.0, delta=1e-5),
        ("delta", "budget=privtune.Budget("),
    ),
    "n_trials": (
        lambda p: p.create().optimize(build, n_trials=10),
        ("PapernotSteinke(mean_runs=10)",),
    ),
    "a function for a task": (
        lambda p: p.create().optimize(build, strategy=FIXED, epochs=1, expected_batch_size=20),
        ("task = 'function'", "privtune.make_task(build, loss=..., data=...)"),
    ),
    "all in one call": (
        lambda p: p.create().optimize(build, loss=loss, data=(X, Y), strategy=FIXED),
        ("loss= and data= belong to privtune.make_task(build, loss=..., data=...)",),
    ),
    "no strategy": (
        lambda p: p.optimize(strategy=...),
        ("needs strategy", "PapernotSteinke(mean_runs=10)"),
    ),
    "a strategy's name": (
        lambda p: p.optimize(strategy="papernot-steinke"),
        ("PapernotSteinke(mean_runs=10)",),
    ),
    "a strategy's class": (
        lambda p: p.optimize(strategy=strategies.Fixed),
        ("PapernotSteinke(mean_runs=10)",),
    ),
    "a sampler as strategy": (
        lambda p: p.optimize(strategy=optuna.samplers.TPESampler()),
        ("TPESampler", "PapernotSteinke(mean_runs=10)"),
    ),
    "nothing is returned": (
        lambda p: p.optimize(of_none),
        ("'NoneType'", "privtune.Candidate(model"),
    ),
    "a score is returned": (
        lambda p: p.optimize(of_a_score),
        ("'float'", "privtune.Candidate(model"),
    ),
    "the model alone is returned": (
        lambda p: p.optimize(of_a_model),
        ("'Linear'", "privtune.Candidate(model"),
    ),
    "a number for build": (lambda p: p.optimize(3.0), ("build = 'float'", "must be a function")),
    "suggest_loguniform": (lambda p: p.optimize(of_loguniform), ("trial.suggest_float", "log=")),
    "best_params before the end": (
        lambda p: p.create().best_params,
        ("no arm yet", "study.optimize"),
    ),
    "best_value before the end": (
        lambda p: p.create().best_value,
        ("no arm yet", "study.optimize"),
    ),
    "best_trial of an open study": (
        lambda p: p.create().best_trial,
        ("study.best_params", "study.release"),
    ),
    "study_name": (
        lambda p: privtune.load_study(study_name="mine"),
        ("privtune.load_study('mine')",),
    ),
    "load before create": (
        lambda p: privtune.load_study("mine", storage=p.storage),
        ("no study named 'mine'", "privtune study create"),
    ),
    "create twice": (
        lambda p: [p.create("mine"), p.create("mine")],
        ("'mine' exists already", "load_if_exists=True"),
    ),
    "another budget for a study that is there": (
        lambda p: [
            p.create(),
            p.create(budget=Budget(8.0, 1e-5, name="clinic"), load_if_exists=True),
        ],
        ("other budget", "privtune.load_study"),
    ),
    "run of an open study": (lambda p: p.create().run(), ("is open", "study.optimize")),
    "a release before any arm": (
        lambda p: p.create().release("plain"),
        ("no arm 'plain'", "study.optimize"),
    ),
    "one callback": (lambda p: p.optimize(callbacks=print), ("callbacks", "must be a list")),
    "a storage of Optuna's": (
        lambda p: p.create(storage=optuna.storages.InMemoryStorage()),
        ("InMemoryStorage", "sqlite:///privtune.db"),
    ),
    "another tracker": (lambda p: p.create(tracking="wandb"), ("'wandb'", "mlflow")),
    "the tracker's address": (
        lambda p: p.create(tracking="http://127.0.0.1:5000"),
        ("MLFLOW_TRACKING_URI",),
    ),
    "a misspelt argument": (
        lambda p: p.optimize(batchsize=20),
        ("'batchsize'", "expected_batch_size?"),
    ),
}

DATA: dict[str, tuple[Does, tuple[str, ...]]] = {
    "no loss": (lambda p: p.optimize(loss=...), ("loss = None", "def loss(model, x, y)")),
    "a loss of outputs": (
        lambda p: p.optimize(loss=of_outputs),
        ("of_outputs()", "def loss(model, x, y)"),
    ),
    "a loss of torch's": (
        lambda p: p.optimize(loss=nn.CrossEntropyLoss()),
        ("def loss(model, x, y)",),
    ),
    "a score of scikit-learn's": (
        lambda p: p.optimize(score="roc_auc"),
        ("'roc_auc'", "Did you mean auc?"),
    ),
    "no split": (lambda p: p.optimize(split=...), ("split = None", 'split={"train": 1000')),
    "a split by shares": (
        lambda p: p.optimize(split={"train": 0.8}),
        ("split.train = 0.8", "Multiply"),
    ),
    "val": (
        lambda p: p.optimize(split={"train": 180, "val": 60}),
        ("'val'", "Did you mean validation?"),
    ),
    "a share for the split": (
        lambda p: p.optimize(split=0.2),
        ("split = 0.2", 'split={"train": 1000'),
    ),
    "parts of other lengths": (
        lambda p: p.optimize(data=(X, Y[:200])),
        ("200, 240", "as many records"),
    ),
    "inputs alone": (lambda p: p.optimize(data=X), ("needs one target", "the second of a pair")),
    "targets of two axes": (lambda p: p.optimize(data=(X, Y[:, None])), ("(1, 1)", "y.squeeze(1)")),
    "float labels": (lambda p: p.optimize(data=(X, Y.float())), ("torch.float32", "y.long()")),
    "whole numbers as inputs": (
        lambda p: p.optimize(data=(X.long(), Y)),
        ("torch.int64", "x.float()"),
    ),
    "labels from one": (
        lambda p: p.optimize(data=(X, Y + 1)),
        ("before anything was charged", "PRIVTUNE_CURATOR=1"),
    ),
    "NaN in every record": (
        lambda p: p.optimize(data=(X * float("nan"), Y)),
        ("do not fit", "PRIVTUNE_CURATOR=1"),
    ),
    "lists of texts": (
        lambda p: p.optimize(data=(["a text"] * 240, Y)),
        ("must be numbers", "Encode texts"),
    ),
    "a loader": (
        lambda p: p.optimize(data=LOADER),
        ("'DataLoader'", "Pass the dataset, not its loader"),
    ),
    "an iterable dataset": (
        lambda p: p.optimize(data=Stream()),
        ("'Stream'", "a map-style dataset"),
    ),
    "a table's path": (
        lambda p: p.optimize(data="people.csv"),
        ("'people.csv'", "privtune study draft people.csv"),
    ),
    "data and train": (
        lambda p: p.optimize(train=(X, Y)),
        ("does not go with data", "Pass data= with split="),
    ),
    "a model of another width": (lambda p: p.optimize(of_other_width), ("inputs (1, 3)",)),
    "batch normalisation": (lambda p: p.optimize(of_batch_norm), ("BatchNorm1d", "GroupNorm")),
    "an optimizer of another model": (
        lambda p: p.optimize(of_other_weights),
        ("optimizer", "another model"),
    ),
    "one output for two classes": (
        lambda p: p.optimize(of_one_output),
        ("does not reach its loss", "an output for each class"),
    ),
    "a GPU that is not there": (
        lambda p: p.create(device="cuda").optimize(
            privtune.make_task(build, loss=loss, data=(X, Y), split={"train": 240}),
            strategy=FIXED,
            epochs=1,
            expected_batch_size=20,
        ),
        ("device = 'cuda'", "Give auto or cpu"),
    ),
    "no epochs": (lambda p: p.optimize(epochs=...), ("epochs = None", "epochs=10")),
    "a batch above the data": (
        lambda p: p.optimize(expected_batch_size=512),
        ("512", "training records, 160"),
    ),
}

OPACUS: dict[str, tuple[Does, tuple[str, ...]]] = {
    "batch_size": (lambda p: p.optimize(batch_size=20), ("batch_size", "expected_batch_size=64")),
    "noise_multiplier and target_epsilon": (
        lambda p: p.optimize(noise_multiplier=1.1, target_epsilon=3.0),
        ("noise_multiplier: the noise follows from the budget",),
    ),
    "max_physical_batch_size": (
        lambda p: p.optimize(max_physical_batch_size=8),
        ("in pieces by itself",),
    ),
    "max_grad_norm": (
        lambda p: p.optimize(max_grad_norm=1.0),
        ("privtune.Candidate(model, optimizer, max_grad_norm=1.0)",),
    ),
    "get_epsilon": (lambda p: p.create().get_epsilon(delta=1e-5), ("study.spent()",)),
    "make_private_with_epsilon": (lambda p: opacus.make_private_with_epsilon, ("study.optimize",)),  # type: ignore[attr-defined]
    "noise for a script": (
        lambda p: p.select(noise_multiplier=1.1),
        ("select(..., epsilon=4.0, delta=1e-5)",),
    ),
    "epochs of none": (lambda p: p.select(epochs=0), ("epochs = 0", "from 1")),
    "a loader to score on": (
        lambda p: p.select(validation=LOADER),
        ("validation = 'DataLoader'", "Pass the dataset"),
    ),
    "scores on training records": (
        lambda p: p.select(
            validation=(X[:80], Y[:80]), strategy=strategies.PapernotSteinke(mean_runs=2)
        ),
        ("training data", "without them"),
    ),
}

SKLEARN: dict[str, tuple[Does, tuple[str, ...]]] = {
    "how many classes": (
        lambda p: p.classifier(classes=2).fit(*NP),
        ("classes = 2", "classes=[0, 1]"),
    ),
    "one class": (lambda p: p.classifier(classes=[0]).fit(*NP), ("[0]", "must be two or more")),
    "one class in the labels": (
        lambda p: p.classifier(classes="from y").fit(NP[0], 0 * NP[1]),
        ("[0]", "must be two or more"),
    ),
    "labels as texts": (
        lambda p: p.classifier().fit(NP[0], NP[1].astype(str)),
        ("another type", "classes=['0', '1']"),
    ),
    "a number to predict": (
        lambda p: p.classifier(classes="from y").fit(NP[0], NP[0][:, 1]),
        ("continuous",),
    ),
    "one column": (
        lambda p: p.classifier().fit(NP[0][:, 0], NP[1]),
        ("axes of X = 1", "reshape(-1, 1)"),
    ),
    "one row": (
        lambda p: p.classifier().fit(NP[0][0].tolist(), NP[1]),
        ("rows", "Reshape your data"),
    ),
    "inputs and labels of other lengths": (
        lambda p: p.classifier().fit(NP[0], NP[1][:200]),
        ("[240, 200]",),
    ),
    "texts": (
        lambda p: p.classifier().fit([["a", "b", "c"]] * 240, NP[1]),
        ("must be numbers", "encode texts"),
    ),
    "predict before fit": (lambda p: p.classifier().predict(NP[0]), ("not fitted yet", "'fit'")),
    "bounds the wrong way round": (
        lambda p: p.classifier(bounds=(4, -4)).fit(*NP),
        ("(4, -4)", "Exchange the two"),
    ),
    "bounds by column": (lambda p: p.classifier(bounds=[(-4, 4)] * 3).fit(*NP), ("zip(*pairs)",)),
    "a target's range the wrong way round": (
        lambda p: p.regressor(target_range=(4, -4)).fit(*NP),
        ("target_range = (4, -4)", "Exchange the two"),
    ),
    "texts to predict": (
        lambda p: p.regressor().fit(NP[0], ["high"] * 240),
        ("y = 'texts'", "must be numbers"),
    ),
    "probabilities of numbers": (
        lambda p: p.regressor().predict_proba(NP[0]),
        ("predict_proba", "PrivateClassifier"),
    ),
    "a fit that goes on": (
        lambda p: p.classifier().partial_fit(*NP),
        ("partial_fit", "a charge of its own"),
    ),
    "ε above the budget": (
        lambda p: p.classifier(epsilon=8.0).fit(*NP),
        ("costs ε = 8.000 alone", "ε = 4.000 is left"),
    ),
}


@pytest.mark.parametrize(
    ("does", "says"),
    [
        pytest.param(*row, id=name)
        for rows in (OPTUNA, DATA, OPACUS, SKLEARN)
        for name, row in rows.items()
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_mistake_is_one_sentence_and_costs_nothing(
    does: Does, says: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((PrivTuneError, TypeError, ValueError, AttributeError)) as caught:
        does(Place("sqlite:///privtune.db"))
    said = str(caught.value)
    for words in says:
        assert words in said, said
    assert "\n" not in said, said
    assert MARK not in said, "a record"
    assert not re.search(r"(?<!\.)\.\.(\s|$)", said), said
    assert nothing_charged(tmp_path)


def nothing_charged(folder: Path) -> bool:
    if not (folder / "privtune.db").exists():
        return True
    with Ledger(f"sqlite:///{folder / 'privtune.db'}") as ledger:
        return not any(ledger.charges(budget.name) for budget in ledger.budgets())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_script_that_forgot_its_result_goes_on_at_the_same_charge(
    tmp_path: Path, cli: Cli
) -> None:
    place = Place(f"sqlite:///{tmp_path / 'privtune.db'}")
    with pytest.raises(PrivTuneError) as caught:
        place.select()
    command = re.search(r"privtune (study show opacus --curator)", str(caught.value))
    assert command is not None
    shown = cli(*command[1].split(), "--storage", place.storage)
    assert "must return what trial.result(model, score=...) gave" in shown.out
    assert place.select(mended).params
    with Ledger(place.storage) as ledger:
        assert len(ledger.charges("opacus")) == 1


@pytest.mark.parametrize("wrong", [lambda p: p.classifier(), lambda p: p.regressor()])
def test_other_columns_to_predict_are_counted_and_none_is_shown(
    wrong: Does, tmp_path: Path
) -> None:
    model = wrong(Place(f"sqlite:///{tmp_path / 'privtune.db'}"))
    model.fit(*NP)
    with pytest.raises(ValueError, match=r"2 features, but .* is expecting 3") as caught:
        model.predict(NP[0][:, :2])
    assert MARK not in str(caught.value)
    with pytest.raises(ValueError, match="axes of X = 1: must have two") as caught:
        model.predict(NP[0][:, 0])
    assert MARK not in str(caught.value)
    assert not hasattr(model, "partial_fit")
