"""Every strategy through a whole study on a toy task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from privtune.accounting import Poisson
from privtune.ledger import Ledger, verify_certificate
from privtune.strategies import NonPrivateError, Release
from privtune.study import Study
from privtune.study.arm_rounds import Batch, TrialFiles
from tests.study.conftest import toy_spec
from tests.toy import curated

CLIP = {"max_grad_norm": 1.0}
RATE = {"learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True}}


def run(storage: str, arm: dict[str, Any], **changes: Any) -> tuple[Study, Release]:
    study = Study.create(toy_spec(arms=[{"name": "arm", **arm}], **changes), storage)
    (release,) = study.run()
    return study, release


@pytest.mark.parametrize(
    "arm",
    [
        {"strategy": "liu-talwar", "mean_runs": 3, "maximum": 6},
        {"strategy": "papernot-steinke", "law": "logarithmic", "mean_runs": 2},
        {"strategy": "subsampled-tuning", "variant": 1, "rate": 0.25, "mean_runs": 3},
        {"strategy": "subsampled-tuning", "variant": 2, "rate": 0.25, "mean_runs": 3},
        {"strategy": "dp-hyper", "share": 0.3, "mean_runs": 3},
    ],
    ids=lambda arm: f"{arm['strategy']}-{arm.get('variant', '')}",
)
def test_a_sealed_arm_shows_its_winner_and_nothing_else(storage: str, arm: dict) -> None:
    study, release = run(storage, arm, seed=1)
    assert release.guarantee.epsilon <= 6.0
    assert not release.is_nothing
    assert release.trials == ()
    assert release.curves == {}
    assert release.utility["test_accuracy"] > 0.3
    assert set(release.params) == {"learning_rate", "max_grad_norm"}
    assert not list(study.folder.glob("sealed/**/*.safetensors"))
    exported = json.dumps(study.export())
    for trial in curated(study).sealed_trials("arm"):
        if trial["params"]["max_grad_norm"] != release.params["max_grad_norm"]:
            assert repr(trial["params"]["max_grad_norm"]) not in exported


def test_everything_and_linear_scaling_show_all_of_their_trials(storage: str) -> None:
    arms = [
        {"name": "tpe", "strategy": "everything", "trials": 3, "parameters": CLIP},
        {
            "name": "grid",
            "strategy": "everything",
            "trials": 3,
            "sampler": "grid",
            "parameters": CLIP,
        },
        {
            "name": "line",
            "strategy": "linear-scaling",
            "trials": 2,
            "steps": [0.5, 1.0],
            "parameters": CLIP,
        },
    ]
    study = Study.create(toy_spec(arms=arms, space=RATE), storage)
    tpe, grid, line = study.run()
    assert [len(r.trials) for r in (tpe, grid, line)] == [3, 3, 4]
    assert tpe.score == max(t.score for t in tpe.trials)
    assert len({t.params["learning_rate"] for t in grid.trials}) == 3
    assert study.spent().epsilon <= 6.0
    again = Study("toy", storage).releases()
    for before, after in zip((tpe, grid, line), again, strict=True):
        assert [t.params for t in before.trials] == [t.params for t in after.trials]
        assert all(
            torch.equal(b.weights, a.weights)
            for b, a in zip(before.trials, after.trials, strict=True)
        )


@pytest.mark.parametrize("variant", [1, 2])
def test_a_search_on_a_subset_shows_its_trials_and_releases_one_training_more(
    storage: str, variant: int
) -> None:
    arm = {"strategy": "subset-search", "variant": variant, "trials": 4, "rate": 0.5}
    study, release = run(storage, {**arm, "startup_trials": 2}, seed=1)
    (plan,) = study.plans
    assert release.guarantee.epsilon <= 6.0
    assert len(release.trials) == 4
    best = max(release.trials, key=lambda trial: trial.score)
    assert release.params == best.params
    assert release.score == best.score
    assert not torch.equal(release.weights, best.weights)
    assert release.utility["test_accuracy"] > 0.3
    # A look by Optuna: all trials, each with what it costs the records of its part.
    shown = release.to_optuna().trials
    assert [trial.value for trial in shown] == [trial.score for trial in release.trials]
    assert {trial.user_attrs["epsilon"] for trial in shown} == {plan.details["trial_epsilon"]}
    again = Study("toy", storage).release("arm")
    assert torch.equal(again.weights, release.weights)
    assert [trial.params for trial in again.trials] == [trial.params for trial in release.trials]


def test_a_search_on_a_subset_that_is_stopped_goes_on_with_the_same_trials(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = {"strategy": "subset-search", "trials": 4, "rate": 0.5, "startup_trials": 1}
    _, whole = run(storage, arm, seed=3)
    other = f"sqlite:///{tmp_path / 'other.db'}"
    study = Study.create(toy_spec(arms=[{"name": "arm", **arm}], seed=3), other)
    train = TrialFiles.train
    calls: list[int] = []

    def stop_at_third(self: TrialFiles, batch: Batch) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(self, batch)

    monkeypatch.setattr(TrialFiles, "train", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    (rest,) = study.run()
    assert len(calls) == 6, "four trials and a final training, one of them begun twice"
    assert [trial.params for trial in rest.trials] == [trial.params for trial in whole.trials]
    assert torch.equal(rest.weights, whole.weights)


def test_no_run_is_released_as_nothing_and_charged(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Poisson, "sample", lambda *_: 0)
    study, release = run(
        storage, {"strategy": "papernot-steinke", "law": "poisson", "mean_runs": 2}
    )
    assert release.is_nothing
    assert release.score is None
    assert release.params == {}
    assert release.utility == {}
    assert "The charge is spent" in release.note
    assert study.spent().epsilon > 5.5
    assert Study("toy", storage).release("arm").note == release.note


def test_an_oracle_runs_only_where_somebody_says_so_and_costs_no_budget(storage: str) -> None:
    arms = [
        {"name": "oracle", "strategy": "non-private-grid", "points": 2},
        {"name": "arm", "strategy": "papernot-steinke", "mean_runs": 2},
    ]
    study = Study.create(toy_spec(arms=arms), storage)
    with pytest.raises(NonPrivateError, match="Run it with --non-private"):
        study.run()
    with Ledger(storage) as ledger:
        assert not ledger.charges("toy")
    oracle, _ = study.run(non_private=True)
    assert math.isinf(oracle.guarantee.epsilon)
    assert len(oracle.trials) == 4
    assert study.spent().epsilon <= 6.0
    assert [s.state for s in study.status()] == ["not charged", "settled"]
    with Ledger(storage) as ledger:
        assert len(ledger.charges("toy")) == 1


def test_a_grid_that_changes_the_guarantee_runs_what_it_charged(storage: str) -> None:
    space = {
        **toy_spec().space,
        "epochs": {"type": "categorical", "choices": [1, 2]},
    }
    arm = {"strategy": "papernot-steinke", "mean_runs": 6, "guarantee": "common"}
    _, release = run(storage, arm, space=space, seed=2)
    assert release.params["epochs"] in (1, 2)


def test_the_certificate_in_the_folder_verifies(storage: str) -> None:
    study, release = run(storage, {"strategy": "papernot-steinke", "mean_runs": 2})
    certificate = json.loads((study.folder / "certificate.json").read_text())
    verified = verify_certificate(certificate)
    assert verified.charges == 1
    assert study.export()["arms"][0]["release"]["params"] == dict(release.params)
    frame = study.compare()
    assert frame.loc["arm", "params.learning_rate"] == release.params["learning_rate"]


def test_scores_can_be_losses_with_laplace_noise(storage: str) -> None:
    scoring = {"metric": "loss", "mechanism": "laplace", "bound": 4.0}
    _, release = run(storage, {"strategy": "papernot-steinke", "mean_runs": 2}, scoring=scoring)
    assert release.score is not None
    assert release.score < 1.0
