"""Methods that adapt by themselves, on a model and a loss of one's own; and jobs that share them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import privtune
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import Ledger
from privtune.strategies import InRun, PapernotSteinke
from privtune.study import Study
from tests.toy import blobs

DATA = blobs().load()
TRAIN, VALIDATION = (DATA.train.x, DATA.train.y), (DATA.validation.x, DATA.validation.y)
LOOP = privtune.DPSGD(records=240, epochs=1, expected_batch_size=24)
SPLIT = privtune.Validation(records=60)
OPEN = {"learning_rate": 0.2, "max_grad_norm": 1.0, "largest_variance": 0.1}
METHODS = {
    "adaclip": ("learning_rate", "largest_variance"),
    "adadp": ("max_grad_norm",),
    "automatic-clipping": ("learning_rate",),
    "d-adaptation": (),
    "dog": (),
    "dowg": (),
    "dp-adam": ("learning_rate", "max_grad_norm"),
    "hyfreedp": (),
    "norm-bound": ("learning_rate",),
    "prodigy": (),
    "public-rate": (),
    "quantile-clipping": ("learning_rate",),
}


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def make(storage: str, name: str = "loops", **options: Any) -> Study:
    budget = privtune.Budget(6.0, 1e-5, name=name)
    return privtune.create_study(name, budget=budget, storage=storage, **options)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_trains_a_model_of_ones_own_and_shows_its_curves(name: str, storage: str) -> None:
    first: list[torch.Tensor] = []

    def objective(trial: privtune.Trial) -> float:
        model = build()
        given = {key: OPEN[key] for key in METHODS[name]}
        private = trial.make_private(model, None, TRAIN, parameters=given)
        first.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        private.fit(loss_of)
        return trial.score(model, None)

    release = make(storage).optimize(
        objective, strategy=InRun(arm="loop", method=name), training=LOOP
    )
    assert release.guarantee.epsilon <= 6.0
    assert release.strategy == name
    assert bool(release.weights.isfinite().all())
    assert not torch.equal(first[-1], release.weights)
    assert release.curves
    for curve in release.curves.values():
        assert len(curve) == LOOP.schedule.steps
        assert any(math.isfinite(value) for value in curve)  # some have no number on every step


@pytest.mark.parametrize("name", ["hyfreedp", "dp-adam", "quantile-clipping"])
def test_a_method_under_selection_is_sealed(name: str, storage: str) -> None:
    """What the method leaves open is suggested under its own name; curves stay with the trials."""

    def objective(trial: privtune.Trial) -> float:
        for key in METHODS[name]:
            trial.suggest_float(key, 0.05, 1.0, log=True)
        model = build()
        private = trial.make_private(model, None, TRAIN)
        private.fit(loss_of)
        return trial.score(model, VALIDATION)

    release = make(storage).optimize(
        objective,
        strategy=PapernotSteinke(mean_runs=2, method=name),
        training=LOOP,
        validation=SPLIT,
    )
    assert release.sealed
    assert not release.curves
    assert release.guarantee.epsilon <= 6.0
    assert release.is_nothing or set(METHODS[name]) <= set(release.params)


def charges(storage: str) -> int:
    with Ledger(storage) as ledger:
        return len(ledger.charges("loops"))


@pytest.mark.parametrize("name", ["hyfreedp", "adadp", "dp-adam"])
def test_an_optimizer_for_a_method_that_steps_is_refused_before_the_charge(
    name: str, storage: str
) -> None:
    def objective(trial: privtune.Trial) -> float:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = trial.make_private(model, optimizer, TRAIN)
        private.fit(loss_of)
        return trial.score(model, None)

    with pytest.raises(InvalidInputError, match="Pass optimizer=None") as caught:
        make(storage).optimize(objective, strategy=InRun(arm="a", method=name), training=LOOP)
    assert f"method '{name}' of this arm steps by itself" in str(caught.value)
    assert "nothing was charged" in caught.value.__notes__[0]
    assert charges(storage) == 0


@pytest.mark.parametrize("given", [{}, {"learning_rate": 0.1, "max_grad_norm": 1.0, "rate": 2.0}])
def test_hyperparameters_that_are_missing_or_unknown_are_refused_before_the_charge(
    given: dict[str, float], storage: str
) -> None:
    def objective(trial: privtune.Trial) -> float:
        model = build()
        trial.make_private(model, None, TRAIN, parameters=given).fit(loss_of)
        return trial.score(model, None)

    match = "takes learning_rate, max_grad_norm" if given else "needs learning_rate, max_grad_norm"
    with pytest.raises(PrivTuneError, match=match):
        make(storage).optimize(objective, strategy=InRun(arm="a", method="dp-adam"), training=LOOP)
    assert charges(storage) == 0


def test_a_method_cannot_be_served_with_losses_and_says_what_to_call(storage: str) -> None:
    def objective(trial: privtune.Trial) -> float:
        model = build()
        private = trial.make_private(model, None, TRAIN)
        for x, y in private.batches():
            private.step(loss_of(private.model, x, y))  # type: ignore[arg-type]
        return trial.score(model, None)

    with pytest.raises(InvalidInputError, match=r"private.step\(batch, loss_of\)"):
        make(storage).optimize(objective, strategy=InRun(arm="a", method="hyfreedp"), training=LOOP)
    assert charges(storage) == 0


def test_several_jobs_run_the_same_trials(storage: str) -> None:
    """The same first weights, samples, dropout and noise, whichever thread runs a trial, and when."""
    found: list[dict[int, Any]] = []
    for jobs in (1, 4):
        seen: dict[int, Any] = {}

        def objective(trial: privtune.Trial) -> float:
            rate = trial.suggest_float("rate", 0.1, 2.0, log=True)
            width = trial.suggest_int("width", 4, 16)
            model = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.Linear(width, 3))
            first = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            private = trial.make_private(model, optimizer, TRAIN)
            private.fit(loss_of)
            last = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            score = trial.score(model, VALIDATION)
            if not trial._rehearsal:
                seen[trial.number] = (rate, width, first, last, score)  # noqa: B023
            return score

        study = make(storage, f"jobs-{jobs}", seed=5)
        release = study.optimize(
            objective,
            strategy=PapernotSteinke(mean_runs=6, law="poisson"),
            training=LOOP,
            validation=SPLIT,
            n_jobs=jobs,
        )
        assert not release.is_nothing
        found.append(seen)
    one, four = found
    assert len(one) > 1
    assert one.keys() == four.keys()
    for number, (rate, width, first, last, score) in one.items():
        other = four[number]
        assert (rate, width) == other[:2]
        assert torch.equal(first, other[2])
        torch.testing.assert_close(last, other[3], rtol=1e-4, atol=1e-5)
        # A score is an accuracy of 60 records, plus the same noise.
        assert score == pytest.approx(other[4], abs=1.01 / 60)
