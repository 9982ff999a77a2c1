"""Studies from creation to release, with interruptions."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
import torch

import privtune
from privtune.errors import PrivTuneError
from privtune.ledger import Budget, BudgetExceededError, ChargeRequest, Ledger
from privtune.strategies import Plan
from privtune.study import (
    Observer,
    Study,
    StudyExistsError,
    StudyNotFoundError,
    StudySpec,
)
from privtune.study.lifecycle import Life
from tests.study.conftest import toy_spec
from tests.toy import LOADS, curated


def states(study: Study) -> list[str]:
    return [status.state for status in study.status()]


@pytest.mark.quick
def test_a_study_runs_to_its_releases(storage: str) -> None:
    before = len(LOADS)
    study = Study.create(toy_spec(seed=2), storage)
    assert states(study) == ["planned"] * 3
    assert len(LOADS) == before, "creating a study touches no data"

    releases = study.run()
    assert states(study) == ["settled"] * 3
    assert [r.arm for r in releases] == ["defaults", "selection", "hyfree"]
    assert releases[0].utility["test_accuracy"] > 0.5
    assert study.spent().epsilon <= 6.0
    assert study.remaining() >= 0.0

    defaults, selection, hyfree = releases
    assert defaults.score is None
    assert selection.score is not None
    assert set(selection.params) == {"learning_rate", "max_grad_norm"}
    assert selection.sealed
    assert not selection.curves
    assert len(hyfree.curves["learning_rate"]) == study.plans[2].training.schedule.steps
    study.close()
    again = Study("toy", storage)
    for before, after in zip(releases, again.releases(), strict=True):
        assert torch.equal(before.weights, after.weights)
        assert before.params == after.params
        assert before.score == after.score
        assert before.guarantee == after.guarantee
        assert before.utility == after.utility
        assert before.curves == after.curves


def test_whoever_shows_a_study_reads_no_weights(
    finished_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them imports torch, which takes longer than all else that showing takes."""
    monkeypatch.setattr("safetensors.torch.load", lambda _: pytest.fail("weights were read"))
    shown = Study(finished_study.name, finished_study.storage)
    assert [status.release.score for status in shown.status() if status.release][1] is not None
    monkeypatch.undo()
    assert all(release.weights.numel() for release in shown.releases())


def test_creating_twice_is_an_error_and_changes_nothing(storage: str) -> None:
    Study.create(toy_spec(), storage)
    with pytest.raises(StudyExistsError, match="exists already"):
        Study.create(toy_spec(epochs=3), storage)
    assert Study("toy", storage).spec.epochs == 2


def test_a_study_of_a_program_names_the_call_that_goes_on_with_it(storage: str) -> None:
    budget = privtune.Budget(4.0, 1e-5, name="mine")
    privtune.create_study("mine", budget=budget, storage=storage)
    with pytest.raises(StudyExistsError, match=r"load_if_exists=True\)\.$") as refused:
        privtune.create_study("mine", budget=budget, storage=storage)
    assert "privtune study run" not in str(refused.value)
    again = privtune.create_study("mine", budget=budget, storage=storage, load_if_exists=True)
    assert again.name == "mine"


def test_a_study_that_is_not_there(storage: str) -> None:
    Study.create(toy_spec(), storage)
    with pytest.raises(StudyNotFoundError, match="it holds: toy"):
        Study("joy", storage)


def test_running_a_finished_study_spends_nothing(storage: str) -> None:
    study = Study.create(toy_spec(), storage)
    first = study.run()
    spent, loads = study.spent(), len(LOADS)
    assert study.finished
    again = study.run(executor="external", device="cuda:7")  # nobody is waited for
    assert [release.params for release in again] == [release.params for release in first]
    assert [release.arm for release in again] == list(study.arms)
    assert study.spent() == spent
    assert len(LOADS) == loads


def test_all_arms_are_charged_before_data_is_touched(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []
    study = Study.create(toy_spec(), storage)
    load = StudySpec.load_task

    def spy(spec: object, *released: object) -> object:
        task = load(spec, *released)
        original = task.load

        def loading() -> object:
            with Ledger(storage) as ledger:
                seen.append(("load", [c.state for c in ledger.charges("toy")]))
            return original()

        object.__setattr__(task, "load", loading)
        return task

    monkeypatch.setattr(StudySpec, "load_task", spy)
    study.run(force=True)  # without the curator's look
    assert seen == [("load", ["started", "reserved", "reserved"])]


def test_a_study_that_does_not_fit_is_refused_whole(storage: str) -> None:
    spec = toy_spec()
    study = Study.create(spec, storage)
    with Ledger(storage) as ledger:
        ledger.reserve("toy", [ChargeRequest(event=study.plans[0].event, note="another")])
    loads = len(LOADS)
    with pytest.raises(BudgetExceededError):
        study.run(force=True)  # without the curator's look
    assert states(study) == ["planned"] * 3
    assert len(LOADS) == loads


def test_a_budget_with_other_terms_is_named(storage: str) -> None:
    with Ledger(storage) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="toy"))
    with pytest.raises(PrivTuneError, match=r"exists with epsilon = 3\.0"):
        Study.create(toy_spec(), storage)


def test_data_of_another_size_than_declared_is_refused_before_the_charge(storage: str) -> None:
    study = Study.create(toy_spec(task="tests.toy:wrong_size"), storage)
    with pytest.raises(PrivTuneError, match="declares 250 train records"):
        study.run()
    assert states(study)[0] == "planned"


class Stop(Observer):
    """Interrupts a study at a given moment."""

    def __init__(self, arm: str, moment: str) -> None:
        self.arm, self.moment = arm, moment

    def arm_started(self, plan: Plan) -> None:
        if (plan.arm, "start") == (self.arm, self.moment):
            raise KeyboardInterrupt

    def step(self, plan: Plan, done: int, steps: int) -> None:
        if (plan.arm, "step") == (self.arm, self.moment) and done == steps // 2:
            raise KeyboardInterrupt

    def released(self, plan: Plan, release: object) -> None:
        if (plan.arm, "release") == (self.arm, self.moment):
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arm", "moment"),
    [("defaults", "step"), ("defaults", "release"), ("selection", "start"), ("hyfree", "step")],
)
def test_an_interrupted_study_goes_on_without_a_second_charge(
    storage: str, arm: str, moment: str
) -> None:
    study = Study.create(toy_spec(), storage)
    with pytest.raises(KeyboardInterrupt):
        study.run(Stop(arm, moment))
    spent = study.spent()
    study.close()

    again = Study("toy", storage)
    releases = again.run()
    assert len(releases) == 3
    assert states(again) == ["settled"] * 3
    assert again.spent() == spent
    with Ledger(storage) as ledger:
        assert len(ledger.charges("toy")) == 3


class Stopping(Observer):
    """Interrupts each arm at its step."""

    def __init__(self, **at: int) -> None:
        self.at, self.steps = at, []

    def step(self, plan: Plan, done: int, steps: int) -> None:
        self.steps.append((plan.arm, done))
        if done == self.at.get(plan.arm):
            raise KeyboardInterrupt


@pytest.mark.parametrize("large", [False, True])
def test_a_long_training_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr("privtune.training.engine.checkpoint._SECONDS", 0.0)
    monkeypatch.setattr("privtune.training.engine.checkpoint._SHARE", 1e9)
    if large:
        monkeypatch.setattr("privtune.study.rows._LARGE", 100)
    spec = toy_spec(seed=2)
    (tmp_path / "whole").mkdir()
    whole = Study.create(spec, f"sqlite:///{tmp_path / 'whole' / 'privtune.db'}").run()
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    Study.create(spec, storage).close()
    observers = [Stopping(defaults=7), Stopping(hyfree=4), Stopping(hyfree=15), Stopping()]
    for observer in observers[:-1]:
        with pytest.raises(KeyboardInterrupt):
            Study("toy", storage).run(observer)
    life = Life("toy", storage)
    assert life.sealed("defaults").names() == []
    assert life.sealed("hyfree").names() == ["checkpoint"]
    releases = Study("toy", storage).run(observers[-1])
    assert observers[1].steps[0] == ("defaults", 7)
    assert observers[2].steps[0] == ("hyfree", 4)
    assert observers[3].steps[0] == ("hyfree", 15)
    for one, other in zip(whole, releases, strict=True):
        assert torch.equal(one.weights, other.weights)
        assert (one.params, one.curves) == (other.params, other.curves)
    assert life.sealed("hyfree").names() == []
    assert not (tmp_path / "toy" / "sealed" / "hyfree").exists()
    digests = [charge.transcript_digest for charge in life.ledger.charges("toy")]
    with Ledger(f"sqlite:///{tmp_path / 'whole' / 'privtune.db'}") as ledger:
        assert [charge.transcript_digest for charge in ledger.charges("toy")] == digests


def test_the_secret_and_the_losers_are_gone_after_the_release(storage: str) -> None:
    study = Study.create(toy_spec(), storage)
    study.run()
    for plan in study.plans:
        with closing(Life("toy", storage)) as life:
            assert life.arms()[plan.arm].secret is None
            assert life.sealed(plan.arm).names() == [], "models that lost are in no row either"
    assert not list(study.folder.glob("sealed/**/*.safetensors"))


def test_a_diverged_candidate_is_a_result_and_never_wins(storage: str) -> None:
    space = {
        "learning_rate": {"type": "categorical", "choices": [0.5, 1e300]},
        "max_grad_norm": {"type": "float", "low": 1.0, "high": 2.0},
    }
    arm = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 12}
    study = Study.create(toy_spec(space=space, arms=[arm], seed=5), storage)
    (release,) = study.run()
    trials = curated(study).sealed_trials("selection")
    rates = {trial["params"]["learning_rate"] for trial in trials}
    assert rates == {0.5, 1e300}, "the seed was chosen so that both are drawn"
    for trial in trials:
        assert trial["state"] == "COMPLETE"
        assert (trial["score"] == -math.inf) == (trial["params"]["learning_rate"] == 1e300)
    assert release.params["learning_rate"] == 0.5


def test_a_seed_makes_a_study_reproducible_and_none_does_not(tmp_path: Path) -> None:
    arms = toy_spec().model_dump(mode="json")["arms"][:2]

    def weights(name: str, seed: int | None) -> list[torch.Tensor]:
        study = Study.create(toy_spec(seed=seed, arms=arms), f"sqlite:///{tmp_path / name}.db")
        return [release.weights for release in study.run()]

    first, second, other = weights("a", 3), weights("b", 3), weights("c", None)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
