"""study.optimize: a user's own loop, with every refusal where the mistake is made."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
import threading
import traceback
import types
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from scipy.stats import chisquare
from torch import nn

import privtune
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import Ledger, OpenRound
from privtune.priors import LogNormal
from privtune.spaces import DependentSamplerError, SearchSpace
from privtune.strategies import (
    Everything,
    Fixed,
    LinearScaling,
    LiuTalwar,
    PapernotSteinke,
    Scoring,
    StrategyError,
)
from privtune.strategies import SubsampledTuning as Subsampled
from privtune.study import (
    SealedError,
    SealedTrialError,
    Study,
    StudyInterruptedError,
    _optimize,
)
from privtune.study.failures import ArmStoppedError
from privtune.study.objective import ObjectiveFiles, plan_objective
from privtune.training.own_loop.private_training import PlanExhaustedError
from tests.toy import blobs

DATA = blobs().load()
TRAIN, VALIDATION = (DATA.train.x, DATA.train.y), (DATA.validation.x, DATA.validation.y)
LOOP = privtune.DPSGD(records=240, epochs=1, expected_batch_size=24)
SPLIT = privtune.Validation(records=60)
ARGUMENTS: dict[str, Any] = {"training": LOOP, "validation": SPLIT}


def train(trial: privtune.Trial, model: nn.Module, rate: float, train: Any = TRAIN) -> nn.Module:
    private = trial.make_private(model, torch.optim.SGD(model.parameters(), rate), train)
    for x, y in private.batches():
        private.step(nn.functional.cross_entropy(private.model(x), y, reduction="none"))
    return model


def objective(trial: privtune.Trial) -> float:
    rate = trial.suggest_float("rate", 0.1, 2.0, log=True)
    if trial.suggest_categorical("deep", [True, False]):
        width = trial.suggest_int("width", 4, 8)
        model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    else:
        model = nn.Sequential(nn.Linear(6, 3))
    return trial.score(train(trial, model, rate), VALIDATION)


def make(storage: str, **options: Any) -> Study:
    budget = privtune.Budget(6.0, 1e-5, name="loop")
    return privtune.create_study("loop", budget=budget, storage=storage, **options)


def charges(storage: str) -> int:
    with Ledger(storage) as ledger:
        return len(ledger.charges("loop"))


def test_a_conditional_space_is_searched_and_the_best_alone_released(storage: str) -> None:
    study = make(storage, seed=3)
    heard: list[Any] = []
    release = study.optimize(
        objective,
        strategy=PapernotSteinke(mean_runs=4),
        callbacks=[lambda s, r: heard.append((s.name, r.arm))],
        **ARGUMENTS,
    )
    assert release.guarantee.epsilon <= 6.0
    assert ("width" in release.params) == release.params["deep"]
    assert release.score is not None
    assert release.trials == ()
    assert heard == [("loop", "papernot-steinke")]
    declared = study.plans[0].public_facts
    assert declared["training records"] == "240, private"
    assert declared["validation records"] == "60, private"
    assert study.export()["certificate"]["entries"][1]["body"]["public"] == declared
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    if release.params["deep"] and release.params["width"] == 8:
        model.load_state_dict(release.state_dict())
    assert sum(t.numel() for t in release.state_dict().values()) == release.weights.numel()
    frame = study.compare()
    assert list(frame.index) == ["papernot-steinke"]
    assert frame.loc["papernot-steinke", "state"] == "settled"
    assert charges(storage) == 1
    again = study.optimize(
        objective, strategy=PapernotSteinke(mean_runs=4), epsilon=6.0, **ARGUMENTS
    )
    assert torch.equal(again.weights, release.weights)
    assert not study.finished, "another arm may come"
    assert charges(storage) == 1


def test_the_released_file_is_loadable_without_privtune(storage: str) -> None:
    from safetensors.torch import load_file

    study = make(storage)
    study.optimize(
        lambda t: t.score(train(t, nn.Sequential(nn.Linear(6, 3)), 0.5), VALIDATION),
        strategy=PapernotSteinke(mean_runs=2),
        **ARGUMENTS,
    )
    nn.Sequential(nn.Linear(6, 3)).load_state_dict(load_file(study.model_path("papernot-steinke")))
    assert (study.folder / "papernot-steinke" / "certificate.json").exists()


def test_trials_are_for_the_curator_alone(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    study = make(storage)
    study.optimize(objective, strategy=PapernotSteinke(mean_runs=3), **ARGUMENTS)
    with pytest.raises(PrivTuneError, match="PRIVTUNE_CURATOR=1 or load the study with curator"):
        _ = study.trials
    curator = privtune.load_study("loop", storage=storage, curator=True)
    assert curator.trials
    assert all(math.isfinite(t.value) for t in curator.trials)
    monkeypatch.setenv("PRIVTUNE_CURATOR", "1")
    assert len(privtune.load_study("loop", storage=storage).trials) == len(curator.trials)


def test_fixed_needs_no_score_and_touches_no_validation(storage: str) -> None:
    scores: list[float] = []

    def once(trial: privtune.Trial) -> float:
        model = train(trial, nn.Sequential(nn.Linear(6, 3)), 0.5)
        scores.append(trial.score(model, "never looked at"))
        return scores[-1]

    release = make(storage).optimize(once, strategy=Fixed(), training=LOOP)
    assert math.isnan(scores[0])
    assert release.score is None
    assert not release.is_nothing


def test_a_hyperparameter_that_is_called_otherwise_is_refused_before_the_charge(
    storage: str,
) -> None:
    study = make(storage)
    with pytest.raises(
        StrategyError, match=r"called learning_rate, but .* are deep, rate(, width)?:"
    ) as said:
        study.optimize(objective, strategy=Subsampled(rate=0.25, mean_runs=2), **ARGUMENTS)
    assert "or choose another extrapolation than scale-learning-rate." in str(said.value)
    assert charges(storage) == 0
    # What the arm fixes does not reach the winner's hyperparameters unless it is suggested.
    fixed = Subsampled(rate=0.25, mean_runs=2, parameters={"learning_rate": 0.5})
    with pytest.raises(StrategyError, match="called learning_rate"):
        study.optimize(objective, strategy=fixed, **ARGUMENTS)
    assert charges(storage) == 0


def test_subsampled_tuning_trains_on_the_subset_and_then_on_the_rest(storage: str) -> None:
    seen: list[float] = []

    def spy(trial: privtune.Trial) -> float:
        rate = trial.suggest_float("learning_rate", 0.05, 0.2)
        seen.append(rate)
        return trial.score(train(trial, nn.Sequential(nn.Linear(6, 3)), rate), VALIDATION)

    release = make(storage).optimize(
        spy, strategy=Subsampled(variant=1, rate=0.25, mean_runs=2), **ARGUMENTS
    )
    assert 0.05 <= release.params["learning_rate"] <= 0.2, "the space is that of the release"
    assert seen[-1] == release.params["learning_rate"]
    # A quarter is tuned on and three are trained on: a third of the rate.
    assert all(0.05 / 3 - 1e-9 <= rate <= 0.2 / 3 + 1e-9 for rate in seen[:-1])
    assert any(3 * rate == pytest.approx(seen[-1], rel=1e-9) for rate in seen[:-1])


def test_a_whole_number_is_no_learning_rate_on_a_subset(storage: str) -> None:
    def whole(trial: privtune.Trial) -> float:
        rate = trial.suggest_int("learning_rate", 1, 3)
        return trial.score(train(trial, nn.Sequential(nn.Linear(6, 3)), rate), VALIDATION)

    with pytest.raises(InvalidInputError, match="must be suggested by suggest_float"):
        make(storage).optimize(whole, strategy=Subsampled(rate=0.25, mean_runs=2), **ARGUMENTS)
    assert charges(storage) == 0


def seven_times(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 7.0 * nn.functional.cross_entropy(model(x), y, reduction="none")


def squared(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - nn.functional.one_hot(y, 3)).square().mean(dim=1)


def reconstructed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) @ model[0].weight - x).square().sum(dim=1)


def by_hand(name: str, weights: dict[str, torch.Tensor], x: np.ndarray, y: np.ndarray) -> Any:
    """The losses of records, by NumPy."""
    w, b = (weights[n].double().numpy() for n in ("0.weight", "0.bias"))
    outputs = x @ w.T + b
    if name == "reconstructed":
        return ((outputs @ w - x) ** 2).sum(axis=1)
    if name == "squared":
        return ((outputs - np.eye(3)[y]) ** 2).mean(axis=1)
    outputs -= outputs.max(axis=1, keepdims=True)
    return 7.0 * (np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(len(y)), y])


@pytest.mark.parametrize("bound", [0.5, 100.0])
@pytest.mark.parametrize("loss_of", [seven_times, squared, reconstructed])
@pytest.mark.parametrize("form", ["pair", "dict", "step"])
def test_the_metric_loss_is_the_loss_that_was_trained_on(
    storage: str, loss_of: Any, bound: float, form: str
) -> None:
    """Clipped to its bound, on a public split, against the released weights."""

    def named(model: nn.Module, record: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(model, record["x"], record["labels"])

    def one(trial: privtune.Trial) -> float:
        model = nn.Sequential(nn.Linear(6, 3))
        rate = trial.suggest_float("rate", 0.01, 0.1)
        data, held = TRAIN, VALIDATION
        if form == "dict":
            data, held = ({"x": x, "labels": y} for x, y in (TRAIN, VALIDATION))
        private = trial.make_private(model, torch.optim.SGD(model.parameters(), rate), data)
        if form == "step":
            for batch in private.batches():
                private.step(batch, loss_of)
        else:
            private.fit(named if form == "dict" else loss_of)
        return trial.score(model, held)

    scoring = Scoring(metric="loss", bound=bound)
    release = make(storage).optimize(
        one,
        strategy=PapernotSteinke(mean_runs=2),
        training=LOOP,
        validation=privtune.Validation(records=60, public=True, scoring=scoring),
    )
    x, y = (part.numpy() for part in VALIDATION)
    losses = by_hand(loss_of.__name__, release.state_dict(), x.astype(float), y)
    assert release.score == pytest.approx(-np.clip(losses, 0.0, bound).mean(), rel=1e-5)


def test_a_loss_that_nobody_knows_is_no_metric(storage: str) -> None:
    """In Opacus' form the loop computes losses; refused in the rehearsal, before the charge."""
    study = make(storage)
    split = privtune.Validation(records=60, scoring=Scoring(metric="loss", bound=3.0))
    with pytest.raises(
        InvalidInputError, match=r"loss'?: is not known here.* private\.fit\(loss_of\)"
    ):
        study.optimize(objective, strategy=PapernotSteinke(), training=LOOP, validation=split)
    assert charges(storage) == 0


def test_everything_takes_any_sampler_and_shows_all_trials(storage: str) -> None:
    study = make(storage)
    release = study.optimize(
        objective,
        strategy=Everything(trials=3),
        sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=1),
        **ARGUMENTS,
    )
    assert len(release.trials) == 3
    assert release.score == max(t.score for t in release.trials)
    assert len(study.release("everything").trials) == 3


def test_a_pruner_needs_public_scores(storage: str) -> None:
    def reporting(trial: privtune.Trial) -> float:
        model = train(trial, nn.Sequential(nn.Linear(6, 3)), 0.5)
        score = trial.score(model, VALIDATION)
        trial.report(score, step=0)
        assert not trial.should_prune()
        return score

    study = make(storage)
    with pytest.raises(PrivTuneError, match="each intermediate score would be a release"):
        study.optimize(reporting, strategy=Everything(trials=2), epsilon=2.0, arm="a", **ARGUMENTS)
    public = privtune.Validation(records=60, public=True)
    release = study.optimize(
        reporting,
        strategy=Everything(trials=2),
        epsilon=2.0,
        arm="b",
        pruner=optuna.pruners.MedianPruner(),
        training=LOOP,
        validation=public,
    )
    assert len(release.trials) == 2


def test_threads_share_a_round(storage: str) -> None:
    release = make(storage).optimize(
        objective, strategy=PapernotSteinke(mean_runs=4), n_jobs=2, **ARGUMENTS
    )
    assert not release.is_nothing
    assert charges(storage) == 1


def test_the_best_of_the_trials_is_released(storage: str) -> None:
    study = make(storage, seed=1)
    release = study.optimize(objective, strategy=PapernotSteinke(mean_runs=8), **ARGUMENTS)
    curator = privtune.load_study("loop", storage=storage, curator=True)
    # What is shown is held to what an accuracy can be; the choice is among the scores themselves.
    assert release.score == min(max(t.value for t in curator.trials), 1.0)
    assert release.params in [t["params"] for t in curator.sealed_trials(study.arms[0])]


def test_a_mistake_of_the_program_is_found_before_anything_is_charged(storage: str) -> None:
    def broken(trial: privtune.Trial) -> float:
        return trial.score(train(trial, nn.Sequential(nn.Linear(7, 3)), 0.5), VALIDATION)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        make(storage).optimize(broken, strategy=PapernotSteinke(mean_runs=2), **ARGUMENTS)
    assert "nothing was charged" in caught.value.__notes__[0]
    assert charges(storage) == 0


def test_a_failure_stops_the_arm_which_goes_on_after_the_mend(storage: str) -> None:
    broken = [True]

    def flaky(trial: privtune.Trial) -> float:
        if broken[0] and trial._live is None and not trial._rehearsal:
            raise KeyError("typo")
        return objective(trial)

    study, strategy = make(storage), PapernotSteinke(mean_runs=3)
    with pytest.raises(ArmStoppedError, match="nothing was released") as caught:
        study.optimize(flaky, strategy=strategy, epsilon=5.0, **ARGUMENTS)
    assert "typo" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None
    broken[0] = False
    release = study.optimize(flaky, strategy=strategy, epsilon=5.0, **ARGUMENTS)
    assert not release.is_nothing
    assert charges(storage) == 1


def test_a_timeout_releases_nothing_and_can_go_on(storage: str) -> None:
    study, strategy = make(storage), PapernotSteinke(mean_runs=3)
    with pytest.raises(StudyInterruptedError, match="call optimize again"):
        study.optimize(objective, strategy=strategy, timeout=1e-9, **ARGUMENTS)
    assert not study.releases()
    assert not study.optimize(objective, strategy=strategy, **ARGUMENTS).is_nothing
    assert charges(storage) == 1


def test_an_arm_does_not_change_its_plan(storage: str) -> None:
    study = make(storage)
    with pytest.raises(StudyInterruptedError):
        study.optimize(objective, strategy=PapernotSteinke(mean_runs=3), timeout=1e-9, **ARGUMENTS)
    with pytest.raises(PrivTuneError, match="exists with another plan"):
        study.optimize(objective, strategy=PapernotSteinke(mean_runs=5), **ARGUMENTS)


@pytest.mark.parametrize(
    ("factor", "same"), [(1.0 + 1e-3, True), (1.0 - 1e-3, True), (1.03, False)]
)
def test_an_arm_of_another_version_s_accounts_runs_as_it_was_charged(
    storage: str, monkeypatch: pytest.MonkeyPatch, factor: float, same: bool
) -> None:
    """Today's calibration asks for a little other noise than the one that was charged."""
    study, strategy = make(storage), PapernotSteinke(mean_runs=2)
    with pytest.raises(StudyInterruptedError):
        study.optimize(objective, strategy=strategy, timeout=1e-9, **ARGUMENTS)
    charged = study.status()[0].plan
    real = _optimize.plan_objective

    def drifted(*args: Any, **options: Any) -> Any:
        plan = real(*args, **options)
        search = replace(plan.search, trainings=(plan.search.trainings[0].scaled(factor),))
        return replace(plan, training=plan.training.scaled(factor), search=search)

    monkeypatch.setattr(_optimize, "plan_objective", drifted)
    if not same:
        with pytest.raises(PrivTuneError, match="exists with another plan"):
            study.optimize(objective, strategy=strategy, **ARGUMENTS)
        return
    study.optimize(objective, strategy=strategy, **ARGUMENTS)
    assert study.status()[0].plan == charged
    assert charges(storage) == 1


def test_a_second_arm_must_say_what_it_may_cost(storage: str) -> None:
    study = make(storage)
    study.optimize(objective, strategy=PapernotSteinke(mean_runs=2), epsilon=2.0, **ARGUMENTS)
    with pytest.raises(PrivTuneError, match="say what arm 'liu-talwar' may cost"):
        study.optimize(objective, strategy=LiuTalwar(mean_runs=2), **ARGUMENTS)
    study.optimize(objective, strategy=LiuTalwar(mean_runs=2), epsilon=2.0, **ARGUMENTS)
    assert study.arms == ("papernot-steinke", "liu-talwar")
    assert study.spent().epsilon <= 6.0


def test_priors_and_a_sampler_of_ones_own(storage: str) -> None:
    class Mine:
        independent = True

        def draw(self, rng: Any) -> dict[str, float]:
            return {"rate": 0.5}

    def own(trial: privtune.Trial) -> float:
        rate = trial.suggest("rate", LogNormal(0.5, 0.2))
        return trial.score(train(trial, nn.Sequential(nn.Linear(6, 3)), rate), VALIDATION)

    study = make(storage)
    first = study.optimize(own, strategy=PapernotSteinke(mean_runs=2), epsilon=2.0, **ARGUMENTS)
    assert 0.1 < first.params["rate"] < 2.0
    second = study.optimize(
        own,
        strategy=PapernotSteinke(mean_runs=2),
        arm="mine",
        epsilon=2.0,
        sampler=Mine(),
        **ARGUMENTS,
    )
    assert second.params["rate"] == 0.5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"sampler": optuna.samplers.TPESampler()},
            DependentSamplerError,
            "TPESampler does not draw",
        ),
        ({"sampler": object()}, DependentSamplerError, "Set `independent = True`"),
        ({"pruner": optuna.pruners.MedianPruner()}, PrivTuneError, "pruner 'MedianPruner'"),
        ({"validation": None}, PrivTuneError, "no validation split was declared"),
        ({"strategy": LinearScaling()}, PrivTuneError, "cannot call a function of yours"),
        ({"n_jobs": 0}, PrivTuneError, "n_jobs"),
        ({"n_jobs": "2"}, InvalidInputError, "n_jobs = '2': must be a whole number"),
        ({"timeout": math.nan}, InvalidInputError, "timeout = nan: must be finite seconds"),
        ({"timeout": "5"}, InvalidInputError, "timeout = '5': must be finite seconds"),
        ({"timeout": 0}, InvalidInputError, "timeout = 0: must be finite seconds above 0"),
        ({"timeout": -1.0}, InvalidInputError, "timeout = -1.0: must be finite seconds above 0"),
        ({"strategy": "papernot-steinke"}, InvalidInputError, "must be one of privtune.strategies"),
        ({"strategy": PapernotSteinke}, InvalidInputError, "must be one of privtune.strategies"),
        ({"training": 240}, InvalidInputError, "must be a privtune.DPSGD"),
        ({"validation": 60}, InvalidInputError, "must be a privtune.Validation"),
        ({"epsilon": "2"}, InvalidInputError, "epsilon = '2': must be a finite number"),
    ],
)
def test_what_is_not_covered_is_refused_before_anything_is_charged(
    storage: str, changes: dict, error: type[Exception], message: str
) -> None:
    study = make(storage)
    with pytest.raises(error, match=message):
        study.optimize(
            objective, **{"strategy": PapernotSteinke(mean_runs=2), **ARGUMENTS, **changes}
        )
    assert charges(storage) == 0


def _twice_private(trial: privtune.Trial) -> float:
    train(trial, nn.Sequential(nn.Linear(6, 3)), 0.5)
    train(trial, nn.Sequential(nn.Linear(6, 3)), 0.5)
    return 0.0


def _twice_scored(trial: privtune.Trial) -> float:
    model = train(trial, nn.Sequential(nn.Linear(6, 3)), 0.5)
    trial.score(model, VALIDATION)
    return trial.score(model, VALIDATION)


def _one_name_twice(trial: privtune.Trial) -> float:
    model = train(trial, nn.Sequential(nn.Linear(6, 3)), trial.suggest_float("a", 0.1, 0.9))
    return trial.score(model, VALIDATION) * trial.suggest_int("a", 1, 4)


def _one_name_twice_by_luck(trial: privtune.Trial) -> float:
    model = train(trial, nn.Sequential(nn.Linear(6, 3)), trial.suggest_float("a", 0.1, 0.9))
    trial.suggest_float("a", 0.0, 1.0)
    return trial.score(model, VALIDATION)


def _other_number(trial: privtune.Trial) -> float:
    model = train(trial, nn.Sequential(nn.Linear(6, 3)), 0.5)
    trial.score(model, VALIDATION)
    return 0.99


def _never_private(trial: privtune.Trial) -> float:
    return 0.5


def _more_steps(trial: privtune.Trial) -> float:
    model = nn.Sequential(nn.Linear(6, 3))
    private = trial.make_private(model, torch.optim.SGD(model.parameters(), 0.1), TRAIN)
    for _ in range(2):
        for x, y in private.batches():
            private.step(nn.functional.cross_entropy(private.model(x), y, reduction="none"))
    return trial.score(model, VALIDATION)


def _other_size(trial: privtune.Trial) -> float:
    model = nn.Sequential(nn.Linear(6, 3))
    train(trial, model, 0.1, (TRAIN[0][:100], TRAIN[1][:100]))
    return trial.score(model, VALIDATION)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (_twice_private, SealedTrialError, "called twice in one trial"),
        (_twice_scored, SealedTrialError, "one look at the private validation split"),
        (_one_name_twice, InvalidInputError, "was suggested to this trial before"),
        (_one_name_twice_by_luck, InvalidInputError, "was suggested to this trial before"),
        (_other_number, SealedTrialError, "public or noised"),
        (_never_private, SealedTrialError, "without trial.make_private"),
        (_more_steps, PlanExhaustedError, "all of them are taken"),
        (_other_size, PrivTuneError, "must hold the declared records"),
    ],
)
def test_a_loop_that_leaves_its_plan_is_stopped(
    storage: str, wrong: Any, error: type[Exception], message: str
) -> None:
    study = make(storage)
    with pytest.raises(error, match=message):
        study.optimize(wrong, strategy=PapernotSteinke(mean_runs=2), **ARGUMENTS)
    assert not study.releases()


@pytest.mark.parametrize("active", [True, False])
def test_the_users_own_logging_is_stopped(
    storage: str, monkeypatch: pytest.MonkeyPatch, active: bool
) -> None:
    fake = types.ModuleType("mlflow")
    fake.active_run = lambda: object() if active else None  # type: ignore[attr-defined]
    tools = types.ModuleType("mlflow.utils.autologging_utils")
    tools.AUTOLOGGING_INTEGRATIONS = {"pytorch": {"disable": False}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.utils.autologging_utils", tools)
    message = "mlflow.end_run" if active else "mlflow.autolog\\(disable=True\\)"
    with pytest.raises(SealedError, match=message):
        make(storage).optimize(objective, strategy=PapernotSteinke(mean_runs=2), **ARGUMENTS)
    assert charges(storage) == 0


def test_an_open_study_has_no_arms_to_run_and_a_declared_one_no_objective(storage: str) -> None:
    from tests.study.conftest import toy_spec

    study = make(storage)
    with pytest.raises(PrivTuneError, match=r"study\.optimize"):
        study.run()
    declared = Study.create(toy_spec(arms=[{"name": "hyfree", "strategy": "hyfreedp"}]), storage)
    with pytest.raises(PrivTuneError, match="Make an open study"):
        declared.optimize(objective, strategy=PapernotSteinke(), **ARGUMENTS)


def test_deleting_a_study_never_deletes_a_charge(storage: str) -> None:
    study = make(storage)
    study.optimize(objective, strategy=PapernotSteinke(mean_runs=2), **ARGUMENTS)
    spent = study.spent()
    study.delete()
    assert not study.folder.exists()
    with pytest.raises(PrivTuneError, match="no study named"):
        privtune.load_study("loop", storage=storage)
    with Ledger(storage) as ledger:
        assert ledger.spent("loop") == spent


def test_a_progress_bar_says_no_more_than_that_a_sealed_arm_runs(
    storage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    release = make(storage, seed=3).optimize(
        objective, strategy=PapernotSteinke(mean_runs=4), show_progress_bar=True, **ARGUMENTS
    )
    assert not release.is_nothing
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "papernot-steinke (sealed)" in shown
    assert not re.search(r"\d", shown), "no count, no time"


def test_a_model_made_outside_of_the_objective_is_refused(storage: str) -> None:
    """A second trial would start from the weights that the first has trained, which are sealed."""
    model = nn.Sequential(nn.Linear(6, 3))

    def shared(trial: privtune.Trial) -> float:
        return trial.score(train(trial, model, 0.5), VALIDATION)

    with pytest.raises(SealedTrialError, match="inside the objective"):
        make(storage).optimize(shared, strategy=PapernotSteinke(mean_runs=2), **ARGUMENTS)


def test_a_validation_record_that_cannot_be_read_says_nothing(storage: str) -> None:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, number: int) -> Any:
            if number == 7:
                raise ValueError("a secret record")
            return VALIDATION[0][number], VALIDATION[1][number]

    def own(trial: privtune.Trial) -> float:
        return trial.score(train(trial, nn.Sequential(nn.Linear(6, 3)), 0.5), Rows())

    study = make(storage)
    release = study.optimize(own, strategy=PapernotSteinke(mean_runs=2), **ARGUMENTS)
    assert release.score is not None


@pytest.mark.parametrize(
    "data", [(TRAIN[0],), torch.utils.data.DataLoader(list(zip(*TRAIN, strict=True)))]
)
def test_what_is_no_dataset_of_pairs_is_one_sentence(storage: str, data: Any) -> None:
    def own(trial: privtune.Trial) -> float:
        model = train(trial, nn.Sequential(nn.Linear(6, 3)), 0.5, data)
        return trial.score(model, VALIDATION)

    with pytest.raises(PrivTuneError, match="must be inputs and targets"):
        make(storage).optimize(own, strategy=PapernotSteinke(mean_runs=2), **ARGUMENTS)
    assert charges(storage) == 0


def test_a_release_travels_between_processes(storage: str) -> None:
    released = make(storage).optimize(objective, strategy=Everything(trials=2), **ARGUMENTS)
    for there in (pickle.loads(pickle.dumps(released)), copy.deepcopy(released)):
        assert there.guarantee == released.guarantee
        assert there.guarantee.bounds == released.guarantee.bounds
        assert torch.equal(there.weights, released.weights)
        assert [t.params for t in there.trials] == [t.params for t in released.trials]


@pytest.mark.parametrize("wrong", [0, -1, True, "10", 2.5, math.nan])
@pytest.mark.parametrize(
    "made",
    [
        lambda wrong: privtune.DPSGD(records=wrong, epochs=1, expected_batch_size=10),
        lambda wrong: privtune.DPSGD(records=100, epochs=1, expected_batch_size=wrong),
        lambda wrong: privtune.Validation(records=wrong),
    ],
)
def test_numbers_of_records_are_whole(made: Any, wrong: Any) -> None:
    """Said where they are written, not by whatever computes with them first."""
    with pytest.raises(InvalidInputError, match="must be a whole number from 1"):
        made(wrong)


POSITION = 314_159_000
"""The first of many positions, of digits that occur nowhere else."""


@pytest.mark.statistical
def test_the_number_of_a_sealed_trial_is_a_draw_of_its_own(storage: str) -> None:
    """Uniform numbers exceed each of these bounds with a probability of 1e-6; the seed is fixed."""
    found: list[int] = []

    def asked(trial: privtune.Trial) -> float:
        found.append(trial.number)
        assert trial.number == found[-1]
        told = repr([trial, vars(trial), threading.current_thread()])
        assert not re.search(rf"\b{POSITION + len(found) - 1}\b", told), (
            "nothing tells the position"
        )
        raise optuna.TrialPruned

    study = make(storage, seed=3)
    plan = plan_objective(
        PapernotSteinke(mean_runs=4),
        LOOP,
        SPLIT,
        budget=privtune.Budget(6.0, 1e-5, name="loop"),
        epsilon=6.0,
        sampler=None,
        pruner=None,
    )
    files = ObjectiveFiles(
        plan=plan,
        secret=bytes(32),
        results=study._life.sealed(plan.arm),
        space=SearchSpace({}),
        objective=asked,
        stack=1,
    )
    opened = OpenRound("loop-1", 4000, bytes(32))
    for number in range(POSITION, POSITION + opened.tasks):
        secrets = {number: opened.seed(number)}
        with pytest.raises(SealedTrialError):
            list(files.train(plan.training, {number: {}}, secrets=secrets, scored=True))
    assert len(set(found)) == len(found)
    assert 0 <= min(found) < 2**23
    assert 2**31 - 2**23 <= max(found) < 2**31
    for size in (2, 7, 10, 20):
        counts = np.bincount(np.array(found) % size, minlength=size)
        assert chisquare(counts).pvalue > 1e-6
        # What follows the position would repeat after every walk through the grid.
        pairs = np.bincount((np.array(found) % size - np.arange(len(found))) % size, minlength=size)
        assert chisquare(pairs).pvalue > 1e-6


def test_numbers_are_optuna_s_where_trials_are_shown_and_drawn_where_they_are_sealed(
    storage: str,
) -> None:
    seen: dict[str, list[int]] = {}

    def asked(trial: privtune.Trial) -> float:
        if not trial._rehearsal:
            seen.setdefault(arm, []).append(trial.number)
        return objective(trial)

    study = make(storage, seed=3)
    for arm, strategy in (
        ("all", Everything(trials=4)),
        ("best", PapernotSteinke(mean_runs=8)),
    ):
        study.optimize(asked, strategy=strategy, arm=arm, epsilon=2.5, **ARGUMENTS)
    assert seen["all"] == [0, 1, 2, 3]
    (rows,) = [len(study._life.trials.of("best"))]
    assert len(set(seen["best"])) == rows > 1
    assert min(seen["best"]) > 100, "no position"
