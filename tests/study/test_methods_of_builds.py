"""Methods that adapt by themselves, on a model of one's own; and jobs that share trials."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import privtune
from privtune.strategies import InRun, PapernotSteinke
from tests.study.elsewhere import OWN, TERMS
from tests.study.test_optimize import make

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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "by the arm") for name in METHODS),
        ("adaclip", "by the candidate"),
        ("dog", "by the candidate"),
    ],
)
def test_a_method_trains_a_model_of_ones_own(name: str, said: str, storage: str) -> None:
    """Alone it shows its curves; under a selection they stay with the trials."""

    def build(trial: privtune.Trial) -> privtune.Candidate:
        for key in METHODS[name]:
            trial.suggest_float(key, 0.9 * OPEN[key], 1.1 * OPEN[key])
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        return privtune.Candidate(model, method=None if said == "by the arm" else name)

    study = make(storage)
    if said == "by the arm":
        release = study.optimize(
            privtune.make_task(build, **OWN), strategy=InRun(arm="own", method=name), **TERMS
        )
        assert release.strategy == name
        assert release.curves
        for curve in release.curves.values():
            assert len(curve) == study.plans[0].training.schedule.steps
            assert any(math.isfinite(value) for value in curve)  # some have none on every step
    else:
        release = study.optimize(
            privtune.make_task(build, **OWN), strategy=PapernotSteinke(mean_runs=2), **TERMS
        )
        assert study.plans[0].training.method.name == name
        assert not release.curves
    assert release.guarantee.epsilon <= 6.0
    assert set(METHODS[name]) == set(release.params)
    assert bool(release.weights.isfinite().all())


def test_several_jobs_run_the_same_trials(tmp_path: object) -> None:
    """The same first weights, samples, dropout and noise, whichever thread runs a trial, and when."""

    def build(trial: privtune.Trial) -> privtune.Candidate:
        width = trial.suggest_int("width", 4, 16)
        model = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.Linear(width, 3))
        rate = trial.suggest_float("rate", 0.1, 2.0, log=True)
        return privtune.Candidate(model, torch.optim.SGD(model.parameters(), lr=rate))

    found = []
    for jobs in (1, 4):
        storage = f"sqlite:///{tmp_path}/{jobs}.db"
        strategy = PapernotSteinke(mean_runs=6, law="poisson")
        make(storage, seed=5).optimize(
            privtune.make_task(build, **OWN), strategy=strategy, n_jobs=jobs, **TERMS
        )
        curated = privtune.load_study("loop", storage=storage, curator=True)
        found.append([(t["params"], t["score"]) for t in curated.sealed_trials("papernot-steinke")])
    one, four = found
    assert len(one) > 1
    assert [params for params, _ in one] == [params for params, _ in four]
    for (_, score), (_, other) in zip(one, four, strict=True):
        # A score is an accuracy of 60 records, plus the same noise.
        assert score == pytest.approx(other, abs=1.01 / 60)
