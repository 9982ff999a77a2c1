"""The temperature of a release: charged with its score, kept with it, used by its probabilities alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privtune.strategies import Plan, Release
from privtune.strategies.arms import TEMPERATURE
from privtune.study import Study, plan_study
from privtune.tables.raw_rows import ServedModel
from privtune.tasks import Task
from tests.study.conftest import FIXED, toy_spec
from tests.toy import blobs

ARMS = [FIXED, {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2}]
ROWS = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)


def many() -> Task:
    """Blobs whose private test split is said to hold many records, as plans see it."""
    return replace(blobs(), public_test=False, test_records=5_000)


def spec(**changes: Any) -> Any:
    terms = {"task": "tests.toy:private_blobs", "arms": ARMS, "epochs": 1, "seed": 3}
    return toy_spec(**{**terms, **changes})


def report(calibration: str) -> dict[str, str]:
    return {"metric": "accuracy", "calibration": calibration}


def probabilities(release: Release) -> Any:
    return release.predict(ROWS).filter(like="probability_").to_numpy()


def test_a_temperature_is_charged_within_the_score(storage: str, tmp_path: Path) -> None:
    """Trainings and event are those of a study without it; the plan and the release say that it is there."""
    without = Study.create(spec(report=report("none")), storage)
    other = f"sqlite:///{tmp_path / 'other.db'}"
    with_it = Study.create(spec(report=report("temperature")), other)
    for plan, bare in zip(with_it.plans, without.plans, strict=True):
        assert plan.event == bare.event
        assert TEMPERATURE in plan.released
        assert TEMPERATURE not in bare.released
        assert plan.digest() != bare.digest()
        assert plan.report is not None
        assert bare.report is not None
        assert plan.report.noises[0].scale > bare.report.noises[0].scale
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    for release, bare in zip(with_it.run(), without.run(), strict=True):
        assert torch.equal(release.weights, bare.weights)
        assert release.params == bare.params
        assert release.guarantee.epsilon == bare.guarantee.epsilon
        assert bare.temperature is None
        assert release.temperature is not None
        # The same class of each row, by other probabilities.
        mine, others = release.predict(ROWS), bare.predict(ROWS)
        assert mine["prediction"].tolist() == others["prediction"].tolist()
        with torch.no_grad():
            logits = release.model(torch.from_numpy(ROWS)).double()
        for temperature, made in ((release.temperature, release), (1.0, bare)):
            expected = (logits / temperature).softmax(dim=1).numpy()
            np.testing.assert_allclose(probabilities(made), expected, rtol=1e-6)
    again = Study("toy", other)
    assert [r.temperature for r in again.releases()] == [r.temperature for r in with_it.releases()]


def test_a_public_test_split_gives_one_for_nothing(storage: str, tmp_path: Path) -> None:
    """Unless it is told not to; no score has to be asked for."""
    terms = {"task": "tests.toy:blobs", "arms": ARMS[:1]}
    (release,) = Study.create(spec(**terms), storage).run()
    assert release.temperature is not None
    other = f"sqlite:///{tmp_path / 'other.db'}"
    (bare,) = Study.create(spec(**terms, report=report("none")), other).run()
    assert bare.temperature is None
    assert bare.estimates == release.estimates


def test_a_small_private_split_gives_none_unless_it_is_asked_for() -> None:
    shares = []
    for task, calibration in (
        ("tests.toy:private_blobs", "auto"),
        ("tests.toy:private_blobs", "temperature"),
        ("tests.study.test_temperature:many", "auto"),
    ):
        planned = plan_study(
            spec(task=task, arms=ARMS[:1], report=report(calibration), epsilon=1.0)
        )
        (plan,) = planned.plans
        assert plan.report is not None
        shares.append(plan.report.calibration)
    assert shares == [0.0, 0.2, 0.01]


@pytest.mark.parametrize("temperature", [1 / 64, 0.3, 1.0, 7.0, 4096.0, None])
def test_the_predicted_class_stays(temperature: float | None) -> None:
    """Of logits of every size, level ones included: a quotient that rounds to a tie changes nothing."""
    logits = torch.cat(
        [
            torch.randn(200, 5, generator=torch.Generator().manual_seed(0)) * 10.0**power
            for power in range(-30, 31, 5)
        ]
    )
    close = torch.zeros(1, 5)
    close[0, 3] = 1e-40  # no normal number
    logits = torch.cat([logits, torch.zeros(1, 5), close])
    served = blobs().served(torch.nn.Identity(), temperature=temperature)
    served = replace(served, labels=range(5))
    answers = served.answers(logits.numpy(), np.ones(len(logits), bool))
    assert answers["prediction"][0] == logits.argmax(dim=1).tolist()
    shares = np.array([answers[f"probability_{label}"][0] for label in range(5)])
    chosen = shares[logits.argmax(dim=1).numpy(), np.arange(len(logits))]
    assert bool((chosen == shares.max(axis=0)).all())


def test_a_saved_model_keeps_it(tmp_path: Path) -> None:
    model = blobs().model().eval()
    served = blobs().served(model, temperature=2.5)
    served.save(tmp_path)
    program = torch.export.export(
        model, (torch.zeros(2, 6),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    torch.export.save(program, tmp_path / "network.pt2")
    assert ServedModel.load(tmp_path).temperature == 2.5
    expected = served.predict(ROWS)
    assert ServedModel.load(tmp_path).predict(ROWS).equals(expected)
