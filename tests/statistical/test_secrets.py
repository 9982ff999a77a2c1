"""What every audit of a strategy takes for granted: each training has noise of its own, and the
number of them is the law's. Real rounds of a real study."""

from __future__ import annotations

import pytest

from privtune.study import Study
from privtune.training.engine.train import Training
from tests.study.conftest import toy_spec

RATE = {"learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True}}
NORM = {"parameters": {"max_grad_norm": 1.0}}


@pytest.fixture
def secrets(monkeypatch):
    """The secret of each training that the engine runs. Those of a rehearsal repeat one byte."""
    seen, real = [], Training.of

    def of(self, made):
        def noted():
            for each in made:
                if len(set(each.secret)) > 1:
                    seen.append(each.secret)
                yield each

        return real(self, noted())

    monkeypatch.setattr(Training, "of", of)
    return seen


@pytest.mark.parametrize(
    ("arm", "trainings"),
    [
        ({"strategy": "linear-scaling", "trials": 2, **NORM}, 5),
        ({"strategy": "everything", "trials": 3, **NORM}, 3),
        ({"strategy": "papernot-steinke", "mean_runs": 1, "maximum": 1, **NORM}, 1),
        ({"strategy": "liu-talwar", "mean_runs": 1, **NORM}, 1),
        ({"strategy": "subsampled-tuning", "rate": 0.5, "mean_runs": 1, **NORM}, 2),
        ({"strategy": "subset-search", "trials": 3, **NORM}, 4),
        ({"strategy": "dp-hyper", "mean_runs": 1, **NORM}, 2),
    ],
    ids=lambda value: value["strategy"] if isinstance(value, dict) else "",
)
def test_each_training_has_noise_of_its_own_and_there_is_none_more(
    arm, trainings, secrets, storage
):
    """A geometric law of mean 1 draws 1: a row more would be a run that nobody paid for."""
    with_name = [{"name": "arm", **arm}]
    study = Study.create(toy_spec(arms=with_name, space=RATE, epochs=1), storage)
    study.run()
    study.close()
    assert len(secrets) == trainings
    assert len(set(secrets)) == trainings
